"""Contract checks of the lifecycle: start, close, death, snapshots, exposed addresses, limits."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import replace

from turnwise.errors import SandboxDied, SandboxError, SandboxUnavailable
from turnwise.ext.checks.sandbox.context import (
    CheckContext,
    CheckFailed,
    CheckSkipped,
    alive,
    beating,
    beats,
    expect,
    gone,
    need,
    quiet,
    soon,
)
from turnwise.sandboxes.core import Sandbox


async def identity(exam: CheckContext) -> None:
    """Sandboxes have unique ids, separate files, and the probed capabilities."""
    async with exam.fresh() as one, exam.fresh() as other:
        need(bool(one.id) and one.id != other.id, f"two sandboxes have the ids {one.id!r} and {other.id!r}")
        need(one.capabilities.isolation == exam.capabilities.isolation, f"the probe reported {exam.capabilities}")
        need(one.backend == exam.backend.name, f"sandbox.backend is {one.backend!r}, not {exam.backend.name!r}")
        for path in ("file", "/tmp/file") if exam.rooted else ("file",):
            await one.write_file(path, b"of one")
            need(not (await other.exec(["ls", path])).ok, f"{path} of one sandbox is seen in another")


async def closing(exam: CheckContext) -> None:
    """``close`` is idempotent, also before a start; a closed sandbox raises SandboxDied."""
    sandbox = exam.backend.make(exam.spec)
    await sandbox.close()
    async with exam.fresh() as sandbox:
        pass
    await sandbox.close()
    uses: dict[str, Callable[[], Awaitable[object]]] = {
        "exec": lambda: sandbox.exec(["true"]),
        "spawn": lambda: sandbox.spawn(["true"]),
        "read_file": lambda: sandbox.read_file("x"),
        "write_file": lambda: sandbox.write_file("x", b""),
        "upload": lambda: sandbox.upload(exam.folder, "x"),
        "download": lambda: sandbox.download("x", exam.folder / "never"),
    }
    for name, use in uses.items():
        with expect(SandboxDied, what=f"{name} after close"):
            await soon(use(), 10, f"{name} after close")


async def close_during(exam: CheckContext) -> None:
    """Closing during a command makes its call raise SandboxDied."""
    async with exam.fresh() as sandbox:
        file = exam.name()
        work = asyncio.create_task(sandbox.exec(f"while :; do echo >> {file}; sleep 0.05; done"))
        process = await sandbox.spawn(["cat"])
        need(await alive(sandbox, file), "the command did not start")
        await soon(sandbox.close(), 20, "close during a command")
        with expect(SandboxDied, what="a command during which the sandbox was closed"):
            await soon(work, 10, "a command during which the sandbox was closed")
        with contextlib.suppress(SandboxDied):
            need(await soon(process.read(), 10, "read of a spawned command after close") == b"", "it gave output")


async def close_ends_all(exam: CheckContext) -> None:
    """Closing kills every process inside."""
    mark = f"{exam.token}-{exam.name()}"
    async with exam.fresh() as sandbox:
        await sandbox.exec(beating("beat", mark))
        await sandbox.spawn(f"trap '' TERM INT HUP; : {mark}; while :; do sleep 1; done")
        need(await alive(sandbox, "beat"), "the background process did not start")
    need(await gone(mark), "a process of a closed sandbox is still in this machine's /proc")


async def start_cancelled(exam: CheckContext) -> None:
    """A cancelled start leaves a sandbox that can be closed, and others start."""
    for pause in (0.0, 0.01, 0.05):
        sandbox = exam.backend.make(exam.spec)
        starting = asyncio.create_task(sandbox.start())
        await asyncio.sleep(pause)
        starting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await soon(starting, 30, "a cancelled start")
        await soon(sandbox.close(), 20, "close after a cancelled start")
    async with exam.fresh() as sandbox:
        need((await sandbox.exec(["true"])).ok, "after cancelled starts a sandbox does not respond")


async def start_refused(exam: CheckContext) -> None:
    """An impossible spec raises SandboxError, and the sandbox can be closed."""
    asked = {
        "a missing image": replace(exam.spec, image=f"turnwise-no-such-image-{exam.name()}"),
        "a missing snapshot": replace(exam.spec, snapshot=f"no-such-snapshot-{exam.name()}"),
    }
    for what, spec in asked.items():
        sandbox = exam.backend.make(spec)
        try:
            with expect(SandboxError, what=f"a start with {what}"):
                await soon(sandbox.start(), 60, f"a start with {what}")
        finally:
            await sandbox.close()


async def workdir(exam: CheckContext) -> None:
    """Another workdir is created and writable."""
    if not exam.rooted:
        raise CheckSkipped("the backend takes no images and chooses the workdir itself")
    async with exam.fresh(workdir="/tmp/check workdir/inner") as sandbox:
        await sandbox.write_file("file", b"x")
        result = await sandbox.exec("pwd -P && echo more >> file && cat /tmp/check*/inner/file")
        need(result.stdout == b"/tmp/check workdir/inner\nxmore\n", f"got {result.text!r}")


async def snapshots(exam: CheckContext) -> None:
    """A snapshot is immutable and starts any number of sandboxes; dropping it is idempotent."""
    if not exam.capabilities.snapshots:
        await _refused(exam, lambda sandbox: sandbox.snapshot(), "snapshot")
        return
    async with exam.fresh() as sandbox:
        await sandbox.write_file("kept/file", b"before")
        await sandbox.exec("chmod 700 kept; ln -s file kept/link; sleep 60 &")
        name = await sandbox.snapshot()
        await sandbox.write_file("kept/file", b"after")
        need(
            (await sandbox.exec(["cat", "kept/link"])).stdout == b"after",
            "a sandbox does not continue after a snapshot",
        )
    try:
        async with exam.fresh(snapshot=name) as first, exam.fresh(snapshot=name) as second:
            for each in (first, second):
                need(await each.read_file("kept/link") == b"before", "it lacks the files of the snapshot")
            await first.exec("echo x > kept/file; rm kept/link")
            need(await second.read_file("kept/link") == b"before", "two sandboxes of a snapshot share files")
        async with exam.fresh(snapshot=name) as third:
            need(await third.read_file("kept/file") == b"before", "a sandbox changed the snapshot that it started from")
    finally:
        await exam.backend.drop_snapshot(name)
    await exam.backend.drop_snapshot(name)


async def forks(exam: CheckContext) -> None:
    """Forks have their origin's files and diverge, from it and from each other; forks of forks, too."""
    if not exam.capabilities.snapshots:
        await _refused(exam, lambda sandbox: sandbox.fork(), "fork")
        return
    async with exam.fresh() as sandbox:
        await sandbox.write_file("file", b"common")
        with expect(ValueError, what="fork(0)"):
            await sandbox.fork(0)
        made = list(await sandbox.fork(2))
        try:
            need(len(made) == 2, f"fork(2) returned {len(made)} sandboxes")
            need(len({sandbox.id, *(each.id for each in made)}) == 3, "forks have an id in common, or their origin's")
            await sandbox.write_file("file", b"of origin")
            first, second = made
            need(await first.read_file("file") == b"common", "a fork lacks the files of its origin as they were")
            await first.write_file("file", b"of fork")
            need(await second.read_file("file") == b"common", "a write in a fork reached another")
            need(await sandbox.read_file("file") == b"of origin", "a write in a fork reached its origin")
            made += await first.fork()
            made += await sandbox.fork()
            need(await made[2].read_file("file") == b"of fork", "a fork of a fork lacks its files")
            need(
                await made[3].read_file("file") == b"of origin", "a second fork lacks what was written since the first"
            )
            await sandbox.close()
            need((await first.exec(["cat", "file"])).stdout == b"of fork", "a fork does not outlive its origin")
        finally:
            for each in made:
                await each.close()


