"""The local backend: state folders, snapshots, the launcher's lifecycle, and reaping."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import os
import py_compile
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Final, get_args

from turnwise.errors import ConfigError, SandboxStartError, SandboxUnavailable, shown
from turnwise.sandboxes import packing
from turnwise.sandboxes.core import Capabilities, Sandbox, SandboxBackend, SandboxSpec
from turnwise.sandboxes.local import isolation_probe as ladder
from turnwise.sandboxes.local.boot import groups, keep
from turnwise.sandboxes.local.channel import Launcher
from turnwise.sandboxes.local.mount_plan import (
    COPIED,
    HOME,
    INSIDE,
    KEPT,
    USER,
    Isolation,
    IsolationLevel,
    Origin,
    Place,
    find_groups,
)
from turnwise.sandboxes.local.sandbox import LocalSandbox, put_off


@dataclass(slots=True)
class _Snapshot:
    origin: Origin
    parent: str | None
    users: set[str] = field(default_factory=set)
    dropped: bool = False


class Snapshots:
    """The snapshots of one backend, reference-counted."""

    def __init__(self) -> None:
        self._kept: dict[str, _Snapshot] = {}
        self._numbers = itertools.count(1)

    def new(self, state: Path) -> tuple[str, Path]:
        """Return a new name and its folder."""
        name = f"snapshot-{next(self._numbers)}"
        return name, state / "snapshots" / name

    def add(self, name: str, origin: Origin, parent: str | None) -> None:
        """Register a complete snapshot, which holds a reference to its parent."""
        self._kept[name] = _Snapshot(origin, parent)
        if parent is not None:
            self._kept[parent].users.add(name)

    def use(self, name: str, sandbox: str, holder: str | None = None) -> Origin:
        """Return a snapshot's origin and hold a reference until :meth:`release`. Raises SandboxUnavailable.

        Args:
            name: The snapshot.
            sandbox: The sandbox that is to hold it.
            holder: One that holds it already; without one, a dropped snapshot cannot be used.
        """
        kept = self._kept.get(name)
        if kept is None or (kept.dropped and not kept.users & {sandbox, holder}):
            raise SandboxUnavailable(f"snapshot {name!r} does not exist: it was dropped, or made by another process")
        kept.users.add(sandbox)
        return kept.origin

    def release(self, user: str, only: str | None = None) -> None:
        """Drop the references of a sandbox or snapshot, or its reference to ``only`` one snapshot."""
        for name, kept in list(self._kept.items()):
            if user in kept.users and only in (None, name):
                kept.users.discard(user)
                self._remove(name)

    def drop(self, name: str) -> None:
        """Remove a snapshot once it is unreferenced."""
        if name in self._kept:
            self._kept[name].dropped = True
            self._remove(name)

    def _remove(self, name: str) -> None:
        kept = self._kept[name]
        if kept.dropped and not kept.users:
            del self._kept[name]
            if kept.origin.snapshot is not None:
                keep.remove(str(kept.origin.snapshot))
            self.release(name)


_PLACES: Final = ("/var/tmp", "/dev/shm", "/run")
_BOOT: Final = Path(__file__).parent / "boot"


def started(pid: int) -> str | None:
    """Return a process's start time in kernel ticks, or None if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        # No other error means that it is dead: without a free file descriptor, say, no process can be read.
        return None
    return None if fields[0] in (b"Z", b"X") else fields[19].decode()


def host_name() -> str:
    """Return the id of this process on this machine."""
    return f"{os.getpid()}-{started(os.getpid())}"


def choose_folder(directory: Path | None, uid: int | None) -> Path:
    """Return the parent of state folders; SandboxUnavailable if none is writable and reachable by sandboxes."""
    wanted = [directory] if directory is not None else [Path(place) for place in _PLACES]
    for place in wanted:
        if directory is not None:
            place.mkdir(parents=True, exist_ok=True)
        if place.is_dir() and os.access(place, os.W_OK | os.X_OK) and (uid is None or _reachable(place)):
            return place.resolve()
    tried = ", ".join(str(place) for place in wanted)
    raise SandboxUnavailable(
        f"no folder for the state of sandboxes (tried: {tried}): it must be writable, and other users must be able to "
        "pass it and all folders above it (chmod o+x). Name one in sandbox.config.directory"
    )


