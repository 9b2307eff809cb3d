"""The bounded output of a command.

It imports nothing of this package, because its source is sent into sandboxes.
"""

from __future__ import annotations

_SLACK = 65_536
"""Excess bytes of the tail before it is cut: cutting it at every write would copy it every time."""


class HeadTailBuffer:
    """The head and tail of a byte stream, ``limit`` bytes in all; ``total`` counts the bytes written."""

    __slots__ = ("_head", "_limit", "_tail", "total")

    def __init__(self, limit: int) -> None:
        self.total = 0
        self._limit = limit
        self._head = bytearray()
        self._tail = bytearray()

    @property
    def truncated(self) -> bool:
        """Whether more than ``limit`` bytes were written."""
        return self.total > self._limit

    @property
    def data(self) -> bytes:
        """Head and tail, with a line between them that counts the missing bytes."""
        if not self.truncated:
            return bytes(self._head + self._tail)
        tail = self._tail[len(self._tail) - (self._limit - self._limit // 2) :]
        return bytes(self._head) + b"\n[%d bytes are missing here]\n" % (self.total - self._limit) + bytes(tail)

    def add(self, data: bytes) -> None:
        """Append bytes."""
        self.total += len(data)
        room = max(self._limit // 2 - len(self._head), 0)
        self._head += data[:room]
        self._tail += data[room:]
        tail_size = self._limit - self._limit // 2
        if len(self._tail) > 2 * tail_size + _SLACK:
            del self._tail[: len(self._tail) - tail_size]
