"""LocalSandbox: commands, files, snapshots and sockets through the agent's channel."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
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
from turnwise.sandboxes.local.channel import Channel, Request, RequestRefused, mark_retrieved
from turnwise.sandboxes.local.host_python import check_python
from turnwise.sandboxes.local.launch_plan import HostPaths, IsolationLevel, check_spec, hello_message, launch_plan
from turnwise.sandboxes.local.launcher import Launcher
from turnwise.sandboxes.local.packets import memory_file
from turnwise.sandboxes.local.process import KILL_SECONDS, Collector, LocalProcess, exit_code
from turnwise.sandboxes.local.snapshots import Origin
from turnwise.sandboxes.users import SandboxUsers


class SandboxStartTimeout(SandboxStartError):
    """A sandbox did not answer in time, which says nothing about the isolation of this machine."""


class SandboxHost(Protocol):
    """The part of its backend that a sandbox uses."""

    level: IsolationLevel
    capabilities: Capabilities
    launcher: Launcher
    users: SandboxUsers

    async def begin(self) -> None:
        """Create what all sandboxes share, once."""

    def try_level(self, level: IsolationLevel) -> None:
        """Switch to an isolation level to probe it."""

    def paths(self, name: str) -> HostPaths:
        """Return the host folders of one sandbox."""

    def origin(self, sandbox: LocalSandbox) -> Origin:
        """Return the origin of a sandbox's files."""

    def forget(self, sandbox: LocalSandbox) -> None:
        """Release a closed sandbox."""

    async def snapshot(self, sandbox: LocalSandbox, *, frozen: bool = False) -> tuple[str, bool]:
        """Snapshot a sandbox's files, ``frozen`` for its forks alone; return the name and whether it was idle."""

    def forks(self, sandbox: LocalSandbox, snapshot: str, count: int) -> list[LocalSandbox]:
        """Return sandboxes that begin from a snapshot which another one holds."""


def exec_request(command: Command, cwd: str, env: Mapping[str, str] | None) -> dict[str, Any]:
    """Return the request that starts a command."""
    argv = None if isinstance(command, str) else [str(word) for word in command]
    if argv == []:
        raise ValueError("command is an empty sequence: give a program and its arguments, or a string for the shell")
    shell = str(command) if isinstance(command, str) else None
    return {"op": "exec", "argv": argv, "shell": shell, "cwd": cwd, "env": dict(env or {})}


def missing_program(error: RequestRefused, command: Command, cwd: str | None) -> SandboxFileNotFound:
    """Return the error of a missing folder or program."""
    if error.what == "cwd":
        return SandboxFileNotFound(f"cwd {cwd!r} inside: {error.reason}")
    return SandboxFileNotFound(f"{shown(command)}: {error.reason}")


def refused_result(error: RequestRefused, command: Command, cwd: str | None, duration: float) -> ExecResult:
    """Return the result of a command that did not start; SandboxFileNotFound if ``cwd`` is not a folder."""
    if error.what == "cwd":
        raise missing_program(error, command, cwd)
    program = command if isinstance(command, str) else command[0]
    code = 127 if error.number == errno.ENOENT else 126
    text = f"{shown(program)}: {error.reason}\n".encode()
    return ExecResult(code, b"", text, duration=duration)


_START_SECONDS: Final = 60.0
_FILE_SECONDS: Final = 60.0
"""Seconds for a file request: code inside may stop the process that serves it, and must not block the host."""
_BYTES_PER_SECOND: Final = 4 * 2**20
"""The slowest transfer that is allowed beyond that time."""


