"""Connection limits of an HTTP server: silent clients, incomplete heads, slow readers.

A connection beyond the limit replaces the longest idle one, never one with an open request. A request whose head
arrives at once costs only a few comparisons.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, ClassVar, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from turnwise.append_file import raise_file_limit

_log = logging.getLogger(__name__)

_FILES_KEPT = 256
"""File descriptors reserved for all but clients' connections."""
_PROBE_S = 0.2
"""Seconds between the two probes of a client that ended its sending side."""
_TOO_LARGE = (431, "Request Header Fields Too Large", "the head of the request has more than {bytes} bytes")
_TOO_LATE = (408, "Request Timeout", "the head of the request did not arrive within {seconds:g} s")
_TOO_MANY = (503, "Service Unavailable", "{maximum} connections are open, which is the limit")


def guarded(
    connections: int, head_bytes: int, head_seconds: float, write_seconds: float = 60.0
) -> type[asyncio.Protocol]:
    """Return a protocol class for ``uvicorn.Config(http=...)``, for the connections of one server.

    Args:
        connections: Maximum connections; fewer if the process may not open as many files.
        head_bytes: Maximum bytes of a request's head.
        head_seconds: Seconds for a head to arrive, from its first byte; for the first one, from the connection's
            opening.
        write_seconds: Seconds for a client to accept buffered data.
    """
    shared = {
        "seconds": head_seconds,
        "write_seconds": write_seconds,
        "max_head_bytes": head_bytes,
        "maximum": _connection_limit(connections),
        "idle": {},
    }
    return cast("type[asyncio.Protocol]", type("Guarded", (_Guarded,), shared))


class _HeadRefused(Exception):
    """Stops parsing a head."""


class _Guarded(HttpToolsProtocol):  # type: ignore[misc]
    """One connection; state shared by a server's connections is on the class that :func:`guarded` makes."""

    seconds: ClassVar[float]
    write_seconds: ClassVar[float]
    max_head_bytes: ClassVar[int]
    maximum: ClassVar[int]
    # Connections without a request, longest waiting first.
    idle: ClassVar[dict[Any, None]]

    _late: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None
    _in_head = False
    # Bytes of a head in the pieces after its first one, and all bytes of the current piece.
    _head_bytes = 0
    _size = 0
    _refusal: tuple[int, str, str] | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > self.maximum:
            oldest = next(iter(self.idle), None)
            if oldest is None:
                self._refuse(_TOO_MANY)
                return
            oldest.give_way()
        self.idle[self] = None
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._end_writing_limit()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._limit_writing()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self._end_writing_limit()

    def give_way(self) -> None:
        """Close in favour of another connection."""
        self._stop_waiting()
        self.connections.discard(self)
        self.transport.abort()

    def eof_received(self) -> bool:
        """Stay open for the answer to a whole request, whose client may have ended only its sending side."""
        cycle = self.cycle
        if cycle is None or cycle.more_body or cycle.response_started:
            return False
        cycle.keep_alive = False
        self._probe()
        self.loop.call_later(_PROBE_S, self._probe)
        return True

    def _probe(self) -> None:
        """Write what clients skip: one that is gone resets the connection, which the next write notices."""
        if self.scope["http_version"] == "1.1" and not (self.transport.is_closing() or self.cycle.response_started):
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def data_received(self, data: bytes) -> None:
        self._head_bytes = self._head_bytes + len(data) if self._in_head else 0
        self._size = len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._in_head and self._head_bytes > self.max_head_bytes:
            self._refuse(_TOO_LARGE)
        elif self._in_head or self.cycle is None or self.cycle.response_complete:
            self._wait_for_head()

    def on_message_begin(self) -> None:
        self._in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        if max(self._head_bytes, self._size) > self.max_head_bytes:
            size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
            if size > self.max_head_bytes:
                self._refusal = _TOO_LARGE
                raise _HeadRefused
        self._stop_waiting()
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._limit_writing()
        elif self.cycle.response_complete:
            self.idle[self] = None

    def send_400_response(self, msg: str) -> None:
        if self._refusal is not None:
            self._refuse(self._refusal)
        elif not self.transport.is_closing():
            super().send_400_response(msg)

    def _wait_for_head(self) -> None:
        if self._late is None:
            self._late = self.loop.call_later(self.seconds, self._check_head)

    def _check_head(self) -> None:
        self._late = None
        if self.cycle is not None and not self.cycle.response_complete:
            # The request before it is answered first.
            self._wait_for_head()
        elif self._in_head:
            self._refuse(_TOO_LATE)
        else:
            # It sent no request: the client could read an answer as that to its next request.
            self._close()

    def _refuse(self, refusal: tuple[int, str, str]) -> None:
        if self.transport.is_closing():
            return
        status, phrase, message = refusal
        text = message.format(bytes=self.max_head_bytes, seconds=self.seconds, maximum=self.maximum)
        body = f'{{"error":{{"message":"{text}","type":"invalid_request_error"}}}}'
        self.transport.write(
            f"HTTP/1.1 {status} {phrase}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
            f"retry-after: 1\r\nconnection: close\r\n\r\n{body}".encode()
        )
        self._close()

    def _close(self) -> None:
        """Close once the client has accepted buffered data, within the time limit."""
        self._stop_waiting()
        self.transport.close()
        self._limit_writing()

    def _limit_writing(self) -> None:
        if self._stalled is None:
            self._stalled = self.loop.call_later(self.write_seconds, self.transport.abort)

    def _end_writing_limit(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def _stop_waiting(self) -> None:
        self.idle.pop(self, None)
        if self._late is not None:
            self._late.cancel()
            self._late = None


def _connection_limit(connections: int) -> int:
    """Return the number of connections possible under the limit of open files, which is raised if allowed."""
    # Each connection causes at most one to a model server.
    needed = 2 * connections + _FILES_KEPT
    files = raise_file_limit(needed)
    if files >= needed:
        return connections
    possible = max(1, (int(files) - _FILES_KEPT) // 2)
    text = "%d open files allow %d of %d connections (limits.connections): raise the limit (ulimit -n)"
    _log.warning(text, files, possible, connections)
    return possible
