"""File requests, served inside a sandbox by one process each."""

from __future__ import annotations

import errno
import os
import stat
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_CHUNK = 1 << 20


def serve(request: dict[str, Any], fds: list[int]) -> None:
    """Serve a request, whose stream is the first descriptor.

    Raises:
        OSError: It fails.
    """
    # A path of 4,096 bytes, the longest, names 2,048 folders, and os.makedirs calls itself for each of them.
    sys.setrecursionlimit(5_000)
    path = request["path"]
    operation = request["op"]
    if operation == "read":
        read(path, request["max"], fds[0])
    elif operation == "write":
        write(path, request["mode"], fds[0])
    elif operation == "pack":
        pack(path, fds[0])
    else:
        unpack(path, fds[0])


def open_regular(path: str, flags: int, mode: int = 0o666) -> int:
    """Open a regular file; a pipe, a socket or a device is refused instead of waited for.

    Raises:
        OSError: It cannot be opened, or is not a regular file.
    """
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, mode)
    kind = os.fstat(fd).st_mode
    if stat.S_ISREG(kind):
        return fd
    os.close(fd)
    if stat.S_ISDIR(kind):
        raise OSError(errno.EISDIR, "it is a folder")
    raise OSError(errno.EINVAL, "it is not a regular file")


def read(path: str, limit: int, out: int) -> None:
    """Send a file's content, and at most one byte beyond the limit."""
    fd = open_regular(path, os.O_RDONLY)
    if os.fstat(fd).st_size > limit:
        raise OSError(errno.EFBIG, f"it holds {os.fstat(fd).st_size} bytes")
    remaining = limit + 1
    while remaining:
        data = os.read(fd, min(remaining, _CHUNK))
        if not data:
            return
        remaining -= len(data)
        write_all(out, data)
    raise OSError(errno.EFBIG, f"it holds more than {limit} bytes")


def write_all(out: int, data: bytes) -> None:
    """Write all of some bytes."""
    view = memoryview(data)
    while view:
        view = view[os.write(out, view) :]


def write(path: str, mode: int | None, source: int) -> None:
    """Write a file from a stream, creating parent folders."""
    folder = os.path.dirname(path)
    if folder:
        os.makedirs(folder, exist_ok=True)
    fd = open_regular(path, os.O_WRONLY | os.O_CREAT, 0o644)
    os.ftruncate(fd, 0)
    if mode is not None:
        os.fchmod(fd, mode)
    while data := os.read(source, _CHUNK):
        write_all(fd, data)
    os.close(fd)


def pack(path: str, out: int) -> None:
    """Send a file, or a folder's content, as an archive."""
    import packing  # type: ignore[import-not-found]

    os.set_blocking(out, True)
    with os.fdopen(out, "wb", closefd=False) as stream:
        packing.write_archive(path, stream)


def unpack(path: str, source: int) -> None:
    """Extract an archive into a folder."""
    import packing

    with os.fdopen(source, "rb", closefd=False) as stream:
        packing.extract_archive(stream, path)
