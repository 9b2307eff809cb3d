"""Tar archives between host and sandbox: packing, and safe extraction of untrusted ones."""

from __future__ import annotations

import contextlib
import os
import posixpath
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Final

from turnwise.errors import SandboxFileError, SandboxFileTooLarge
from turnwise.sandboxes.packing import write_archive

_CHUNK: Final = 2**20
HEADERS: Final = 256 * 2**20
"""Bytes that an archive may have beside the content of files: headers, padding, names."""


def pack(source: Path, stream: IO[bytes], *, name: str = ".", uid: int = 0, gid: int = 0) -> None:
    """Write an archive, as :func:`turnwise.sandboxes.packing.write_archive`, with OSError as SandboxFileError."""
    try:
        write_archive(str(source), stream, name, uid, gid)
    except (FileNotFoundError, BrokenPipeError):
        raise
    except OSError as error:
        raise SandboxFileError(f"{str(source)!r} cannot be uploaded: {error.strerror or error}") from error


def pack_upload(source: Path, stream: IO[bytes], target: str) -> str:
    """Pack a file or folder that is to become ``target``; return the folder to extract it in. Raises as pack."""
    name = "." if source.is_dir() else posixpath.basename(target)
    try:
        pack(source, stream, name=name)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{str(source)!r} does not exist and cannot be uploaded") from error
    return target if name == "." else posixpath.dirname(target)


class ArchiveSender:
    """A file or folder that is written as an archive to a descriptor; ``sent`` counts the bytes taken so far."""

    def __init__(self, source: Path, target: str, fd: int) -> None:
        self.sent = 0
        self._source = source
        self._target = target
        self._stream = os.fdopen(fd, "wb")

    def run(self) -> None:
        """Write it, and close the descriptor. Raises as :func:`pack_upload`."""
        stream: Any = self
        with self._stream:
            pack_upload(self._source, stream, self._target)

    def write(self, data: bytes) -> int:
        """Write a piece of it."""
        self.sent += self._stream.write(data)
        return len(data)


def receive_archive(fd: int, target: Path, max_bytes: int) -> None:
    """Extract an archive from a descriptor, and close it. Raises as :func:`unpack`."""
    with os.fdopen(fd, "rb") as stream:
        unpack(stream, target, max_bytes)


class _ByteBudget:
    def __init__(self, limit: int) -> None:
        self.left = self._limit = limit

    def take(self, size: int, what: str) -> None:
        self.left -= size
        if self.left < 0:
            raise SandboxFileTooLarge(f"{what} exceeds max_bytes={self._limit}")


class _BoundedReader:
    def __init__(self, stream: IO[bytes], max_bytes: int) -> None:
        self._stream = stream
        self._budget = _ByteBudget(max_bytes)

    def read(self, size: int) -> bytes:
        data = self._stream.read(size)
        self._budget.take(len(data), "the archive")
        return data


def unpack(stream: IO[bytes], target: Path, max_bytes: int) -> None:
    """Extract an archive: one file as the target, or a folder's content into it.

    Members that lead out, and those that are not files, folders or links, are skipped; hard links become separate
    files. Raises SandboxFileTooLarge above ``max_bytes`` in all, SandboxFileError if it is not an archive.
    """
    bounded: Any = _BoundedReader(stream, max_bytes + HEADERS)
    try:
        with tarfile.open(fileobj=bounded, mode="r|") as archive:
            first = archive.next()
            if first is not None and first.isdir():
                target.mkdir(parents=True, exist_ok=True)
                _unpack_folder(archive, target, _ByteBudget(max_bytes))
            elif first is not None and first.isfile():
                target.parent.mkdir(parents=True, exist_ok=True)
                with _closing(os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)) as folder:
                    _write_file(_content(archive, first), first, folder, target.name, _ByteBudget(max_bytes))
            else:
                raise SandboxFileError("the sandbox did not send an archive of a file or a folder")
        # The packing process still waits for the end: it would not know whether that arrived.
        while bounded.read(_CHUNK):
            pass
    except (tarfile.TarError, EOFError, ValueError, OverflowError, RecursionError) as error:
        raise SandboxFileError(f"the sandbox sent an invalid archive: {error}") from error


@contextlib.contextmanager
def _closing(fd: int) -> Iterator[int]:
    try:
        yield fd
    finally:
        os.close(fd)


