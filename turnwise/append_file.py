"""Files that grow by whole lines, whatever happens to the process or the disk."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from turnwise.errors import DiskError


class AppendFile:
    """A file of lines that only this process appends to; a line is in the file when :meth:`append` returns.

    Args:
        path: The file; its folder is made.
        cut: Whether half a line that a killed process left is removed. Otherwise it stays unreadable, but does not
            swallow the next one.
    """

    def __init__(self, path: Path, *, cut: bool = False) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._closed = False
        self.size = os.fstat(self._file).st_size
        if self.size and os.pread(self._file, 1, self.size - 1) != b"\n":
            if cut:
                self.truncate(_last_line(self._file, self.size))
            else:
                append_whole(self._file, b"\n")
                self.size += 1

    def append(self, line: bytes) -> int:
        """Append one line (without its line break), whole or not at all; return where in the file it begins.

        Raises:
            OSError: The disk is full, or the file is gone.
        """
        append_whole(self._file, line + b"\n")
        begins, self.size = self.size, self.size + len(line) + 1
        return begins

    def read(self, offset: int, length: int) -> bytes:
        """Return bytes of the file; fewer where it ends before."""
        return os.pread(self._file, length, offset)

    def truncate(self, size: int) -> None:
        """Cut the file to its first ``size`` bytes."""
        os.ftruncate(self._file, size)
        self.size = size

    def sync(self) -> None:
        """Force what was appended to disk: after that a power cut does not lose it either."""
        if not self._closed:
            os.fsync(self._file)

    def close(self) -> None:
        """Close the file. Closing twice is no error."""
        if not self._closed:
            self._closed = True
            os.close(self._file)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Say what a disk that refuses means for the run.

    Raises:
        DiskError: It refused.
    """
    try:
        yield
    except OSError as error:
        raise DiskError(
            f"{path} cannot be written: {error.strerror or error}. Make room on its file system and give the same "
            "command again: the run goes on from its last checkpoint, and nothing that the journal names is lost"
        ) from error


def append_whole(file: int, data: bytes) -> None:
    """Append bytes to a file that only this process writes; where that fails, nothing of them stays in it.

    Half a line would swallow the one that the next call writes, once the disk has room again.
    """
    written = 0
    try:
        while written < len(data):
            written += os.write(file, data[written:] if written else data)
    except OSError:
        if written:
            os.ftruncate(file, os.fstat(file).st_size - written)
        raise


def _last_line(file: int, size: int) -> int:
    """Return where the last line of a file begins that has no line break at its end."""
    block = 2**20
    while size > 0:
        begins = max(0, size - block)
        found = os.pread(file, size - begins, begins).rfind(b"\n")
        if found >= 0:
            return begins + found + 1
        size = begins
    return 0