async def fork_processes(exam: CheckContext) -> None:
    """Processes of an origin go on, and in its forks only where the capabilities say so."""
    if not exam.capabilities.snapshots:
        raise CheckSkipped("the backend does not fork")
    async with exam.fresh() as sandbox:
        await sandbox.exec(beating("beats", exam.token))
        need(await alive(sandbox, "beats"), "a background process does not run")
        [forked] = await sandbox.fork()
        try:
            need(await alive(sandbox, "beats"), "a fork ended a process of its origin")
            if exam.capabilities.fork_processes:
                need(await alive(forked, "beats"), "a fork lacks the processes of its origin")
            else:
                need(
                    await quiet(forked, "beats"), "a process writes to a fork, and the capabilities say that none runs"
                )
            [later] = await sandbox.fork()
            try:
                seen = await beats(later, "beats")
                need(seen > 0, "a fork lacks what a process of its origin wrote")
            finally:
                await later.close()
        finally:
            await forked.close()


async def fork_limits(exam: CheckContext) -> None:
    """A fork has the limits and the environment of its origin."""
    if not exam.capabilities.snapshots:
        raise CheckSkipped("the backend does not fork")
    limits = replace(exam.spec.limits, file_size=2**20)
    async with exam.fresh(limits=limits, env={**exam.spec.env, "MARK": "of origin"}) as sandbox:
        [forked] = await sandbox.fork()
        try:
            need((await forked.exec('printf %s "$MARK"')).stdout == b"of origin", "a fork lacks the spec's variables")
            done = await forked.exec("head -c 3000000 /dev/zero > large; wc -c < large")
            need(int(done.stdout or b"0") <= 2**20, f"limits.file_size does not hold in a fork: {done.text!r}")
        finally:
            await forked.close()


