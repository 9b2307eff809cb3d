"""The E2B backend and its sandboxes."""

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
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, ClassVar, Final

import e2b

from turnwise.errors import (
    ConfigError,
    SandboxDied,
    SandboxError,
    SandboxFileError,
    SandboxFileNotFound,
    SandboxFileTooLarge,
    SandboxUnavailable,
    undo_on_error_async,
)
from turnwise.sandboxes import packing
from turnwise.sandboxes.archives import HEADERS, pack, unpack
from turnwise.sandboxes.core import (
    MAX_FILE,
    MAX_OUTPUT,
    Capabilities,
    Command,
    ExecResult,
    Sandbox,
    SandboxBackend,
    SandboxProcess,
    SandboxSpec,
    check_count,
)
from turnwise.sandboxes.e2b.command import E2BProcess, Request, Running, mapped, starting

_FILES: Final = "\n".join(
    Path(each).read_text() for each in (packing.__file__, Path(__file__).parent / "guest_files.py")
)
_CALL: Final = ("python3", "-I", "-S", "-c", _FILES)
_INLINE: Final = 2**18
"""Bytes that travel with a command; what is larger travels as a file."""
_FORKS: Final = 20
"""Forks that the SDK asks for in one request."""
_LATE: Final = 20.0
"""Seconds that a command whose time is over may be late, before it is ended from here."""


