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
        owner: User and group of the copies, if this process is root; None: those of the files.
    """

    def __init__(self, limit: int | None, owner: int | None = None) -> None:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # a folder stays open while its subfolders are copied
        self._remaining = limit
        self._owner = owner
        self._names: dict[tuple[int, int], str] = {}

    def copy_folder(self, source: str, target: str) -> None:
        """Copy a folder with its content to a path, where an empty folder may be."""
        os.makedirs(target, exist_ok=True)
        # A stack of folders that are not complete: code inside may nest them deeper than calls can be nested.
        folders = [_open_copy(os.open(source, _FOLDER), target, None)]
        try:
            while folders:
                folder = folders[-1]
                if folder.entries:
                    self._copy_entry(folder.entries.pop(), folders)
                else:
                    self._copy_attributes(folder.source_fd, folder.target_fd)
                    folders.pop().close()
        finally:
            for folder in folders:
                folder.close()

    def _copy_entry(self, name: str, folders: list[_FolderPair]) -> None:
        """Copy an entry of the last folder; a folder becomes the last one."""
        source_fd, target_fd, fd, goal = folders[-1].source_fd, folders[-1].target_fd, -1, ""
        try:
            status = os.stat(name, dir_fd=source_fd, follow_symlinks=False)
            kind = stat.S_IFMT(status.st_mode)
            if kind in (stat.S_IFDIR, stat.S_IFREG):
                fd = os.open(name, _FOLDER if kind == stat.S_IFDIR else _FILE, dir_fd=source_fd)
            elif kind == stat.S_IFLNK:
                goal = os.readlink(name, dir_fd=source_fd)
        except OSError as error:
            if error.errno in _VANISHED:
                return
            raise
        if kind == stat.S_IFDIR:
            os.mkdir(name, 0o700, dir_fd=target_fd)
            folders.append(_open_copy(fd, name, target_fd))
        elif kind == stat.S_IFREG:
            try:
                if stat.S_ISREG(os.fstat(fd).st_mode):
                    self._copy_file(fd, name, folders)
            finally:
                os.close(fd)
        elif goal or (kind == stat.S_IFCHR and not status.st_rdev):
            if goal:
                os.symlink(goal, name, dir_fd=target_fd)
            else:
                os.mknod(name, stat.S_IFCHR, 0, dir_fd=target_fd)  # an overlay's mark of a removed file
            self._chown(name, status, target_fd)

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
            self._copy_attributes(source_fd, fd)
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

    def _copy_attributes(self, source: int, target: int) -> None:
        """Copy owner, mode, times and overlay attributes of an open file or folder to another."""
        status = os.fstat(source)
        self._chown(target, status)
        for name in os.listxattr(source):
            # Marks of a folder that hides the one below it, or was renamed.
            if ".overlay." in name:
                os.setxattr(target, name, os.getxattr(source, name))
        os.chmod(target, stat.S_IMODE(status.st_mode))
        os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))

    def _chown(self, path: str | int, status: os.stat_result, folder_fd: int | None = None) -> None:
        if os.geteuid() == 0:
            user, group = (status.st_uid, status.st_gid) if self._owner is None else (self._owner, self._owner)
            os.chown(path, user, group, dir_fd=folder_fd, follow_symlinks=folder_fd is None)


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


def _open_copy(source_fd: int, name: str, parent_fd: int | None) -> _FolderPair:
    """Begin the copy of an open folder to an empty one, by its name in a folder or its path."""
    try:
        target_fd = os.open(name, _FOLDER, dir_fd=parent_fd)
        return _FolderPair(source_fd, target_fd, name, os.listdir(source_fd))
    except OSError:
        os.close(source_fd)
        raise


def remove_tree(path: str) -> None:
    """Remove a folder with its content, at any depth and whatever its permissions."""
    with contextlib.suppress(RecursionError):
        shutil.rmtree(path, ignore_errors=True)
    if os.path.lexists(path):
        for command in (["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
            subprocess.run([*command, "--", path], capture_output=True, check=False)
