"""Checks of what ends and what goes on: time-outs, cancellation, background processes, and spawned ones.

Owns: one function a check. Refuses: attacks (``attacks.py``).
"""

from __future__ import annotations

import asyncio
import contextlib
import time

from turnwise.errors import SandboxFileNotFound
from turnwise.sandboxes.checker.exam import Exam, alive, beating, beats, expect, need, quiet, soon
from turnwise.sandboxes.core import Sandbox, SandboxProcess


async def timeout(exam: Exam) -> None:
    """A time-out is a result: 124, with what was written before, in time, and the sandbox lives on."""
    sandbox = await exam.sandbox()
    began = time.monotonic()
    result = await sandbox.exec("echo before; echo sorry >&2; sleep 60; echo after", timeout=0.7)
    took = time.monotonic() - began
    need(result.timed_out and result.exit_code == 124 and not result.ok, f"got {result}")
    need((result.stdout, result.stderr) == (b"before\n", b"sorry\n"), f"what it wrote before is lost: {result}")
    need(0.6 < took < 10, f"a time-out of 0.7 s returned after {took:.1f} s")
    need((await sandbox.exec("echo on")).stdout == b"on\n", "the sandbox does not answer after a time-out")


async def timeout_tree(exam: Exam) -> None:
    """A time-out ends all that the command started, however it detached itself."""
    sandbox = await exam.sandbox()
    file = exam.name()
    script = f"{beating(file, exam.token)}; trap '' TERM INT; while :; do sleep 0.1; done"
    # On a busy machine a second may be over before the background has begun.
    for seconds in (1.0, 15.0):
        result = await sandbox.exec(script, timeout=seconds)
        need(result.timed_out, f"the command did not run into its time-out: {result}")
        if await beats(sandbox, file) > 0:
            break
    need(await beats(sandbox, file) > 0, "what it left in the background never ran")
    need(await quiet(sandbox, file), "a process that forked twice and deafened itself outlives the time-out")


async def timeout_spam(exam: Exam) -> None:
    """A command that writes without end is ended at its time-out, and its head and tail are kept."""
    result = await (await exam.sandbox()).exec("yes", timeout=0.7, max_output=4096)
    need(result.timed_out and result.truncated, f"{result.timed_out=} {result.truncated=}")
    need(result.stdout.startswith(b"y\ny\n") and len(result.stdout) < 4400, f"{len(result.stdout)} bytes are kept")


async def timeout_spares(exam: Exam) -> None:
    """A time-out spares what another command left in the background, and other commands."""
    sandbox = await exam.sandbox()
    file = exam.name()
    await sandbox.exec(beating(file, exam.token))
    other = asyncio.create_task(sandbox.exec("sleep 1.2; echo other"))
    ended = await sandbox.exec("sleep 60", timeout=0.5)
    need(ended.timed_out, f"got {ended}")
    need(await alive(sandbox, file), "a time-out ended what another command had left in the background")
    need((await other).stdout == b"other\n", "a time-out ended another command")
    await _end(sandbox, file)


async def cancellation(exam: Exam) -> None:
    """A command whose call is cancelled is ended with all that it started."""
    sandbox = await exam.sandbox()
    file = exam.name()
    work = asyncio.create_task(sandbox.exec(f"{beating(file, exam.token)}; sleep 60"))
    need(await alive(sandbox, file), "the command did not begin")
    work.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await soon(work, 10, "a cancelled exec")
    need(work.cancelled(), "a cancelled exec did not raise CancelledError")
    need(await quiet(sandbox, file), "what the command had started outlives its cancellation")
    need((await sandbox.exec("echo on")).stdout == b"on\n", "the sandbox does not answer after a cancellation")


async def background(exam: Exam) -> None:
    """A command ends when its program ends: what that left in the background lives on, though it holds the output."""
    sandbox = await exam.sandbox()
    file = exam.name()
    loop = f"while :; do echo >> {file}; sleep 0.05; done"
    result = await soon(sandbox.exec(f"(: {exam.token}; {loop}) & echo started"), 10, "a command with a background")
    need(result.stdout == b"started\n" and result.ok, f"got {result}")
    need(await alive(sandbox, file), "what a command left in the background did not live on")
    need((await sandbox.exec("echo next")).stdout == b"next\n", "the next command has another output")
    need(await alive(sandbox, file), "what a command left in the background did not survive the next command")
    await _end(sandbox, file)


