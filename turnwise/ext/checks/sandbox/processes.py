"""Checks of a command's processes: time-outs, cancellation, background processes and ``spawn``."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable

from turnwise.errors import SandboxFileNotFound
from turnwise.ext.checks.sandbox.commands import Expected
from turnwise.ext.checks.sandbox.context import (
    CheckContext,
    endless_writer,
    expect,
    keeps_writing,
    lines_written,
    need,
    result_within,
    same,
    stopped_writing,
)
from turnwise.sandboxes.core import Sandbox, SandboxProcess


async def timeout_result(context: CheckContext) -> None:
    """A timeout is a result (124, with the output so far), on time, and the sandbox survives."""
    sandbox = await context.sandbox()
    began = time.monotonic()
    result = await sandbox.exec("echo before; echo sorry >&2; sleep 60; echo after", timeout=0.7)
    took = time.monotonic() - began
    need(result.timed_out and result.exit_code == 124 and not result.ok, f"got {result}")
    same((result.stdout, result.stderr), (b"before\n", b"sorry\n"), "output before the time-out")
    need(0.6 < took < 10, f"a time-out of 0.7 s returned after {took:.1f} s")
    need((await sandbox.exec("echo on")).stdout == b"on\n", "the sandbox does not respond after a time-out")


async def timeout_tree(context: CheckContext) -> None:
    """A timeout kills all processes of the command, however detached."""
    sandbox, file = await context.scratch()
    script = f"{endless_writer(file, context.token)}; trap '' TERM INT; while :; do sleep 0.1; done"
    # On a busy machine the background process may start after more than a second.
    for seconds in (1.0, 15.0):
        result = await sandbox.exec(script, timeout=seconds)
        need(result.timed_out, f"the command did not run into its time-out: {result}")
        if await lines_written(sandbox, file) > 0:
            break
    need(await lines_written(sandbox, file) > 0, "its background process never ran")
    need(await stopped_writing(sandbox, file), "a process that forked twice and ignores signals outlives the time-out")


async def timeout_endless_output(context: CheckContext) -> None:
    """A command with endless output is killed at its timeout, with head and tail kept."""
    result = await (await context.sandbox()).exec("yes", timeout=0.7, max_output=4096)
    need(result.timed_out and result.truncated, f"{result.timed_out=} {result.truncated=}")
    need(result.stdout.startswith(b"y\ny\n") and len(result.stdout) < 4400, f"{len(result.stdout)} bytes are kept")


async def timeout_spares(context: CheckContext) -> None:
    """A timeout spares other commands and their background processes."""
    sandbox, file = await context.scratch()
    await sandbox.exec(endless_writer(file, context.token))
    other = asyncio.create_task(sandbox.exec("sleep 1.2; echo other"))
    result = await sandbox.exec("sleep 60", timeout=0.5)
    need(result.timed_out, f"got {result}")
    need(await keeps_writing(sandbox, file), "a time-out ended another command's background process")
    need((await other).stdout == b"other\n", "a time-out ended another command")
    await _kill_by_file(sandbox, file)


async def cancellation(context: CheckContext) -> None:
    """Cancelling the call kills the command with all its processes."""
    sandbox, file = await context.scratch()
    work = asyncio.create_task(sandbox.exec(f"{endless_writer(file, context.token)}; sleep 60"))
    need(await keeps_writing(sandbox, file), "the command did not start")
    work.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await result_within(work, 10, "a cancelled exec")
    need(work.cancelled(), "a cancelled exec did not raise CancelledError")
    need(await stopped_writing(sandbox, file), "a process of the command outlives its cancellation")
    need((await sandbox.exec("echo on")).stdout == b"on\n", "the sandbox does not respond after a cancellation")


async def background_survives(context: CheckContext) -> None:
    """A command ends with its program; its background processes survive, even holding the output."""
    sandbox, file = await context.scratch()
    loop = f"while :; do echo >> {file}; sleep 0.05; done"
    result = await result_within(
        sandbox.exec(f"(: {context.token}; {loop}) & echo started"), 10, "a command with a background"
    )
    need(result.stdout == b"started\n" and result.ok, f"got {result}")
    need(await keeps_writing(sandbox, file), "a command's background process did not keep running")
    need((await sandbox.exec("echo next")).stdout == b"next\n", "the next command has unexpected output")
    need(await keeps_writing(sandbox, file), "a background process did not survive the next command")
    await _kill_by_file(sandbox, file)


async def background_output(context: CheckContext) -> None:
    """Later output of a background process appears in no other command's output."""
    sandbox = await context.sandbox()
    await sandbox.exec("(sleep 0.2; echo late; echo late >&2) & echo now")
    result = await sandbox.exec("sleep 0.6; echo second")
    need((result.stdout, result.stderr) == (b"second\n", b""), f"got {result.stdout!r} and {result.stderr!r}")


