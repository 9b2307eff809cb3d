"""Contract checks of ``exec`` and ``spawn``: exit codes, streams, environment, timeouts, processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time

from turnwise.errors import SandboxFileNotFound
from turnwise.ext.checks.sandbox.context import SECRET, CheckContext, alive, beating, beats, expect, need, quiet, soon
from turnwise.sandboxes.core import Sandbox, SandboxProcess


async def exit_codes(exam: CheckContext) -> None:
    """A command's exit code is reported."""
    sandbox = await exam.sandbox()
    for code in (0, 1, 7, 255):
        result = await sandbox.exec(f"exit {code}")
        need(result.exit_code == code, f"'exit {code}' gave {result.exit_code}")
        need(result.ok == (code == 0) and not result.timed_out, f"'exit {code}' gave {result}")


async def signals(exam: CheckContext) -> None:
    """A command killed by signal n has the exit code 128 + n."""
    sandbox = await exam.sandbox()
    for name, number in (("KILL", 9), ("SEGV", 11)):
        result = await sandbox.exec(f"kill -{name} $$")
        need(result.exit_code == 128 + number, f"a command that SIG{name} ended gave {result.exit_code}")


async def missing_program(exam: CheckContext) -> None:
    """A missing program is a result with exit code 127."""
    sandbox = await exam.sandbox()
    for command in (["turnwise-no-such-program"], "turnwise-no-such-program", ["/no/such/program", "x"]):
        result = await sandbox.exec(command)
        need(result.exit_code == 127, f"{command!r} gave {result.exit_code}, not 127")


async def streams(exam: CheckContext) -> None:
    """Stdout and stderr are separate."""
    result = await (await exam.sandbox()).exec("echo out; echo err >&2; echo out2")
    need((result.stdout, result.stderr) == (b"out\nout2\n", b"err\n"), f"got {result.stdout!r} and {result.stderr!r}")
    need(result.text == "out\nout2\nerr\n", f"text is {result.text!r}")


async def binary(exam: CheckContext) -> None:
    """Binary output is unchanged."""
    script = r"printf '\000\377\200\r\n\033'; printf '\376\000' >&2"
    result = await (await exam.sandbox()).exec(script)
    need(result.stdout == b"\x00\xff\x80\r\n\x1b", f"stdout came as {result.stdout!r}")
    need(result.stderr == b"\xfe\x00", f"stderr came as {result.stderr!r}")


async def arguments(exam: CheckContext) -> None:
    """A sequence is executed without a shell."""
    words = ["a b", "$HOME", "*", "", "'\"\\", "two\nlines", "--", "é"]
    result = await (await exam.sandbox()).exec(["printf", "[%s]", *words])
    need(result.stdout.decode() == "".join(f"[{word}]" for word in words), f"printf got {result.stdout!r}")
    result = await (await exam.sandbox()).exec("echo a b | tr 'ab' 'xy' && echo $((1 + 2))")
    need(result.stdout == b"x y\n3\n", f"a text is not run by a shell: {result.stdout!r}")


async def long_argument(exam: CheckContext) -> None:
    """An argument and a variable of 100,000 characters are passed whole."""
    word = "x" * 100_000
    result = await (await exam.sandbox()).exec(["sh", "-c", "echo ${#1} ${#LONG}", "sh", word], env={"LONG": word})
    need(result.stdout == b"100000 100000\n", f"got {result.stdout[:100]!r}, {result.stderr[:200]!r}")


async def folders(exam: CheckContext) -> None:
    """Commands run in the workdir, or in ``cwd``, absolute or relative to it."""
    sandbox = await exam.sandbox()
    name = exam.name()
    await sandbox.exec(["mkdir", "-p", f"{name}/inner"])
    home = exam.spec.workdir if exam.rooted else (await sandbox.exec("pwd -P")).stdout.decode().strip()
    cases = ((None, home), (f"{name}/inner", f"{home}/{name}/inner"), ("/", "/"))
    for cwd, wanted in cases:
        result = await sandbox.exec("pwd -P", cwd=cwd)
        need(result.stdout.decode().strip() == wanted, f"cwd={cwd!r} ran in {result.stdout!r}, not {wanted}")


async def bad_folder(exam: CheckContext) -> None:
    """A ``cwd`` that is not a folder is distinguished from a missing program."""
    sandbox = await exam.sandbox()
    name = exam.name()
    await sandbox.write_file(name, b"")
    for cwd in ("no/such/folder", "/no/such/folder", name):
        with expect(SandboxFileNotFound, what=f"exec with cwd={cwd!r}"):
            await sandbox.exec(["true"], cwd=cwd)
    need((await sandbox.exec(["true"])).ok, "after an invalid cwd commands do not run")


