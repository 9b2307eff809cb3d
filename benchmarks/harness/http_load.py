"""HTTP load without a client library: bytes that were made before, over connections that stay open.

A client that parses and builds as little as possible measures the server: a request is one ``write``, an answer is read
up to its ``content-length``. The same connections serve every side of a benchmark.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field


def request(path: str, body: bytes, *, method: str = "POST", headers: str = "") -> bytes:
    """Return a request of HTTP/1.1; ``headers`` are whole lines, each with its line break."""
    head = f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    return f"{head}{headers}content-length: {len(body)}\r\n\r\n".encode() + body


@dataclass(slots=True)
class Load:
    """What a load measured.

    Attributes:
        seconds: Wall seconds from the first request to the last answer.
        latencies: Seconds of each request, by connection.
    """

    seconds: float = 0.0
    latencies: list[list[float]] = field(default_factory=list)

    @property
    def per_second(self) -> float:
        """Requests per second over all connections."""
        return sum(map(len, self.latencies)) / self.seconds

    @property
    def p50(self) -> float:
        """Median latency in seconds."""
        every = sorted(latency for each in self.latencies for latency in each)
        return every[len(every) // 2]


class Connection:
    """One connection that stays open."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, port: int) -> Connection:
        """Connect to a port of the loopback address."""
        return cls(*await asyncio.open_connection("127.0.0.1", port, limit=2**24))

    async def ask(self, message: bytes) -> tuple[int, bytes]:
        """Send a request, and return status and body of the answer."""
        self._writer.write(message)
        head = await self._reader.readuntil(b"\r\n\r\n")
        at = head.lower().find(b"content-length:")
        if at < 0:
            raise RuntimeError(f"an answer without content-length: {head[:300]!r}")
        size = int(head[at + 15 : head.index(b"\r", at)])
        return int(head[9:12]), await self._reader.readexactly(size)

    async def close(self) -> None:
        """Close it."""
        self._writer.close()
        await self._writer.wait_closed()


async def load(port: int, messages: Sequence[Sequence[bytes]]) -> Load:
    """Send each connection's requests one after the other, all connections at the same time.

    Raises:
        RuntimeError: A request was not answered with status 200.
    """
    connections = [await Connection.open(port) for _ in messages]
    result = Load()

    async def run(connection: Connection, own: Sequence[bytes]) -> list[float]:
        taken = []
        for message in own:
            begun = time.perf_counter()
            status, body = await connection.ask(message)
            taken.append(time.perf_counter() - begun)
            if status != 200:
                raise RuntimeError(f"status {status}: {body[:500]!r}")
        return taken

    begun = time.perf_counter()
    result.latencies = await asyncio.gather(*map(run, connections, messages))
    result.seconds = time.perf_counter() - begun
    for connection in connections:
        await connection.close()
    return result
