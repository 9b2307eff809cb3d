"""Checks of ``exec``.

Owns: one function a check. Refuses: time-outs and what goes on in the background (``persistence.py``).
"""

from __future__ import annotations

import asyncio
import os

from turnwise.errors import SandboxFileNotFound
from turnwise.sandboxes.checker.exam import SECRET, Exam, expect, need


async def exit_codes(exam: Exam) -> None:
    """A command's exit code is what it says."""
    sandbox = await exam.sandbox()
    for code in (0, 1, 7, 255):
        result = await sandbox.exec(f"exit {code}")
        need(result.exit_code == code, f"'exit {code}' gave {result.exit_code}")
        need(result.ok == (code == 0) and not result.timed_out, f"'exit {code}' gave {result}")


async def signals(exam: Exam) -> None:
    """A command that signal n ended has the exit code 128 + n."""
    sandbox = await exam.sandbox()
    for name, number in (("KILL", 9), ("SEGV", 11)):
        result = await sandbox.exec(f"kill -{name} $$")
        need(result.exit_code == 128 + number, f"a command that SIG{name} ended gave {result.exit_code}")


async def missing_program(exam: Exam) -> None:
    """A program that is not there is a result with 127."""
    sandbox = await exam.sandbox()
    for command in (["turnwise-no-such-program"], "turnwise-no-such-program", ["/no/such/program", "x"]):
        result = await sandbox.exec(command)
        need(result.exit_code == 127, f"{command!r} gave {result.exit_code}, not 127")


async def streams(exam: Exam) -> None:
    """The two streams are kept apart."""
    result = await (await exam.sandbox()).exec("echo out; echo err >&2; echo out2")
    need((result.stdout, result.stderr) == (b"out\nout2\n", b"err\n"), f"got {result.stdout!r} and {result.stderr!r}")
    need(result.text == "out\nout2\nerr\n", f"text is {result.text!r}")


async def binary(exam: Exam) -> None:
    """Bytes that are no text come through unchanged."""
    script = r"printf '\000\377\200\r\n\033'; printf '\376\000' >&2"
    result = await (await exam.sandbox()).exec(script)
    need(result.stdout == b"\x00\xff\x80\r\n\x1b", f"stdout came as {result.stdout!r}")
    need(result.stderr == b"\xfe\x00", f"stderr came as {result.stderr!r}")


async def arguments(exam: Exam) -> None:
    """A sequence is run as it is: no shell reads it."""
    words = ["a b", "$HOME", "*", "", "'\"\\", "two\nlines", "--", "é"]
    result = await (await exam.sandbox()).exec(["printf", "[%s]", *words])
    need(result.stdout.decode() == "".join(f"[{word}]" for word in words), f"printf got {result.stdout!r}")
    result = await (await exam.sandbox()).exec("echo a b | tr 'ab' 'xy' && echo $((1 + 2))")
    need(result.stdout == b"x y\n3\n", f"a text is not run by a shell: {result.stdout!r}")


async def long_argument(exam: Exam) -> None:
    """An argument and a variable of 100,000 characters come through."""
    word = "x" * 100_000
    result = await (await exam.sandbox()).exec(["sh", "-c", "echo ${#1} ${#LONG}", "sh", word], env={"LONG": word})
    need(result.stdout == b"100000 100000\n", f"got {result.stdout[:100]!r}, {result.stderr[:200]!r}")


async def folders(exam: Exam) -> None:
    """Commands run in the workdir, or in ``cwd``, absolute or relative to it."""
    sandbox = await exam.sandbox()
    name = exam.name()
    await sandbox.exec(["mkdir", "-p", f"{name}/inner"])
    home = exam.spec.workdir if exam.rooted else (await sandbox.exec("pwd -P")).stdout.decode().strip()
    cases = ((None, home), (f"{name}/inner", f"{home}/{name}/inner"), ("/", "/"))
    for cwd, wanted in cases:
        result = await sandbox.exec("pwd -P", cwd=cwd)
        need(result.stdout.decode().strip() == wanted, f"cwd={cwd!r} ran in {result.stdout!r}, not {wanted}")


async def bad_folder(exam: Exam) -> None:
    """A ``cwd`` that is no folder is told apart from a missing program."""
    sandbox = await exam.sandbox()
    name = exam.name()
    await sandbox.write_file(name, b"")
    for cwd in ("no/such/folder", "/no/such/folder", name):
        with expect(SandboxFileNotFound, what=f"exec with cwd={cwd!r}"):
            await sandbox.exec(["true"], cwd=cwd)
    need((await sandbox.exec(["true"])).ok, "after a bad cwd nothing can be run")


async def variables(exam: Exam) -> None:
    """Variables of the spec hold for every command, those of a call over them and for that call only."""
    env = {"CHECK_A": "of spec", "CHECK_B": "of spec"}
    async with exam.fresh(env={**exam.spec.env, **env}) as sandbox:
        value = "two\nlines $HOME 'quoted' é="
        script = 'printf "%s|%s|%s" "$CHECK_A" "$CHECK_B" "$CHECK_C"'
        result = await sandbox.exec(script, env={"CHECK_B": "of call", "CHECK_C": value})
        need(result.stdout.decode() == f"of spec|of call|{value}", f"got {result.stdout!r}")
        result = await sandbox.exec(script)
        need(result.stdout == b"of spec|of spec|", f"the next call has {result.stdout!r}")


