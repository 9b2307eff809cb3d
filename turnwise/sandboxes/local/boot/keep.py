"""Files of a sandbox, copied out of it as they are, with all that an overlay notes in them, and removed.

Programs inside keep running while a more privileged process copies their files: every step goes from an
open folder to a name in it, and follows no link, so what is swapped meanwhile leads nowhere. Holes stay holes and
second names stay names, so that a copy takes no more room than the files do.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
import stat
import subprocess
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

_PIECE = 2**23
_DEEPEST = 10_000
_GONE = (errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.ENXIO)
"""The errors of a name that was removed, or became something else, since it was listed."""


def keep(request: dict[str, Any], pid: int) -> None:
    """Copy some folders of a sandbox, whose process has its own view of them, to where they outlive it.

    Raises:
        OSError: They cannot be read or written, or hold more than they may.
    """
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # a folder is held open while those below are copied
    sys.setrecursionlimit(_DEEPEST)
    root = f"/proc/{pid}/root" if request["private"] else ""
    os.makedirs(request["target"])
    os.chmod(request["target"], 0o711)
    copying = Copying(request["most"])
    for source, name in request["names"]:
        copying.folder(f"{root}{request['files']}/{source}", os.path.join(request["target"], name))


def idle(pid: int, nested: bool) -> bool:
    """Whether nothing runs in a sandbox beside the agent, which every process in it comes from.

    Args:
        pid: Its first process.
        nested: Whether that is the parent of the agent, not the agent.
    """
    try:
        [agent] = _children(pid) if nested else [pid]
        return not _children(agent)
    except (OSError, ValueError):
        return False


def _children(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(word) for word in file.read().split()]


class Copying:
    """One copy of several folders.

    Args:
        most: Bytes that their files may hold together; None: no bound.
    """

    def __init__(self, most: int | None) -> None:
        self._left = most
        self._names: dict[tuple[int, int], str] = {}

    def folder(self, source: str, target: str) -> None:
        """Copy a folder with all below it to where nothing is."""
        there = os.open(source, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            self._folder(there, target, None, target)
        finally:
            os.close(there)

    def _folder(self, there: int, name: str, above: int | None, path: str) -> None:
        os.mkdir(name, 0o700, dir_fd=above)
        here = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
        try:
            for each in os.listdir(there):
                try:
                    self._entry(there, each, here, f"{path}/{each}")
                except _Gone:
                    continue
            _dress(there, here)
        finally:
            os.close(here)

    def _entry(self, there: int, name: str, here: int, path: str) -> None:
        with _seen():
            status = os.stat(name, dir_fd=there, follow_symlinks=False)
        kind = stat.S_IFMT(status.st_mode)
        if kind == stat.S_IFLNK:
            with _seen():
                goal = os.readlink(name, dir_fd=there)
            os.symlink(goal, name, dir_fd=here)
        elif kind == stat.S_IFCHR and not status.st_rdev:
            os.mknod(name, stat.S_IFCHR, 0, dir_fd=here)  # an overlay's mark of a removed file
        elif kind in (stat.S_IFDIR, stat.S_IFREG):
            with _seen():
                only = os.O_DIRECTORY if kind == stat.S_IFDIR else os.O_NONBLOCK | os.O_NOCTTY
                found = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | only, dir_fd=there)
            try:
                if kind == stat.S_IFDIR:
                    self._folder(found, name, here, path)
                elif stat.S_ISREG(os.fstat(found).st_mode):
                    self._file(found, name, here, path)
            finally:
                os.close(found)
            return
        else:
            return
        if os.geteuid() == 0:
            os.chown(name, status.st_uid, status.st_gid, dir_fd=here, follow_symlinks=False)

    def _file(self, there: int, name: str, here: int, path: str) -> None:
        status = os.fstat(there)
        known = self._names.get((status.st_dev, status.st_ino)) if status.st_nlink > 1 else None
        if known is not None:
            try:
                os.link(known, name, dst_dir_fd=here, follow_symlinks=False)
            except OSError as error:
                if error.errno != errno.EMLINK:
                    raise
            else:
                return
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=here)
        try:
            self._content(there, fd, status.st_size)
            _dress(there, fd)
        finally:
            os.close(fd)
        if status.st_nlink > 1:
            self._names[status.st_dev, status.st_ino] = path

    def _content(self, source: int, target: int, size: int) -> None:
        """Copy what is in a file between its holes."""
        os.ftruncate(target, size)
        at = 0
        while at < size:
            try:
                at = os.lseek(source, at, os.SEEK_DATA)
                end = min(os.lseek(source, at, os.SEEK_HOLE), size)
            except OSError as error:
                if error.errno == errno.ENXIO:
                    return  # nothing but a hole is left
                raise
            os.lseek(target, at, os.SEEK_SET)
            while at < end:
                sent = os.sendfile(target, source, at, min(end - at, _PIECE))
                if not sent:
                    return  # it was cut meanwhile
                at += sent
                if self._left is not None:
                    self._left -= sent
                    if self._left < 0:
                        raise OSError(errno.ENOSPC, "the files hold more than the limit of disk")


class _Gone(Exception):
    """What was seen is not there any more."""


@contextlib.contextmanager
def _seen() -> Iterator[None]:
    """Tell a name that was removed, or became something else, since it was seen from what cannot be read."""
    try:
        yield
    except OSError as error:
        if error.errno in _GONE:
            raise _Gone from error
        raise


def _dress(source: int, target: int) -> None:
    """Give an open file or folder the owner, the mode, the times and an overlay's notes of another."""
    status = os.fstat(source)
    if os.geteuid() == 0:
        os.chown(target, status.st_uid, status.st_gid)
    for name in os.listxattr(source):
        # What marks a folder that hides the one below it, or one that was renamed.
        if ".overlay." in name:
            os.setxattr(target, name, os.getxattr(source, name))
    os.chmod(target, stat.S_IMODE(status.st_mode))
    os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))


def remove(path: str) -> None:
    """Remove a folder with all below it, however deep that is and whatever its owner may do with it."""
    with contextlib.suppress(RecursionError):
        shutil.rmtree(path, ignore_errors=True)
    if os.path.lexists(path):
        for command in (["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
            subprocess.run([*command, "--", path], capture_output=True, check=False)
