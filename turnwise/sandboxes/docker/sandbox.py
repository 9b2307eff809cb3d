"""DockerSandbox: one container, with its commands and files."""

from __future__ import annotations

import asyncio
import contextlib
import posixpath
import re
import secrets
import socket
import tarfile
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, ClassVar, Final

from turnwise.errors import (
    SandboxDied,
    SandboxError,
    SandboxFileError,
    SandboxFileNotFound,
    SandboxFileTooLarge,
    SandboxStartError,
    SandboxUnavailable,
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
    SandboxProcess,
    SandboxSpec,
    check_count,
    check_sources,
)
from turnwise.sandboxes.docker import scripts
from turnwise.sandboxes.docker.commands import Commands, RunningCommand
from turnwise.sandboxes.docker.pool import ContainerPool
from turnwise.sandboxes.docker.settings import HOME, TMP, USER, user_of
from turnwise.sandboxes.docker.streams import Output
from turnwise.sandboxes.forwarding import listen_in

_TIMED_OUT: Final = 124
_FILE_S: Final = 120.0
"""Seconds for a file of the usual size."""
_ARCHIVE_S: Final = 900.0
_NOT_EXECUTABLE: Final = 126
"""The exit code of a program that the engine could not start."""
_SIGXFSZ: Final = 128 + 25
"""The exit code of a program that exceeded the file size limit."""
_MIN_POLL: Final = 0.02
_MAX_POLL: Final = 0.5
_SPOOL_BYTES: Final = 8 * 2**20


class DockerProcess(SandboxProcess):
    """A spawned command and its connection."""

    def __init__(self, commands: Commands, running: RunningCommand) -> None:
        assert running.stream is not None
        self._commands = commands
        self._running = running
        self._stream = running.stream
        self._output = bytearray()
        self._input_open = True
        self._code: int | None = None

    async def write(self, data: bytes) -> None:
        """Write to its input."""
        if not self._input_open or self._stream.ended or self._code is not None:
            raise BrokenPipeError("the command has ended, or its input is closed")
        try:
            await self._stream.write(data)
        except OSError as error:
            raise BrokenPipeError("the command has ended") from error

    async def read(self, max_bytes: int = MAX_OUTPUT) -> bytes:
        """Return output as soon as there is any."""
        if not self._output:
            for _, piece in await self._stream.pieces():
                self._output += piece
        output = bytes(self._output[:max_bytes])
        del self._output[:max_bytes]
        return output

    async def close_stdin(self) -> None:
        """Close its input."""
        if self._input_open:
            self._input_open = False
            self._stream.end_input()

    async def interrupt(self) -> None:
        """Send SIGINT to its process group."""
        if self._code is None:
            await self._commands.interrupt(self._running)

    async def kill(self) -> None:
        """Kill it with all its processes."""
        with contextlib.suppress(OSError, SandboxDied):
            await self._commands.end(self._running)

    async def wait(self) -> int:
        """Wait for its end by polling the engine, since its streams may stay open longer."""
        pause = _MIN_POLL
        while self._code is None:
            self._code = await self._commands.exit_code(self._running)
            if self._code is None:
                await asyncio.sleep(pause)
                pause = min(pause * 1.5, _MAX_POLL)
        return self._code

    def disconnect(self) -> None:
        """Close the connection."""
        self._stream.close()


@dataclass(slots=True)
class _Freeze:
    """A snapshot that ``open_forks`` share; the last that is closed drops it."""

    snapshot: str
    open_forks: int


