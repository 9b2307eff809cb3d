"""Tar archives of files and folders, written on the host or inside a sandbox.

It imports nothing of this package, because its source and compiled form are sent into sandboxes. Untrusted archives are
read in :mod:`turnwise.sandboxes.archives`.
"""

from __future__ import annotations

import errno
import os
import stat
import tarfile

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import IO, Any

_BLOCK = 512
_CHUNK = 1 << 20
_VANISHED = (errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.EINVAL)
"""The errors of a name that was removed, or became something else, since it was listed."""


def write_archive(source: str, stream: IO[bytes], name: str = ".", uid: int = 0, gid: int = 0) -> None:
    """Write a file or a folder's content as an archive: files, folders and links; hard links as separate files.

    A link given as ``source`` is followed, links below it are not. A growing file is copied as of its opening; entries
    that vanish or change kind are skipped. ``name`` is the top-level name in the archive. Raises OSError, also if a
    file shrinks.
    """
    source = os.path.realpath(source)
    if stat.S_IFMT(os.stat(source).st_mode) not in (stat.S_IFREG, stat.S_IFDIR):
        raise OSError(errno.EINVAL, "it is neither a file nor a folder")
    pending = [(source, name)]
    while pending:
        path, member_name = pending.pop()
        try:
            children = _add_entry(path, member_name, stream, uid, gid)
        except OSError as error:
            if path == source or error.errno not in _VANISHED:
                raise
            continue
        pending += [(f"{path}/{child}", f"{member_name}/{child}") for child in sorted(children, reverse=True)]
    stream.write(bytes(2 * _BLOCK))


def extract_archive(stream: IO[bytes], folder: str) -> None:
    """Extract an archive into a folder without special permission bits, as ``tarfile``'s filter ``tar``.

    A file or link in the way is replaced, a folder merged. Raises OSError, also for what is no archive.
    """
    os.makedirs(folder, exist_ok=True)
    top = os.path.realpath(folder)
    trusted: dict[str, Any] = {"filter": "fully_trusted"} if hasattr(tarfile, "fully_trusted_filter") else {}
    try:
        with tarfile.open(fileobj=stream, mode="r|") as archive:
            for member in archive:
                target = os.path.join(folder, member.name)
                if os.path.islink(target) or (os.path.isfile(target) and not member.isdir()):
                    os.unlink(target)
                destination = os.path.realpath(os.path.join(top, member.name))
                if (
                    os.path.commonpath((destination, top)) != top
                ):  # a folder of that name is a link that leads elsewhere
                    raise OSError(errno.EINVAL, f"{member.name!r} points outside the folder that it is unpacked into")
                member.mode &= 0o755
                archive.extract(member, folder, numeric_owner=True, **trusted)
        while stream.read(_CHUNK):
            pass
    except (tarfile.TarError, RecursionError) as error:  # headers that announce headers are read by recursion
        raise OSError(errno.EINVAL, f"it is not an archive: {error}") from error


def _add_entry(path: str, name: str, stream: IO[bytes], uid: int, gid: int) -> list[str]:
    member = tarfile.TarInfo(name)
    member.uid, member.gid = uid, gid
    status = os.lstat(path)
    if stat.S_ISREG(status.st_mode):
        # Another entry of that name since then (a link, a pipe) is neither followed nor waited for.
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(fd)
            if stat.S_ISREG(status.st_mode):
                member.size = status.st_size
                _write_header(member, status, stream)
                _write_content(fd, member, stream)
        finally:
            os.close(fd)
        return []
    if stat.S_ISDIR(status.st_mode):
        children = os.listdir(path)
        member.type = tarfile.DIRTYPE
        _write_header(member, status, stream)
        return children
    if stat.S_ISLNK(status.st_mode):
        member.type, member.linkname = tarfile.SYMTYPE, os.readlink(path)
        _write_header(member, status, stream)
    return []


def _write_header(member: tarfile.TarInfo, status: os.stat_result, stream: IO[bytes]) -> None:
    member.mode, member.mtime = stat.S_IMODE(status.st_mode), int(status.st_mtime)
    stream.write(member.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape"))


def _write_content(fd: int, member: tarfile.TarInfo, stream: IO[bytes]) -> None:
    remaining = member.size
    while remaining:
        data = os.read(fd, min(remaining, _CHUNK))
        if not data:
            raise OSError(errno.EIO, f"{member.name!r} became shorter while it was read")
        stream.write(data)
        remaining -= len(data)
    stream.write(bytes(-member.size % _BLOCK))
