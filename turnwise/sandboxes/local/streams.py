"""Output of commands, kept within bounds.

Owns: reading a pipe as it fills, and emptying it when nobody wants it any longer.
"""

from __future__ import annotations

import asyncio
import os
from typing import Final

from turnwise.sandboxes.outputs import Kept

_CHUNK: Final = 65_536
_LAST: Final = 2**20 + _CHUNK
"""Bytes that are looked for after a command's end: more than a pipe holds, so what it wrote itself is found."""


class Collector:
    """Reads one pipe, and keeps the head and the tail of what comes.

    Args:
        fd: The pipe's end; owned from now on.
        limit: Bytes that are kept.
    """

    def __init__(self, fd: int, limit: int) -> None:
        self._loop = asyncio.get_running_loop()
        self.fd = fd
        self._kept = Kept(limit)
        self._dropping = False
        self.over: asyncio.Future[None] = self._loop.create_future()
        os.set_blocking(fd, False)
        self._loop.add_reader(fd, self._ready)

    @property
    def truncated(self) -> bool:
        """Whether more came than is kept."""
        return self._kept.truncated

    @property
    def closed(self) -> bool:
        """Whether all writers are gone, or this was closed."""
        return self.fd < 0

    def result(self) -> bytes:
        """Return what is kept, with a line in the place of what is missing."""
        return self._kept.data

    def finish(self) -> None:
        """Take what is there now; what comes from now on is dropped, so that no writer ever waits or fails."""
        seen = 0
        while not self.closed and seen < _LAST:
            size = self._read()
            if size <= 0:
                break
            seen += size
        self._dropping = True

    def close(self) -> None:
        """Stop reading. Closing twice is no error."""
        if self.fd >= 0:
            self._loop.remove_reader(self.fd)
            os.close(self.fd)
            self.fd = -1
            if not self.over.done():
                self.over.set_result(None)

    def _ready(self) -> None:
        self._read()

    def _read(self) -> int:
        """Read once; return how much, 0 at the end and -1 where nothing is there yet."""
        try:
            data = os.read(self.fd, _CHUNK)
        except BlockingIOError:
            return -1
        if not data:
            self.close()
            return 0
        if not self._dropping:
            self._kept.add(data)
        return len(data)
