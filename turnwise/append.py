"""Files that grow by whole lines, whatever happens to the process or the disk.

Owns: :class:`AppendFile`. Refuses: knowing what a line means.
"""

from __future__ import annotations

import os
from pathlib import Path


class AppendFile:
    """A file of lines that only this process appends to; a line is in the file when :meth:`append` returns.

    A killed process may have left half a line: it stays unreadable, but does not swallow the next one.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._closed = False
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            append_whole(self._file, b"\n")

    def append(self, line: bytes) -> None:
        """Append one line (without its line break), whole or not at all.

        Raises:
            OSError: The disk is full, or the file is gone.
        """
        append_whole(self._file, line + b"\n")

    def close(self) -> None:
        """Close the file. Closing twice is no error."""
        if not self._closed:
            self._closed = True
            os.close(self._file)


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