class DockerSandbox(Sandbox):
    """One container; ``ready`` probes the engine before the first start."""

    backend: ClassVar[str] = "docker"

    def __init__(
        self, spec: SandboxSpec, pool: ContainerPool, ready: Callable[[], Awaitable[Capabilities]] | None = None
    ) -> None:
        self.spec = spec
        self.id = f"turnwise-{secrets.token_hex(8)}"
        self._pool = pool
        self._ready = ready
        self._engine = pool.engine
        self._commands: Commands | None = None
        self._processes: list[DockerProcess] = []
        self._image = ""
        self._user = (0, 0)
        self._start_called = False
        self._closed = False
        self._freeze: _Freeze | None = None

    async def start(self) -> None:
        """Start it."""
        if self._start_called or self._closed:
            raise SandboxStartError(f"sandbox {self.id} was started before")
        self._start_called = True
        async with undo_on_error_async(lambda: asyncio.shield(asyncio.create_task(self._remove()))):
            if self._ready is not None:
                await self._ready()
            await self._start()
        assert self._pool.capabilities is not None
        self.capabilities = self._pool.capabilities

    async def close(self) -> None:
        """Kill everything inside and free its resources."""
        if self._closed:
            return
        self._closed = True
        await self.stop_relays()
        if self._commands is not None and self._commands.gone is None:
            self._commands.gone = f"sandbox {self.id} was closed"
        for process in self._processes:
            process.disconnect()
        await asyncio.shield(asyncio.create_task(self._remove()))
        if self._freeze is not None:
            self._freeze.open_forks -= 1
            if not self._freeze.open_forks:
                await self._pool.drop_snapshot(self._freeze.snapshot)

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
        out, err = Output(max_output), Output(max_output)
        code = await self._commands_or_raise().run(
            command, self._inside(cwd), out, err, env=env or {}, stdin=stdin, timeout=timeout
        )
        return ExecResult(
            exit_code=_TIMED_OUT if code is None else code,
            stdout=out.data,
            stderr=err.data,
            timed_out=code is None,
            truncated=out.truncated or err.truncated,
            duration=time.monotonic() - began,
        )

    async def spawn(
        self, command: Command, *, cwd: str | None = None, env: Mapping[str, str] | None = None
    ) -> SandboxProcess:
        """Start a long-running command."""
        commands = self._commands_or_raise()
        running = await commands.spawn(command, self._inside(cwd), env or {})
        process = DockerProcess(commands, running)
        self._processes.append(process)
        return process

    async def read_file(self, path: str, *, max_bytes: int = MAX_FILE) -> bytes:
        """Return a file's content."""
        # At twice the expected size nothing is cut.
        out = Output(2 * max_bytes + 2)
        await self._run_script(path, scripts.READ_FILE, str(max_bytes + 1), out=out)
        data = out.data
        if len(data) > max_bytes:
            raise SandboxFileTooLarge(f"{path!r} in the sandbox holds more than max_bytes={max_bytes}")
        return data

    async def write_file(self, path: str, data: bytes, *, mode: int | None = None) -> None:
        """Write a file, creating parent folders."""
        permissions = "" if mode is None else f"{mode & 0o7777:o}"
        await self._run_script(path, scripts.WRITE_FILE, permissions, stdin=data)

    async def upload(self, source: Path, target: str) -> None:
        """Copy a host file or folder into the container."""
        with tempfile.SpooledTemporaryFile(_SPOOL_BYTES) as packed:
            folder = await asyncio.to_thread(archives.pack_upload, source, packed, self._inside(target))
            packed.seek(0)
            await self._run_script(folder, scripts.UNPACK, stdin=packed, timeout=_ARCHIVE_S)

    async def download(self, source: str, target: Path, *, max_bytes: int = MAX_FILE) -> None:
        """Copy a file or folder to the host."""
        with tempfile.SpooledTemporaryFile(_SPOOL_BYTES) as packed:
            await self._pack(source, packed, max_bytes)
            await asyncio.to_thread(archives.unpack, packed, target, max_bytes)

    async def snapshot(self) -> str:
        """Snapshot the files."""
        await self._check_alive()
        if not self._pool.in_memory:
            return await self._pool.save_snapshot(self.id, self._image, self._user[0], None)
        folders = [folder.strip("/") for folder in (self.spec.workdir, TMP, HOME)]
        with tempfile.SpooledTemporaryFile(_SPOOL_BYTES) as packed:
            await self._pack("/", packed, self.spec.limits.disk, *folders)
            return await self._pool.save_snapshot(self.id, self._image, self._user[0], packed)

    async def fork(self, count: int = 1) -> list[DockerSandbox]:
        """Return started containers of one commit of the current files, without processes."""
        check_count(count)
        freeze = _Freeze(await self.snapshot(), count)
        spec = replace(self.spec, snapshot=freeze.snapshot, workspace=None)
        forks = [DockerSandbox(spec, self._pool, self._ready) for _ in range(count)]
        for fork in forks:
            fork._freeze, fork.start_slots = freeze, self.start_slots

        async def start(fork: DockerSandbox) -> None:
            async with fork.start_slots:
                await fork.start()

        async def close() -> None:
            await asyncio.gather(*(fork.close() for fork in forks))

        async with undo_on_error_async(close):
            for result in await asyncio.gather(*map(start, forks), return_exceptions=True):
                if result is not None:
                    raise result
        return forks

    async def listen(self, port: int = 0) -> socket.socket:
        """Return a socket that listens inside and is accepted on the host."""
        await self._check_alive()
        pid = await self._commands_or_raise().first_pid()
        if pid is None:
            raise SandboxUnavailable(
                "a sandbox of this engine cannot reach this machine: its processes run on another machine, or are not "
                "visible from here"
            )
        return await listen_in(pid, port)

    async def _start(self) -> None:
        spec = replace(self.spec, user=self.spec.user or self._pool.take_user(self.id, self.spec.snapshot))
        self._user = user = user_of(spec)
        check_sources(spec)
        settings = await self._pool.settings(spec, self.id)
        self._image = str(settings["Image"])
        making = asyncio.create_task(
            self._engine.call(
                lambda client: client.create_container_from_config(settings, self.id),
                SandboxStartError,
                f"sandbox {self.id} of image {settings['Image']!r} was not created",
            )
        )
        try:
            await asyncio.shield(making)
        except asyncio.CancelledError:
            # A creation cannot be revoked: it is awaited, so that the container can be removed.
            await asyncio.wait([making])
            raise
        in_memory = self._pool.in_memory
        if not in_memory:
            await self._make_folders(user)
        await self._engine.call(
            lambda client: client.start(self.id),
            SandboxStartError,
            f"sandbox {self.id} of image {settings['Image']!r} did not start (an image needs /bin/sh)",
        )
        self._commands = Commands(
            self._engine,
            self.id,
            f"{user[0]}:{user[1]}",
            {"HOME": HOME, "USER": USER, "LOGNAME": USER, **spec.env},
            pids=spec.limits.pids,
            keeps_files=not in_memory,
        )
        if in_memory:
            await self._restore_files()

    async def _make_folders(self, user: tuple[int, int]) -> None:
        """Give the workdir to the user before anything inside could replace it."""
        workspace = self.spec.workspace if self.spec.snapshot is None else None
        with (
            tempfile.SpooledTemporaryFile(_SPOOL_BYTES) as folders,
            tempfile.SpooledTemporaryFile(_SPOOL_BYTES) as packed,
        ):
            with tarfile.open(fileobj=folders, mode="w", format=tarfile.GNU_FORMAT) as archive:
                for folder in (HOME, self.spec.workdir):
                    member = tarfile.TarInfo(folder.strip("/"))
                    member.type, member.mode, member.mtime = tarfile.DIRTYPE, 0o755, int(time.time())
                    member.uid, member.gid = user
                    archive.addfile(member)
            if workspace is not None:
                await asyncio.to_thread(archives.pack, workspace, packed, uid=user[0], gid=user[1])
            for folder, content in (("/", folders), (self.spec.workdir, packed)):
                if content.tell():
                    content.seek(0)
                    await self._put_archive(folder, content)

    async def _put_archive(self, folder: str, packed: IO[bytes]) -> None:
        await self._engine.call(
            lambda client: client.put_archive(self.id, folder, packed),
            SandboxStartError,
            f"the workdir {self.spec.workdir!r} of sandbox {self.id} was not made",
        )

    async def _restore_files(self) -> None:
        archive = self._pool.archive_of(self.spec.snapshot) if self.spec.snapshot is not None else None
        if archive is not None:
            with archive.open("rb") as packed:
                await self._run_script("/", scripts.UNPACK, stdin=packed, timeout=_ARCHIVE_S)
        elif self.spec.workspace is not None:
            await self.upload(self.spec.workspace, self.spec.workdir)

    async def _pack(self, source: str, packed: IO[bytes], max_bytes: int, *names: str) -> None:
        out = _SpoolOutput(packed, max_bytes + archives.HEADERS)
        try:
            await self._run_script(source, scripts.PACK, *names, out=out, timeout=_ARCHIVE_S)
        except _OutputTooLarge as error:
            raise SandboxFileTooLarge(f"{source!r} in the sandbox holds more than max_bytes={max_bytes}") from error
        packed.seek(0)

    async def _run_script(
        self,
        path: str,
        text: str,
        *arguments: str,
        stdin: bytes | IO[bytes] | None = None,
        timeout: float = _FILE_S,
        out: Output | None = None,
    ) -> None:
        if "\0" in path:
            raise SandboxFileError(f"{path!r} is not a path")
        out, err = out or Output(), Output()
        command = scripts.script(text, self._inside(path), *arguments)
        code = await self._commands_or_raise().run(command, "/", out, err, env={}, stdin=stdin, timeout=timeout)
        if code == 0:
            return
        errors = re.sub(r"^turnwise: (line \d+: |\d+: )?", "", err.data.decode("utf-8", "replace").strip())
        if code == scripts.NOT_FOUND:
            raise SandboxFileNotFound(f"there is no {path!r} in the sandbox")
        if code == scripts.NOT_A_FILE:
            raise SandboxFileError(f"{path!r} in the sandbox is not a regular file")
        if code == scripts.UNREADABLE:
            raise SandboxFileError(f"{path!r} in the sandbox is not readable by the sandbox's user")
        if code is None:
            raise SandboxFileError(f"{path!r} in the sandbox: it took more than {timeout:.0f} s")
        if code == _SIGXFSZ or "File too large" in errors or "File size limit" in errors:
            errors = f"{errors} (its limit is file_size={self.spec.limits.file_size})"
        elif "No space left" in errors:
            errors = f"{errors} (its limit is disk={self.spec.limits.disk})"
        if code == _NOT_EXECUTABLE or "can't fork" in errors or "Cannot fork" in errors:
            errors = (
                f"{errors or out.data.decode('utf-8', 'replace').strip()} (its limit is pids={self.spec.limits.pids})"
            )
        raise SandboxFileError(f"{path!r} in the sandbox: {errors or f'exit code {code}'}")

    def _inside(self, path: str | None) -> str:
        return posixpath.join(self.spec.workdir, path or "")

    def _commands_or_raise(self) -> Commands:
        if self._commands is None or self._closed:
            raise SandboxDied(f"sandbox {self.id} {'was closed' if self._closed else 'was not started'}")
        return self._commands

    async def _check_alive(self) -> None:
        commands = self._commands_or_raise()
        reason = commands.gone or await commands.why_gone()
        if reason is not None:
            raise SandboxDied(f"sandbox {self.id} has ended: {reason}")

    async def _remove(self) -> None:
        if self._start_called:
            with contextlib.suppress(SandboxError):
                await self._pool.remove_container(self.id)


class _OutputTooLarge(Exception):
    """Output exceeded the limit."""


class _SpoolOutput(Output):
    """An output that is written to a file, up to a limit."""

    def __init__(self, file: IO[bytes], limit: int) -> None:
        super().__init__()
        self._file = file
        self._remaining = limit

    def add(self, data: bytes) -> None:
        """Write bytes."""
        self._remaining -= len(data)
        if self._remaining < 0:
            raise _OutputTooLarge
        self._file.write(data)
