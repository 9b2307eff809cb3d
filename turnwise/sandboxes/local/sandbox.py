"""LocalSandbox: commands, files, snapshots and sockets through the agent's channel."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final, Protocol

from turnwise.errors import (
    SandboxDied,
    SandboxError,
    SandboxFileError,
    SandboxFileNotFound,
    SandboxFileTooLarge,
    SandboxStartError,
    SandboxUnavailable,
    shown,
    undo_on_error,
    undo_on_error_async,
)
from turnwise.sandboxes import archives
from turnwise.sandboxes.core import (
    MAX_FILE,
    MAX_OUTPUT,
    Capabilities,
    Command,
    ExecResult,
    Sandbox,
    SandboxSpec,
    check_count,
)
from turnwise.sandboxes.local import mount_plan as plans
from turnwise.sandboxes.local.channel import Channel, Launcher, Refused, Request, in_memory, retrieved
from turnwise.sandboxes.local.mount_plan import IsolationLevel, Origin, Place
from turnwise.sandboxes.local.process import KILL_SECONDS, Collector, LocalProcess, exit_code


class SandboxStartTimeout(SandboxStartError):
    """A sandbox did not answer in time, which says nothing of what this machine allows."""


class SandboxHost(Protocol):
    """What a sandbox needs of the backend that made it."""

    rung: IsolationLevel
    capabilities: Capabilities
    launcher: Launcher

    async def begin(self) -> None:
        """Make what all sandboxes need, once."""

    def try_rung(self, rung: IsolationLevel, program: str) -> None:
        """Take a rung to try sandboxes on."""

    def place(self, name: str) -> Place:
        """Return the host's folders of one sandbox."""

    def origin(self, sandbox: LocalSandbox) -> Origin:
        """Return what a sandbox begins from."""

    def forget(self, sandbox: LocalSandbox) -> None:
        """Take note that a sandbox is closed."""

    async def keep(self, sandbox: LocalSandbox, *, frozen: bool = False) -> tuple[str, bool]:
        """Keep a sandbox's files, ``frozen`` for its forks alone; return the name, and whether nothing ran in it."""

    def forks(self, sandbox: LocalSandbox, snapshot: str, count: int) -> list[LocalSandbox]:
        """Return sandboxes that begin from a snapshot which another one holds."""


def exec_request(command: Command, cwd: str, env: Mapping[str, str] | None) -> dict[str, Any]:
    """Return the request that starts a command."""
    argv = None if isinstance(command, str) else [str(word) for word in command]
    if argv == []:
        raise ValueError("command is an empty sequence: give a program and its arguments, or a string for the shell")
    shell = str(command) if isinstance(command, str) else None
    return {"op": "exec", "argv": argv, "shell": shell, "cwd": cwd, "env": dict(env or {})}


def missing_program(error: Refused, command: Command, cwd: str | None) -> SandboxFileNotFound:
    """Return the error of a missing folder or program."""
    if error.what == "cwd":
        return SandboxFileNotFound(f"cwd {cwd!r} inside: {error.reason}")
    return SandboxFileNotFound(f"{shown(command)}: {error.reason}")


def refused_result(error: Refused, command: Command, cwd: str | None, duration: float) -> ExecResult:
    """Return the result of a command that did not start; SandboxFileNotFound if ``cwd`` is not a folder."""
    if error.what == "cwd":
        raise missing_program(error, command, cwd)
    program = command if isinstance(command, str) else command[0]
    code = 127 if error.number == errno.ENOENT else 126
    text = f"{shown(program)}: {error.reason}\n".encode()
    return ExecResult(code, b"", text, duration=duration)


_START_SECONDS: Final = 60.0
_FILE_SECONDS: Final = 60.0
"""Seconds for a request about files. Code inside may stop the process that serves it, and must not stop the host."""
_BYTES_PER_SECOND: Final = 4 * 2**20
"""What a transfer may be as slow as, on top of that."""


