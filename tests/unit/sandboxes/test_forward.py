"""Port forwarding: what a relay forwards, and when it ends. A loopback socket stands for one inside."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from turnwise.errors import SandboxUnavailable
from turnwise.sandboxes.forwarding import PortForwarding, listen_in

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Inside(PortForwarding):
    """A sandbox reduced to its forwarding."""

    backend = "inside"

    async def listen(self, port: int = 0) -> socket.socket:
        return socket.create_server(("127.0.0.1", port))


@contextlib.asynccontextmanager
async def exposed(serve: Serve) -> AsyncIterator[tuple[Inside, int]]:
    """Serve connections and expose the server: yields the sandbox and the port inside."""
    sandbox = Inside()
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with asyncio.timeout(20), server:
        url = await sandbox.expose("127.0.0.1", server.sockets[0].getsockname()[1])
        assert url.startswith("http://127.0.0.1:")
        yield sandbox, int(url.rpartition(":")[2])
        await sandbox.stop_relays()


async def upper(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer only after the client has closed its sending side."""
    writer.write((await reader.read()).upper())
    writer.close()


async def test_half_closed_connection_is_still_answered() -> None:
    async with exposed(upper) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"hello there")
        writer.write_eof()
        assert await reader.read() == b"HELLO THERE"
        writer.close()


async def test_concurrent_binary_streams_arrive_unchanged() -> None:
    data = os.urandom(3_000_000)

    async def once(port: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)

        async def send() -> None:
            writer.write(data)
            await writer.drain()
            writer.write_eof()

        _, answer = await asyncio.gather(send(), reader.read())
        writer.close()
        return answer

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(70_000):
            writer.write(piece)
            await writer.drain()
        writer.close()

    async with exposed(echo) as (_, port):
        assert set(await asyncio.gather(*(once(port) for _ in range(4)))) == {data}


async def test_slow_reader_holds_back_the_sender() -> None:
    sent = 0

    async def pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        del reader
        nonlocal sent
        with contextlib.suppress(OSError):
            for _ in range(4000):
                writer.write(bytes(65_536))
                await writer.drain()
                sent += 65_536
        writer.close()

    async with exposed(pour) as (_, port):
        _, writer = await asyncio.open_connection("127.0.0.1", port, limit=65_536)
        previous = -1
        while not sent or sent != previous:
            previous = sent
            await asyncio.sleep(0.2)
        # What the kernel's and our buffers hold; all of it would be 250 MiB.
        assert 0 < sent < 100 * 2**20
        writer.transport.abort()


async def test_address_has_one_port_until_the_sandbox_ends() -> None:
    async with exposed(upper) as (sandbox, port):
        known_address, new_address = sorted(sandbox._relays or ())[0], ("127.0.0.1", 1)
        assert await sandbox.expose(*known_address) == f"http://127.0.0.1:{port}"
        assert await sandbox.expose(*new_address) != f"http://127.0.0.1:{port}"
        reader, _ = await asyncio.open_connection("127.0.0.1", port)
        await sandbox.stop_relays()
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        with pytest.raises(ConnectionError):
            await asyncio.open_connection("127.0.0.1", port)
        await sandbox.stop_relays()


async def test_connection_to_a_closed_port_ends() -> None:
    sandbox = Inside()
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    url = await sandbox.expose("127.0.0.1", port)
    reader, _ = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    async with asyncio.timeout(20):
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
    await sandbox.stop_relays()


async def test_concurrent_connections_are_bounded() -> None:
    async with exposed(upper) as (_, port):
        connections = [await asyncio.open_connection("127.0.0.1", port) for _ in range(64)]
        # The relay takes connections in the order in which they came.
        reader, _ = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        first_reader, first = connections[0]
        first.write(b"still here")
        first.write_eof()
        assert await first_reader.read() == b"STILL HERE"
        for _, writer in connections:
            writer.transport.abort()


async def test_backend_without_forwarding_raises() -> None:
    class Far(PortForwarding):
        backend = "far"

    with pytest.raises(SandboxUnavailable, match=r"'far' cannot be given access"):
        await Far().expose("127.0.0.1", 80)


async def test_listening_in_a_dead_process_raises() -> None:
    process = await asyncio.create_subprocess_exec("true")
    await process.wait()
    with pytest.raises(SandboxUnavailable, match="cannot enter"):
        await listen_in(process.pid)


async def test_concurrent_expose_shares_one_relay_and_close_leaves_none() -> None:
    class Slow(Inside):
        closed = False

        async def listen(self, port: int = 0) -> socket.socket:
            await asyncio.sleep(0.01)
            if self.closed:
                raise SandboxUnavailable("closed")
            listener = await super().listen(port)
            listeners.append(listener)
            return listener

    listeners: list[socket.socket] = []
    sandbox = Slow()
    first, second = await asyncio.gather(sandbox.expose("127.0.0.1", 9), sandbox.expose("127.0.0.1", 9))
    assert first == second
    assert [listener.fileno() >= 0 for listener in listeners] == [True, False]
    exposing = asyncio.create_task(sandbox.expose("127.0.0.1", 10))
    await asyncio.sleep(0)
    sandbox.closed = True
    await sandbox.stop_relays()
    with pytest.raises(SandboxUnavailable):
        await exposing
    assert all(listener.fileno() < 0 for listener in listeners)