def _reachable(place: Path) -> bool:
    """Whether an unprivileged user can traverse a folder and its parents."""
    place = place.resolve()
    return all(each.stat().st_mode & stat.S_IXOTH for each in (place, *place.parents))


def make_folder(folder: Path) -> tuple[Path, int]:
    """Create this process's state folder; return it and the descriptor that holds its lock.

    This process or its launcher is alive while the lock is held. Pids would be ambiguous between containers that share
    the folder. The lock is the folder's own, so that one whose removal was cut off is still known to be dead. Raises
    SandboxUnavailable.
    """
    for number in range(1000):
        made = folder / f"turnwise-{os.geteuid()}-{host_name()}-{number}"
        try:
            made.mkdir(mode=0o711)
            lock = _lock(made)
        except FileExistsError:
            continue
        except OSError as error:
            raise SandboxUnavailable(f"the state of sandboxes cannot be stored in {folder}: {error}") from error
        if lock is not None:
            break
    else:
        raise SandboxUnavailable(f"the state of sandboxes cannot be stored in {folder}: remove turnwise-* there")
    try:
        _fill(made)
    except OSError as error:
        keep.remove(str(made))
        os.close(lock)
        raise SandboxUnavailable(f"the state of sandboxes cannot be stored in {folder}: {error}") from error
    return made, lock


def _fill(made: Path) -> None:
    """Write what a state folder begins with."""
    made.chmod(0o711)
    for name in ("boot", "etc", "boxes", "snapshots", "stage", "lib"):
        (made / name).mkdir()
        (made / name).chmod(0o711 if name in ("boxes", "snapshots", "stage") else 0o755)
    for program in (_BOOT / "agent.py", _BOOT / "files.py", Path(packing.__file__)):
        compiled = made / "boot" / f"{program.stem}.pyc"
        py_compile.compile(str(program), str(compiled), doraise=True)
        compiled.chmod(0o644)
    _etc(made / "etc")
    folders = [str(each / made.name) for each in find_groups().folders()]
    (made / "groups").write_text("\n".join(folders) + "\n" if folders else "")


def copy_libraries(folder: Path) -> None:
    """Copy the interpreter's shared libraries, for images without them. Raises SandboxUnavailable."""
    if (folder / "loader").exists():
        return
    program = "import _ctypes, _socket, select, resource, tarfile; print(open('/proc/self/maps').read())"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, check=False)
    files = {line.split(maxsplit=5)[5] for line in done.stdout.splitlines() if ".so" in line.rpartition("/")[2]}
    loaders = [file for file in files if re.match(r"ld[-.]", os.path.basename(file))]
    if len(loaders) != 1:
        raise SandboxUnavailable(
            f"images need an interpreter with exactly one dynamic loader (found: {loaders}): use the docker backend"
        )
    for file in files:
        if "/lib-dynload/" not in file and file not in loaders:
            name = os.path.basename(file)
            shutil.copyfile(file, folder / name)
            # What is mapped is the file; it is asked for by a name with fewer numbers (libffi.so.8 of libffi.so.8.1.2).
            stem, _, numbers = name.partition(".so.")
            for count in range(1, numbers.count(".") + 1):
                (folder / f"{stem}.so.{'.'.join(numbers.split('.')[:count])}").symlink_to(name)
    shutil.copyfile(loaders[0], folder / "loading")
    for made in folder.iterdir():
        made.chmod(0o755)
    (folder / "loading").rename(folder / "loader")


def _etc(folder: Path) -> None:
    """Write minimal /etc files: users, hosts, and mount points for the host's."""
    files = {
        "passwd": f"root:x:0:0:root:/root:/bin/sh\n{USER}:x:{INSIDE}:{INSIDE}:{USER}:{HOME}:/bin/sh\n"
        "nobody:x:65534:65534:nobody:/nonexistent:/bin/false\n",
        "group": f"root:x:0:\n{USER}:x:{INSIDE}:\nnogroup:x:65534:\n",
        "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
        "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
        "resolv.conf": "",
    }
    for name in COPIED:
        with contextlib.suppress(OSError):
            shutil.copyfile(f"/etc/{name}", folder / name)
            (folder / name).chmod(0o644)
    for name, text in files.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o644)
    for name in ("alternatives", "ssl", "ca-certificates"):
        (folder / name).mkdir()
        (folder / name).chmod(0o755)