class LocalSandbox(Sandbox):
    """A sandbox on this machine; made by its backend."""

    backend: ClassVar[str] = "local"

    def __init__(self, backend: SandboxHost, spec: SandboxSpec, name: str) -> None:
        self.spec = spec
        self.id = name
        self._backend = backend
        self._channel: Channel | None = None
        self._over: asyncio.Future[int] | None = None
        self._open: set[Collector | LocalProcess] = set()
        self._closed = False
        # A fork's start is put off until its first use.
        self._put_off = False
        self._starting: asyncio.Task[None] | None = None
        # Requests that may have changed files; the snapshot of the last freeze, and their number then.
        self._changes = 0
        self._frozen: tuple[str, int] | None = None
        self._freezing = asyncio.Lock()

    async def start(self) -> None:
        """Start it. A start that fails or is cancelled leaves nothing behind."""
        if self._channel is not None or self._closed or self._put_off:
            raise SandboxStartError(f"sandbox {self.id} was started before: a sandbox is started once")
        await self._backend.begin()
        await self.launch()

    async def launch(self) -> None:
        """Start it at the backend's current isolation level. Raises SandboxUnavailable or SandboxStartError."""
        self.capabilities = self._backend.capabilities
        plans.check(self.spec)
        origin = self._backend.origin(self)
        async with undo_on_error_async(self._end):
            await self._launch(plans.plan(self._backend.rung, self.spec, self._backend.place(self.id), origin))

    async def close(self) -> None:
        """Kill everything inside and free its resources."""
        self._closed = True
        if self._starting is not None and not self._starting.done():
            self._starting.cancel()
            await asyncio.wait([self._starting])
        await self._end()

    async def _end(self) -> None:
        self._closed = True
        await self.stop_relays()
        if self._channel is not None:
            self._channel.close()
        for each in list(self._open):
            each.close()
        self._open.clear()
        if self._over is not None:
            self._backend.launcher.stop(self.id)
            await asyncio.wait([self._over], timeout=KILL_SECONDS)
        self._backend.forget(self)

    async def exec(
        self,
        command: Command,
        *,
        timeout: float | None = 30.0,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
        max_output: int = MAX_OUTPUT,
    ) -> ExecResult:
        """Run a command to its end."""
        began = time.monotonic()
        channel = await self._used()
        message = exec_request(command, self._inside(cwd or "."), env) | {
            "streams": [0, 1, 2] if stdin is not None else [-1, 0, 1]
        }
        streams: list[Collector] = []
        with contextlib.ExitStack() as ends:
            given = [] if stdin is None else [in_memory(stdin)]
            for fd in given:
                ends.callback(os.close, fd)
            for _ in range(2):
                reading, writing = os.pipe2(os.O_CLOEXEC)
                streams.append(self._hold(Collector(reading, max_output)))
                ends.callback(os.close, writing)
                given.append(writing)
            with undo_on_error(lambda: self._release(streams)):
                request = await channel.request(message | {"spawned": False}, given)
        timed_out = False
        try:
            done, _ = await asyncio.wait([request.ended], timeout=timeout)
            if not done:
                timed_out = True
                await self._kill(request)
            status = 124 if timed_out else exit_code(request.ended.result())
        except asyncio.CancelledError:
            try:
                with contextlib.suppress(SandboxError):
                    await asyncio.shield(self._kill(request))
            finally:
                self._release(streams)
            raise
        except Refused as refused:
            self._release(streams)
            return refused_result(refused, command, cwd, time.monotonic() - began)
        except BaseException:  # also a cancellation: the streams are closed
            self._release(streams)
            raise
        for each in streams:
            each.finish()
        cut = any(each.truncated for each in streams)
        took = time.monotonic() - began
        return ExecResult(status, streams[0].result(), streams[1].result(), timed_out, cut, took)

    async def spawn(
        self, command: Command, *, cwd: str | None = None, env: Mapping[str, str] | None = None
    ) -> LocalProcess:
        """Start a long-running command."""
        channel = await self._used()
        inner_in, stdin = os.pipe2(os.O_CLOEXEC)
        output, inner_out = os.pipe2(os.O_CLOEXEC)
        request: Request | None = None
        try:
            message = exec_request(command, self._inside(cwd or "."), env) | {"streams": [0, 1, 1], "spawned": True}
            request = await channel.request(message, [inner_in, inner_out])
            done, _ = await asyncio.wait([request.started], timeout=_START_SECONDS)
            if not done:
                await self._kill(request)
                raise SandboxError(f"{shown(command)} did not start within {_START_SECONDS:g} s")
            request.started.result()
        except BaseException as error:  # also a cancellation: the pipes are closed
            os.close(stdin)
            os.close(output)
            if isinstance(error, Refused):
                if error.what == "fork":
                    raise SandboxError(f"{shown(command)} did not start: {error.reason}") from error
                raise missing_program(error, command, cwd) from error
            if request is not None and isinstance(error, asyncio.CancelledError):
                # No other process could end it.
                with contextlib.suppress(SandboxError):
                    await asyncio.shield(self._kill(request))
            raise
        finally:
            os.close(inner_in)
            os.close(inner_out)
        process = LocalProcess(channel, request, stdin, output, self._open.discard)
        self._open.add(process)
        return process

    async def read_file(self, path: str, *, max_bytes: int = MAX_FILE) -> bytes:
        """Return a file's content."""
        channel = await self._used(changes=False)
        reading, writing = os.pipe2(os.O_CLOEXEC)
        stream = self._hold(Collector(reading, 2 * max_bytes + 2))
        try:
            try:
                request = await channel.request({"op": "read", "path": self._inside(path), "max": max_bytes}, [writing])
            finally:
                os.close(writing)
            await self._served(request, path, max_bytes)
            if not stream.closed:
                await asyncio.wait([stream.over], timeout=_FILE_SECONDS)
            return stream.result()
        except SandboxFileTooLarge:
            raise SandboxFileTooLarge(f"{path} holds more than {max_bytes} bytes (max_bytes)") from None
        finally:
            self._release([stream])

    async def write_file(self, path: str, data: bytes, *, mode: int | None = None) -> None:
        """Write a file, creating parent folders."""
        channel = await self._used()
        fd = in_memory(data)
        try:
            request = await channel.request({"op": "write", "path": self._inside(path), "mode": mode}, [fd])
        finally:
            os.close(fd)
        await self._served(request, path, len(data))

    async def upload(self, source: Path, target: str) -> None:
        """Copy a host file or folder into the sandbox."""
        channel = await self._used()
        if source.is_dir():
            reading, writing = os.pipe2(os.O_CLOEXEC)
            try:
                with undo_on_error(lambda: os.close(writing)):
                    request = await channel.request({"op": "unpack", "path": self._inside(target)}, [reading])
            finally:
                os.close(reading)
            sending = archives.ArchiveSender(source, writing)
            packing = asyncio.create_task(asyncio.to_thread(sending.run))
            try:
                await self._served(request, target, 0, lambda: sending.sent)
            finally:
                with contextlib.suppress(BrokenPipeError):
                    await packing
            return
        fd = archives.open_source(source)
        try:
            size = os.fstat(fd)
            message = {"op": "write", "path": self._inside(target), "mode": size.st_mode & 0o777}
            request = await channel.request(message, [fd])
            await self._served(request, target, size.st_size)
        finally:
            os.close(fd)

    async def download(self, source: str, target: Path, *, max_bytes: int = MAX_FILE) -> None:
        """Copy a file or folder to the host."""
        channel = await self._used(changes=False)
        reading, writing = os.pipe2(os.O_CLOEXEC)
        try:
            with undo_on_error(lambda: os.close(reading)):
                request = await channel.request({"op": "pack", "path": self._inside(source)}, [writing])
        finally:
            os.close(writing)
        unpacking = asyncio.create_task(asyncio.to_thread(archives.receive, reading, target, max_bytes))
        unpacking.add_done_callback(retrieved)
        try:
            await self._served(request, source, max_bytes)
        except SandboxFileError as error:
            # Where the host had enough, what is inside only saw its stream break.
            failed = await asyncio.gather(unpacking, return_exceptions=True)
            raise next((each for each in failed if isinstance(each, SandboxFileTooLarge)), error) from None
        await unpacking

    async def snapshot(self) -> str:
        """Snapshot the files; return the name for ``spec.snapshot``."""
        await self._used(changes=False)
        return (await self._backend.keep(self))[0]

    async def fork(self, count: int = 1) -> list[LocalSandbox]:
        """Return sandboxes over a frozen layer of the current files, without processes; each starts when it is used.

        While nothing runs in this one and nothing is asked of it that may change a file, later forks share the layer.
        """
        check_count(count)
        if self._put_off and not self._closed and self._starting is None:
            # It has changed nothing: its forks begin where it does.
            assert self.spec.snapshot is not None
            return self._backend.forks(self, self.spec.snapshot, count)
        await self._used(changes=False)
        async with self._freezing:
            if self._frozen is None or self._frozen[1] != self._changes:
                before = self._changes
                name, idle = await self._backend.keep(self, frozen=True)
                if self._closed:
                    self._backend.forget(self)
                self._alive()
                self._frozen = (name, before if idle else -1)
            return self._backend.forks(self, self._frozen[0], count)

    async def listen(self, port: int = 0) -> socket.socket:
        """Return a socket that listens inside, at 127.0.0.1, and is accepted on the host."""
        if not self.capabilities.expose:
            raise SandboxUnavailable(
                f"a sandbox isolated by {self.capabilities.isolation} cannot be given access to a single address: "
                "install bubblewrap, or choose the docker backend"
            )
        request = await (await self._used(changes=False)).request({"op": "listen", "port": port})
        try:
            await self._served(request, f"port {port}", 0)
        except BaseException as error:  # also a cancellation: the passed descriptors are closed
            if request.handed >= 0:
                os.close(request.handed)
            if isinstance(error, SandboxFileError):
                raise SandboxError(f"port {port} of the sandbox cannot be listened on: {error}") from error
            raise
        return socket.socket(fileno=request.handed)

    async def _launch(self, plan: dict[str, Any]) -> None:
        backend = self._backend
        place = backend.place(self.id)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        errors, told = os.pipe2(os.O_CLOEXEC)
        try:
            with theirs:
                place.home.mkdir(parents=True)
                place.home.chmod(0o711)
                self._channel = Channel(ours, self._why)
                self._over = backend.launcher.start(plan, [theirs.fileno(), told])
                self._over.add_done_callback(self._ended)
            os.close(told)
            told = -1
            greeting = plans.greeting(backend.rung, self.spec, place, self.spec.env)
            with contextlib.suppress(SandboxDied):
                await self._channel.send(greeting)
            # The end of its process closes the channel, so that is waited for here, too.
            await asyncio.wait([self._channel.ready], timeout=_START_SECONDS)
            late = not self._channel.ready.done()
            if late or self._channel.ready.exception() is not None:
                backend.launcher.stop(self.id)
                await asyncio.wait([self._over], timeout=KILL_SECONDS)
                os.set_blocking(errors, False)
                said = b"its first process has not answered" if late else b"its first process ended"
                with contextlib.suppress(BlockingIOError):
                    said = os.read(errors, 65_536) or said
                why = said.decode(errors="replace").strip()
                if late:
                    raise SandboxStartTimeout(f"sandbox {self.id} did not start within {_START_SECONDS:g} s: {why}")
                raise SandboxStartError(f"sandbox {self.id} did not start: {why}")
            plans.check_python(self._channel.ready.result())
        finally:
            os.close(errors)
            if told >= 0:
                os.close(told)
            if self._channel is None:
                ours.close()

    def _ended(self, _: asyncio.Future[int]) -> None:
        if self._channel is not None:
            self._channel.close()

    def _why(self) -> str:
        return f"sandbox {self.id} {'is closed' if self._closed else 'is gone: its first process ended'}"

    async def _used(self, *, changes: bool = True) -> Channel:
        """Return the channel, of a fork once that has started.

        Args:
            changes: Whether it is used for what may change files.
        """
        if self._put_off and not self._closed:
            if self._starting is None:
                self._starting = asyncio.create_task(self._start_fork())
                self._starting.add_done_callback(retrieved)
            # A request that is cancelled ends itself, not the start that others wait for, too.
            await asyncio.wait([self._starting])
            if not self._starting.cancelled():
                self._starting.result()
        self._changes += changes
        return self._alive()

    async def _start_fork(self) -> None:
        async with self.start_slots:
            await self.launch()
        self._put_off = False

    def _alive(self) -> Channel:
        if self._channel is None or self._channel.dead:
            raise SandboxDied(self._why() if self._channel is not None else f"sandbox {self.id} was not started")
        return self._channel

    def _inside(self, path: str) -> str:
        """Translate a path for processes inside: without a mount namespace the workdir is elsewhere."""
        if self.capabilities.isolation == "bubblewrap" or not path.startswith("/"):
            return path
        below = os.path.relpath(os.path.normpath(path), self.spec.workdir)
        return path if below.split("/")[0] == ".." else below

    def _hold(self, stream: Collector) -> Collector:
        self._open.add(stream)
        # What a command left in the background may hold its pipe open for long.
        stream.over.add_done_callback(lambda _: self._open.discard(stream))
        return stream

    def _release(self, streams: Sequence[Collector]) -> None:
        for each in streams:
            each.close()
            self._open.discard(each)

    async def _kill(self, request: Request) -> None:
        """Kill a command's process tree; SandboxDied if that fails, which ends the sandbox."""
        channel = self._alive()
        if not await channel.kill(request, KILL_SECONDS):
            channel.close()
            self._backend.launcher.stop(self.id)
            raise SandboxDied(f"sandbox {self.id} did not end a command within {KILL_SECONDS:g} s")

    async def _served(self, request: Request, path: str, size: int, moved: Callable[[], int] = lambda: 0) -> None:
        """Wait for a file request, as long as ``moved`` bytes become more. Raises SandboxFileError or SandboxDied."""
        seconds = _FILE_SECONDS + size / _BYTES_PER_SECOND
        try:
            before = -1
            while not request.ended.done() and (now := moved()) > before:
                before = now
                await asyncio.wait([request.ended], timeout=seconds)
        except asyncio.CancelledError:
            with contextlib.suppress(SandboxError):
                await asyncio.shield(self._kill(request))
            raise
        if not request.ended.done():
            await self._kill(request)
            raise SandboxFileError(f"{path}: no data arrived within {seconds:g} s")
        try:
            if request.ended.result() is None:
                raise SandboxFileError(f"{path}: the process that served this was killed inside the sandbox")
        except Refused as refused:
            kind = {errno.ENOENT: SandboxFileNotFound, errno.EFBIG: SandboxFileTooLarge}.get(refused.number)
            if refused.number == errno.EFBIG and refused.reason == os.strerror(errno.EFBIG):
                raise SandboxFileError(
                    f"{path}: the limit of file_size is {self.spec.limits.file_size} bytes"
                ) from None
            if refused.number == errno.ENOSPC:
                raise SandboxFileError(f"{path}: the limit of disk is {self.spec.limits.disk} bytes") from None
            raise (kind or SandboxFileError)(f"{path}: {refused.reason}") from None


def put_off(backend: SandboxHost, spec: SandboxSpec, name: str, origin: LocalSandbox) -> LocalSandbox:
    """Return a fork of another sandbox, which starts with its first use."""
    made = LocalSandbox(backend, spec, name)
    made._put_off, made.start_slots, made.capabilities = True, origin.start_slots, origin.capabilities
    return made
