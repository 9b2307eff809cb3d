"""Checks of ``exec``: exit codes, streams, arguments, environment, input and output."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from turnwise.errors import SandboxFileNotFound
from turnwise.ext.checks.sandbox.context import CheckContext, expect, need, same
from turnwise.ext.checks.sandbox.fixtures import SECRET
from turnwise.sandboxes.core import Command, ExecResult


@dataclass(frozen=True, slots=True)
class Expected:
    """One command and its expected result; ``options`` are further arguments of ``exec``."""

    command: Command
    exit_code: int = 0
    stdout: bytes = b""
    stderr: bytes | None = b""
    options: dict[str, Any] = field(default_factory=dict)


def results(*commands: Expected) -> Callable[[CheckContext], Awaitable[None]]:
    """Return a check that runs commands and compares their results, none of which may be a time-out or truncated."""

    async def check(context: CheckContext) -> None:
        sandbox = await context.sandbox()
        for row in commands:
            result = await sandbox.exec(row.command, **row.options)
            stderr = result.stderr if row.stderr is None else row.stderr
            expected = ExecResult(row.exit_code, row.stdout, stderr, duration=result.duration)
            words = f"{str(row.command)[:100]!r} gave {str(result)[:400]}, not {str(expected)[:400]}"
            need(result == expected and result.ok == (row.exit_code == 0), words)

    return check


exit_codes = results(*(Expected(f"exit {code}", code) for code in (0, 1, 7, 255)))
signals = results(
    *(Expected(f"kill -{name} $$", 128 + number, stderr=None) for name, number in (("KILL", 9), ("SEGV", 11)))
)
missing_program = results(
    Expected(["turnwise-no-such-program"], 127, stderr=None),
    Expected("turnwise-no-such-program", 127, stderr=None),
    Expected(["/no/such/program", "x"], 127, stderr=None),
)
streams = results(Expected("echo out; echo err >&2; echo out2", stdout=b"out\nout2\n", stderr=b"err\n"))
binary = results(
    Expected(
        r"printf '\000\377\200\r\n\033'; printf '\376\000' >&2", stdout=b"\x00\xff\x80\r\n\x1b", stderr=b"\xfe\x00"
    )
)
long_argument = results(
    Expected(
        ["sh", "-c", "echo ${#1} ${#LONG}", "sh", "x" * 100_000],
        stdout=b"100000 100000\n",
        options={"env": {"LONG": "x" * 100_000}},
    )
)
long_stdin = results(
    Expected("echo $(wc -c)", stdout=b"5242880\n", options={"stdin": b"12345678" * 655_360, "timeout": 60})
)
_BYTES = bytes(range(256)) * 64
standard_input = results(
    Expected(["cat"], stdout=_BYTES, options={"stdin": _BYTES}),
    Expected(["cat"], options={"timeout": 10}),
    Expected(["cat"], options={"stdin": b"", "timeout": 10}),
    Expected("exit 3", 3, options={"stdin": bytes(2**20), "timeout": 20}),
)
_WORDS = ("a b", "$HOME", "*", "", "'\"\\", "two\nlines", "--", "é")
arguments = results(
    Expected(["printf", "[%s]", *_WORDS], stdout="".join(f"[{word}]" for word in _WORDS).encode()),
    Expected("echo a b | tr 'ab' 'xy' && echo $((1 + 2))", stdout=b"x y\n3\n"),
)
uncut = results(Expected("head -c 10000 /dev/zero", stdout=bytes(10_000), options={"max_output": 10_000}))


async def folders(context: CheckContext) -> None:
    """Commands run in the workdir, or in ``cwd``, absolute or relative to it."""
    sandbox, name = await context.scratch()
    await sandbox.exec(["mkdir", "-p", f"{name}/inner"])
    workdir = context.spec.workdir if context.rooted else (await sandbox.exec("pwd -P")).stdout.decode().strip()
    cases = ((None, workdir), (f"{name}/inner", f"{workdir}/{name}/inner"), ("/", "/"))
    for cwd, expected_folder in cases:
        result = await sandbox.exec("pwd -P", cwd=cwd)
        same(result.stdout.decode().strip(), expected_folder, f"folder of a command with cwd={cwd!r}")


async def bad_folder(context: CheckContext) -> None:
    """A ``cwd`` that is not a folder is distinguished from a missing program."""
    sandbox, name = await context.scratch()
    await sandbox.write_file(name, b"")
    for cwd in ("no/such/folder", "/no/such/folder", name):
        with expect(SandboxFileNotFound, what=f"exec with cwd={cwd!r}"):
            await sandbox.exec(["true"], cwd=cwd)
    need((await sandbox.exec(["true"])).ok, "after an invalid cwd commands do not run")


async def variables(context: CheckContext) -> None:
    """Variables of the spec apply to every command; those of a call override them for that call."""
    env = {"CHECK_A": "of spec", "CHECK_B": "of spec"}
    async with context.fresh(env={**context.spec.env, **env}) as sandbox:
        value = "two\nlines $HOME 'quoted' é="
        script = 'printf "%s|%s|%s" "$CHECK_A" "$CHECK_B" "$CHECK_C"'
        result = await sandbox.exec(script, env={"CHECK_B": "of call", "CHECK_C": value})
        need(result.stdout.decode() == f"of spec|of call|{value}", f"got {result.stdout!r}")
        result = await sandbox.exec(script)
        need(result.stdout == b"of spec|of spec|", f"the next call has {result.stdout!r}")


async def host_environment(context: CheckContext) -> None:
    """Nothing of the host's environment is inherited."""
    result = await (await context.sandbox()).exec(["env"])
    need(result.ok, f"'env' gave {result}")
    need(os.environ[SECRET] not in result.text, f"the host's {SECRET} is in the environment of a command")
    need("HOME=" in result.text and "PATH=" in result.text, f"a command has no HOME or no PATH: {result.text!r}")