class E2BSandbox(Sandbox):
    """One sandbox in E2B's cloud, or of a server with its protocol."""

    backend: ClassVar[str] = "e2b"

    def __init__(self, spec: SandboxSpec, owner: E2BBackend) -> None:
        self.spec = spec
        self.id = f"e2b-{uuid.uuid4().hex[:16]}"
        self._owner = owner
        self._user = spec.user or owner.user
        self._sdk: e2b.AsyncSandbox | None = None
        self._closed = False
        self._running: set[Running] = set()
        self._refresh: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Create it, keep it alive, and upload what the spec asks for."""
        self._look()
        creating = asyncio.ensure_future(self._create())
        try:
            self._sdk = await asyncio.shield(creating)
        except asyncio.CancelledError:
            # What E2B has begun it finishes: it is ended as soon as it is known.
            with contextlib.suppress(SandboxError):
                self._sdk = await creating
            await asyncio.shield(self.close())
            raise
        self.id = self._sdk.sandbox_id
        self.capabilities = self._owner.capabilities
        self._refresh = asyncio.create_task(self._refreshed(self._sdk))
        async with undo_on_error_async(lambda: asyncio.shield(self.close())):
            await self._furnish()

    async def close(self) -> None:
        """Kill it."""
        self._closed = True
        if self._refresh is not None:
            self._refresh.cancel()
        await self.stop_relays()
        sdk, self._sdk = self._sdk, None
        died = SandboxDied(f"E2B sandbox {self.id} was closed")
        for running in list(self._running):
            running.fail(died)
        if sdk is not None:
            with mapped(self.id):
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
        running = await Running.start(self._live(), replace(self._request(command, cwd, env), merged=True), live=True)
        self._running.add(running)
        return E2BProcess(running)

    async def read_file(self, path: str, *, max_bytes: int = MAX_FILE) -> bytes:
        """Return a file's content."""
        found = await self._on_file("read", path, str(max_bytes), str(_INLINE), max_output=_INLINE * 2)
        if not found.stderr:
            return found.stdout
        # It is large: the SDK's own route for files is the faster one.
        data = io.BytesIO()
        await self._fetch(found.stderr.decode(), data, max_bytes, f"{path!r} holds more than max_bytes={max_bytes}")
        return data.getvalue()

    async def write_file(self, path: str, data: bytes, *, mode: int | None = None) -> None:
        """Write a file."""
        self._live()
        bound = self.spec.limits.file_size
        if len(data) > bound:
            raise SandboxFileError(f"{path!r} would have {len(data)} bytes, and limits.file_size is {bound}")
        await self._on_file("write", path, "" if mode is None else str(mode), stdin=data)

    async def upload(self, source: Path, target: str) -> None:
        """Copy a host file or folder into the sandbox."""
        await self._upload(source, target, self._user)

    async def download(self, source: str, target: Path, *, max_bytes: int = MAX_FILE) -> None:
        """Copy a file or folder to the host."""
        found = await self._on_file("pack", source, str(max_bytes))
        kind, _, name = found.stdout.decode().partition(" ")
        try:
            with tempfile.TemporaryFile() as spool:
                most = max_bytes if kind == "file" else max_bytes + HEADERS
                await self._fetch(name, spool, most, f"{source!r} holds more than max_bytes={max_bytes}")
                spool.seek(0)
                if kind == "file":
                    await asyncio.to_thread(_write_plain, spool, target, int(found.stderr or b"420"))
                else:
                    await asyncio.to_thread(unpack, spool, target, max_bytes=max_bytes)
        finally:
            if kind == "folder" and self._sdk is not None:
                await self._run(self._of_root(["rm", "-f", name]))

    async def snapshot(self) -> str:
        """Snapshot the files."""
        with mapped(self.id):
            made = await self._live().create_snapshot(mode="filesystem")
        return self._owner.keep(str(made.snapshot_id))

    async def fork(self, count: int = 1) -> list[E2BSandbox]:
        """Return running copies with the files and the processes of this one; of one freeze up to 20 forks.

        E2B pauses a sandbox for it and cuts the streams of its commands, so it is refused while a command runs.
        """
        check_count(count)
        sdk = self._live()
        if any(not running.over for running in self._running):
            raise SandboxUnavailable(
                f"E2B sandbox {self.id} cannot be forked while a command runs in it, whose stream that would cut: wait "
                "for its end or kill it first; what runs in the background goes on"
            )
        forking = asyncio.ensure_future(self._forks(sdk, count))
        try:
            return await asyncio.shield(forking)
        except asyncio.CancelledError:
            # What E2B has begun it finishes: it is ended as soon as it is known.
            with contextlib.suppress(SandboxError):
                await asyncio.gather(*(each.close() for each in await forking))
            raise

    async def _forks(self, sdk: e2b.AsyncSandbox, count: int) -> list[E2BSandbox]:
        made: list[E2BSandbox] = []
        failed: list[Exception] = []
        async with self.start_slots:
            while len(made) < count and not failed:
                most = min(_FORKS, count - len(made))
                with mapped(self.id):
                    found = await sdk.fork(timeout=self._owner.lifetime, count=most)
                failed = [each for each in found if isinstance(each, Exception)]
                made += [self._adopted(each) for each in found if isinstance(each, e2b.AsyncSandbox)]
        if failed:
            await asyncio.gather(*(each.close() for each in made))
            with starting(f"a fork of sandbox {self.id}"):
                raise failed[0]
        return made

    def _adopted(self, sdk: e2b.AsyncSandbox) -> E2BSandbox:
        made = E2BSandbox(self.spec, self._owner)
        made._sdk, made.id = sdk, sdk.sandbox_id
        made.capabilities, made.start_slots = self.capabilities, self.start_slots
        made._refresh = asyncio.create_task(made._refreshed(sdk))
        return made

    def _live(self) -> e2b.AsyncSandbox:
        if self._sdk is None:
            raise SandboxDied(f"E2B sandbox {self.id} is {'closed' if self._closed else 'not started'}")
        return self._sdk

    async def _create(self) -> e2b.AsyncSandbox:
        template = self.spec.snapshot or self.spec.image or self._owner.template
        with starting(f"template or snapshot {template!r}" if template else "default template"):
            return await e2b.AsyncSandbox.create(
                template=template,
                timeout=self._owner.lifetime,
                metadata=self._owner.metadata(self.spec.labels),
                allow_internet_access=self.spec.limits.network,
                **self._owner.access,
            )

    async def _refreshed(self, sdk: e2b.AsyncSandbox) -> None:
        """Extend its lifetime while this process lives; without refreshes E2B kills it."""
        while True:
            await asyncio.sleep(self._owner.lifetime / 3)
            with contextlib.suppress(SandboxError), mapped(self.id):
                await sdk.set_timeout(self._owner.lifetime)

    def _look(self) -> None:
        """Check uploads before anything is created."""
        if self.spec.workspace is not None and not self.spec.workspace.is_dir():
            raise SandboxUnavailable(f"spec.workspace {str(self.spec.workspace)!r} is not a folder on this machine")
        for mount in self.spec.mounts:
            if not mount.source.exists():
                raise SandboxUnavailable(f"spec.mounts: {str(mount.source)!r} does not exist on this machine")

    async def _furnish(self) -> None:
        script = 'mkdir -p "$1" && chown "$2" "$1"'
        made = await self._run(self._of_root(["sh", "-c", script, "sh", self.spec.workdir, self._user]))
        if not made.ok:
            raise SandboxError(f"the workdir {self.spec.workdir!r} cannot be created: {made.text.strip()}")
        if self.spec.workspace is not None and self.spec.snapshot is None:
            await self._upload(self.spec.workspace, self.spec.workdir, self._user)
        for mount in self.spec.mounts:
            await self._upload(mount.source, mount.target, "root")

    def _request(self, command: Command, cwd: str | None, env: Mapping[str, str] | None) -> Request:
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
        return Request(argv, folder, {**self.spec.env, **(env or {})}, self._user, limits)

    def _of_root(self, argv: list[str]) -> Request:
        return Request(argv, "/", {}, "root", {}, timeout=120.0, max_output=MAX_OUTPUT)

    async def _run(self, request: Request, stdin: bytes = b"") -> ExecResult:
        began = time.monotonic()
        if len(stdin) > _INLINE:
            request, stdin = replace(request, stdin_file=await self._parcel(stdin)), b""
        async with self._command(request) as running:
            feeding = asyncio.create_task(_fed(running, stdin))
            try:
                # The program inside ends the command in time; should it not, it is ended from here.
                bound = None if request.timeout is None else request.timeout + _LATE
                ended = await asyncio.wait_for(running.result(), bound)
                code, late, cut = ended.code, ended.timed_out, ended.cut
            except TimeoutError:
                code, late, cut = 124, True, False
                await running.end()
            finally:
                feeding.cancel()
        out, err = bytes(running.output["o"]), bytes(running.output["e"])
        return ExecResult(code, out, err, late, cut, time.monotonic() - began)

    @contextlib.asynccontextmanager
    async def _command(self, request: Request) -> AsyncIterator[Running]:
        running = await Running.start(self._live(), request)
        self._running.add(running)
        try:
            yield running
        finally:
            self._running.discard(running)
            if not running.over:
                await asyncio.shield(running.end())

    async def _parcel(self, data: bytes) -> str:
        """Upload bytes as a root-only file and return its path."""
        path = posixpath.join("/root", f".turnwise-{uuid.uuid4().hex}")
        with mapped(self.id):
            await self._live().files.write(path, data, user="root")
        return path

    async def _fetch(self, name: str, into: IO[bytes], most: int, too_large: str) -> None:
        """Download a file as root, which may have grown since its size was checked."""
        with mapped(self.id):
            async for piece in await self._live().files.read(name, format="stream", user="root"):
                into.write(piece)
                if into.tell() > most:
                    raise SandboxFileTooLarge(too_large)

    async def _on_file(
        self, kind: str, path: str, *rest: str, stdin: bytes = b"", max_output: int = MAX_OUTPUT
    ) -> ExecResult:
        """Run a file operation as the user of commands and raise its error."""
        argv = [*_CALL, kind, posixpath.join(self.spec.workdir, path), *rest]
        request = self._request(argv, "/", None)
        done = await self._run(replace(request, timeout=300.0, max_output=max_output), stdin)
        if done.exit_code == 0:
            return done
        said = done.stderr.decode("utf-8", "replace").strip()[-300:]
        kinds = {44: SandboxFileNotFound, 45: SandboxFileTooLarge}
        raise kinds.get(done.exit_code, SandboxFileError)(f"{kind} of {path!r}: {said or done.exit_code}")

    async def _upload(self, source: Path, target: str, user: str) -> None:
        self._live()
        source = source.resolve(strict=True)
        target = posixpath.join(self.spec.workdir, target)
        if source.is_file():
            data = await asyncio.to_thread(source.read_bytes)
            argv = [*_CALL, "write", target, str(source.stat().st_mode & 0o777)]
        else:
            archive = io.BytesIO()
            await asyncio.to_thread(pack, source, archive)
            data = archive.getvalue()
            argv = [*_CALL, "unpack", target]
        limits = {"RLIMIT_FSIZE": self.spec.limits.file_size}
        request = Request(argv, "/", {}, user, limits, timeout=600.0, max_output=MAX_OUTPUT)
        done = await self._run(request, data)
        if not done.ok:
            said = done.stderr.decode("utf-8", "replace").strip()[-300:]
            raise SandboxFileError(f"upload to {target!r}: {said or done.exit_code}")


