"""State folders of local backends: created, locked, and reaped after a host's death."""

from __future__ import annotations

import contextlib
import fcntl
import os
import py_compile
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Final

from turnwise.errors import SandboxUnavailable
from turnwise.sandboxes import packing
from turnwise.sandboxes.local.boot import file_copy, groups
from turnwise.sandboxes.local.control_groups import find_groups
from turnwise.sandboxes.local.launch_plan import COPIED_ETC_FILES, HOME, USER, USER_ID
from turnwise.sandboxes.process_identity import start_time

_PARENTS: Final = ("/var/tmp", "/dev/shm", "/run")
_BOOT: Final = Path(__file__).parent / "boot"


def host_name() -> str:
    """Return the id of this process on this machine."""
    return f"{os.getpid()}-{start_time(os.getpid())}"


def choose_folder(directory: Path | None, uid: int | None) -> Path:
    """Return the parent of state folders; SandboxUnavailable if none is writable and reachable by sandboxes."""
    candidates = [directory] if directory is not None else [Path(candidate) for candidate in _PARENTS]
    for candidate in candidates:
        if directory is not None:
            candidate.mkdir(parents=True, exist_ok=True)
        if (
            candidate.is_dir()
            and os.access(candidate, os.W_OK | os.X_OK)
            and (uid is None or _is_traversable(candidate))
        ):
            return candidate.resolve()
    tried = ", ".join(str(candidate) for candidate in candidates)
    raise SandboxUnavailable(
        f"no folder for the state of sandboxes (tried: {tried}): it must be writable, and other users must be able to "
        "traverse it and all folders above it (chmod o+x). Name one in sandbox.config.directory"
    )


def _is_traversable(folder: Path) -> bool:
    """Whether an unprivileged user can traverse a folder and its parents."""
    folder = folder.resolve()
    return all(ancestor.stat().st_mode & stat.S_IXOTH for ancestor in (folder, *folder.parents))


def make_folder(folder: Path) -> tuple[Path, int]:
    """Create this process's state folder; return it and the descriptor that holds its lock.

    This process or its launcher is alive while the lock is held. Pids would be ambiguous between containers that share
    the folder. The lock is on the folder itself, so that a half-removed one still counts as dead. Raises
    SandboxUnavailable.
    """
    for number in range(1000):
        state = folder / f"turnwise-{os.geteuid()}-{host_name()}-{number}"
        try:
            state.mkdir(mode=0o711)
            lock = _lock(state)
        except FileExistsError:
            continue
        except OSError as error:
            raise SandboxUnavailable(f"the state of sandboxes cannot be stored in {folder}: {error}") from error
        if lock is not None:
            break
    else:
        raise SandboxUnavailable(f"the state of sandboxes cannot be stored in {folder}: remove turnwise-* there")
    try:
        _write_contents(state)
    except OSError as error:
        file_copy.remove_tree(str(state))
        os.close(lock)
        raise SandboxUnavailable(f"the state of sandboxes cannot be stored in {folder}: {error}") from error
    return state, lock


def _write_contents(state: Path) -> None:
    """Write the initial content of a state folder."""
    state.chmod(0o711)
    for name in ("boot", "etc", "boxes", "snapshots", "stage", "lib"):
        (state / name).mkdir()
        (state / name).chmod(0o711 if name in ("boxes", "snapshots", "stage") else 0o755)
    for program in (_BOOT / "agent.py", _BOOT / "files.py", Path(packing.__file__)):
        compiled = state / "boot" / f"{program.stem}.pyc"
        py_compile.compile(str(program), str(compiled), doraise=True)
        compiled.chmod(0o644)
    _write_etc(state / "etc")
    folders = [str(parent / state.name) for parent in find_groups().folders()]
    (state / "groups").write_text("\n".join(folders) + "\n" if folders else "")


def copy_libraries(folder: Path) -> None:
    """Copy the interpreter's shared libraries, for images without them. Raises SandboxUnavailable."""
    if (folder / "loader").exists():
        return
    program = "import _ctypes, _socket, select, resource, tarfile; print(open('/proc/self/maps').read())"
    result = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, check=False)
    files = {line.split(maxsplit=5)[5] for line in result.stdout.splitlines() if ".so" in line.rpartition("/")[2]}
    loaders = [file for file in files if re.match(r"ld[-.]", os.path.basename(file))]
    if len(loaders) != 1:
        raise SandboxUnavailable(
            f"images need an interpreter with exactly one dynamic loader (found: {loaders}): use the docker backend"
        )
    for file in files:
        if "/lib-dynload/" not in file and file not in loaders:
            name = os.path.basename(file)
            shutil.copyfile(file, folder / name)
            # The mapped file has a full version; programs ask for fewer numbers (libffi.so.8 of libffi.so.8.1.2).
            stem, _, numbers = name.partition(".so.")
            for count in range(1, numbers.count(".") + 1):
                (folder / f"{stem}.so.{'.'.join(numbers.split('.')[:count])}").symlink_to(name)
    shutil.copyfile(loaders[0], folder / "loading")
    for library in folder.iterdir():
        library.chmod(0o755)
    (folder / "loading").rename(folder / "loader")


def _write_etc(folder: Path) -> None:
    """Write minimal /etc files: users, hosts, and mount points for the host's."""
    files = {
        "passwd": f"root:x:0:0:root:/root:/bin/sh\n{USER}:x:{USER_ID}:{USER_ID}:{USER}:{HOME}:/bin/sh\n"
        "nobody:x:65534:65534:nobody:/nonexistent:/bin/false\n",
        "group": f"root:x:0:\n{USER}:x:{USER_ID}:\nnogroup:x:65534:\n",
        "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
        "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
        "resolv.conf": "",
    }
    for name in COPIED_ETC_FILES:
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
    for state in folder.glob(f"turnwise-{os.geteuid()}-*"):
        lock = _lock(state) if _is_own_folder(state) else None
        if lock is None:
            continue
        with contextlib.suppress(OSError):
            count += len(list((state / "boxes").iterdir()))
        remove_unused(state, lock)
    return count


def remove_unused(folder: Path, lock: int) -> None:
    """Remove an unused state folder, and release its lock."""
    remove_folder(folder)
    os.close(lock)


def _is_own_folder(state: Path) -> bool:
    """Whether this is an existing folder of this user."""
    try:
        status = state.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()


def remove_folder(folder: Path) -> None:
    """Remove a state folder once its control groups are gone; otherwise it is left for the next reap."""
    if groups.remove_all(str(folder)):
        file_copy.remove_tree(str(folder))


def _lock(state: Path) -> int | None:
    """Lock a state folder; None if a live process holds it, or it was removed meanwhile."""
    try:
        lock = os.open(state, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(lock), state.stat()):
            return lock
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(lock)
    return None