async def variables(exam: CheckContext) -> None:
    """Variables of the spec apply to every command; those of a call override them for that call."""
    env = {"CHECK_A": "of spec", "CHECK_B": "of spec"}
    async with exam.fresh(env={**exam.spec.env, **env}) as sandbox:
        value = "two\nlines $HOME 'quoted' é="
        script = 'printf "%s|%s|%s" "$CHECK_A" "$CHECK_B" "$CHECK_C"'
        result = await sandbox.exec(script, env={"CHECK_B": "of call", "CHECK_C": value})
        need(result.stdout.decode() == f"of spec|of call|{value}", f"got {result.stdout!r}")
        result = await sandbox.exec(script)
        need(result.stdout == b"of spec|of spec|", f"the next call has {result.stdout!r}")


async def host_environment(exam: CheckContext) -> None:
    """Nothing of the host's environment is inherited."""
    result = await (await exam.sandbox()).exec(["env"])
    need(result.ok, f"'env' gave {result}")
    need(os.environ[SECRET] not in result.text, f"the host's {SECRET} is in the environment of a command")
    need("HOME=" in result.text and "PATH=" in result.text, f"a command has no HOME or no PATH: {result.text!r}")


async def stdin(exam: CheckContext) -> None:
    """Input arrives whole; the default is empty; a command need not read it."""
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


async def long_stdin(exam: CheckContext) -> None:
    """Five megabytes of input arrive whole."""
    result = await (await exam.sandbox()).exec(["wc", "-c"], stdin=b"12345678" * 655_360, timeout=60)
    need(result.stdout.strip() == b"5242880", f"wc counted {result.stdout!r} {result.stderr!r}")


async def cut(exam: CheckContext) -> None:
    """Of long output exactly the head and tail are kept, with a line that counts the missing bytes."""
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


async def uncut(exam: CheckContext) -> None:
    """Output of exactly ``max_output`` bytes is whole."""
    result = await (await exam.sandbox()).exec("head -c 10000 /dev/zero", max_output=10_000)
    need(result.stdout == bytes(10_000) and not result.truncated, f"{len(result.stdout)} bytes, {result.truncated=}")


async def much_output(exam: CheckContext) -> None:
    """Twenty megabytes of output are drained, and the command ends."""
    result = await (await exam.sandbox()).exec("head -c 20000000 /dev/zero; echo end", timeout=60)
    need(
        result.ok and result.truncated and result.stdout.endswith(b"end\n"), f"{result.exit_code=} {result.timed_out=}"
    )
    need(len(result.stdout) < 70_000, f"{len(result.stdout)} bytes are kept of 65536")


async def together(exam: CheckContext) -> None:
    """Commands run concurrently, each with its own result."""
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


async def duration(exam: CheckContext) -> None:
    """The duration is the command's."""
    result = await (await exam.sandbox()).exec("sleep 0.3", timeout=None)
    need(0.25 <= result.duration < 10, f"'sleep 0.3' reports a duration of {result.duration} s")


async def user(exam: CheckContext) -> None:
    """Commands run as an unprivileged user with write access to the workdir and /tmp."""
    sandbox = await exam.sandbox()
    name = exam.name()
    temporary = "/tmp" if exam.rooted else "${TMPDIR:-/tmp}"
    script = f"T={temporary}; echo x > {name} && echo x > $T/{name} && cat {name} $T/{name} && rm $T/{name}"
    result = await sandbox.exec(f"id -u; {script}")
    need(result.stdout.endswith(b"x\nx\n"), f"the workdir or /tmp cannot be written: {result.text!r}")
    uid = result.stdout.split()[0]
    if exam.spec.user is None and exam.capabilities.kernel:
        need(uid != b"0", "commands run as root, though the spec names no user")


async def timeout(exam: CheckContext) -> None:
    """A timeout is a result (124, with the output so far), on time, and the sandbox survives."""
    sandbox = await exam.sandbox()
    began = time.monotonic()
    result = await sandbox.exec("echo before; echo sorry >&2; sleep 60; echo after", timeout=0.7)
    took = time.monotonic() - began
    need(result.timed_out and result.exit_code == 124 and not result.ok, f"got {result}")
    need(
        (result.stdout, result.stderr) == (b"before\n", b"sorry\n"), f"its output before the time-out is lost: {result}"
    )
    need(0.6 < took < 10, f"a time-out of 0.7 s returned after {took:.1f} s")
    need((await sandbox.exec("echo on")).stdout == b"on\n", "the sandbox does not respond after a time-out")


