"""Archives that cross a sandbox's border.

Owns: packing a folder of the host, and writing what came out of a sandbox without ever leaving the folder that it is
meant for. Nothing in such an archive is trusted: neither names, nor links, nor sizes.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tarfile
from pathlib import Path
from typing import IO, Any, Final

from turnwise.errors import SandboxFileError, SandboxFileTooLarge

_CHUNK: Final = 2**20
_HEADERS: Final = 256 * 2**20
"""Bytes of an archive that may be no file's content: headers, padding, names."""


def pack(source: Path, stream: IO[bytes]) -> None:
    """Write a folder's content as an archive: files, folders and links; hard links as files of their own.

    Raises:
        OSError: It cannot be read, or the stream has no reader.
    """
    with tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT) as archive:

        def kept(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
            archive.inodes = {}  # type: ignore[attr-defined]  # hard links travel as files
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            return member if member.isfile() or member.isdir() or member.issym() else None

        archive.add(source, arcname=".", filter=kept)


def opened(source: Path) -> int:
    """Return a descriptor of a file of the host, to be read; a pipe is refused instead of waited for.

    Raises:
        FileNotFoundError: There is no such file.
        SandboxFileError: It is neither a file nor a folder.
    """
    fd = os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise SandboxFileError(f"{str(source)!r} is neither a file nor a folder, so it is not uploaded")
    return fd


def send(source: Path, fd: int) -> None:
    """Write a folder's content as an archive to a descriptor, and close it.

    Raises:
        OSError: It cannot be read, or nobody reads the archive.
    """
    with os.fdopen(fd, "wb") as stream:
        pack(source, stream)


def receive(fd: int, target: Path, max_bytes: int) -> None:
    """Write what an archive from a descriptor holds to a path, and close the descriptor.

    Raises:
        SandboxFileTooLarge: Its files hold more than ``max_bytes``.
        SandboxFileError: It is no archive.
    """
    with os.fdopen(fd, "rb") as stream:
        unpack(stream, target, max_bytes)


class _Bounded:
    """Reads a stream up to a number of bytes."""

    def __init__(self, stream: IO[bytes], most: int) -> None:
        self._stream = stream
        self._left = most
        self._most = most

    def read(self, size: int) -> bytes:
        data = self._stream.read(size)
        self._left -= len(data)
        if self._left < 0:
            raise SandboxFileTooLarge(f"the archive has more than {self._most} bytes")
        return data


def unpack(stream: IO[bytes], target: Path, max_bytes: int) -> None:
    """Write what an archive holds to a path: a folder's content into it, or one file.

    What would lead out of it, and what is no file, folder or link, is left out.

    Raises:
        SandboxFileTooLarge: Its files hold more than ``max_bytes``.
        SandboxFileError: It is no archive.
    """
    bounded: Any = _Bounded(stream, max_bytes + _HEADERS)
    try:
        with tarfile.open(fileobj=bounded, mode="r|") as archive:
            first = archive.next()
            if first is None:
                return
            if first.isfile() and first.name == "file":
                target.parent.mkdir(parents=True, exist_ok=True)
                folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
                try:
                    _file(archive, first, folder, target.name, max_bytes)
                finally:
                    os.close(folder)
                return
            target.mkdir(parents=True, exist_ok=True)
            _folder(archive, target, max_bytes)
    except (tarfile.TarError, EOFError, ValueError, OverflowError) as error:
        raise SandboxFileError(f"what the sandbox sent is no archive: {error}") from error


def _folder(archive: tarfile.TarFile, target: Path, max_bytes: int) -> None:
    root = os.open(target, os.O_RDONLY | os.O_DIRECTORY)
    links: list[tuple[list[str], str]] = []
    modes: list[tuple[list[str], int]] = []
    try:
        for member in archive:
            parts = [part for part in member.name.split("/") if part not in ("", ".")]
            if not parts or ".." in parts or member.name.startswith("/"):
                continue
            if member.issym():
                # Links are made last: nothing is ever written through one.
                links.append((parts, member.linkname))
            elif member.isdir():
                with contextlib.suppress(OSError):
                    os.close(_open_folder(root, parts))
                    modes.append((parts, stat.S_IMODE(member.mode)))
            elif member.isfile():
                # What stands in the way (a file where a folder should be, an older link) keeps its place.
                with contextlib.suppress(NotADirectoryError, IsADirectoryError, FileExistsError):
                    folder = _open_folder(root, parts[:-1])
                    try:
                        max_bytes = _file(archive, member, folder, parts[-1], max_bytes)
                    finally:
                        os.close(folder)
        for parts, goal in links:
            if _stays(parts, goal):
                with contextlib.suppress(OSError):
                    _link(root, parts, goal)
        for parts, mode in reversed(modes):
            with contextlib.suppress(OSError):
                folder = _open_folder(root, parts)
                os.fchmod(folder, mode & 0o777 | 0o700)
                os.close(folder)
    finally:
        os.close(root)


def _stays(parts: list[str], goal: str) -> bool:
    """Whether a link leads nowhere outside, whatever other links there are.

    Steps upwards come first and are no more than the link's own depth, so they pass real folders only; the steps after
    them go down, through folders or through links of which the same holds.
    """
    steps = [step for step in goal.split("/") if step not in ("", ".")]
    up = 0
    while up < len(steps) and steps[up] == "..":
        up += 1
    return not goal.startswith("/") and up < len(parts) and ".." not in steps[up:]


def _open_folder(root: int, parts: list[str]) -> int:
    """Open a folder below another, made where it is not there, without following a link."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    here = os.dup(root)
    for part in parts:
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(part, 0o755, dir_fd=here)
            below = os.open(part, flags, dir_fd=here)
        finally:
            os.close(here)
        here = below
    return here


def _file(archive: tarfile.TarFile, member: tarfile.TarInfo, folder: int, name: str, left: int) -> int:
    """Write one file, in the place of what had its name; return how many bytes may still come."""
    if member.size > left:
        raise SandboxFileTooLarge(f"{member.name!r} and what came before it hold more bytes than are taken")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)
    content = archive.extractfile(member)
    assert content is not None
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(name, flags, 0o600, dir_fd=folder), "wb") as file:
        while data := content.read(min(_CHUNK, left + 1)):
            left -= len(data)
            if left < 0:
                raise SandboxFileTooLarge(f"{member.name!r} and what came before it hold more bytes than are taken")
            file.write(data)
        os.fchmod(file.fileno(), stat.S_IMODE(member.mode) & 0o777)
        with contextlib.suppress(OSError, OverflowError, ValueError):
            os.utime(file.fileno(), (member.mtime, member.mtime))
    return left


def _link(root: int, parts: list[str], goal: str) -> None:
    folder = _open_folder(root, parts[:-1])
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(parts[-1], dir_fd=folder)
        os.symlink(goal, parts[-1], dir_fd=folder)
    finally:
        os.close(folder)