async def exposed(exam: CheckContext) -> None:
    """An exposed address is reached from inside at a stable URL, and nothing else of the host is."""
    if not exam.capabilities.expose:
        await _refused(exam, lambda sandbox: sandbox.expose("127.0.0.1", 9), "expose")
        return

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = await reader.readline()
        writer.write(b"hello " + asked)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    hidden = await asyncio.start_server(greet, "127.0.0.1", 0)
    port, other = (each.sockets[0].getsockname()[1] for each in (server, hidden))
    try:
        async with exam.fresh() as sandbox:
            url = await sandbox.expose("127.0.0.1", port)
            need(await sandbox.expose("127.0.0.1", port) == url, "exposing the same address twice returned two URLs")
            answer = await _asked(sandbox, url)
            need(answer == b"hello you\n", f"{url} answered {answer!r}")
            if exam.capabilities.network:
                answer = await _asked(sandbox, f"http://127.0.0.1:{other}")
                need(b"hello" not in answer, "a port of the host that was not exposed is reachable")
    finally:
        server.close()
        hidden.close()


async def reaping(exam: CheckContext) -> None:
    """Reaping spares live sandboxes, forks included."""
    async with exam.fresh() as sandbox:
        await sandbox.write_file("file", b"x")
        made = [sandbox, *(await sandbox.fork(2) if exam.capabilities.snapshots else ())]
        try:
            need(await made[-1].read_file("file") == b"x", "a fork lacks the files of its origin")
            need(await exam.backend.reap() >= 0, "reap returned a negative number")
            for each in made:
                need(await each.read_file("file") == b"x", "reap removed a sandbox whose host is alive, or its files")
                need((await each.exec(["true"])).ok, "reap removed a sandbox whose host is alive")
        finally:
            for each in made[1:]:
                await each.close()


async def zombies(exam: CheckContext) -> None:
    """Orphans are reaped: hundreds of them do not count against ``limits.pids``."""
    # Four rounds of 40 are too many, and what a busy machine has not ended of the round before is not.
    limits = replace(exam.spec.limits, pids=128)
    async with exam.fresh(limits=limits) as sandbox:
        script = "i=0; while [ $i -lt 40 ]; do (sh -c 'sleep 0.01' &) ; i=$((i+1)); done; sleep 0.3; echo done"
        for _ in range(4):
            result = await sandbox.exec(script)
            need(result.stdout == b"done\n" and not result.stderr, f"got {result.text[:300]!r}")


async def cpu_seconds(exam: CheckContext) -> None:
    """A process above ``limits.cpu_seconds`` is killed; the sandbox survives."""
    limits = replace(exam.spec.limits, cpu_seconds=1)
    async with exam.fresh(limits=limits) as sandbox:
        result = await sandbox.exec("sh -c 'while :; do :; done'; echo code $?", timeout=30)
        need(not result.timed_out, "a loop ran for 30 s although limits.cpu_seconds is 1")
        need(result.stdout in (b"code 137\n", b"code 152\n"), f"it ended with {result.text!r}")


async def _asked(sandbox: Sandbox, url: str) -> bytes:
    host, _, port = url.removeprefix("http://").rstrip("/").partition(":")
    program = (
        "import socket,sys\ns=socket.create_connection((sys.argv[1],int(sys.argv[2])),5)\ns.sendall(b'you\\n')\n"
        "sys.stdout.buffer.write(s.recv(100))"
    )
    if not (await sandbox.exec(["python3", "-c", ""])).ok:
        raise CheckSkipped("there is no python3 inside to connect with")
    return (await sandbox.exec(["python3", "-I", "-c", program, host, port], timeout=20)).stdout


async def _refused(exam: CheckContext, use: Callable[[Sandbox], Awaitable[object]], what: str) -> None:
    try:
        await use(await exam.sandbox())
    except SandboxUnavailable:
        raise CheckSkipped("the capabilities and the backend agree that this is not supported") from None
    raise CheckFailed(f"the capabilities deny {what}, which works")