async def timeout_tree(exam: CheckContext) -> None:
    """A timeout kills all processes of the command, however detached."""
    sandbox = await exam.sandbox()
    file = exam.name()
    script = f"{beating(file, exam.token)}; trap '' TERM INT; while :; do sleep 0.1; done"
    # On a busy machine a second may be over before the background has begun.
    for seconds in (1.0, 15.0):
        result = await sandbox.exec(script, timeout=seconds)
        need(result.timed_out, f"the command did not run into its time-out: {result}")
        if await beats(sandbox, file) > 0:
            break
    need(await beats(sandbox, file) > 0, "its background process never ran")
    need(await quiet(sandbox, file), "a process that forked twice and ignores signals outlives the time-out")


async def timeout_spam(exam: CheckContext) -> None:
    """A command with endless output is killed at its timeout, with head and tail kept."""
    result = await (await exam.sandbox()).exec("yes", timeout=0.7, max_output=4096)
    need(result.timed_out and result.truncated, f"{result.timed_out=} {result.truncated=}")
    need(result.stdout.startswith(b"y\ny\n") and len(result.stdout) < 4400, f"{len(result.stdout)} bytes are kept")


async def timeout_spares(exam: CheckContext) -> None:
    """A timeout spares other commands and their background processes."""
    sandbox = await exam.sandbox()
    file = exam.name()
    await sandbox.exec(beating(file, exam.token))
    other = asyncio.create_task(sandbox.exec("sleep 1.2; echo other"))
    ended = await sandbox.exec("sleep 60", timeout=0.5)
    need(ended.timed_out, f"got {ended}")
    need(await alive(sandbox, file), "a time-out ended another command's background process")
    need((await other).stdout == b"other\n", "a time-out ended another command")
    await _end(sandbox, file)


async def cancellation(exam: CheckContext) -> None:
    """Cancelling the call kills the command with all its processes."""
    sandbox = await exam.sandbox()
    file = exam.name()
    work = asyncio.create_task(sandbox.exec(f"{beating(file, exam.token)}; sleep 60"))
    need(await alive(sandbox, file), "the command did not start")
    work.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await soon(work, 10, "a cancelled exec")
    need(work.cancelled(), "a cancelled exec did not raise CancelledError")
    need(await quiet(sandbox, file), "a process of the command outlives its cancellation")
    need((await sandbox.exec("echo on")).stdout == b"on\n", "the sandbox does not respond after a cancellation")


async def background(exam: CheckContext) -> None:
    """A command ends with its program; its background processes survive, even holding the output."""
    sandbox = await exam.sandbox()
    file = exam.name()
    loop = f"while :; do echo >> {file}; sleep 0.05; done"
    result = await soon(sandbox.exec(f"(: {exam.token}; {loop}) & echo started"), 10, "a command with a background")
    need(result.stdout == b"started\n" and result.ok, f"got {result}")
    need(await alive(sandbox, file), "a command's background process did not keep running")
    need((await sandbox.exec("echo next")).stdout == b"next\n", "the next command has unexpected output")
    need(await alive(sandbox, file), "a background process did not survive the next command")
    await _end(sandbox, file)


async def background_output(exam: CheckContext) -> None:
    """Later output of a background process appears in no other command's output."""
    sandbox = await exam.sandbox()
    await sandbox.exec("(sleep 0.2; echo late; echo late >&2) & echo now")
    result = await sandbox.exec("sleep 0.6; echo second")
    need((result.stdout, result.stderr) == (b"second\n", b""), f"got {result.stdout!r} and {result.stderr!r}")


async def spawned(exam: CheckContext) -> None:
    """A spawned command reads input and writes output while it runs; closing its input ends it."""
    process = await (await exam.sandbox()).spawn(["cat"])
    for data in (b"one\n", b"\x00\xff two\n"):
        await process.write(data)
        need(await _read(process, len(data)) == data, f"cat did not return {data!r}")
    await process.close_stdin()
    await process.close_stdin()
    need(await soon(process.read(), 10, "read at the end") == b"", "there is output after the end of the stream")
    need(await soon(process.wait(), 10, "wait") == 0, "cat did not end with 0")
    need(await process.wait() == 0, "the second wait gives another exit code")


