"""E2BSandbox: one sandbox in E2B's cloud."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import posixpath
import shutil
import tempfile
import time
import uuid
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO, ClassVar, Final

import e2b

from turnwise.errors import (
    SandboxDied,
    SandboxError,
    SandboxFileError,
    SandboxFileNotFound,
    SandboxFileTooLarge,
    SandboxUnavailable,
    undo_on_error_async,
)
from turnwise.sandboxes import packing
from turnwise.sandboxes.archives import HEADERS, pack_upload, unpack
from turnwise.sandboxes.core import (
    MAX_FILE,
    MAX_OUTPUT,
    Command,
    ExecResult,
    Sandbox,
    SandboxProcess,
    SandboxSpec,
    check_count,
    check_sources,
)
from turnwise.sandboxes.e2b.account import E2BAccount
from turnwise.sandboxes.e2b.command import CommandRequest, E2BProcess, sdk_errors, start_errors

_GUEST_PROGRAM: Final = "\n".join(
    Path(path).read_text() for path in (packing.__file__, Path(__file__).parent / "guest_files.py")
)
_FILE_COMMAND: Final = ("python3", "-I", "-S", "-c", _GUEST_PROGRAM)
_INLINE: Final = 2**18
"""Bytes that are sent within a command; larger data is sent as a file."""
_FORKS_PER_REQUEST: Final = 20
"""Forks that E2B makes in one request."""
_GRACE_S: Final = 20.0
"""Seconds after its timeout in which the guest program must end a command, before the host does."""


class E2BSandbox(Sandbox):
    """One sandbox in E2B's cloud, or of a server with its protocol."""

    backend: ClassVar[str] = "e2b"

    def __init__(self, spec: SandboxSpec, account: E2BAccount) -> None:
        self.spec = spec
        self.capabilities = account.capabilities
        self.id = f"e2b-{uuid.uuid4().hex[:16]}"
        self._account = account
        self._user = spec.user or account.options.user
        self._sdk: e2b.AsyncSandbox | None = None
        self._closed = False
        self._running: set[E2BProcess] = set()
        self._refreshing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Create it, keep it alive, and upload what the spec asks for."""
        check_sources(self.spec)
        creating = asyncio.ensure_future(self._create())
        try:
            self._sdk = await asyncio.shield(creating)
        except asyncio.CancelledError:
            # E2B completes a request that it has received: the sandbox is killed once it is known.
            with contextlib.suppress(SandboxError):
                self._sdk = await creating
            await asyncio.shield(self.close())
            raise
        self.id = self._sdk.sandbox_id
        self._refreshing = asyncio.create_task(self._keep_alive(self._sdk))
        async with undo_on_error_async(lambda: asyncio.shield(self.close())):
            await self._prepare_files()

    async def close(self) -> None:
        """Kill it."""
        self._closed = True
        if self._refreshing is not None:
            self._refreshing.cancel()
        await self.stop_relays()
        sdk, self._sdk = self._sdk, None
        died = SandboxDied(f"E2B sandbox {self.id} was closed")
        for running in list(self._running):
            running.fail(died)
        if sdk is not None:
            with sdk_errors(self.id):
                await sdk.kill()

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
        request = replace(self._request(command, cwd, env), timeout=timeout, max_output=max_output)
        return await self._run(request, stdin or b"")

    async def spawn(
        self, command: Command, *, cwd: str | None = None, env: Mapping[str, str] | None = None
    ) -> SandboxProcess:
        """Start a long-running command."""
        request = replace(self._request(command, cwd, env), merged=True)
        process = await E2BProcess.start(self._live(), request, live=True)
        self._running.add(process)
        return process

    async def read_file(self, path: str, *, max_bytes: int = MAX_FILE) -> bytes:
        """Return a file's content."""
        result = await self._file_operation("read", path, str(max_bytes), str(_INLINE), max_output=_INLINE * 2)
        if not result.stderr:
            return result.stdout
        # A large file: the SDK's file requests are faster than a command's output.
        data = io.BytesIO()
        await self._fetch(result.stderr.decode(), data, max_bytes, f"{path!r} holds more than max_bytes={max_bytes}")
        return data.getvalue()

    async def write_file(self, path: str, data: bytes, *, mode: int | None = None) -> None:
        """Write a file."""
        self._live()
        bound = self.spec.limits.file_size
        if len(data) > bound:
            raise SandboxFileError(f"{path!r} would have {len(data)} bytes, and limits.file_size is {bound}")
        await self._file_operation("write", path, "" if mode is None else str(mode), stdin=data)

    async def upload(self, source: Path, target: str) -> None:
        """Copy a host file or folder into the sandbox."""
        await self._upload(source, target, self._user)

    async def download(self, source: str, target: Path, *, max_bytes: int = MAX_FILE) -> None:
        """Copy a file or folder to the host."""
        result = await self._file_operation("pack", source, str(max_bytes))
        kind, _, name = result.stdout.decode().partition(" ")
        try:
            with tempfile.TemporaryFile() as spool:
                limit = max_bytes if kind == "file" else max_bytes + HEADERS
                await self._fetch(name, spool, limit, f"{source!r} holds more than max_bytes={max_bytes}")
                spool.seek(0)
                if kind == "file":
                    await asyncio.to_thread(_write_host_file, spool, target, int(result.stderr or b"420"))
                else:
                    await asyncio.to_thread(unpack, spool, target, max_bytes=max_bytes)
        finally:
            if kind == "folder" and self._sdk is not None:
                await self._run(self._root_request(["rm", "-f", name]))

    async def snapshot(self) -> str:
        """Snapshot the files."""
        with sdk_errors(self.id):
            snapshot = await self._live().create_snapshot(mode="filesystem")
        self._account.snapshots.add(str(snapshot.snapshot_id))
        return str(snapshot.snapshot_id)

    async def fork(self, count: int = 1) -> list[E2BSandbox]:
        """Return running copies with the files and the processes of this one; of one freeze up to 20 forks.

        E2B pauses a sandbox for it and cuts the streams of its commands, so it is refused while a command runs.
        """
        check_count(count)
        sdk = self._live()
        if any(not running.over for running in self._running):
            raise SandboxUnavailable(
                f"E2B sandbox {self.id} cannot be forked while a command runs in it, whose stream that would cut: wait "
                "for its end or kill it first; its background processes continue"
            )
        forking = asyncio.ensure_future(self._forks(sdk, count))
        try:
            return await asyncio.shield(forking)
        except asyncio.CancelledError:
            # E2B completes a request that it has received: the sandbox is killed once it is known.
            with contextlib.suppress(SandboxError):
                await asyncio.gather(*(fork.close() for fork in await forking))
            raise

    async def _forks(self, sdk: e2b.AsyncSandbox, count: int) -> list[E2BSandbox]:
        forks: list[E2BSandbox] = []
        failures: list[Exception] = []
        async with self.start_slots:
            while len(forks) < count and not failures:
                batch = min(_FORKS_PER_REQUEST, count - len(forks))
                with sdk_errors(self.id):
                    answers = await sdk.fork(timeout=self._account.options.lifetime, count=batch)
                failures = [answer for answer in answers if isinstance(answer, Exception)]
                forks += [self._adopt(answer) for answer in answers if isinstance(answer, e2b.AsyncSandbox)]
        if failures:
            await asyncio.gather(*(fork.close() for fork in forks))
            with start_errors(f"a fork of sandbox {self.id}"):
                raise failures[0]
        return forks

    def _adopt(self, sdk: e2b.AsyncSandbox) -> E2BSandbox:
        fork = E2BSandbox(self.spec, self._account)
        fork._sdk, fork.id = sdk, sdk.sandbox_id
        fork.start_slots = self.start_slots
        fork._refreshing = asyncio.create_task(fork._keep_alive(sdk))
        return fork

    def _live(self) -> e2b.AsyncSandbox:
        if self._sdk is None:
            raise SandboxDied(f"E2B sandbox {self.id} is {'closed' if self._closed else 'not started'}")
        return self._sdk

    async def _create(self) -> e2b.AsyncSandbox:
        template = self.spec.snapshot or self.spec.image or self._account.options.template
        with start_errors(f"template or snapshot {template!r}" if template else "default template"):
            return await self._account.create(template, labels=self.spec.labels, network=self.spec.limits.network)

    async def _keep_alive(self, sdk: e2b.AsyncSandbox) -> None:
        """Extend its lifetime while this process lives; without refreshes E2B kills it."""
        while True:
            await asyncio.sleep(self._account.options.lifetime / 3)
            with contextlib.suppress(SandboxError), sdk_errors(self.id):
                await sdk.set_timeout(self._account.options.lifetime)

    async def _prepare_files(self) -> None:
        script = 'mkdir -p "$1" && chown "$2" "$1"'
        result = await self._run(self._root_request(["sh", "-c", script, "sh", self.spec.workdir, self._user]))
        if not result.ok:
            raise SandboxError(f"the workdir {self.spec.workdir!r} cannot be created: {result.text.strip()}")
        if self.spec.workspace is not None and self.spec.snapshot is None:
            await self._upload(self.spec.workspace, self.spec.workdir, self._user)
        for mount in self.spec.mounts:
            await self._upload(mount.source, mount.target, "root")

    def _request(self, command: Command, cwd: str | None, env: Mapping[str, str] | None) -> CommandRequest:
        argv = ["bash", "-c", command] if isinstance(command, str) else list(command)
        bounds = self.spec.limits
        limits = {
            "RLIMIT_NPROC": bounds.pids,
            "RLIMIT_FSIZE": bounds.file_size,
            "RLIMIT_NOFILE": bounds.open_files,
            "RLIMIT_CORE": 0,
        }
        if bounds.cpu_seconds is not None:
            limits["RLIMIT_CPU"] = max(1, round(bounds.cpu_seconds))
        folder = posixpath.join(self.spec.workdir, cwd or "")
        return CommandRequest(argv, folder, {**self.spec.env, **(env or {})}, self._user, limits)

    def _root_request(self, argv: list[str]) -> CommandRequest:
        return CommandRequest(argv, "/", {}, "root", {}, timeout=120.0, max_output=MAX_OUTPUT)

    async def _run(self, request: CommandRequest, stdin: bytes = b"") -> ExecResult:
        began = time.monotonic()
        if len(stdin) > _INLINE:
            request, stdin = replace(request, stdin_file=await self._upload_input(stdin)), b""
        running = await E2BProcess.start(self._live(), request)
        self._running.add(running)
        sending = asyncio.create_task(_send_input(running, stdin))
        try:
            # The guest program enforces the timeout; the host does if it fails to.
            bound = None if request.timeout is None else request.timeout + _GRACE_S
            end = await asyncio.wait_for(running.result(), bound)
            code, late, cut = end.code, end.timed_out, end.cut
        except TimeoutError:
            code, late, cut = 124, True, False
        finally:
            sending.cancel()
            self._running.discard(running)
            if not running.over:
                await asyncio.shield(running.end())
        out, err = bytes(running.output["o"]), bytes(running.output["e"])
        return ExecResult(code, out, err, late, cut, time.monotonic() - began)

    async def _upload_input(self, data: bytes) -> str:
        """Upload bytes as a root-only file and return its path."""
        path = posixpath.join("/root", f".turnwise-{uuid.uuid4().hex}")
        with sdk_errors(self.id):
            await self._live().files.write(path, data, user="root")
        return path

    async def _fetch(self, name: str, target: IO[bytes], limit: int, too_large: str) -> None:
        """Download a file as root, which may have grown since its size was checked."""
        with sdk_errors(self.id):
            async for piece in await self._live().files.read(name, format="stream", user="root"):
                target.write(piece)
                if target.tell() > limit:
                    raise SandboxFileTooLarge(too_large)

    async def _file_operation(
        self, kind: str, path: str, *arguments: str, stdin: bytes = b"", max_output: int = MAX_OUTPUT, user: str = ""
    ) -> ExecResult:
        """Run a file operation as the user of commands, or another one, and raise its error."""
        argv = [*_FILE_COMMAND, kind, posixpath.join(self.spec.workdir, path), *arguments]
        request = self._request(argv, "/", None)
        request = replace(request, timeout=600.0, max_output=max_output, user=user or self._user)
        result = await self._run(request, stdin)
        if result.exit_code == 0:
            return result
        errors = result.stderr.decode("utf-8", "replace").strip()[-300:]
        error_types = {44: SandboxFileNotFound, 45: SandboxFileTooLarge}
        raise error_types.get(result.exit_code, SandboxFileError)(f"{kind} of {path!r}: {errors or result.exit_code}")

    async def _upload(self, source: Path, target: str, user: str) -> None:
        self._live()
        archive = io.BytesIO()
        target = posixpath.join(self.spec.workdir, target)
        folder = await asyncio.to_thread(pack_upload, source, archive, target)
        await self._file_operation("unpack", folder, stdin=archive.getvalue(), user=user)


async def _send_input(running: E2BProcess, stdin: bytes) -> None:
    # A command that does not read its input, or has ended, is no failure.
    with contextlib.suppress(BrokenPipeError, SandboxError):
        await running.write(stdin)
        await running.close_stdin()


def _write_host_file(spool: IO[bytes], target: Path, mode: int) -> None:
    """Write one host file, replacing an existing entry and following no link."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with os.fdopen(os.open(target, flags, mode & 0o777 | 0o600), "wb") as file:
        shutil.copyfileobj(spool, file)
