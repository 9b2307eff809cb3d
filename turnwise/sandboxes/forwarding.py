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
"""Concurrent connections of one relay; a further one is closed at once."""
_CHUNK: Final = 65_536
_CONNECT_S: Final = 10.0


class PortForwarding:
    """Forwarding into a sandbox. Backends implement ``listen`` and stop relays when they close."""

    backend: ClassVar[str]
    _relays: dict[tuple[str, int], Relay] | None = None

    async def listen(self, port: int = 0) -> socket.socket:
        """Return a socket that listens inside, at 127.0.0.1, and is accepted on the host; ``port`` 0 takes a free one.

        The caller owns it, and what it serves is all that is reachable; it stops with the sandbox. With
        ``limits.network`` other machines may reach it, too.

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
                # Another call was faster, or the sandbox was closed meanwhile.
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
        server = await asyncio.start_server(self._accept, sock=self._listener, limit=_CHUNK)
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
        task = asyncio.create_task(self._serve_connection(reader, writer))
        self._open.add(task)
        task.add_done_callback(self._open.discard)

    async def _serve_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # An unreachable target ends the connection, as a port does on which nothing listens.
        with contextlib.suppress(OSError, TimeoutError), contextlib.closing(writer):
            async with asyncio.timeout(_CONNECT_S):
                out_reader, out_writer = await asyncio.open_connection(*self._target, limit=_CHUNK)
            with contextlib.closing(out_writer):
                await _relay((reader, writer), (out_reader, out_writer))


_Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def _relay(client: _Streams, target: _Streams) -> None:
    pumps = {asyncio.create_task(_pump(client[0], target[1])), asyncio.create_task(_pump(target[0], client[1]))}
    try:
        finished, _ = await asyncio.wait(pumps, return_when=asyncio.FIRST_EXCEPTION)
        for pump in finished:
            pump.result()
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_CHUNK):
        writer.write(data)
        await writer.drain()
    with contextlib.suppress(OSError):
        writer.write_eof()


_HELPER_SECONDS: Final = 20.0
_MAY_NOT_ENTER: Final = 3
# A process that may not enter the network namespace directly may do so after entering its user namespace, as owner.
_PROGRAM: Final = """
import ctypes, os, socket, sys
pid, port, channel = sys.argv[1], int(sys.argv[2]), socket.socket(fileno=int(sys.argv[3]))
libc = ctypes.CDLL(None, use_errno=True)
def enter(name):
    namespace = os.open("/proc/" + pid + "/ns/" + name, os.O_RDONLY)
    if libc.setns(namespace, 0):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    os.close(namespace)
try:
    network = os.open("/proc/" + pid + "/ns/net", os.O_RDONLY)
    if libc.setns(network, 0):
        enter("user")
        enter("net")
except OSError as error:
    print(error, file=sys.stderr)
    sys.exit(3)
listener = socket.socket()
try:
    listener.bind(("127.0.0.1", port))
    listener.listen(256)
except OSError as error:
    print(error, file=sys.stderr)
    sys.exit(1)
socket.send_fds(channel, [b"."], [listener.fileno()])
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
            async with asyncio.timeout(_HELPER_SECONDS):
                _, errors = await process.communicate()
        except BaseException:  # also a time-out or a cancellation: the process is killed
            if process.returncode is None:
                process.kill()
                await process.wait()
            raise
        if process.returncode == 0:
            _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
            return socket.socket(fileno=descriptors[0])
    reason = errors.decode(errors="replace").strip() or f"exit status {process.returncode}"
    if process.returncode == _MAY_NOT_ENTER:
        raise SandboxUnavailable(f"cannot enter the network namespace of process {pid}: {reason}; run as root")
    raise SandboxError(f"port {port} of the sandbox cannot be listened on: {reason}")