async def spawn_streams(exam: CheckContext) -> None:
    """A spawned command's streams are merged in order; its exit code is that of a shell."""
    sandbox = await exam.sandbox()
    process = await sandbox.spawn("echo a; echo b >&2; echo c; exit 5")
    need(await _all(process) == b"a\nb\nc\n", "the streams are not in the order in which they were written")
    need(await process.wait() == 5, "the exit code is not 5")
    process = await sandbox.spawn("kill -KILL $$")
    need(await _all(process) == b"" and await process.wait() == 137, "a killed process does not end with 137")


async def spawn_place(exam: CheckContext) -> None:
    """A spawned command gets its variables and working directory."""
    sandbox = await exam.sandbox()
    process = await sandbox.spawn('echo "$CHECK_X"; pwd -P', cwd="/", env={"CHECK_X": "a b"})
    need(await _all(process) == b"a b\n/\n", "spawn ignores env or cwd")


async def spawn_missing(exam: CheckContext) -> None:
    """Spawning a missing program, or in a missing folder, raises."""
    sandbox = await exam.sandbox()
    with expect(SandboxFileNotFound, what="spawn of a missing program"):
        await sandbox.spawn(["turnwise-no-such-program"])
    with expect(SandboxFileNotFound, what="spawn with a missing cwd"):
        await sandbox.spawn(["cat"], cwd="/no/such/folder")


async def spawn_interrupt(exam: CheckContext) -> None:
    """``interrupt`` acts as Ctrl-C."""
    sandbox = await exam.sandbox()
    trapping = "trap 'echo caught; exit 3' INT; echo ready; while :; do sleep 0.1; done"
    process = await sandbox.spawn(trapping)
    need(await _read(process, 6) == b"ready\n", "the command did not start")
    await process.interrupt()
    need(await soon(process.wait(), 10, "wait after an interrupt") == 3, "the command did not handle the interrupt")
    need(await _all(process) == b"caught\n", "its last output is lost")
    process = await sandbox.spawn("echo ready; exec sleep 60")
    need(await _read(process, 6) == b"ready\n", "the command did not start")
    await process.interrupt()
    need(await soon(process.wait(), 10, "wait after an interrupt") == 130, "sleep did not end with 130")


async def spawn_kill(exam: CheckContext) -> None:
    """``kill`` ends a spawned command with all its processes; calls on an ended one are no-ops."""
    sandbox = await exam.sandbox()
    file = exam.name()
    process = await sandbox.spawn(
        f"{beating(file, exam.token)}; trap '' TERM INT; echo ready; while :; do sleep 1; done"
    )
    need(await _read(process, 6) == b"ready\n", "the command did not start")
    need(await alive(sandbox, file), "its background process did not start")
    await process.kill()
    need(await soon(process.wait(), 10, "wait after kill") == 137, "a killed command does not end with 137")
    need(await quiet(sandbox, file), "a process of the command outlives kill")
    await process.kill()
    await process.interrupt()
    await process.close_stdin()
    with expect(BrokenPipeError, what="write to an ended command"):
        await process.write(b"x")


async def spawn_volume(exam: CheckContext) -> None:
    """A megabyte passes through a spawned command unchanged; ``read`` respects its limit."""
    process = await (await exam.sandbox()).spawn(["cat"])
    data = bytes(range(256)) * 4096

    async def write() -> None:
        for at in range(0, len(data), 65_536):
            await process.write(data[at : at + 65_536])
        await process.close_stdin()

    writing = asyncio.create_task(write())
    got = bytearray()
    while piece := await soon(process.read(10_000), 30, "read"):
        need(len(piece) <= 10_000, f"read(10000) gave {len(piece)} bytes")
        got += piece
    await writing
    need(bytes(got) == data, f"cat gave back {len(got)} bytes of {len(data)}, or others")
    need(await process.wait() == 0, "cat did not end with 0")


async def _read(process: SandboxProcess, size: int) -> bytes:
    got = b""
    while len(got) < size:
        piece = await soon(process.read(), 10, "read")
        if not piece:
            break
        got += piece
    return got


async def _all(process: SandboxProcess) -> bytes:
    got = b""
    while piece := await soon(process.read(), 10, "read"):
        got += piece
    return got


async def _end(sandbox: Sandbox, file: str) -> None:
    """Kill background processes that would slow down later checks."""
    # Where /proc is out of reach, it is left to the sandbox's end.
    pattern = f"[{file[0]}]{file[1:]}"  # which does not match this command's own line
    await sandbox.exec(
        f"for p in /proc/[0-9]*; do grep -q '{pattern}' $p/cmdline 2>/dev/null && kill -9 ${{p#/proc/}}; done"
    )