async def _fed(running: Running, stdin: bytes) -> None:
    # A command that does not read its input, or has ended, is not a failure.
    with contextlib.suppress(BrokenPipeError, SandboxError):
        await running.feed(stdin)
        await running.tell("c")


def _write_plain(spool: IO[bytes], target: Path, mode: int) -> None:
    """Write one host file, replacing an existing entry and following no link."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with os.fdopen(os.open(target, flags, mode & 0o777 | 0o600), "wb") as file:
        shutil.copyfileobj(spool, file)


_MACHINE: Final = "turnwise_machine"
_HOST: Final = "turnwise_host"

_CAPABILITIES: Final = Capabilities(
    isolation="e2b",
    memory=False,
    pids=False,
    disk=False,
    kernel=False,
    survives_host=True,
    fork_processes=True,
    expose=False,
    notes=(
        "memory, processors and disk are those of the template, not those of limits",
        "limits.pids, file_size, open_files and cpu_seconds are rlimits; a user that may use sudo escapes them",
        "the kernel inside is the sandbox's own: what is done to it stays inside",
        "nothing of this machine can be exposed to a sandbox that runs elsewhere",
    ),
)


class E2BBackend(SandboxBackend):
    """Sandboxes in E2B's cloud; ConfigError for invalid values.

    Args:
        template: Default template; None: E2B's.
        api_key_env: The environment variable that holds the API key.
        user: Default user of commands, existing in the template.
        lifetime: Seconds until E2B kills a sandbox that its host stopped refreshing.
        api_url: URL of the API, instead of E2B's.
        sandbox_url: URL of sandboxes, instead of E2B's.
        http_version: ``1.1`` or ``2``; None: the SDK's choice.
        request_timeout: Seconds per request.
    """

    name: ClassVar[str] = "e2b"
    capabilities: ClassVar[Capabilities] = _CAPABILITIES

    def __init__(
        self,
        template: str | None = None,
        api_key_env: str = "E2B_API_KEY",
        user: str = "user",
        lifetime: int = 300,
        api_url: str | None = None,
        sandbox_url: str | None = None,
        http_version: str | None = None,
        request_timeout: float = 60.0,
    ) -> None:
        if lifetime < 15:
            raise ConfigError(
                f"sandbox.config.lifetime is {lifetime} s: it must be at least 15, so that it can be renewed in time"
            )
        if http_version not in {None, "1.1", "2"}:
            raise ConfigError(f"sandbox.config.http_version is {http_version!r}: it must be '1.1' or '2'")
        if not request_timeout > 0:
            raise ConfigError(f"sandbox.config.request_timeout is {request_timeout!r}: it must be more than 0 seconds")
        self.template = template
        self.user = user
        self.lifetime = lifetime
        self._key_env = api_key_env
        given = {"api_url": api_url, "sandbox_url": sandbox_url, "http_version": http_version}
        self._given = {name: value for name, value in given.items() if value is not None}
        self._timeout = request_timeout
        self._snapshots: set[str] = set()

    @property
    def access(self) -> dict[str, Any]:
        """Common arguments of the SDK's calls; SandboxUnavailable without an API key."""
        key = os.environ.get(self._key_env)
        if not key:
            raise SandboxUnavailable(
                f"the environment variable {self._key_env} holds no E2B API key: set it, or name another variable in "
                "sandbox.config.api_key_env"
            )
        return {"api_key": key, "request_timeout": self._timeout, **self._given}

    def metadata(self, labels: Mapping[str, str]) -> dict[str, str]:
        """Return the ownership metadata of a sandbox."""
        return {**labels, _MACHINE: _machine(), _HOST: f"{os.getpid()}-{_started(os.getpid())}"}

    async def probe(self) -> Capabilities:
        """Check the API key."""
        with mapped("list"):
            await e2b.AsyncSandbox.list(limit=1, **self.access).next_items()
        return self.capabilities

    def make(self, spec: SandboxSpec) -> Sandbox:
        """Return an unstarted sandbox."""
        return E2BSandbox(spec, self)

    def keep(self, snapshot: str) -> str:
        """Register a snapshot for removal with the backend."""
        self._snapshots.add(snapshot)
        return snapshot

    async def drop_snapshot(self, snapshot: str) -> None:
        """Remove a snapshot."""
        self._snapshots.discard(snapshot)
        with mapped(snapshot):
            await e2b.AsyncSandbox.delete_snapshot(snapshot, **self.access)

    async def reap(self) -> int:
        """Kill sandboxes of dead processes of this machine."""
        reaped = 0
        with mapped("list"):
            query = e2b.SandboxQuery(metadata={_MACHINE: _machine()})
            pages = e2b.AsyncSandbox.list(query=query, **self.access)
            while pages.has_next:
                for found in await pages.next_items():
                    pid, _, started = (found.metadata or {}).get(_HOST, "").partition("-")
                    if pid.isdigit() and _started(int(pid)) != started:
                        reaped += await e2b.AsyncSandbox.kill(found.sandbox_id, **self.access)
        return reaped

    async def close(self) -> None:
        """Remove all snapshots."""
        for name in list(self._snapshots):
            with contextlib.suppress(SandboxError):
                await self.drop_snapshot(name)


def _machine() -> str:
    """Return an id of this machine's boot and pid namespace (containers of one machine differ)."""
    with contextlib.suppress(OSError):
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}-{os.stat('/proc/self/ns/pid').st_ino}"
    return f"{uuid.getnode():x}"


def _started(pid: int) -> str:
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return ""
