"""Services of one sandbox that a copy of it reaches at the same ports, beside none of the processes and files."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable
from typing import Final

from turnwise.errors import SandboxError, SandboxUnavailable
from turnwise.sandboxes.core import Sandbox, SandboxProcess

_MOST_PORTS: Final = 32
_MOST_CONNECTIONS: Final = 32
_CHUNK: Final = 65_536
_LISTENING: Final = re.compile(r"^ *\d+: [0-9A-F]+:([0-9A-F]{4}) \S+ 0A ", re.MULTILINE)
"""Rows of the kernel's tables of TCP sockets that listen, with their ports; an agent may have forged others."""
# A command in the background reads nothing from descriptor 0; on Docker a command's errors are part of its output.
_CONNECT: Final = 'exec 2>/dev/null 4<&0 3<>"/dev/tcp/127.0.0.1/$1" || exit; cat <&4 >&3 & cat <&3; kill $!'


@contextlib.asynccontextmanager
async def shared_services(origin: Sandbox, copy: Sandbox) -> AsyncIterator[None]:
    """Make what listens in a sandbox reachable in its copy, at the same TCP ports of 127.0.0.1.

    Raises:
        SandboxUnavailable: The backend cannot listen in a sandbox.
    """
    connections = _Connections(origin)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(connections.close)
        for port in await _listening_ports(origin):
            try:
                listener = await copy.listen(port)
            except SandboxUnavailable:
                raise
            except SandboxError:
                # The port is taken in the copy, too, or not for its user.
                continue
            listener.setblocking(False)
            server = await asyncio.start_server(connections.acceptor(port), sock=listener, limit=_CHUNK)
            stack.callback(server.close)
        yield


async def _listening_ports(sandbox: Sandbox) -> list[int]:
    tables = await sandbox.exec(["sh", "-c", "cat /proc/net/tcp /proc/net/tcp6 2>/dev/null"])
    ports = {int(port, 16) for port in _LISTENING.findall(tables.stdout.decode("ascii", "replace"))}
    return sorted(ports)[:_MOST_PORTS]


class _Connections:
    """Connections to ports of a sandbox, each through a command in it."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._slots = asyncio.Semaphore(_MOST_CONNECTIONS)
        self._open: set[asyncio.Task[None]] = set()

    def acceptor(self, port: int) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], None]:
        """Return what is called with each connection to a port."""

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.create_task(self._serve(port, reader, writer))
            self._open.add(task)
            task.add_done_callback(self._open.discard)

        return accept

    async def close(self) -> None:
        """Drop all connections."""
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _serve(self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A connection that fails ends, as one at which nothing listens any more.
        with contextlib.suppress(OSError, SandboxError), contextlib.closing(writer):
            async with self._slots:
                process = await self._sandbox.spawn(["bash", "-c", _CONNECT, "bash", str(port)])
                sending = asyncio.create_task(_send(reader, process))
                try:
                    while piece := await process.read(_CHUNK):
                        writer.write(piece)
                        await writer.drain()
                finally:
                    sending.cancel()
                    await asyncio.gather(sending, return_exceptions=True)
                    await process.kill()


async def _send(reader: asyncio.StreamReader, process: SandboxProcess) -> None:
    while piece := await reader.read(_CHUNK):
        await process.write(piece)
    await process.close_stdin()