async def cut_output(context: CheckContext) -> None:
    """Of long output exactly the head and tail are kept, with a line that counts the missing bytes."""
    sandbox = await context.sandbox()
    complete = "".join(f"{number}\n" for number in range(1, 30_001)).encode()
    for stream, redirect in (("stdout", ""), ("stderr", " >&2")):
        result = await sandbox.exec(f"seq 1 30000{redirect}", max_output=10_000)
        output = result.stdout if stream == "stdout" else result.stderr
        need(result.truncated, f"{stream} of {len(complete)} bytes is not marked as truncated")
        need(output.startswith(complete[:5000]), f"{stream} does not begin with the first half of what is kept")
        need(output.endswith(complete[-5000:]), f"{stream} does not end with the last half of what is kept")
        middle = output[5000:-5000]
        need(len(middle) < 200, f"{stream} keeps {len(output)} bytes of 10000")
        missing = str(len(complete) - 10_000).encode()
        need(missing in middle.replace(b",", b""), f"the line between does not say {missing!r}: {middle!r}")


async def much_output(context: CheckContext) -> None:
    """Twenty megabytes of output are drained, and the command ends."""
    result = await (await context.sandbox()).exec("head -c 20000000 /dev/zero; echo end", timeout=60)
    end = (result.exit_code, result.timed_out, result.truncated, result.stdout[-4:])
    same(end, (0, False, True, b"end\n"), "exit code, time-out, truncation and last line")
    need(len(result.stdout) < 70_000, f"{len(result.stdout)} bytes are kept of 65536")


async def concurrent(context: CheckContext) -> None:
    """Commands run concurrently, each with its own result."""
    sandbox, name = await context.scratch()
    # Each waits for all others: run one after another they would wait for ever.
    met = f"until [ $(ls {name}.* | wc -l) -eq 8 ]; do sleep 0.05; done"
    results = await asyncio.gather(
        *(sandbox.exec(f": > {name}.{n}; {met}; echo {n}; exit {n}", timeout=60) for n in range(8))
    )
    for number, result in enumerate(results):
        need(not result.timed_out, "eight commands that wait for each other do not run at the same time")
        need((result.stdout, result.exit_code) == (f"{number}\n".encode(), number), f"command {number} gave {result}")


async def duration(context: CheckContext) -> None:
    """The duration is the command's."""
    result = await (await context.sandbox()).exec("sleep 0.3", timeout=None)
    need(0.25 <= result.duration < 10, f"'sleep 0.3' reports a duration of {result.duration} s")


async def unprivileged_user(context: CheckContext) -> None:
    """Commands run as an unprivileged user with write access to the workdir and /tmp."""
    sandbox, name = await context.scratch()
    temporary = "/tmp" if context.rooted else "${TMPDIR:-/tmp}"
    script = f"T={temporary}; echo x > {name} && echo x > $T/{name} && cat {name} $T/{name} && rm $T/{name}"
    result = await sandbox.exec(f"id -u; {script}")
    need(result.stdout.endswith(b"x\nx\n"), f"the workdir or /tmp cannot be written: {result.text!r}")
    uid = result.stdout.split()[0]
    if context.spec.user is None and context.capabilities.kernel:
        need(uid != b"0", "commands run as root, though the spec names no user")