async def host_environment(exam: Exam) -> None:
    """Nothing of the host's environment is inherited."""
    result = await (await exam.sandbox()).exec(["env"])
    need(result.ok, f"'env' gave {result}")
    need(os.environ[SECRET] not in result.text, f"the host's {SECRET} is in the environment of a command")
    need("HOME=" in result.text and "PATH=" in result.text, f"a command has no HOME or no PATH: {result.text!r}")


async def stdin(exam: Exam) -> None:
    """Input comes through whole; without, it is empty; a command need not read it."""
    sandbox = await exam.sandbox()
    data = bytes(range(256)) * 64
    result = await sandbox.exec(["cat"], stdin=data)
    need(result.stdout == data, f"cat gave {len(result.stdout)} bytes of {len(data)}, or others")
    result = await sandbox.exec(["cat"], timeout=10)
    need(result.ok and result.stdout == b"", f"cat without input gave {result}")
    result = await sandbox.exec(["cat"], stdin=b"", timeout=10)
    need(result.ok and result.stdout == b"", f"cat with empty input gave {result}")
    result = await sandbox.exec("exit 3", stdin=bytes(2**20), timeout=20)
    need(result.exit_code == 3, f"a command that does not read its input gave {result.exit_code}")


async def long_stdin(exam: Exam) -> None:
    """Five megabytes of input come through."""
    result = await (await exam.sandbox()).exec(["wc", "-c"], stdin=b"12345678" * 655_360, timeout=60)
    need(result.stdout.strip() == b"5242880", f"wc counted {result.stdout!r} {result.stderr!r}")


async def cut(exam: Exam) -> None:
    """Of long output the head and the tail are kept, to the byte, and a line says how much is missing."""
    sandbox = await exam.sandbox()
    whole = "".join(f"{number}\n" for number in range(1, 30_001)).encode()
    for stream, redirect in (("stdout", ""), ("stderr", " >&2")):
        result = await sandbox.exec(f"seq 1 30000{redirect}", max_output=10_000)
        got = result.stdout if stream == "stdout" else result.stderr
        need(result.truncated, f"{stream} of {len(whole)} bytes is not marked as truncated")
        need(got.startswith(whole[:5000]), f"{stream} does not begin with the first half of what is kept")
        need(got.endswith(whole[-5000:]), f"{stream} does not end with the last half of what is kept")
        between = got[5000:-5000]
        need(len(between) < 200, f"{stream} keeps {len(got)} bytes of 10000")
        missing = str(len(whole) - 10_000).encode()
        need(missing in between.replace(b",", b""), f"the line between does not say {missing!r}: {between!r}")


async def uncut(exam: Exam) -> None:
    """Output of exactly as many bytes as are kept is whole."""
    result = await (await exam.sandbox()).exec("head -c 10000 /dev/zero", max_output=10_000)
    need(result.stdout == bytes(10_000) and not result.truncated, f"{len(result.stdout)} bytes, {result.truncated=}")


async def much_output(exam: Exam) -> None:
    """Twenty megabytes of output are read and dropped, and the command ends."""
    result = await (await exam.sandbox()).exec("head -c 20000000 /dev/zero; echo end", timeout=60)
    need(
        result.ok and result.truncated and result.stdout.endswith(b"end\n"), f"{result.exit_code=} {result.timed_out=}"
    )
    need(len(result.stdout) < 70_000, f"{len(result.stdout)} bytes are kept of 65536")


async def together(exam: Exam) -> None:
    """Commands run at the same time, and each has its own result."""
    sandbox = await exam.sandbox()
    name = exam.name()
    # Each waits for all the others: one after another they would wait for ever.
    met = f"until [ $(ls {name}.* | wc -l) -eq 8 ]; do sleep 0.05; done"
    results = await asyncio.gather(
        *(sandbox.exec(f": > {name}.{n}; {met}; echo {n}; exit {n}", timeout=60) for n in range(8))
    )
    for number, result in enumerate(results):
        need(not result.timed_out, "eight commands that wait for each other do not run at the same time")
        need((result.stdout, result.exit_code) == (f"{number}\n".encode(), number), f"command {number} gave {result}")


async def duration(exam: Exam) -> None:
    """The duration is that of the command."""
    result = await (await exam.sandbox()).exec("sleep 0.3", timeout=None)
    need(0.25 <= result.duration < 10, f"'sleep 0.3' is said to have taken {result.duration} s")


async def user(exam: Exam) -> None:
    """Commands run as an unprivileged user, who may write in the workdir and in /tmp."""
    sandbox = await exam.sandbox()
    name = exam.name()
    temporary = "/tmp" if exam.rooted else "${TMPDIR:-/tmp}"
    script = f"T={temporary}; echo x > {name} && echo x > $T/{name} && cat {name} $T/{name} && rm $T/{name}"
    result = await sandbox.exec(f"id -u; {script}")
    need(result.stdout.endswith(b"x\nx\n"), f"the workdir or /tmp cannot be written: {result.text!r}")
    uid = result.stdout.split()[0]
    if exam.spec.user is None and exam.capabilities.kernel:
        need(uid != b"0", "commands run as root, though the spec names no user")
