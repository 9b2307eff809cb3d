"""Forwarding: host services that a sandbox can reach through its own loopback.

A listening socket is created inside the sandbox's network namespace, but held and accepted on the host. Nothing of the
host is mounted, no forwarding process runs inside, and only what serves the socket is reachable. A helper process
enters the namespace, since threads of this one must not, and passes the socket back; that needs root or a namespace of
this user.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from typing import ClassVar, Final

from turnwise.errors import SandboxError, SandboxUnavailable

_CONNECTIONS: Final = 64
"""Connections that one relay passes on at the same time; a further one is closed at once."""
_PIECE: Final = 65_536
_CONNECT_S: Final = 10.0


class PortForwarding:
    """Forwarding into a sandbox. Backends implement ``listen`` and stop relays when they close."""

    backend: ClassVar[str]
    _relays: dict[tuple[str, int], Relay] | None = None

    async def listen(self, port: int = 0) -> socket.socket:
        """Return a socket that listens inside, at 127.0.0.1, and is accepted on the host; ``port`` 0 takes a free one.

        The caller owns it and decides by what it serves what is reachable; it stops with the sandbox. With
        ``limits.network`` it may also be reachable from elsewhere.

        Raises:
            SandboxUnavailable: The backend has no forwarding.
            SandboxError: The port is taken, or (SandboxDied) the sandbox has ended.
        """
        del port
        raise SandboxUnavailable(
            f"a sandbox of {self.backend!r} cannot be given access to this machine: choose another backend "
            "(rollout.sandbox.name: local or docker)"
        )

    async def expose(self, host: str, port: int) -> str:
        """Make one TCP address of the host reachable from inside; return its URL there (``http://127.0.0.1:8000``).

        To expose a part of a server, serve that part on a socket of :meth:`listen`. Raises SandboxUnavailable or
        SandboxDied.
        """
        relays = self._relays = {} if self._relays is None else self._relays
        if (host, port) not in relays:
            listener = await self.listen()
            if (host, port) in relays or self._relays is not relays:
                # Another was faster, or the sandbox was closed meanwhile.
                listener.close()
                return await self.expose(host, port)
            relays[host, port] = Relay(listener, host, port)
            try:
                await relays[host, port].open()
            except BaseException:  # also a cancellation: the listener is closed
                relays.pop((host, port), None)
                listener.close()
                raise
        return f"http://127.0.0.1:{relays[host, port].port}"

    async def stop_relays(self) -> None:
        """Stop all relays; called by every backend's ``close``."""
        relays, self._relays = self._relays or {}, None
        await asyncio.gather(*(relay.close() for relay in relays.values()))


class Relay:
    """Relays connections of an owned listening socket to one TCP address, with half-close and backpressure."""

    def __init__(self, listener: socket.socket, host: str, port: int) -> None:
        self.port: int = listener.getsockname()[1]
        self._listener = listener
        self._closed = False
        self._target = (host, port)
        self._open: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        """Start relaying."""
        self._listener.setblocking(False)
        self._listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        server = await asyncio.start_server(self._accept, sock=self._listener, limit=_PIECE)
        if self._closed:
            server.close()
        else:
            self._server = server

    async def close(self) -> None:
        """Stop listening and drop all connections; idempotent."""
        self._closed = True
        server, self._server = self._server, None
        if server is not None:
            server.close()
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._open) >= _CONNECTIONS or self._server is None:
            writer.transport.abort()
            return
        task = asyncio.create_task(self._pass_on(reader, writer))
        self._open.add(task)
        task.add_done_callback(self._open.discard)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Where the target cannot be reached the connection ends, as it does where nothing listens.
        with contextlib.suppress(OSError, TimeoutError), contextlib.closing(writer):
            async with asyncio.timeout(_CONNECT_S):
                out_reader, out_writer = await asyncio.open_connection(*self._target, limit=_PIECE)
            with contextlib.closing(out_writer):
                await _both_ways((reader, writer), (out_reader, out_writer))


_Side = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def _both_ways(one: _Side, other: _Side) -> None:
    pumps = {asyncio.create_task(_pump(one[0], other[1])), asyncio.create_task(_pump(other[0], one[1]))}
    try:
        ended, _ = await asyncio.wait(pumps, return_when=asyncio.FIRST_EXCEPTION)
        for pump in ended:
            pump.result()
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_PIECE):
        writer.write(data)
        await writer.drain()
    with contextlib.suppress(OSError):
        writer.write_eof()


_SECONDS: Final = 20.0
_REFUSED: Final = 3
# Enters the user namespace first where it may not enter the other one at once: as its owner it then may.
_PROGRAM: Final = """
import ctypes, os, socket, sys
pid, port, channel = sys.argv[1], int(sys.argv[2]), socket.socket(fileno=int(sys.argv[3]))
libc = ctypes.CDLL(None, use_errno=True)
def enter(name):
    there = os.open("/proc/" + pid + "/ns/" + name, os.O_RDONLY)
    if libc.setns(there, 0):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    os.close(there)
try:
    here = os.open("/proc/" + pid + "/ns/net", os.O_RDONLY)
    if libc.setns(here, 0):
        enter("user")
        enter("net")
except OSError as error:
    print(error, file=sys.stderr)
    sys.exit(3)
made = socket.socket()
try:
    made.bind(("127.0.0.1", port))
    made.listen(256)
except OSError as error:
    print(error, file=sys.stderr)
    sys.exit(1)
socket.send_fds(channel, [b"."], [made.fileno()])
"""


async def listen_in(pid: int, port: int = 0) -> socket.socket:
    """Return a socket that listens at 127.0.0.1 in a process's network namespace; ``port`` 0 takes a free one."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", "-c", _PROGRAM, str(pid), str(port), str(theirs.fileno())),
            pass_fds=(theirs.fileno(),),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(_SECONDS):
                _, said = await process.communicate()
        except BaseException:  # also a time-out or a cancellation: the process is killed
            if process.returncode is None:
                process.kill()
                await process.wait()
            raise
        if process.returncode == 0:
            _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
            return socket.socket(fileno=descriptors[0])
    why = said.decode(errors="replace").strip() or f"exit status {process.returncode}"
    if process.returncode == _REFUSED:
        raise SandboxUnavailable(f"cannot enter the network namespace of process {pid}: {why}; run as root")
    raise SandboxError(f"port {port} of the sandbox cannot be listened on: {why}")