def _parts(name: str) -> list[str]:
    """Split a member's path; empty if it is not below the archive's top."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    return [] if ".." in parts or name.startswith("/") else parts


def _unpack_folder(archive: tarfile.TarFile, target: Path, budget: _ByteBudget) -> None:
    links: list[tuple[list[str], str]] = []
    modes: list[tuple[list[str], int]] = []
    with _closing(os.open(target, os.O_RDONLY | os.O_DIRECTORY)) as root:
        while (member := archive.next()) is not None:
            # tarfile remembers every member that it read: there may be very many.
            archive.members.clear()  # type: ignore[attr-defined]
            parts = _parts(member.name)
            if not parts:
                continue
            if member.issym():
                # Links are made last: nothing is ever written through one.
                links.append((parts, member.linkname))
            elif member.isdir():
                with contextlib.suppress(OSError), _closing(_open_folder(root, parts)):
                    modes.append((parts, stat.S_IMODE(member.mode)))
            elif member.isfile() or member.islnk():
                # An obstacle (a file where a folder should be, an older link) is left in place.
                with (
                    contextlib.suppress(NotADirectoryError, IsADirectoryError, FileExistsError),
                    _closing(_open_folder(root, parts[:-1])) as folder,
                ):
                    if member.isfile():
                        _write_file(_content(archive, member), member, folder, parts[-1], budget)
                    else:
                        _hard_link(root, member, folder, parts[-1], budget)
        for parts, goal in links:
            if _stays_inside(parts, goal):
                with contextlib.suppress(OSError):
                    _make_link(root, parts, goal)
        for parts, mode in reversed(modes):
            with contextlib.suppress(OSError), _closing(_open_folder(root, parts)) as folder:
                os.fchmod(folder, mode & 0o755 | 0o700)


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> IO[bytes]:
    content = archive.extractfile(member)
    assert content is not None
    return content


def _hard_link(root: int, member: tarfile.TarInfo, folder: int, name: str, budget: _ByteBudget) -> None:
    first = _parts(member.linkname)
    if not first:
        return
    try:
        with _closing(_open_folder(root, first[:-1])) as above:
            fd = os.open(first[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=above)
    except OSError:
        return  # The first name was skipped, too.
    with os.fdopen(fd, "rb") as content:
        status = os.fstat(fd)
        if stat.S_ISREG(status.st_mode):
            member.size, member.mode = status.st_size, status.st_mode
            _write_file(content, member, folder, name, budget)


def _stays_inside(parts: list[str], goal: str) -> bool:
    """Whether a relative link stays inside, whatever other links exist.

    Its leading ``..`` steps are at most its own depth, so they pass real folders only; the later steps descend through
    folders or through links of which the same holds.
    """
    steps = [step for step in goal.split("/") if step not in ("", ".")]
    up = 0
    while up < len(steps) and steps[up] == "..":
        up += 1
    return not goal.startswith("/") and up < len(parts) and ".." not in steps[up:]


def _open_folder(root: int, parts: list[str]) -> int:
    """Open (or create) a folder below another without following links."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    folder_fd = os.dup(root)
    for part in parts:
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(part, 0o755, dir_fd=folder_fd)
            child_fd = os.open(part, flags, dir_fd=folder_fd)
        finally:
            os.close(folder_fd)
        folder_fd = child_fd
    return folder_fd


def _write_file(content: IO[bytes], member: tarfile.TarInfo, folder: int, name: str, budget: _ByteBudget) -> None:
    if member.size > budget.left:
        budget.take(member.size, repr(member.name))
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(name, flags, 0o600, dir_fd=folder), "wb") as file:
        while data := content.read(min(_CHUNK, budget.left + 1)):
            budget.take(len(data), repr(member.name))
            file.write(data)
        os.fchmod(file.fileno(), stat.S_IMODE(member.mode) & 0o755 | 0o600)
        with contextlib.suppress(OSError, OverflowError, ValueError):
            os.utime(file.fileno(), (member.mtime, member.mtime))


def _make_link(root: int, parts: list[str], goal: str) -> None:
    with _closing(_open_folder(root, parts[:-1])) as folder:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(parts[-1], dir_fd=folder)
        os.symlink(goal, parts[-1], dir_fd=folder)
