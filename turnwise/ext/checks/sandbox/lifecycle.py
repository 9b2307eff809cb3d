"""Checks of the lifecycle: start, close, snapshots, forks, exposed addresses and limits."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from turnwise.errors import SandboxDied, SandboxError
from turnwise.ext.checks.sandbox.context import (
    CheckContext,
    endless_writer,
    expect,
    forks_of,
    keeps_writing,
    lines_written,
    need,
    processes_ended,
    result_within,
    same,
    stopped_writing,
)
from turnwise.ext.checks.sandbox.report import CheckSkipped
from turnwise.sandboxes.core import Sandbox


async def identity(context: CheckContext) -> None:
    """Sandboxes have unique ids, separate files, and the probed capabilities."""
    async with context.fresh() as first, context.fresh() as second:
        need(bool(first.id) and first.id != second.id, f"two sandboxes have the ids {first.id!r} and {second.id!r}")
        same(first.capabilities.isolation, context.capabilities.isolation, "isolation of a sandbox and of the probe")
        same(first.backend, context.backend.name, "sandbox.backend")
        for path in ("file", "/tmp/file") if context.rooted else ("file",):
            await first.write_file(path, b"of one")
            need(not (await second.exec(["ls", path])).ok, f"{path} of one sandbox is seen in another")


async def close_twice(context: CheckContext) -> None:
    """``close`` is idempotent, also before a start; a closed sandbox raises SandboxDied."""
    sandbox = context.backend.make(context.spec)
    await sandbox.close()
    async with context.fresh() as sandbox:
        pass
    await sandbox.close()
    uses: dict[str, Callable[[], Awaitable[object]]] = {
        "exec": lambda: sandbox.exec(["true"]),
        "spawn": lambda: sandbox.spawn(["true"]),
        "read_file": lambda: sandbox.read_file("x"),
        "write_file": lambda: sandbox.write_file("x", b""),
        "upload": lambda: sandbox.upload(context.folder, "x"),
        "download": lambda: sandbox.download("x", context.folder / "never"),
    }
    for name, use in uses.items():
        with expect(SandboxDied, what=f"{name} after close"):
            await result_within(use(), 10, f"{name} after close")


async def close_during(context: CheckContext) -> None:
    """Closing during a command makes its call raise SandboxDied."""
    async with context.fresh() as sandbox:
        file = context.name()
        work = asyncio.create_task(sandbox.exec(f"while :; do echo >> {file}; sleep 0.05; done"))
        process = await sandbox.spawn(["cat"])
        need(await keeps_writing(sandbox, file), "the command did not start")
        await result_within(sandbox.close(), 20, "close during a command")
        with expect(SandboxDied, what="a command during which the sandbox was closed"):
            await result_within(work, 10, "a command during which the sandbox was closed")
        with contextlib.suppress(SandboxDied):
            same(await result_within(process.read(), 10, "read after close"), b"", "output after close")


async def close_ends_all(context: CheckContext) -> None:
    """Closing kills every process inside."""
    mark = f"{context.token}-{context.name()}"
    async with context.fresh() as sandbox:
        await sandbox.exec(endless_writer("beat", mark))
        await sandbox.spawn(f"trap '' TERM INT HUP; : {mark}; while :; do sleep 1; done")
        need(await keeps_writing(sandbox, "beat"), "the background process did not start")
    need(await processes_ended(mark), "a process of a closed sandbox is still in this machine's /proc")


async def start_cancelled(context: CheckContext) -> None:
    """A cancelled start leaves a sandbox that can be closed, and others start."""
    for pause in (0.0, 0.01, 0.05):
        sandbox = context.backend.make(context.spec)
        starting = asyncio.create_task(sandbox.start())
        await asyncio.sleep(pause)
        starting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await result_within(starting, 30, "a cancelled start")
        await result_within(sandbox.close(), 20, "close after a cancelled start")
    async with context.fresh() as sandbox:
        need((await sandbox.exec(["true"])).ok, "after cancelled starts a sandbox does not respond")


def refused(*specs: dict[str, Any]) -> Callable[[CheckContext], Awaitable[None]]:
    """Return a check that impossible specs raise SandboxError, and that their sandboxes can be closed."""

    async def check(context: CheckContext) -> None:
        for changes in specs:
            sandbox = context.backend.make(replace(context.spec, **changes))
            try:
                with expect(SandboxError, what=f"a start with {changes}"):
                    await result_within(sandbox.start(), 60, f"a start with {changes}")
            finally:
                await sandbox.close()

    return check


start_refused = refused({"image": "turnwise-no-such-image"}, {"snapshot": "turnwise-no-such-snapshot"})
workspace_missing = refused({"workspace": Path("/turnwise/no-such-folder")})


async def workdir(context: CheckContext) -> None:
    """Another workdir is created and writable."""
    async with context.fresh(workdir="/tmp/check workdir/inner") as sandbox:
        await sandbox.write_file("file", b"x")
        result = await sandbox.exec("pwd -P && echo more >> file && cat /tmp/check*/inner/file")
        need(result.stdout == b"/tmp/check workdir/inner\nxmore\n", f"got {result.text!r}")


async def snapshot(context: CheckContext) -> None:
    """A snapshot is immutable and starts any number of sandboxes; dropping it is idempotent."""
    async with context.fresh() as sandbox:
        await sandbox.write_file("kept/file", b"before")
        await sandbox.exec("chmod 700 kept; ln -s file kept/link; sleep 60 &")
        name = await sandbox.snapshot()
        await sandbox.write_file("kept/file", b"after")
        same((await sandbox.exec(["cat", "kept/link"])).stdout, b"after", "file that was changed after a snapshot")
    try:
        async with context.fresh(snapshot=name) as first, context.fresh(snapshot=name) as second:
            for box in (first, second):
                need(await box.read_file("kept/link") == b"before", "it lacks the files of the snapshot")
            await first.exec("echo x > kept/file; rm kept/link")
            need(await second.read_file("kept/link") == b"before", "two sandboxes of a snapshot share files")
        async with context.fresh(snapshot=name) as third:
            need(await third.read_file("kept/file") == b"before", "a sandbox changed the snapshot that it started from")
    finally:
        await context.backend.drop_snapshot(name)
    await context.backend.drop_snapshot(name)


async def fork(context: CheckContext) -> None:
    """Forks have their origin's files and diverge, from it and from each other; forks of forks, too."""
    async with context.fresh() as sandbox:
        await sandbox.write_file("file", b"common")
        with expect(ValueError, what="fork(0)"):
            await sandbox.fork(0)
        async with forks_of(sandbox, 2) as forked:
            need(len(forked) == 2, f"fork(2) returned {len(forked)} sandboxes")
            need(len({sandbox.id, *(fork.id for fork in forked)}) == 3, "forks have an id in common, or their origin's")
            await sandbox.write_file("file", b"of origin")
            first, second = forked
            need(await first.read_file("file") == b"common", "a fork lacks the files of its origin as they were")
            await first.write_file("file", b"of fork")
            need(await second.read_file("file") == b"common", "a write in a fork reached another")
            need(await sandbox.read_file("file") == b"of origin", "a write in a fork reached its origin")
            forked += await first.fork()
            forked += await sandbox.fork()
            need(await forked[2].read_file("file") == b"of fork", "a fork of a fork lacks its files")
            same(await forked[3].read_file("file"), b"of origin", "file of a second fork")
            await sandbox.close()
            need((await first.exec(["cat", "file"])).stdout == b"of fork", "a fork does not outlive its origin")


