"""What is kept of a command's output, where that is long.

Owns: :class:`Kept`. Refuses: where output comes from (the backends' ``streams.py``).
"""

from __future__ import annotations

from typing import Final

_SLACK: Final = 65_536
"""Bytes that the tail may be longer than needed before it is cut: cutting at every byte would copy it every time."""


class Kept:
    """The head and the tail of what is written.

    Args:
        most: Bytes that are kept.

    Attributes:
        total: Bytes that were written.
    """

    __slots__ = ("_head", "_most", "_tail", "total")

    def __init__(self, most: int) -> None:
        self.total = 0
        self._most = most
        self._head = bytearray()
        self._tail = bytearray()

    @property
    def truncated(self) -> bool:
        """Whether more was written than is kept."""
        return self.total > self._most

    @property
    def data(self) -> bytes:
        """What is kept, with a line in the place of what is missing."""
        if not self.truncated:
            return bytes(self._head + self._tail)
        tail = self._tail[len(self._tail) - (self._most - self._most // 2) :]
        return bytes(self._head) + b"\n[%d bytes are missing here]\n" % (self.total - self._most) + bytes(tail)

    def add(self, data: bytes) -> None:
        """Take what was written."""
        self.total += len(data)
        room = max(self._most // 2 - len(self._head), 0)
        self._head += data[:room]
        self._tail += data[room:]
        most = self._most - self._most // 2
        if len(self._tail) > 2 * most + _SLACK:
            del self._tail[: len(self._tail) - most]
