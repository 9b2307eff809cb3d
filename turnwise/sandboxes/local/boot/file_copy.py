"""Copies of a sandbox's files, overlay attributes included, and the removal of its folders.

Programs inside keep running while a more privileged process copies their files: every step goes from an
open folder to a name in it and follows no link, so an entry that is swapped meanwhile leads nowhere. Holes and hard
links are preserved, so that a copy takes no more space than the files.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
import stat
import subprocess
from typing import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

_CHUNK = 2**23
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_VANISHED = (errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.ENXIO)
"""The errors of a name that was removed, or became something else, since it was listed."""


def copy_files(request: dict[str, Any], pid: int) -> None:
    """Copy folders of a sandbox, as its process sees them, to a folder that outlives it.

    Raises:
        OSError: They cannot be read or written, or exceed the limit.
    """
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # a folder stays open while its subfolders are copied
    root = f"/proc/{pid}/root" if request["private"] else ""
    os.makedirs(request["target"])
    os.chmod(request["target"], 0o711)
    copy = FolderCopy(request["max_bytes"])
    for source, name in request["names"]:
        copy.copy_folder(f"{root}{request['files']}/{source}", os.path.join(request["target"], name))


def is_idle(pid: int, nested: bool) -> bool:
    """Whether no process but the agent, the ancestor of all others, runs in a sandbox.

    Args:
        pid: Its first process.
        nested: Whether ``pid`` is the agent's parent rather than the agent.
    """
    try:
        [agent] = children(pid) if nested else [pid]
        return not children(agent)
    except (OSError, ValueError):
        return False


def children(pid: int) -> list[int]:
    """Return the child processes of a process's main thread. Raises OSError."""
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(word) for word in file.read().split()]


class FolderCopy:
    """One copy of several folders.

    Args:
        limit: Maximum bytes of their files together; None: unlimited.
    """

    def __init__(self, limit: int | None) -> None:
        self._remaining = limit
        self._names: dict[tuple[int, int], str] = {}

    def copy_folder(self, source: str, target: str) -> None:
        """Copy a folder with its content to a path that does not exist yet."""
        # A stack of folders that are not complete: code inside may nest them deeper than calls can be nested.
        folders = [_open_copy(os.open(source, _FOLDER), target)]
        try:
            while folders:
                folder = folders[-1]
                if folder.entries:
                    with contextlib.suppress(_EntryVanished):
                        self._copy_entry(folder.entries.pop(), folders)
                else:
                    _copy_attributes(folder.source_fd, folder.target_fd)
                    folders.pop().close()
        finally:
            for folder in folders:
                folder.close()

    def _copy_entry(self, name: str, folders: list[_FolderPair]) -> None:
        """Copy an entry of the last folder; a folder becomes the last one."""
        source_fd, target_fd = folders[-1].source_fd, folders[-1].target_fd
        with _vanishing():
            status = os.stat(name, dir_fd=source_fd, follow_symlinks=False)
        kind = stat.S_IFMT(status.st_mode)
        if kind == stat.S_IFDIR:
            with _vanishing():
                fd = os.open(name, _FOLDER, dir_fd=source_fd)
            folders.append(_open_copy(fd, name, target_fd))
            return
        if kind == stat.S_IFREG:
            with _vanishing():
                fd = os.open(
                    name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY, dir_fd=source_fd
                )
            try:
                if stat.S_ISREG(os.fstat(fd).st_mode):
                    self._copy_file(fd, name, folders)
            finally:
                os.close(fd)
            return
        if kind == stat.S_IFLNK:
            with _vanishing():
                goal = os.readlink(name, dir_fd=source_fd)
            os.symlink(goal, name, dir_fd=target_fd)
        elif kind == stat.S_IFCHR and not status.st_rdev:
            os.mknod(name, stat.S_IFCHR, 0, dir_fd=target_fd)  # an overlay's mark of a removed file
        else:
            return
        if os.geteuid() == 0:
            os.chown(name, status.st_uid, status.st_gid, dir_fd=target_fd, follow_symlinks=False)

    def _copy_file(self, source_fd: int, name: str, folders: list[_FolderPair]) -> None:
        status, target_fd = os.fstat(source_fd), folders[-1].target_fd
        first_path = self._names.get((status.st_dev, status.st_ino)) if status.st_nlink > 1 else None
        if first_path is not None:
            try:
                os.link(first_path, name, dst_dir_fd=target_fd, follow_symlinks=False)
            except OSError as error:
                if error.errno not in (errno.EMLINK, errno.ENAMETOOLONG):
                    raise
            else:
                return
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=target_fd)
        try:
            self._copy_content(source_fd, fd, status.st_size)
            _copy_attributes(source_fd, fd)
        finally:
            os.close(fd)
        if status.st_nlink > 1:
            self._names[status.st_dev, status.st_ino] = "/".join([*(folder.name for folder in folders), name])

    def _copy_content(self, source: int, target: int, size: int) -> None:
        """Copy a file's data between its holes."""
        os.ftruncate(target, size)
        at = 0
        while at < size:
            try:
                at = os.lseek(source, at, os.SEEK_DATA)
                end = min(os.lseek(source, at, os.SEEK_HOLE), size)
            except OSError as error:
                if error.errno == errno.ENXIO:
                    return  # the rest is a hole
                raise
            os.lseek(target, at, os.SEEK_SET)
            while at < end:
                bytes_sent = os.sendfile(target, source, at, min(end - at, _CHUNK))
                if not bytes_sent:
                    return  # truncated meanwhile
                at += bytes_sent
                if self._remaining is not None:
                    self._remaining -= bytes_sent
                    if self._remaining < 0:
                        raise OSError(errno.ENOSPC, "the files hold more than the limit of disk")