class LocalSandbox(Sandbox):
    """A sandbox on this machine, created by its backend."""

    backend: ClassVar[str] = "local"

    def __init__(self, backend: SandboxHost, spec: SandboxSpec, name: str) -> None:
        self.spec = spec
        self.id = name
        self._backend = backend
        self._channel: Channel | None = None
        self._end_future: asyncio.Future[int] | None = None
        self._open_streams: set[Collector | LocalProcess] = set()
        self._closed = False
        # A fork starts with its first use.
        self._deferred = False
        self._starting: asyncio.Task[None] | None = None
        # Requests that may have changed files; the snapshot of the last freeze, and their number then.
        self._changes = 0
        self._frozen: tuple[str, int] | None = None
        self._freezing = asyncio.Lock()

    async def start(self) -> None:
        """Start it. A start that fails or is cancelled leaves nothing behind."""
        if self._channel is not None or self._closed or self._deferred:
            raise SandboxStartError(f"sandbox {self.id} was started before: a sandbox is started once")
        await self._backend.begin()
        await self.launch()

    async def launch(self) -> None:
        """Start it at the backend's current isolation level. Raises SandboxUnavailable or SandboxStartError."""
        self.capabilities = self._backend.capabilities
        check_spec(self.spec)
        origin = self._backend.origin(self)
        async with undo_on_error_async(self._end):
            level = self._backend.level
            if level.uid is not None:
                level = replace(level, uid=self._backend.users.take(self.id))
            await self._launch(launch_plan(level, self.spec, self._backend.paths(self.id), origin))

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
        for handle in list(self._open_streams):
            handle.close()
        self._open_streams.clear()
        if self._end_future is not None:
            self._backend.launcher.stop(self.id)
            await asyncio.wait([self._end_future], timeout=KILL_SECONDS)
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
        channel = await self._channel_in_use()
        message = exec_request(command, self._inside(cwd or "."), env) | {
            "streams": [0, 1, 2] if stdin is not None else [-1, 0, 1]
        }
        streams: list[Collector] = []
        with contextlib.ExitStack() as ends:
            passed = [] if stdin is None else [memory_file(stdin)]
            for fd in passed:
                ends.callback(os.close, fd)
            for _ in range(2):
                reading, writing = os.pipe2(os.O_CLOEXEC)
                streams.append(self._track(Collector(reading, max_output)))
                ends.callback(os.close, writing)
                passed.append(writing)
            with undo_on_error(lambda: self._release(streams)):
                request = channel.request(message | {"spawned": False}, passed)
        timed_out = False
        try:
            done, _ = await asyncio.wait([request.exit_status], timeout=timeout)
            if not done:
                timed_out = True
                await self._kill(request)
            status = 124 if timed_out else exit_code(request.exit_status.result())
        except asyncio.CancelledError:
            try:
                with contextlib.suppress(SandboxError):
                    await asyncio.shield(self._kill(request))
            finally:
                self._release(streams)
            raise
        except RequestRefused as refused:
            self._release(streams)
            return refused_result(refused, command, cwd, time.monotonic() - began)
        except BaseException:  # also a cancellation: the streams are closed
            self._release(streams)
            raise
        for stream in streams:
            stream.finish()
        cut = any(stream.truncated for stream in streams)
        took = time.monotonic() - began
        return ExecResult(status, streams[0].data, streams[1].data, timed_out, cut, took)

    async def spawn(
        self, command: Command, *, cwd: str | None = None, env: Mapping[str, str] | None = None
    ) -> LocalProcess:
        """Start a long-running command."""
        channel = await self._channel_in_use()
        inner_in, stdin = os.pipe2(os.O_CLOEXEC)
        output, inner_out = os.pipe2(os.O_CLOEXEC)
        request: Request | None = None
        try:
            message = exec_request(command, self._inside(cwd or "."), env) | {"streams": [0, 1, 1], "spawned": True}
            request = channel.request(message, [inner_in, inner_out])
            done, _ = await asyncio.wait([request.started], timeout=_START_SECONDS)
            if not done:
                await self._kill(request)
                raise SandboxError(f"{shown(command)} did not start within {_START_SECONDS:g} s")
            request.started.result()
        except BaseException as error:  # also a cancellation: the pipes are closed
            os.close(stdin)
            os.close(output)
            if isinstance(error, RequestRefused):
                if error.what == "fork":
                    raise SandboxError(f"{shown(command)} did not start: {error.reason}") from error
                raise missing_program(error, command, cwd) from error
            if request is not None and isinstance(error, asyncio.CancelledError):
                # No caller has a handle to end it.
                with contextlib.suppress(SandboxError):
                    await asyncio.shield(self._kill(request))
            raise
        finally:
            os.close(inner_in)
            os.close(inner_out)
        process = LocalProcess(channel, request, stdin, output, self._open_streams.discard)
        self._open_streams.add(process)
        return process

    async def read_file(self, path: str, *, max_bytes: int = MAX_FILE) -> bytes:
        """Return a file's content."""
        channel = await self._channel_in_use(changes=False)
        reading, writing = os.pipe2(os.O_CLOEXEC)
        stream = self._track(Collector(reading, 2 * max_bytes + 2))
        try:
            try:
                request = channel.request({"op": "read", "path": self._inside(path), "max": max_bytes}, [writing])
            finally:
                os.close(writing)
            await self._wait_file_request(request, path, max_bytes)
            if not stream.closed:
                await asyncio.wait([stream.done], timeout=_FILE_SECONDS)
            return stream.data
        except SandboxFileTooLarge:
            raise SandboxFileTooLarge(f"{path} holds more than {max_bytes} bytes (max_bytes)") from None
        finally:
            self._release([stream])

    async def write_file(self, path: str, data: bytes, *, mode: int | None = None) -> None:
        """Write a file, creating parent folders."""
        channel = await self._channel_in_use()
        fd = memory_file(data)
        try:
            request = channel.request({"op": "write", "path": self._inside(path), "mode": mode}, [fd])
        finally:
            os.close(fd)
        await self._wait_file_request(request, path, len(data))

    async def upload(self, source: Path, target: str) -> None:
        """Copy a host file or folder into the sandbox."""
        channel = await self._channel_in_use()
        target = self._inside(target)
        folder = target if source.is_dir() else os.path.dirname(target)
        reading, writing = os.pipe2(os.O_CLOEXEC)
        try:
            with undo_on_error(lambda: os.close(writing)):
                request = channel.request({"op": "unpack", "path": folder or "."}, [reading])
        finally:
            os.close(reading)
        sending = archives.ArchiveSender(source, target, writing)
        packing = asyncio.create_task(asyncio.to_thread(sending.run))
        try:
            await self._wait_file_request(request, target, 0, lambda: sending.sent)
        finally:
            with contextlib.suppress(BrokenPipeError):
                await packing

    async def download(self, source: str, target: Path, *, max_bytes: int = MAX_FILE) -> None:
        """Copy a file or folder to the host."""
        channel = await self._channel_in_use(changes=False)
        reading, writing = os.pipe2(os.O_CLOEXEC)
        try:
            with undo_on_error(lambda: os.close(reading)):
                request = channel.request({"op": "pack", "path": self._inside(source)}, [writing])
        finally:
            os.close(writing)
        unpacking = asyncio.create_task(asyncio.to_thread(archives.receive_archive, reading, target, max_bytes))
        unpacking.add_done_callback(mark_retrieved)
        try:
            await self._wait_file_request(request, source, max_bytes)
        except SandboxFileError as error:
            # When the host stops reading at its limit, the process inside only sees a broken pipe.
            outcome = await asyncio.gather(unpacking, return_exceptions=True)
            raise next((failure for failure in outcome if isinstance(failure, SandboxFileTooLarge)), error) from None
        await unpacking

    async def snapshot(self) -> str:
        """Snapshot the files; return the name for ``spec.snapshot``."""
        await self._channel_in_use(changes=False)
        return (await self._backend.snapshot(self))[0]

    async def fork(self, count: int = 1) -> list[LocalSandbox]:
        """Return sandboxes over a frozen layer of the current files, without processes; each starts when it is used.

        While nothing runs in this one and no request may have changed a file, later forks share the layer.
        """
        check_count(count)
        if self._deferred and not self._closed and self._starting is None:
            # A fork that has not started has changed nothing: its forks have its origin.
            assert self.spec.snapshot is not None
            return self._backend.forks(self, self.spec.snapshot, count)
        await self._channel_in_use(changes=False)
        async with self._freezing:
            if self._frozen is None or self._frozen[1] != self._changes:
                changes = self._changes
                name, idle = await self._backend.snapshot(self, frozen=True)
                if self._closed:
                    self._backend.forget(self)
                self._alive()
                self._frozen = (name, changes if idle else -1)
            return self._backend.forks(self, self._frozen[0], count)

    async def listen(self, port: int = 0) -> socket.socket:
        """Return a socket that listens inside, at 127.0.0.1, and is accepted on the host."""
        if not self.capabilities.expose:
            raise SandboxUnavailable(
                f"a sandbox isolated by {self.capabilities.isolation} cannot be given access to a single address: "
                "install bubblewrap, or choose the docker backend"
            )
        request = (await self._channel_in_use(changes=False)).request({"op": "listen", "port": port})
        try:
            await self._wait_file_request(request, f"port {port}", 0)
        except BaseException as error:  # also a cancellation: the passed descriptors are closed
            if request.descriptor >= 0:
                os.close(request.descriptor)
            if isinstance(error, SandboxFileError):
                raise SandboxError(f"port {port} of the sandbox cannot be listened on: {error}") from error
            raise
        return socket.socket(fileno=request.descriptor)

    async def _launch(self, plan: dict[str, Any]) -> None:
        backend = self._backend
        paths, launcher = backend.paths(self.id), backend.launcher
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        errors, error_pipe = os.pipe2(os.O_CLOEXEC)
        try:
            with theirs:
                paths.home.mkdir(parents=True)
                paths.home.chmod(0o711)
                self._channel = Channel(ours, self._death_reason)
                self._end_future = launcher.start(plan, [theirs.fileno(), error_pipe])
                self._end_future.add_done_callback(self._ended)
            os.close(error_pipe)
            error_pipe = -1
            greeting = hello_message(backend.level, self.spec, paths, self.spec.env)
            with contextlib.suppress(SandboxDied):
                self._channel.send(greeting)
            # The end of its process closes the channel, which completes this wait, too.
            await asyncio.wait([self._channel.ready], timeout=_START_SECONDS)
            late, late_reason = not self._channel.ready.done(), b"its first process has not answered"
            if late or self._channel.ready.exception() is not None:
                launcher.stop(self.id)
                await asyncio.wait([self._end_future], timeout=KILL_SECONDS)
                if late and not self._end_future.done():
                    # It neither starts nor ends a sandbox: it is stopped, or hangs. The next start begins another one.
                    launcher.kill()
                    late_reason = b"the process that starts sandboxes answers nothing, and was killed"
                os.set_blocking(errors, False)
                message = late_reason if late else b"its first process ended"
                with contextlib.suppress(BlockingIOError):
                    message = os.read(errors, 65_536) or message
                reason = message.decode(errors="replace").strip()
                if late:
                    raise SandboxStartTimeout(f"sandbox {self.id} did not start within {_START_SECONDS:g} s: {reason}")
                raise SandboxStartError(f"sandbox {self.id} did not start: {reason}")
            check_python(self._channel.ready.result())
        finally:
            os.close(errors)
            if error_pipe >= 0:
                os.close(error_pipe)
            if self._channel is None:
                ours.close()

    def _ended(self, _: asyncio.Future[int]) -> None:
        if self._channel is not None:
            self._channel.close()

    def _death_reason(self) -> str:
        return f"sandbox {self.id} {'is closed' if self._closed else 'is gone: its first process ended'}"

    async def _channel_in_use(self, *, changes: bool = True) -> Channel:
        """Return the channel; a deferred fork is started first.

        Args:
            changes: Whether the request may change files.
        """
        if self._deferred and not self._closed:
            if self._starting is None:
                self._starting = asyncio.create_task(self._start_fork())
                self._starting.add_done_callback(mark_retrieved)
            # A cancelled request does not end the start, for which other requests wait, too.
            await asyncio.wait([self._starting])
            if not self._starting.cancelled():
                self._starting.result()
        self._changes += changes
        return self._alive()

    async def _start_fork(self) -> None:
        async with self.start_slots:
            await self.launch()
        self._deferred = False

    def _alive(self) -> Channel:
        if self._channel is None or self._channel.dead:
            raise SandboxDied(
                self._death_reason() if self._channel is not None else f"sandbox {self.id} was not started"
            )
        return self._channel

    def _inside(self, path: str) -> str:
        """Translate a path for processes inside: without a mount namespace the workdir is a host folder."""
        if self.capabilities.isolation == "bubblewrap" or not path.startswith("/"):
            return path
        relative_path = os.path.relpath(os.path.normpath(path), self.spec.workdir)
        return path if relative_path.split("/")[0] == ".." else relative_path

    def _track(self, stream: Collector) -> Collector:
        self._open_streams.add(stream)
        # A background process of a command may hold its pipe open for long.
        stream.done.add_done_callback(lambda _: self._open_streams.discard(stream))
        return stream

    def _release(self, streams: Sequence[Collector]) -> None:
        for stream in streams:
            stream.close()
            self._open_streams.discard(stream)

    async def _kill(self, request: Request) -> None:
        """Kill a command's process tree; SandboxDied if that fails, which ends the sandbox."""
        channel = self._alive()
        if not await channel.kill(request, KILL_SECONDS):
            channel.close()
            self._backend.launcher.stop(self.id)
            raise SandboxDied(f"sandbox {self.id} did not end a command within {KILL_SECONDS:g} s")

    async def _wait_file_request(
        self, request: Request, path: str, size: int, moved: Callable[[], int] = lambda: 0
    ) -> None:
        """Wait for a file request, as long as ``moved`` bytes grow. Raises SandboxFileError or SandboxDied."""
        seconds = _FILE_SECONDS + size / _BYTES_PER_SECOND
        try:
            previous = -1
            while not request.exit_status.done() and (total := moved()) > previous:
                previous = total
                await asyncio.wait([request.exit_status], timeout=seconds)
        except asyncio.CancelledError:
            with contextlib.suppress(SandboxError):
                await asyncio.shield(self._kill(request))
            raise
        if not request.exit_status.done():
            await self._kill(request)
            raise SandboxFileError(f"{path}: no data arrived within {seconds:g} s")
        try:
            if request.exit_status.result() is None:
                raise SandboxFileError(f"{path}: the process that served this was killed inside the sandbox")
        except RequestRefused as refused:
            kind = {errno.ENOENT: SandboxFileNotFound, errno.EFBIG: SandboxFileTooLarge}.get(refused.number)
            if refused.number == errno.EFBIG and refused.reason == os.strerror(errno.EFBIG):
                raise SandboxFileError(
                    f"{path}: the limit of file_size is {self.spec.limits.file_size} bytes"
                ) from None
            if refused.number == errno.ENOSPC:
                raise SandboxFileError(f"{path}: the limit of disk is {self.spec.limits.disk} bytes") from None
            raise (kind or SandboxFileError)(f"{path}: {refused.reason}") from None


def deferred_fork(backend: SandboxHost, spec: SandboxSpec, name: str, origin: LocalSandbox) -> LocalSandbox:
    """Return a fork of another sandbox, which starts with its first use."""
    fork = LocalSandbox(backend, spec, name)
    fork._deferred, fork.start_slots, fork.capabilities = True, origin.start_slots, origin.capabilities
    return fork