def reap_folders(folder: Path) -> int:
    """Remove state folders, control groups and processes of this user's dead hosts; return the sandbox count."""
    count = 0
    for found in folder.glob(f"turnwise-{os.geteuid()}-*"):
        lock = _lock(found) if _is_ours(found) else None
        if lock is None:
            continue
        with contextlib.suppress(OSError):
            count += len(list((found / "boxes").iterdir()))
        _unmake(found, lock)
    return count


def _unmake(folder: Path, lock: int) -> None:
    """Remove a state folder that is not used."""
    remove_folder(folder)
    os.close(lock)


def _is_ours(found: Path) -> bool:
    """Whether this is a folder of this user's, which another host has not removed meanwhile."""
    try:
        status = found.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()


def remove_folder(folder: Path) -> None:
    """Remove a state folder once its control groups are gone; otherwise it is left for the next reap."""
    if groups.remove_all(str(folder)):
        keep.remove(str(folder))


def _lock(made: Path) -> int | None:
    """Lock a state folder; None if a live process holds it, or it was removed meanwhile."""
    try:
        lock = os.open(made, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(lock), made.stat()):
            return lock
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(lock)
    return None


_NAMES = itertools.count(1)
_PROBE_ATTEMPTS: Final = 3
_SWITCHES = frozenset({"seccomp", "network", "groups", "pids", "watch", "procsys", "readonly", "userns", "landlock"})