class _FolderPair(NamedTuple):
    """A folder that is being copied, its copy by the name that it got, and the entries that are to be copied."""

    source_fd: int
    target_fd: int
    name: str
    entries: list[str]

    def close(self) -> None:
        """Close both folders."""
        os.close(self.source_fd)
        os.close(self.target_fd)


def _open_copy(source_fd: int, name: str, parent_fd: int | None = None) -> _FolderPair:
    """Begin the copy of an open folder by this name, in a folder or as a path; without it close the folder."""
    try:
        entries = os.listdir(source_fd)
        os.mkdir(name, 0o700, dir_fd=parent_fd)
        return _FolderPair(source_fd, os.open(name, _FOLDER, dir_fd=parent_fd), name, entries)
    except OSError:
        os.close(source_fd)
        raise


class _EntryVanished(Exception):
    """An entry was removed or replaced since it was listed."""


@contextlib.contextmanager
def _vanishing() -> Iterator[None]:
    """Raise _EntryVanished for an entry that was removed or replaced since it was listed, other errors as they are."""
    try:
        yield
    except OSError as error:
        if error.errno in _VANISHED:
            raise _EntryVanished from error
        raise


def _copy_attributes(source: int, target: int) -> None:
    """Copy owner, mode, times and overlay attributes of an open file or folder to another."""
    status = os.fstat(source)
    if os.geteuid() == 0:
        os.chown(target, status.st_uid, status.st_gid)
    for name in os.listxattr(source):
        # Marks of a folder that hides the one below it, or was renamed.
        if ".overlay." in name:
            os.setxattr(target, name, os.getxattr(source, name))
    os.chmod(target, stat.S_IMODE(status.st_mode))
    os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))


def remove_tree(path: str) -> None:
    """Remove a folder with its content, at any depth and whatever its permissions."""
    with contextlib.suppress(RecursionError):
        shutil.rmtree(path, ignore_errors=True)
    if os.path.lexists(path):
        for command in (["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
            subprocess.run([*command, "--", path], capture_output=True, check=False)
