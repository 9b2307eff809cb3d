"""The attach streams of a container: frame demultiplexing, end markers, bounded output."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable
from typing import Final

from turnwise.sandboxes.core import MAX_OUTPUT
from turnwise.sandboxes.output import HeadTailBuffer

_CHUNK: Final = 65_536
_HEADER: Final = struct.Struct(">BxxxL")
STDOUT: Final = 1
STDERR: Final = 2


class Demux:
    """Demultiplexes the engine's stream of stdout and stderr frames: stream number, size, bytes."""

    def __init__(self) -> None:
        self._header = bytearray()
        self._stream = 0
        self._remaining = 0

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """Return the (stream, bytes) pieces in ``data``, including the available part of an incomplete frame."""
        view = memoryview(data)
        pieces = []
        while view:
            if self._remaining:
                pieces.append((self._stream, bytes(view[: self._remaining])))
                size = min(self._remaining, len(view))
                self._remaining -= size
                view = view[size:]
            else:
                missing = _HEADER.size - len(self._header)
                self._header += view[:missing]
                view = view[missing:]
                if len(self._header) == _HEADER.size:
                    self._stream, self._remaining = _HEADER.unpack(self._header)
                    self._header.clear()
        return pieces


class Output(HeadTailBuffer):
    """The bounded output of a stream up to the end marker ``mark``; ``end`` is the text after the marker."""

    def __init__(self, max_bytes: int = MAX_OUTPUT) -> None:
        super().__init__(max_bytes)
        self.mark = b""
        self.end: str | None = None
        self._waiting = bytearray()

    def feed(self, data: bytes) -> None:
        """Append bytes; those after the end marker are dropped."""
        if self.end is not None:
            return
        self._waiting += data
        mark = self.mark + b":"
        at = self._waiting.find(mark)
        if at < 0:
            # The end of the data may be the beginning of the marker.
            complete = len(self._waiting) - len(mark) + 1
            if complete > 0:
                self.add(bytes(self._waiting[:complete]))
                del self._waiting[:complete]
            return
        text, line_end, _ = bytes(self._waiting[at + len(mark) :]).partition(b"\n")
        if line_end:
            self.add(bytes(self._waiting[:at]))
            self._waiting.clear()
            self.end = text.decode("ascii", "replace")

    def finish(self) -> None:
        """Flush pending bytes: no more will come."""
        self.add(bytes(self._waiting))
        self._waiting.clear()


class Stream:
    """The hijacked connection of one command: input out, output frames in; created by :meth:`open`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._demux = Demux()
        self._first = b""
        self._release: Callable[[], None] = lambda: None
        self.ended = False

    @classmethod
    async def open(cls, connection: socket.socket, first: bytes, release: Callable[[], None]) -> Stream:
        """Open a stream on a connection of which ``first`` was read already; ``release`` is called at its end."""
        stream = cls(*await asyncio.open_connection(sock=connection, limit=_CHUNK))
        stream._first, stream._release = first, release
        return stream

    async def pieces(self) -> list[tuple[int, bytes]]:
        """Return the next output pieces, none at the end or after a broken connection. Safe to cancel."""
        while not self.ended:
            data, self._first = self._first, b""
            if not data:
                with contextlib.suppress(OSError):
                    data = await self._reader.read(_CHUNK)
            if not data:
                self.ended = True
            elif pieces := self._demux.feed(data):
                return pieces
        return []

    async def write(self, data: bytes) -> None:
        """Write to the command's input. Raises OSError."""
        self._writer.write(data)
        await self._writer.drain()

    def end_input(self) -> None:
        """Close the command's input."""
        with contextlib.suppress(OSError):
            self._writer.write_eof()

    def close(self) -> None:
        """Close the connection, not the command; idempotent."""
        self.ended = True
        self._writer.transport.abort()
        # Once the event loop has let go of it: a closed descriptor's number could be reused before.
        asyncio.get_running_loop().call_soon(self._release)