async def fork_processes(context: CheckContext) -> None:
    """Processes of an origin continue, in its forks only with the capability ``fork_processes``."""
    async with context.fresh() as sandbox:
        await sandbox.exec(endless_writer("beats", context.token))
        need(await keeps_writing(sandbox, "beats"), "a background process does not run")
        async with forks_of(sandbox) as [forked]:
            need(await keeps_writing(sandbox, "beats"), "a fork ended a process of its origin")
            if context.capabilities.fork_processes:
                need(await keeps_writing(forked, "beats"), "a fork lacks the processes of its origin")
            else:
                need(await stopped_writing(forked, "beats"), "a process writes to a fork that is said to have none")
            async with forks_of(sandbox) as [later]:
                need(await lines_written(later, "beats") > 0, "a fork lacks what a process of its origin wrote")


async def fork_deep_tree(context: CheckContext) -> None:
    """A tree that is nested deeper than calls of Python is written and forked."""
    path = "d/" * 1100 + "leaf"
    async with context.fresh() as sandbox:
        await sandbox.write_file(path, b"deep")
        async with forks_of(sandbox) as [forked]:
            same(await forked.read_file(path), b"deep", "file of a deep tree")


async def fork_limits(context: CheckContext) -> None:
    """A fork has the limits and the environment of its origin."""
    limits = replace(context.spec.limits, file_size=2**20)
    env = {**context.spec.env, "MARK": "of origin"}
    async with context.fresh(limits=limits, env=env) as sandbox, forks_of(sandbox) as [forked]:
        need((await forked.exec('printf %s "$MARK"')).stdout == b"of origin", "a fork lacks the spec's variables")
        result = await forked.exec("head -c 3000000 /dev/zero > large; wc -c < large")
        need(int(result.stdout or b"0") <= 2**20, f"limits.file_size does not hold in a fork: {result.text!r}")