async def background_output(exam: Exam) -> None:
    """What a background process writes later is in no other command's output."""
    sandbox = await exam.sandbox()
    await sandbox.exec("(sleep 0.2; echo late; echo late >&2) & echo now")
    result = await sandbox.exec("sleep 0.6; echo second")
    need((result.stdout, result.stderr) == (b"second\n", b""), f"got {result.stdout!r} and {result.stderr!r}")


async def spawned(exam: Exam) -> None:
    """A spawned command's input can be written and its output read while it runs; its input's end ends it."""
    process = await (await exam.sandbox()).spawn(["cat"])
    for data in (b"one\n", b"\x00\xff two\n"):
        await process.write(data)
        need(await _read(process, len(data)) == data, f"cat did not give back {data!r}")
    await process.close_stdin()
    await process.close_stdin()
    need(await soon(process.read(), 10, "read at the end") == b"", "there is output after the end")
    need(await soon(process.wait(), 10, "wait") == 0, "cat did not end with 0")
    need(await process.wait() == 0, "the second wait gives another exit code")


async def spawn_streams(exam: Exam) -> None:
    """Both streams of a spawned command are one, in order; its exit code is as a shell tells it."""
    sandbox = await exam.sandbox()
    process = await sandbox.spawn("echo a; echo b >&2; echo c; exit 5")
    need(await _all(process) == b"a\nb\nc\n", "the streams are not in the order in which they were written")
    need(await process.wait() == 5, "the exit code is not 5")
    process = await sandbox.spawn("kill -KILL $$")
    need(await _all(process) == b"" and await process.wait() == 137, "a killed one does not end with 137")


async def spawn_place(exam: Exam) -> None:
    """A spawned command has its variables and its folder."""
    sandbox = await exam.sandbox()
    process = await sandbox.spawn('echo "$CHECK_X"; pwd -P', cwd="/", env={"CHECK_X": "a b"})
    need(await _all(process) == b"a b\n/\n", "env or cwd of spawn is not as given")


async def spawn_missing(exam: Exam) -> None:
    """To spawn a program that is not there, or in no folder, is an error."""
    sandbox = await exam.sandbox()
    with expect(SandboxFileNotFound, what="spawn of a missing program"):
        await sandbox.spawn(["turnwise-no-such-program"])
    with expect(SandboxFileNotFound, what="spawn with a missing cwd"):
        await sandbox.spawn(["cat"], cwd="/no/such/folder")


async def spawn_interrupt(exam: Exam) -> None:
    """An interrupt reaches the command as Ctrl-C does."""
    sandbox = await exam.sandbox()
    trapping = "trap 'echo caught; exit 3' INT; echo ready; while :; do sleep 0.1; done"
    process = await sandbox.spawn(trapping)
    need(await _read(process, 6) == b"ready\n", "the command did not begin")
    await process.interrupt()
    need(await soon(process.wait(), 10, "wait after an interrupt") == 3, "the command did not handle the interrupt")
    need(await _all(process) == b"caught\n", "its last words are lost")
    process = await sandbox.spawn("echo ready; exec sleep 60")
    need(await _read(process, 6) == b"ready\n", "the command did not begin")
    await process.interrupt()
    need(await soon(process.wait(), 10, "wait after an interrupt") == 130, "sleep did not end with 130")


async def spawn_kill(exam: Exam) -> None:
    """Kill ends a spawned command with all that it started; what is done to an ended one is no error."""
    sandbox = await exam.sandbox()
    file = exam.name()
    process = await sandbox.spawn(
        f"{beating(file, exam.token)}; trap '' TERM INT; echo ready; while :; do sleep 1; done"
    )
    need(await _read(process, 6) == b"ready\n", "the command did not begin")
    need(await alive(sandbox, file), "its background did not begin")
    await process.kill()
    need(await soon(process.wait(), 10, "wait after kill") == 137, "a killed command does not end with 137")
    need(await quiet(sandbox, file), "what the command had started outlives kill")
    await process.kill()
    await process.interrupt()
    await process.close_stdin()
    with expect(BrokenPipeError, what="write to an ended command"):
        await process.write(b"x")


async def spawn_volume(exam: Exam) -> None:
    """A megabyte goes through a spawned command unchanged; ``read`` gives no more than it was asked for."""
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
    """End what was left in the background, so that it does not burden the checks that follow."""
    # Where /proc is out of reach, it is left to the sandbox's end.
    pattern = f"[{file[0]}]{file[1:]}"  # which does not match this command's own line
    await sandbox.exec(
        f"for p in /proc/[0-9]*; do grep -q '{pattern}' $p/cmdline 2>/dev/null && kill -9 ${{p#/proc/}}; done"
    )
