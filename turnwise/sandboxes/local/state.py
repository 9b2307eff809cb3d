"""The folder in which one host process keeps what its sandboxes need, and those that dead processes left.

Owns: where it is, what is in it (the agent as compiled code, a small ``/etc``, folders of sandboxes and snapshots) and
its removal. Its name says whose it is: user, process and when that started, so no reused number is mistaken for it.
"""

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
import time
from pathlib import Path
from typing import Final

from turnwise.errors import SandboxUnavailable
from turnwise.sandboxes import packing
from turnwise.sandboxes.local.boot import groups, removal
from turnwise.sandboxes.local.plans import COPIED, HOME, INSIDE, USER
from turnwise.sandboxes.local.rungs import find_groups

_PLACES: Final = ("/var/tmp", "/dev/shm", "/run")
_MAKING: Final = 60.0
_BOOT: Final = Path(__file__).parent / "boot"


def started(pid: int) -> str | None:
    """Return when a process started, in the kernel's ticks, or None where there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        # Nothing else says that it is dead: with no file descriptor left, say, nothing can be read of anybody.
        return None
    return None if fields[0] in (b"Z", b"X") else fields[19].decode()


def host_name() -> str:
    """Return the name of this process on this machine."""
    return f"{os.getpid()}-{started(os.getpid())}"


def choose(directory: Path | None, uid: int | None) -> Path:
    """Return the folder in which state folders are made.

    Raises:
        SandboxUnavailable: There is none that this process may write to and that sandboxes can reach.
    """
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
    """Whether an unprivileged user can pass a folder and all above it."""
    place = place.resolve()
    return all(each.stat().st_mode & stat.S_IXOTH for each in (place, *place.parents))


def make(folder: Path) -> tuple[Path, int]:
    """Make this process's state folder; return it and the descriptor of its lock.

    Who holds the lock, this process or its launcher, lives: no process number is trusted for that, which another
    container with the same folder would read otherwise.

    Raises:
        SandboxUnavailable: It cannot be made.
    """
    for number in range(1000):
        made = folder / f"turnwise-{os.geteuid()}-{host_name()}-{number}"
        try:
            made.mkdir(mode=0o711)
        except FileExistsError:
            continue
        except OSError as error:
            raise SandboxUnavailable(f"the state of sandboxes cannot be kept in {folder}: {error}") from error
        break
    lock = os.open(made / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
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
    return made, lock


def libraries(folder: Path) -> None:
    """Put what the interpreter is linked with into a folder, for images whose own libraries are others, or none.

    Raises:
        SandboxUnavailable: It cannot be found out.
    """
    if (folder / "loader").exists():
        return
    program = "import _ctypes, _socket, select, resource, tarfile; print(open('/proc/self/maps').read())"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, check=False)
    files = {line.split(maxsplit=5)[5] for line in done.stdout.splitlines() if ".so" in line.rpartition("/")[2]}
    loaders = [file for file in files if re.match(r"ld[-.]", os.path.basename(file))]
    if len(loaders) != 1:
        raise SandboxUnavailable(
            f"images need an interpreter that one dynamic loader starts (found: {loaders}): use the docker backend"
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
    """Write what programs look up: users, hosts, and mount points for the host's own."""
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


def reap(folder: Path) -> int:
    """Remove state folders, control groups and processes of dead hosts of this user; return how many sandboxes."""
    count = 0
    for found in folder.glob(f"turnwise-{os.geteuid()}-*"):
        if found.is_symlink() or not found.is_dir() or found.stat().st_uid != os.geteuid() or _held(found):
            continue
        with contextlib.suppress(OSError):
            count += len(list((found / "boxes").iterdir()))
        remove(found)
    return count


def remove(folder: Path) -> None:
    """Remove a state folder with its control groups; where one of these stays, so does it, for the next who reaps."""
    if groups.remove_all(str(folder)):
        removal.remove(str(folder))


def _held(found: Path) -> bool:
    """Whether somebody lives who holds a state folder."""
    try:
        lock = os.open(found / "lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        # It is being made, or removed: what stays that way for a minute is neither.
        with contextlib.suppress(OSError):
            return time.time() - found.stat().st_mtime < _MAKING
        return True
    except OSError:
        return True
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False
