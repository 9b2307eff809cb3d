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
)
from turnwise.sandboxes.docker import scripts
from turnwise.sandboxes.docker.commands import CommandKiller, Commands
from turnwise.sandboxes.docker.engine import HOME, TMP, user_of
from turnwise.sandboxes.docker.pool import ContainerPool
from turnwise.sandboxes.docker.streams import Output, Stream
from turnwise.sandboxes.forwarding import listen_in

_LEAST_POLL: Final = 0.02
_MOST_POLL: Final = 0.5


class DockerProcess(SandboxProcess):
    """A spawned command and its connection; ``first`` is output that arrived with its start."""

    def __init__(
        self,
        stream: Stream,
        first: bytes,
        exit_code: Callable[[], Awaitable[int | None]],
        interrupt: Callable[[], Awaitable[None]],
        kill: Callable[[], Awaitable[None]],
    ) -> None:
        self._stream = stream
        self._output = bytearray(first)
        self._ask = exit_code
        self._interrupt = interrupt
        self._kill = kill
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
        taken = bytes(self._output[:max_bytes])
        del self._output[:max_bytes]
        return taken

    async def close_stdin(self) -> None:
        """Close its input."""
        if self._input_open:
            self._input_open = False
            self._stream.end_input()

    async def interrupt(self) -> None:
        """Send SIGINT to its process group."""
        if self._code is None:
            await self._interrupt()

    async def kill(self) -> None:
        """Kill it with all its processes."""
        with contextlib.suppress(OSError):
            await self._kill()

    async def wait(self) -> int:
        """Wait for its end by polling the engine, since its streams may stay open longer."""
        pause = _LEAST_POLL
        while self._code is None:
            self._code = await self._ask()
            if self._code is None:
                await asyncio.sleep(pause)
                pause = min(pause * 1.5, _MOST_POLL)
        return self._code

    def drop(self) -> None:
        """Close the connection."""
        self._stream.close()


_TIMED_OUT: Final = 124
_FILE_S: Final = 120.0
"""Seconds for a file of the usual size."""
_ARCHIVE_S: Final = 900.0
_NOT_RUN: Final = 126
"""The exit code of what the engine could not start inside."""
_FILE_SIZE: Final = 128 + 25
"""The exit code of what SIGXFSZ ended."""
_SPOOLED: Final = 8 * 2**20


@dataclass(slots=True)
class _Freeze:
    """A snapshot that ``left`` open forks share; the last that is closed drops it."""

    snapshot: str
    left: int