async def expose(context: CheckContext) -> None:
    """An exposed address is reached from inside at a stable URL, and nothing else of the host is."""

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = await reader.readline()
        writer.write(b"hello " + line)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    hidden = await asyncio.start_server(greet, "127.0.0.1", 0)
    port, hidden_port = (listener.sockets[0].getsockname()[1] for listener in (server, hidden))
    try:
        async with context.fresh() as sandbox:
            url = await sandbox.expose("127.0.0.1", port)
            need(await sandbox.expose("127.0.0.1", port) == url, "exposing the same address twice returned two URLs")
            answer = await _request_line(sandbox, url)
            need(answer == b"hello you\n", f"{url} answered {answer!r}")
            if context.capabilities.network:
                answer = await _request_line(sandbox, f"http://127.0.0.1:{hidden_port}")
                need(b"hello" not in answer, "a port of the host that was not exposed is reachable")
    finally:
        server.close()
        hidden.close()


async def reap_spares_live(context: CheckContext) -> None:
    """Reaping spares live sandboxes, forks included."""
    async with context.fresh() as sandbox:
        await sandbox.write_file("file", b"x")
        async with contextlib.AsyncExitStack() as stack:
            boxes = [sandbox]
            if context.capabilities.snapshots:
                boxes += await stack.enter_async_context(forks_of(sandbox, 2))
            need(await boxes[-1].read_file("file") == b"x", "a fork lacks the files of its origin")
            need(await context.backend.reap() >= 0, "reap returned a negative number")
            for box in boxes:
                need(await box.read_file("file") == b"x", "reap removed a sandbox whose host is alive, or its files")
                need((await box.exec(["true"])).ok, "reap removed a sandbox whose host is alive")


async def reaped_orphans(context: CheckContext) -> None:
    """Orphans are reaped: hundreds of them do not count against ``limits.pids``."""
    # Four rounds of 40 unreaped orphans would exceed the limit; one slow round on a busy machine does not.
    limits = replace(context.spec.limits, pids=128)
    async with context.fresh(limits=limits) as sandbox:
        script = "i=0; while [ $i -lt 40 ]; do (sh -c 'sleep 0.01' &) ; i=$((i+1)); done; sleep 0.3; echo done"
        for _ in range(4):
            result = await sandbox.exec(script)
            need(result.stdout == b"done\n" and not result.stderr, f"got {result.text[:300]!r}")


async def cpu_limit(context: CheckContext) -> None:
    """A process above ``limits.cpu_seconds`` is killed; the sandbox survives."""
    limits = replace(context.spec.limits, cpu_seconds=1)
    async with context.fresh(limits=limits) as sandbox:
        result = await sandbox.exec("sh -c 'while :; do :; done'; echo code $?", timeout=30)
        need(not result.timed_out, "a loop ran for 30 s although limits.cpu_seconds is 1")
        need(result.stdout in (b"code 137\n", b"code 152\n"), f"it ended with {result.text!r}")


async def _request_line(sandbox: Sandbox, url: str) -> bytes:
    host, _, port = url.removeprefix("http://").rstrip("/").partition(":")
    program = (
        "import socket,sys\ns=socket.create_connection((sys.argv[1],int(sys.argv[2])),5)\ns.sendall(b'you\\n')\n"
        "sys.stdout.buffer.write(s.recv(100))"
    )
    if not (await sandbox.exec(["python3", "-c", ""])).ok:
        raise CheckSkipped("there is no python3 inside to connect with")
    return (await sandbox.exec(["python3", "-I", "-c", program, host, port], timeout=20)).stdout