async def spawn_interactive(context: CheckContext) -> None:
    """A spawned command reads input and writes output while it runs; closing its input ends it."""
    process = await (await context.sandbox()).spawn(["cat"])
    for data in (b"one\n", b"\x00\xff two\n"):
        await process.write(data)
        need(await _read(process, len(data)) == data, f"cat did not return {data!r}")
    await process.close_stdin()
    await process.close_stdin()
    same(await result_within(process.read(), 10, "read at the end"), b"", "output after the end of the stream")
    for _ in range(2):
        same(await result_within(process.wait(), 10, "wait"), 0, "exit code of cat")


def spawned(*commands: Expected) -> Callable[[CheckContext], Awaitable[None]]:
    """Return a check that spawns commands and compares their merged output and exit code."""

    async def check(context: CheckContext) -> None:
        sandbox = await context.sandbox()
        for row in commands:
            process = await sandbox.spawn(row.command, **row.options)
            output, code = await _read(process), await process.wait()
            same((output, code), (row.stdout, row.exit_code), f"output and exit code of {row.command!r}")

    return check


spawn_streams = spawned(Expected("echo a; echo b >&2; echo c; exit 5", 5, b"a\nb\nc\n"), Expected("kill -KILL $$", 137))
spawn_arguments = spawned(
    Expected('echo "$CHECK_X"; pwd -P', stdout=b"a b\n/\n", options={"cwd": "/", "env": {"CHECK_X": "a b"}})
)


async def spawn_missing(context: CheckContext) -> None:
    """Spawning a missing program, or in a missing folder, raises."""
    sandbox = await context.sandbox()
    with expect(SandboxFileNotFound, what="spawn of a missing program"):
        await sandbox.spawn(["turnwise-no-such-program"])
    with expect(SandboxFileNotFound, what="spawn with a missing cwd"):
        await sandbox.spawn(["cat"], cwd="/no/such/folder")


async def spawn_interrupt(context: CheckContext) -> None:
    """``interrupt`` acts as Ctrl-C."""
    sandbox = await context.sandbox()
    trapping = "trap 'echo caught; exit 3' INT; echo ready; while :; do sleep 0.1; done"
    for command, code, last in ((trapping, 3, b"caught\n"), ("echo ready; exec sleep 60", 130, b"")):
        process = await sandbox.spawn(command)
        same(await _read(process, 6), b"ready\n", "first output")
        await process.interrupt()
        same(await result_within(process.wait(), 10, "wait after an interrupt"), code, "exit code after an interrupt")
        same(await _read(process), last, "output after an interrupt")


async def spawn_kill(context: CheckContext) -> None:
    """``kill`` ends a spawned command with all its processes; calls on an ended one are no-ops."""
    sandbox, file = await context.scratch()
    process = await sandbox.spawn(
        f"{endless_writer(file, context.token)}; trap '' TERM INT; echo ready; while :; do sleep 1; done"
    )
    need(await _read(process, 6) == b"ready\n", "the command did not start")
    need(await keeps_writing(sandbox, file), "its background process did not start")
    await process.kill()
    need(await result_within(process.wait(), 10, "wait after kill") == 137, "a killed command does not end with 137")
    need(await stopped_writing(sandbox, file), "a process of the command outlives kill")
    await process.kill()
    await process.interrupt()
    await process.close_stdin()
    with expect(BrokenPipeError, what="write to an ended command"):
        await process.write(b"x")


async def spawn_volume(context: CheckContext) -> None:
    """A megabyte passes through a spawned command unchanged; ``read`` respects its limit."""
    process = await (await context.sandbox()).spawn(["cat"])
    data = bytes(range(256)) * 4096

    async def write() -> None:
        for at in range(0, len(data), 65_536):
            await process.write(data[at : at + 65_536])
        await process.close_stdin()

    writing = asyncio.create_task(write())
    output = bytearray()
    while piece := await result_within(process.read(10_000), 30, "read"):
        need(len(piece) <= 10_000, f"read(10000) gave {len(piece)} bytes")
        output += piece
    await writing
    need(bytes(output) == data, f"cat gave back {len(output)} bytes of {len(data)}, or others")
    need(await process.wait() == 0, "cat did not end with 0")


async def _read(process: SandboxProcess, size: float = math.inf) -> bytes:
    """Return output up to a size, or to its end."""
    output = b""
    while len(output) < size and (piece := await result_within(process.read(), 10, "read")):
        output += piece
    return output


async def _kill_by_file(sandbox: Sandbox, file: str) -> None:
    """Kill background processes that would slow down later checks."""
    # Without access to /proc they run until the sandbox ends.
    pattern = f"[{file[0]}]{file[1:]}"  # which does not match this command's own line
    await sandbox.exec(
        f"for p in /proc/[0-9]*; do grep -q '{pattern}' $p/cmdline 2>/dev/null && kill -9 ${{p#/proc/}}; done"
    )