class LocalBackend(SandboxBackend):
    """The local backend.

    Args:
        isolation: ``auto`` takes ``bubblewrap``, else ``landlock``, else fails; ``plain`` must be named.
        unsafe: Whether ``plain``, which isolates nothing, is allowed.
        directory: Parent of state folders, reachable by ``uid``. None: the first suitable of ``/var/tmp``, ``/dev/shm``
            and ``/run``.
        images: Root file system folders by ``spec.image``; a spec may also give a path.
        uid: User and group of sandboxes if this process is root; no account needs to exist.
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
            raise ConfigError(f"sandbox.config.isolation is {shown(isolation)}: it must be one of {known}")
        if isolation == "plain" and not unsafe:
            raise ConfigError(
                "sandbox.config.isolation is 'plain', which isolates nothing: code inside can read and change what "
                "this user can. Set sandbox.config.unsafe to true if you mean it"
            )
        if not isinstance(uid, int) or not 0 < uid < 2**32 - 1:
            raise ConfigError(f"sandbox.config.uid is {shown(uid)}: give the number of an unprivileged user")
        if not _without <= _SWITCHES:
            raise ValueError(f"no such containment: {sorted(_without - _SWITCHES)}")
        self.rung: IsolationLevel
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
        self._frozen: dict[str, str] = {}
        self._program = ""

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
                    self.rung, self.capabilities = await self._start_launcher()
                    return
                except SandboxStartError:
                    if not attempts_left:
                        raise

    async def _start_launcher(self) -> tuple[IsolationLevel, Capabilities]:
        """Start a launcher and select the isolation; SandboxStartError if it died meanwhile."""
        folder = choose_folder(self._directory, self._uid)
        making = asyncio.ensure_future(asyncio.to_thread(make_folder, folder))
        try:
            made, lock = await asyncio.shield(making)
        except asyncio.CancelledError:
            # A thread cannot be cancelled: it is waited for, and its folder removed.
            made, lock = await making
            await asyncio.to_thread(_unmake, made, lock)
            raise
        try:
            self.launcher = Launcher(made, lock)
        except OSError as error:
            await asyncio.to_thread(_unmake, made, lock)
            raise SandboxStartError(f"the sandbox launcher could not be started: {error}") from error
        self._state = made
        try:
            return await ladder.select_isolation(self, self._wanted, self._uid, self._without)
        except BaseException:  # also a cancellation: the launcher is closed, its folder removed
            self._state = None
            await self.launcher.close()
            await asyncio.to_thread(remove_folder, made)
            raise

    def make(self, spec: SandboxSpec) -> Sandbox:
        """Return an unstarted sandbox."""
        return LocalSandbox(self, spec, f"{os.getpid()}-{next(_NAMES)}")

    async def drop_snapshot(self, snapshot: str) -> None:
        """Remove a snapshot once no sandbox runs on it."""
        self._snapshots.drop(snapshot)

    async def reap(self) -> int:
        """Remove leftovers of dead hosts on this machine."""
        return await asyncio.to_thread(reap_folders, choose_folder(self._directory, self._uid))

    async def close(self) -> None:
        """Stop the launcher and everything it started."""
        if self._state is not None:
            made, self._state = self._state, None
            await self.launcher.close()
            await asyncio.to_thread(remove_folder, made)

    def try_rung(self, rung: IsolationLevel, program: str) -> None:
        """Switch to an isolation level to probe it."""
        self.rung = rung
        self._program = program
        self.capabilities = Capabilities(rung.isolation)

    def place(self, name: str) -> Place:
        """Return the host folders of one sandbox. Raises SandboxStartError if the backend is closed."""
        if self._state is None:
            raise SandboxStartError(f"sandbox {name} cannot start: its backend was closed")
        return Place(self._state, name, self._program)

    def origin(self, sandbox: LocalSandbox) -> Origin:
        """Return the origin of a sandbox's files. Raises SandboxUnavailable."""
        spec = sandbox.spec
        if spec.snapshot is not None:
            return self._snapshots.use(spec.snapshot, sandbox.id)
        if spec.image is None:
            # The process that copies or shows it is in another folder.
            return Origin(layers=() if spec.workspace is None else (spec.workspace.absolute(),))
        folder = self._images.get(spec.image, Path(spec.image))
        if not self.capabilities.images:
            raise SandboxUnavailable(
                f"image {spec.image!r}: a sandbox isolated by {self.rung.isolation} sees the machine's own programs; "
                "install bubblewrap, or choose the docker backend"
            )
        if not folder.is_absolute() or not (folder / "bin").is_dir():
            known = ", ".join(sorted(self._images)) or "none"
            raise SandboxUnavailable(
                f"image {spec.image!r} is not a folder with a root file system: name one in sandbox.config.images "
                f"(there: {known}), or give an absolute path"
            )
        if spec.workspace is not None:
            raise SandboxUnavailable(f"image {spec.image!r} and a workspace: the local backend takes one of them")
        assert self._state is not None
        copy_libraries(self._state / "lib")
        return Origin(folder, None, (folder,))

    def forget(self, sandbox: LocalSandbox) -> None:
        """Release a closed sandbox."""
        self._frozen.pop(sandbox.id, None)
        self._snapshots.release(sandbox.id)

    async def keep(self, sandbox: LocalSandbox, *, frozen: bool = False) -> tuple[str, bool]:
        """Snapshot a sandbox's files; return the name, and whether nothing ran in it. Raises SandboxStartError.

        Args:
            sandbox: The sandbox.
            frozen: Whether it is held by the sandbox alone, until that is frozen again or closed.
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
            answer = await asyncio.shield(keeping)
        except asyncio.CancelledError:
            # What is being copied cannot be called back: it goes as soon as it is there.
            keeping.add_done_callback(lambda done: _gone(done, folder))
            raise
        if answer["error"]:
            await asyncio.to_thread(keep.remove, str(folder))
            raise SandboxStartError(f"the files of sandbox {sandbox.id} could not be kept: {answer['error']}")
        layers = (folder / "top", *origin.layers) if self.rung.overlay else (folder / "top",)
        self._snapshots.add(name, Origin(origin.image, folder, layers), sandbox.spec.snapshot)
        if frozen:
            before = self._frozen.pop(sandbox.id, None)
            if before is not None:
                self._snapshots.release(sandbox.id, before)
            self._snapshots.use(name, sandbox.id)
            self._snapshots.drop(name)
            self._frozen[sandbox.id] = name
        return name, answer["idle"]

    def forks(self, sandbox: LocalSandbox, snapshot: str, count: int) -> list[LocalSandbox]:
        """Return sandboxes that begin from a snapshot which another one holds, and start when they are used."""
        spec = replace(sandbox.spec, snapshot=snapshot, image=None, workspace=None)
        made = [put_off(self, spec, f"{os.getpid()}-{next(_NAMES)}", sandbox) for _ in range(count)]
        for each in made:
            self._snapshots.use(snapshot, each.id, sandbox.id)
        return made


def _gone(keeping: asyncio.Future[dict[str, Any]], folder: Path) -> None:
    if not keeping.cancelled() and keeping.exception() is None:
        keep.remove(str(folder))
