"""Sandboxes on this machine, without an engine.

Owns: :class:`LocalBackend`: its configuration, the state folder of this process, the launcher, snapshots, and what
dead processes left. Refuses: finding out what works (``ladder.py``) and single sandboxes (``sandbox.py``).
"""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, get_args

from turnwise.errors import ConfigError, SandboxStartError, SandboxUnavailable, shown
from turnwise.sandboxes.core import Capabilities, Sandbox, SandboxBackend, SandboxSpec
from turnwise.sandboxes.local import ladder, state
from turnwise.sandboxes.local.boot import removal
from turnwise.sandboxes.local.launching import Launcher
from turnwise.sandboxes.local.plans import KEPT, Origin, Place
from turnwise.sandboxes.local.rungs import Isolation, Rung
from turnwise.sandboxes.local.sandbox import LocalSandbox
from turnwise.sandboxes.local.snapshots import Snapshots

_NAMES = itertools.count(1)
_SWITCHES = frozenset({"seccomp", "network", "groups", "pids", "watch", "procsys", "readonly", "userns", "landlock"})


class LocalBackend(SandboxBackend):
    """The embedded backend.

    Args:
        isolation: ``auto`` takes ``bubblewrap``, else ``landlock``, and refuses where neither works; a weaker one is
            taken only when it is named.
        unsafe: Whether ``plain``, which holds nothing back, may be taken.
        directory: Where folders of sandboxes are made; they must be reachable by ``uid``. None: the first of
            ``/var/tmp``, ``/dev/shm`` and ``/run`` that is.
        images: Folders with a root file system by the name that ``spec.image`` uses; a spec may also give a path.
        uid: The user and group that sandboxes run as where this process is root; no account needs to exist.
    """

    name: ClassVar[str] = "local"

    def __init__(
        self,
        isolation: str = "auto",
        unsafe: bool = False,
        directory: str | Path | None = None,
        images: Mapping[str, str | Path] | None = None,
        uid: int = 60_999,
        *,
        _without: frozenset[str] = frozenset(),
    ) -> None:
        if isolation not in ("auto", *get_args(Isolation)):
            known = ", ".join(("auto", *get_args(Isolation)))
            raise ConfigError(f"sandbox.config.isolation is {shown(isolation)}: known are {known}")
        if isolation == "plain" and not unsafe:
            raise ConfigError(
                "sandbox.config.isolation is 'plain', which holds nothing back: code inside can read and change what "
                "this user can. Set sandbox.config.unsafe to true if you mean it"
            )
        if not isinstance(uid, int) or not 0 < uid < 2**32 - 1:
            raise ConfigError(f"sandbox.config.uid is {shown(uid)}: give the number of an unprivileged user")
        if not _without <= _SWITCHES:
            raise ValueError(f"no such containment: {sorted(_without - _SWITCHES)}")
        self.rung: Rung
        self.capabilities: Capabilities
        self.launcher: Launcher
        self._wanted = isolation
        self._directory = None if directory is None else Path(directory)
        self._images = {name: Path(folder) for name, folder in (images or {}).items()}
        self._uid = uid if os.geteuid() == 0 else None
        self._without = _without
        self._state: Path | None = None
        self._probing = asyncio.Lock()
        self._snapshots = Snapshots()
        self._program = ""

    async def probe(self) -> Capabilities:
        """Try what this machine gives."""
        await self.begin()
        return self.capabilities

    async def begin(self) -> None:
        """Make what all sandboxes need, once: the state folder, the launcher, and the knowledge of what works.

        Where something ended the launcher, and all sandboxes with it, there is a new one for the next.

        Raises:
            SandboxUnavailable: Nothing that may be used works here; the message names the remedy.
        """
        async with self._probing:
            if self._state is not None:
                if not self.launcher.dead:
                    return
                await self.close()
                self._snapshots = Snapshots()
            folder = state.choose(self._directory, self._uid)
            made, lock = await asyncio.to_thread(state.make, folder)
            self.launcher = Launcher(made, lock)
            self._state = made
            try:
                found = await ladder.climb(self, self._wanted, self._uid, self._without)
            except BaseException:  # also a cancellation: the launcher is closed, its folder removed
                self._state = None
                await self.launcher.close()
                shutil.rmtree(made, ignore_errors=True)
                raise
            self.rung, self.capabilities = found

    def make(self, spec: SandboxSpec) -> Sandbox:
        """Return a sandbox that was not started."""
        return LocalSandbox(self, spec, f"{os.getpid()}-{next(_NAMES)}")

    async def drop_snapshot(self, snapshot: str) -> None:
        """Remove a snapshot; what still runs on it keeps it until it is closed."""
        self._snapshots.drop(snapshot)

    async def reap(self) -> int:
        """Remove what hosts that are dead left on this machine."""
        return await asyncio.to_thread(state.reap, state.choose(self._directory, self._uid))

    async def close(self) -> None:
        """End the launcher, with it all that is left."""
        if self._state is not None:
            made, self._state = self._state, None
            await self.launcher.close()
            await asyncio.to_thread(state.remove, made)

    def try_rung(self, rung: Rung, program: str) -> None:
        """Take a rung to try sandboxes on."""
        self.rung = rung
        self._program = program
        self.capabilities = Capabilities(rung.isolation)

    def place(self, name: str) -> Place:
        """Return the host's folders of one sandbox."""
        assert self._state is not None
        return Place(self._state, name, self._program)

    def origin(self, sandbox: LocalSandbox) -> Origin:
        """Return what a sandbox begins from.

        Raises:
            SandboxUnavailable: There is no such image or snapshot.
        """
        spec = sandbox.spec
        if spec.snapshot is not None:
            return self._snapshots.use(spec.snapshot, sandbox.id)
        if spec.image is None:
            # Who copies or shows it is in another folder.
            return Origin(layers=() if spec.workspace is None else (spec.workspace.absolute(),))
        folder = self._images.get(spec.image, Path(spec.image))
        if not self.capabilities.images:
            raise SandboxUnavailable(
                f"image {spec.image!r}: a sandbox held back by {self.rung.isolation} sees the machine's own programs; "
                "install bubblewrap, or choose the docker backend"
            )
        if not folder.is_absolute() or not (folder / "bin").is_dir():
            known = ", ".join(sorted(self._images)) or "none"
            raise SandboxUnavailable(
                f"image {spec.image!r} is no folder with a root file system: name one in sandbox.config.images "
                f"(there: {known}), or give an absolute path"
            )
        if spec.workspace is not None:
            raise SandboxUnavailable(f"image {spec.image!r} and a workspace: the local backend takes one of them")
        assert self._state is not None
        state.libraries(self._state / "lib")
        return Origin(folder, None, (folder,))

    def forget(self, sandbox: LocalSandbox) -> None:
        """Take note that a sandbox is closed."""
        self._snapshots.release(sandbox.id)

    async def keep(self, sandbox: LocalSandbox) -> str:
        """Keep a sandbox's files as they are now, and return the snapshot's name.

        Raises:
            SandboxStartError: It could not be kept.
        """
        assert self._state is not None
        name, folder = self._snapshots.new(self._state)
        origin = (
            self.origin(sandbox)
            if sandbox.spec.snapshot is None
            else self._snapshots.use(sandbox.spec.snapshot, sandbox.id)
        )
        top = f"{origin.top}.upper" if self.rung.overlay and origin.layers else origin.top
        request: dict[str, Any] = {
            "op": "keep",
            "id": sandbox.id,
            "files": str(self.place(sandbox.id).files(self.rung)),
            "names": [[top, "top"], *([name, name] for name in KEPT)],
            "target": str(folder),
            "private": self.rung.stage is not None,
            # What is in memory holds no more; what changes while it is copied shall not.
            "most": None if self.rung.stage is None else sandbox.spec.limits.disk,
        }
        keeping = asyncio.ensure_future(self.launcher.call(name, request))
        try:
            wrong = await asyncio.shield(keeping)
        except asyncio.CancelledError:
            # What is being copied cannot be called back: it goes as soon as it is there.
            keeping.add_done_callback(lambda done: _gone(done, folder))
            raise
        if wrong:
            await asyncio.to_thread(removal.remove, str(folder))
            raise SandboxStartError(f"the files of sandbox {sandbox.id} could not be kept: {wrong}")
        layers = (folder / "top", *origin.layers) if self.rung.overlay else (folder / "top",)
        self._snapshots.add(name, Origin(origin.image, folder, layers), sandbox.spec.snapshot)
        return name

    async def fork(self, sandbox: LocalSandbox) -> LocalSandbox:
        """Return a started sandbox with the files of another."""
        name = await self.keep(sandbox)
        made = LocalSandbox(self, replace_snapshot(sandbox.spec, name), f"{os.getpid()}-{next(_NAMES)}")
        try:
            await made.start()
        finally:
            self._snapshots.drop(name)
        return made


def _gone(keeping: asyncio.Future[str], folder: Path) -> None:
    if not keeping.cancelled() and keeping.exception() is None:
        removal.remove(str(folder))


def replace_snapshot(spec: SandboxSpec, name: str) -> SandboxSpec:
    """Return a spec that begins from a snapshot."""
    from dataclasses import replace

    return replace(spec, snapshot=name, image=None, workspace=None)