class DockerSandbox(Sandbox):
    """One container; ``ready`` probes the engine before the first start."""

    backend: ClassVar[str] = "docker"

    def __init__(
        self, spec: SandboxSpec, keeper: ContainerPool, ready: Callable[[], Awaitable[Capabilities]] | None = None
    ) -> None:
        self.spec = spec
        self.id = f"turnwise-{secrets.token_hex(8)}"
        self._keeper = keeper
        self._ready = ready
        self._engine = keeper.engine
        self._commands: Commands | None = None
        self._processes: list[DockerProcess] = []
        self._image = ""
        self._asked = False
        self._closed = False
        self._freeze: _Freeze | None = None

    async def start(self) -> None:
        """Start it."""
        if self._asked or self._closed:
            raise SandboxStartError(f"sandbox {self.id} was started before")
        self._asked = True
        async with undo_on_error_async(lambda: asyncio.shield(asyncio.create_task(self._remove()))):
            if self._ready is not None:
                await self._ready()
            await self._start()
        assert self._keeper.capabilities is not None
        self.capabilities = self._keeper.capabilities

    async def close(self) -> None:
        """Kill everything inside and free its resources."""
        if self._closed:
            return
        self._closed = True
        await self.stop_relays()
        if self._commands is not None and self._commands.gone is None:
            self._commands.gone = f"sandbox {self.id} was closed"
        for process in self._processes:
            process.drop()
        await asyncio.shield(asyncio.create_task(self._remove()))
        if self._freeze is not None:
            self._freeze.left -= 1
            if not self._freeze.left:
                await self._keeper.drop(self._freeze.snapshot)

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
        code, out, err = await self._started().attend(
            command,
            self._inside(cwd),
            lambda mark: (Output(mark, max_output), Output(mark, max_output)),
            env=env or {},
            stdin=stdin,
            timeout=timeout,
        )
        return ExecResult(
            exit_code=_TIMED_OUT if code is None else code,
            stdout=out.kept,
            stderr=err.kept,
            timed_out=code is None,
            truncated=out.truncated or err.truncated,
            duration=time.monotonic() - began,
        )

    async def spawn(
        self, command: Command, *, cwd: str | None = None, env: Mapping[str, str] | None = None
    ) -> SandboxProcess:
        """Start a long-running command."""
        commands = self._started()
        running, said = await commands.spawn(command, self._inside(cwd), env or {})
        stream = running.stream
        assert stream is not None

        async def kill() -> None:
            with contextlib.suppress(SandboxDied):
                await commands.end(running)

        process = DockerProcess(
            stream, said, lambda: commands.exit_code(running), lambda: commands.interrupt(running), kill
        )
        self._processes.append(process)
        return process

    async def read_file(self, path: str, *, max_bytes: int = MAX_FILE) -> bytes:
        """Return a file's content."""
        out = await self._script(path, scripts.READ_FILE, str(max_bytes + 1), keep=max_bytes + 1)
        data = out.kept
        if len(data) > max_bytes:
            raise SandboxFileTooLarge(f"{path!r} in the sandbox holds more than max_bytes={max_bytes}")
        return data

    async def write_file(self, path: str, data: bytes, *, mode: int | None = None) -> None:
        """Write a file, creating parent folders."""
        permissions = "" if mode is None else f"{mode & 0o7777:o}"
        await self._script(path, scripts.WRITE_FILE, permissions, stdin=data)

    async def upload(self, source: Path, target: str) -> None:
        """Copy a host file or folder into the container."""
        inside = self._inside(target)
        with tempfile.SpooledTemporaryFile(_SPOOLED) as packed:
            folder = source.is_dir()
            name = "." if folder else posixpath.basename(inside)
            try:
                await asyncio.to_thread(archives.pack, source, packed, name=name)
            except FileNotFoundError as error:
                raise FileNotFoundError(f"{str(source)!r} does not exist and cannot be uploaded") from error
            packed.seek(0)
            await self._script(
                inside if folder else posixpath.dirname(inside), scripts.UNPACK, stdin=packed, timeout=_ARCHIVE_S
            )

    async def download(self, source: str, target: Path, *, max_bytes: int = MAX_FILE) -> None:
        """Copy a file or folder to the host."""
        with tempfile.SpooledTemporaryFile(_SPOOLED) as packed:
            await self._pack(source, packed, max_bytes)
            await asyncio.to_thread(archives.unpack, packed, target, max_bytes)

    async def snapshot(self) -> str:
        """Snapshot the files."""
        await self._living()
        if not self._keeper.in_memory:
            return await self._keeper.keep(self.id, self._image, None)
        with tempfile.SpooledTemporaryFile(_SPOOLED) as packed:
            await self._pack("/", packed, self.spec.limits.disk, *self._folders())
            return await self._keeper.keep(self.id, self._image, packed)

    async def fork(self, count: int = 1) -> list[DockerSandbox]:
        """Return started containers of one commit of the current files, without processes."""
        check_count(count)
        freeze = _Freeze(await self.snapshot(), count)
        spec = replace(self.spec, snapshot=freeze.snapshot, workspace=None)
        made = [DockerSandbox(spec, self._keeper, self._ready) for _ in range(count)]
        for each in made:
            each._freeze, each.start_slots = freeze, self.start_slots

        async def start(each: DockerSandbox) -> None:
            async with each.start_slots:
                await each.start()

        async def close() -> None:
            await asyncio.gather(*(each.close() for each in made))

        async with undo_on_error_async(close):
            for result in await asyncio.gather(*map(start, made), return_exceptions=True):
                if result is not None:
                    raise result
        return made

    async def listen(self, port: int = 0) -> socket.socket:
        """Return a socket that listens inside and is accepted on the host."""
        await self._living()
        pid = await self._started().process()
        if pid is None:
            raise SandboxUnavailable(
                "a sandbox of this engine cannot be let reach anything of this machine: its processes are not of this "
                "machine, or not to be seen from here"
            )
        return await listen_in(pid, port)

    async def _start(self) -> None:
        spec, user = self.spec, user_of(self.spec, self._keeper.options)
        if spec.workspace is not None and not spec.workspace.is_dir():
            raise SandboxUnavailable(f"workspace {str(spec.workspace)!r} of the sandbox is not a folder")
        settings = await self._keeper.settings(spec, self.id)
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
            # What the engine is making cannot be called back: it is waited for, so that it can be removed.
            await asyncio.wait([making])
            raise
        in_memory = self._keeper.in_memory
        if not in_memory:
            await self._prepare(user)
        await self._engine.call(
            lambda client: client.start(self.id),
            SandboxStartError,
            f"sandbox {self.id} of image {settings['Image']!r} did not start (an image needs /bin/sh)",
        )
        endings = CommandKiller(
            self._engine,
            self.id,
            f"{user[0]}:{user[1]}",
            {"HOME": HOME, **spec.env},
            pids=spec.limits.pids,
            keeps_files=not in_memory,
        )
        self._commands = Commands(endings)
        if in_memory:
            await self._fill()

    async def _prepare(self, user: tuple[int, int]) -> None:
        """Give the workdir to the user before anything inside could replace it."""
        workspace = self.spec.workspace if self.spec.snapshot is None else None
        with tempfile.SpooledTemporaryFile(_SPOOLED) as folders, tempfile.SpooledTemporaryFile(_SPOOLED) as packed:
            with tarfile.open(fileobj=folders, mode="w", format=tarfile.GNU_FORMAT) as archive:
                for folder in (HOME, self.spec.workdir):
                    member = tarfile.TarInfo(folder.strip("/"))
                    member.type, member.mode, member.mtime = tarfile.DIRTYPE, 0o755, int(time.time())
                    member.uid, member.gid = user
                    archive.addfile(member)
            if workspace is not None:
                await asyncio.to_thread(archives.pack, workspace, packed, uid=user[0], gid=user[1])
            for where, content in (("/", folders), (self.spec.workdir, packed)):
                if content.tell():
                    content.seek(0)
                    await self._put(where, content)

    async def _put(self, where: str, packed: IO[bytes]) -> None:
        await self._engine.call(
            lambda client: client.put_archive(self.id, where, packed),
            SandboxStartError,
            f"the workdir {self.spec.workdir!r} of sandbox {self.id} was not made",
        )

    async def _fill(self) -> None:
        kept = self._keeper.kept(self.spec.snapshot) if self.spec.snapshot is not None else None
        if kept is not None:
            with kept.open("rb") as packed:
                await self._script("/", scripts.UNPACK, stdin=packed, timeout=_ARCHIVE_S)
        elif self.spec.workspace is not None:
            await self.upload(self.spec.workspace, self.spec.workdir)

    def _folders(self) -> list[str]:
        return [folder.strip("/") for folder in (self.spec.workdir, TMP, HOME)]

    async def _pack(self, source: str, packed: IO[bytes], max_bytes: int, *names: str) -> None:
        def outputs(mark: bytes) -> tuple[Output, Output]:
            return _Spool(mark, packed, max_bytes + archives.HEADERS), Output(mark)

        try:
            await self._script(source, scripts.PACK, *names, outputs=outputs, timeout=_ARCHIVE_S)
        except _TooMuch as error:
            raise SandboxFileTooLarge(f"{source!r} in the sandbox holds more than max_bytes={max_bytes}") from error
        packed.seek(0)

    async def _script(
        self,
        path: str,
        text: str,
        *arguments: str,
        stdin: bytes | IO[bytes] | None = None,
        keep: int = MAX_OUTPUT,
        timeout: float = _FILE_S,
        outputs: Callable[[bytes], tuple[Output, Output]] | None = None,
    ) -> Output:
        if "\0" in path:
            raise SandboxFileError(f"{path!r} is not a path")
        code, out, err = await self._started().attend(
            scripts.script(text, self._inside(path), *arguments),
            "/",
            # Twice as much as is kept never is cut.
            outputs or (lambda mark: (Output(mark, 2 * keep), Output(mark))),
            env={},
            stdin=stdin,
            timeout=timeout,
        )
        if code == 0:
            return out
        said = re.sub(r"^turnwise: (line \d+: |\d+: )?", "", err.kept.decode("utf-8", "replace").strip())
        if code == scripts.NOT_FOUND:
            raise SandboxFileNotFound(f"there is no {path!r} in the sandbox")
        if code == scripts.NOT_A_FILE:
            raise SandboxFileError(f"{path!r} in the sandbox is not a regular file")
        if code == scripts.UNREADABLE:
            raise SandboxFileError(f"{path!r} in the sandbox is not readable by the sandbox's user")
        if code is None:
            raise SandboxFileError(f"{path!r} in the sandbox: it took more than {timeout:.0f} s")
        if code == _FILE_SIZE or "File too large" in said or "File size limit" in said:
            said = f"{said} (its limit is file_size={self.spec.limits.file_size})"
        elif "No space left" in said:
            said = f"{said} (its limit is disk={self.spec.limits.disk})"
        if code == _NOT_RUN or "can't fork" in said or "Cannot fork" in said:
            said = f"{said or out.kept.decode('utf-8', 'replace').strip()} (its limit is pids={self.spec.limits.pids})"
        raise SandboxFileError(f"{path!r} in the sandbox: {said or f'exit code {code}'}")

    def _inside(self, path: str | None) -> str:
        return posixpath.join(self.spec.workdir, path or "")

    def _started(self) -> Commands:
        if self._commands is None or self._closed:
            raise SandboxDied(f"sandbox {self.id} {'was closed' if self._closed else 'was not started'}")
        return self._commands

    async def _living(self) -> None:
        commands = self._started()
        why = commands.gone or await commands.why_gone()
        if why is not None:
            raise SandboxDied(f"sandbox {self.id} has ended: {why}")

    async def _remove(self) -> None:
        if self._asked:
            with contextlib.suppress(SandboxError):
                await self._keeper.remove_container(self.id)


class _TooMuch(Exception):
    """Output exceeded the limit."""


class _Spool(Output):
    """An output that is written to a file, up to a limit."""

    def __init__(self, mark: bytes, file: IO[bytes], most: int) -> None:
        super().__init__(mark)
        self._file = file
        self._left = most

    def _keep(self, data: bytes) -> None:
        self._left -= len(data)
        if self._left < 0:
            raise _TooMuch
        self._file.write(data)
