"""The local backend: isolation, the launcher's lifecycle, and the files that sandboxes begin from."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Final, get_args

from turnwise.errors import ConfigError, SandboxStartError, SandboxUnavailable, shown
from turnwise.sandboxes.core import Capabilities, Sandbox, SandboxBackend, SandboxSpec
from turnwise.sandboxes.local.boot import file_copy
from turnwise.sandboxes.local.isolation_probe import select_isolation
from turnwise.sandboxes.local.launch_plan import SNAPSHOT_FOLDERS, HostPaths, Isolation, IsolationLevel
from turnwise.sandboxes.local.launcher import Launcher
from turnwise.sandboxes.local.sandbox import LocalSandbox, deferred_fork
from turnwise.sandboxes.local.snapshots import Origin, Snapshots
from turnwise.sandboxes.local.state_folder import (
    choose_folder,
    copy_libraries,
    make_folder,
    reap_folders,
    remove_folder,
    remove_unused,
)
from turnwise.sandboxes.users import FIRST_USER, USERS, SandboxUsers

_SANDBOX_NUMBERS = itertools.count(1)
_PROBE_ATTEMPTS: Final = 3
_CONTAINMENTS = frozenset(
    {"seccomp", "network", "groups", "pids", "watch", "procsys", "readonly", "userns", "landlock", "users"}
)


class LocalBackend(SandboxBackend):
    """The local backend.

    Args:
        isolation: ``auto`` is ``bubblewrap``; ``landlock`` and ``plain``, which isolate less, must be named.
        unsafe: Whether ``plain``, which isolates nothing, is allowed.
        directory: Parent of state folders, reachable by ``uid``. None: the first suitable of ``/var/tmp``, ``/dev/shm``
            and ``/run``.
        images: Root file system folders by ``spec.image``; a spec may also give a path.
        uid: The first user of sandboxes if this process is root: each has its own, and no account needs to exist.
    """

    name: ClassVar[str] = "local"

    def __init__(
        self,
        isolation: str = "auto",
        unsafe: bool = False,
        directory: str | Path | None = None,
        images: Mapping[str, str | Path] | None = None,
        uid: int = FIRST_USER,
        *,
        _without: frozenset[str] = frozenset(),
    ) -> None:
        if isolation not in ("auto", *get_args(Isolation)):
            names = ", ".join(("auto", *get_args(Isolation)))
            raise ConfigError(f"sandbox.config.isolation is {shown(isolation)}: it must be one of {names}")
        if isolation == "plain" and not unsafe:
            raise ConfigError(
                "sandbox.config.isolation is 'plain', which isolates nothing: code inside can read and change what "
                "this user can. Set sandbox.config.unsafe to true if you mean it"
            )
        if not isinstance(uid, int) or not 0 < uid < 2**32 - USERS:
            raise ConfigError(f"sandbox.config.uid is {shown(uid)}: give the first of {USERS} unprivileged users")
        if not _without <= _CONTAINMENTS:
            raise ValueError(f"no such containment: {sorted(_without - _CONTAINMENTS)}")
        self.level: IsolationLevel
        self.capabilities: Capabilities
        self.launcher: Launcher
        self._isolation = isolation
        self._directory = None if directory is None else Path(directory)
        self._images = {name: Path(folder) for name, folder in (images or {}).items()}
        self._uid = uid if os.geteuid() == 0 else None
        self.users = SandboxUsers(uid, 1 if "users" in _without else USERS)
        self._without = _without
        self._state: Path | None = None
        self._probing = asyncio.Lock()
        self._snapshots = Snapshots()
        self._frozen: dict[str, str] = {}

    async def probe(self) -> Capabilities:
        """Probe this machine."""
        await self.begin()
        return self.capabilities

    async def begin(self) -> None:
        """Create state folder and launcher and select the isolation; again if the launcher died."""
        async with self._probing:
            if self._state is not None:
                if not self.launcher.dead:
                    return
                await self.close()
                self._snapshots = Snapshots()
            for attempts_left in reversed(range(_PROBE_ATTEMPTS)):
                try:
                    self.level, self.capabilities = await self._start_launcher()
                    return
                except SandboxStartError:
                    if not attempts_left:
                        raise

    async def _start_launcher(self) -> tuple[IsolationLevel, Capabilities]:
        """Start a launcher and select the isolation; SandboxStartError if it died meanwhile."""
        folder = choose_folder(self._directory, self._uid)
        making = asyncio.ensure_future(asyncio.to_thread(make_folder, folder))
        try:
            state, lock = await asyncio.shield(making)
        except asyncio.CancelledError:
            # A thread cannot be cancelled: it is awaited, and its folder removed.
            state, lock = await making
            await asyncio.to_thread(remove_unused, state, lock)
            raise
        try:
            self.launcher = Launcher(state, lock)
        except OSError as error:
            await asyncio.to_thread(remove_unused, state, lock)
            raise SandboxStartError(f"the sandbox launcher could not be started: {error}") from error
        self._state = state
        try:
            return await select_isolation(self, self._isolation, self._uid, self._without)
        except BaseException:  # also a cancellation: the launcher is closed, its folder removed
            self._state = None
            await self.launcher.end()
            await asyncio.to_thread(remove_folder, state)
            raise

    def make(self, spec: SandboxSpec) -> Sandbox:
        """Return an unstarted sandbox."""
        return LocalSandbox(self, spec, f"{os.getpid()}-{next(_SANDBOX_NUMBERS)}")

    async def drop_snapshot(self, snapshot: str) -> None:
        """Remove a snapshot once no sandbox runs on it."""
        self._snapshots.drop(snapshot)

    async def reap(self) -> int:
        """Remove leftovers of dead hosts on this machine."""
        return await asyncio.to_thread(reap_folders, choose_folder(self._directory, self._uid))

    async def close(self) -> None:
        """Stop the launcher and everything it started."""
        if self._state is not None:
            state, self._state = self._state, None
            await self.launcher.end()
            await asyncio.to_thread(remove_folder, state)

    def try_level(self, level: IsolationLevel) -> None:
        """Switch to an isolation level to probe it."""
        self.level, self.capabilities = level, Capabilities(level.isolation)

    def paths(self, name: str) -> HostPaths:
        """Return the host folders of one sandbox. Raises SandboxStartError if the backend is closed."""
        if self._state is None:
            raise SandboxStartError(f"sandbox {name} cannot start: its backend was closed")
        return HostPaths(self._state, name)

    def origin(self, sandbox: LocalSandbox) -> Origin:
        """Return the origin of a sandbox's files. Raises SandboxUnavailable."""
        spec = sandbox.spec
        if spec.snapshot is not None:
            return self._snapshots.hold(spec.snapshot, sandbox.id)
        if spec.image is None:
            # Absolute, since the process that copies or mounts it has another working directory.
            return Origin(layers=() if spec.workspace is None else (spec.workspace.absolute(),))
        folder = self._images.get(spec.image, Path(spec.image))
        if not self.capabilities.images:
            raise SandboxUnavailable(
                f"image {spec.image!r}: a sandbox isolated by {self.level.isolation} sees the machine's own programs; "
                "install bubblewrap, or choose the docker backend"
            )
        if not folder.is_absolute() or not (folder / "bin").is_dir():
            names = ", ".join(sorted(self._images)) or "none"
            raise SandboxUnavailable(
                f"image {spec.image!r} is not a folder with a root file system: name one in sandbox.config.images "
                f"(there: {names}), or give an absolute path"
            )
        if spec.workspace is not None:
            raise SandboxUnavailable(f"image {spec.image!r} and a workspace: the local backend takes one of them")
        assert self._state is not None
        copy_libraries(self._state / "lib")
        return Origin(folder, None, (folder,))

    def forget(self, sandbox: LocalSandbox) -> None:
        """Release a closed sandbox."""
        self._frozen.pop(sandbox.id, None)
        self.users.release(sandbox.id)
        self._snapshots.release(sandbox.id)

    async def snapshot(self, sandbox: LocalSandbox, *, frozen: bool = False) -> tuple[str, bool]:
        """Snapshot a sandbox's files; return the name, and whether nothing ran in it. Raises SandboxStartError.

        Args:
            sandbox: The sandbox.
            frozen: Whether only the sandbox holds it, until its next freeze or its end.
        """
        assert self._state is not None
        name, folder = self._snapshots.new(self._state)
        origin = self.origin(sandbox)
        top = f"{origin.top}.upper" if self.level.overlay and origin.layers else origin.top
        request: dict[str, Any] = {
            "op": "copy_files",
            "id": sandbox.id,
            "files": str(self.paths(sandbox.id).files(self.level)),
            "names": [[top, "top"], *([name, name] for name in SNAPSHOT_FOLDERS)],
            "target": str(folder),
            "private": self.level.stage is not None,
            # Files in memory are within the limit; files that grow while they are copied must be, too.
            "max_bytes": None if self.level.stage is None else sandbox.spec.limits.disk,
        }
        copying = asyncio.ensure_future(self.launcher.call(name, request))
        try:
            answer = await asyncio.shield(copying)
        except asyncio.CancelledError:
            # A copy cannot be revoked: it is removed once it is complete.
            copying.add_done_callback(lambda finished: _remove_copy(finished, folder))
            raise
        if answer["error"]:
            await asyncio.to_thread(file_copy.remove_tree, str(folder))
            raise SandboxStartError(f"the files of sandbox {sandbox.id} could not be copied: {answer['error']}")
        layers = (folder / "top", *origin.layers) if self.level.overlay else (folder / "top",)
        self._snapshots.add(name, Origin(origin.image, folder, layers), sandbox.spec.snapshot)
        if frozen:
            previous = self._frozen.pop(sandbox.id, None)
            if previous is not None:
                self._snapshots.release(sandbox.id, previous)
            self._snapshots.hold(name, sandbox.id)
            self._snapshots.drop(name)
            self._frozen[sandbox.id] = name
        return name, answer["idle"]

    def forks(self, sandbox: LocalSandbox, snapshot: str, count: int) -> list[LocalSandbox]:
        """Return sandboxes that begin from a snapshot which another one holds, and start with their first use."""
        spec = replace(sandbox.spec, snapshot=snapshot, image=None, workspace=None)
        forks = [deferred_fork(self, spec, f"{os.getpid()}-{next(_SANDBOX_NUMBERS)}", sandbox) for _ in range(count)]
        for fork in forks:
            self._snapshots.hold(snapshot, fork.id, sandbox.id)
        return forks


def _remove_copy(copying: asyncio.Future[dict[str, Any]], folder: Path) -> None:
    if not copying.cancelled() and copying.exception() is None:
        file_copy.remove_tree(str(folder))
