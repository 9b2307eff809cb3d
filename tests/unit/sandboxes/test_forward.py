"""Ways out of a sandbox: what a relay passes on, and when it ends. A loopback socket stands for one inside."""

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
    """The part of a sandbox that is tested here."""

    backend = "inside"

    async def listen(self, port: int = 0) -> socket.socket:
        return socket.create_server(("127.0.0.1", port))


@contextlib.asynccontextmanager
async def exposed(serve: Serve) -> AsyncIterator[tuple[Inside, int]]:
    """Serve something, and let the inside reach it: yields the sandbox and the port inside."""
    sandbox = Inside()
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with asyncio.timeout(20), server:
        url = await sandbox.expose("127.0.0.1", server.sockets[0].getsockname()[1])
        assert url.startswith("http://127.0.0.1:")
        yield sandbox, int(url.rpartition(":")[2])
        await sandbox.stop_relays()


async def upper(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer only once the other side has said all that it has to say."""
    writer.write((await reader.read()).upper())
    writer.close()


async def test_a_side_that_said_all_is_still_answered() -> None:
    async with exposed(upper) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"is there anybody")
        writer.write_eof()
        assert await reader.read() == b"IS THERE ANYBODY"
        writer.close()


async def test_large_and_many_and_binary() -> None:
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


async def test_who_does_not_read_holds_the_other_back() -> None:
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
        before = -1
        while not sent or sent != before:
            before = sent
            await asyncio.sleep(0.2)
        # What the kernel's and our buffers hold; all of it would be 250 MiB.
        assert 0 < sent < 100 * 2**20
        writer.transport.abort()


async def test_one_address_has_one_port_and_is_gone_when_the_sandbox_is() -> None:
    async with exposed(upper) as (sandbox, port):
        one, two = sorted(sandbox._relays or ())[0], ("127.0.0.1", 1)
        assert await sandbox.expose(*one) == f"http://127.0.0.1:{port}"
        assert await sandbox.expose(*two) != f"http://127.0.0.1:{port}"
        reader, _ = await asyncio.open_connection("127.0.0.1", port)
        await sandbox.stop_relays()
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        with pytest.raises(ConnectionError):
            await asyncio.open_connection("127.0.0.1", port)
        await sandbox.stop_relays()


async def test_where_nothing_listens_the_connection_ends() -> None:
    sandbox = Inside()
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    url = await sandbox.expose("127.0.0.1", port)
    reader, _ = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    async with asyncio.timeout(20):
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
    await sandbox.stop_relays()


async def test_connections_are_bounded() -> None:
    async with exposed(upper) as (_, port):
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(64)]
        # The relay takes connections in the order in which they came.
        reader, _ = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        first_reader, first = held[0]
        first.write(b"still here")
        first.write_eof()
        assert await first_reader.read() == b"STILL HERE"
        for _, writer in held:
            writer.transport.abort()


async def test_a_backend_that_cannot_says_so() -> None:
    class Far(PortForwarding):
        backend = "far"

    with pytest.raises(SandboxUnavailable, match=r"'far' cannot be given access"):
        await Far().expose("127.0.0.1", 80)


async def test_a_process_that_is_gone_has_no_network_to_listen_in() -> None:
    process = await asyncio.create_subprocess_exec("true")
    await process.wait()
    with pytest.raises(SandboxUnavailable, match="cannot enter"):
        await listen_in(process.pid)


async def test_an_address_asked_for_twice_at_once_is_relayed_once_and_none_is_left_by_a_close() -> None:
    class Slow(Inside):
        closed = False

        async def listen(self, port: int = 0) -> socket.socket:
            await asyncio.sleep(0.01)
            if self.closed:
                raise SandboxUnavailable("closed")
            made = await super().listen(port)
            listeners.append(made)
            return made

    listeners: list[socket.socket] = []
    sandbox = Slow()
    one, other = await asyncio.gather(sandbox.expose("127.0.0.1", 9), sandbox.expose("127.0.0.1", 9))
    assert one == other
    assert [each.fileno() >= 0 for each in listeners] == [True, False]
    exposing = asyncio.create_task(sandbox.expose("127.0.0.1", 10))
    await asyncio.sleep(0)
    sandbox.closed = True
    await sandbox.stop_relays()
    with pytest.raises(SandboxUnavailable):
        await exposing
    assert all(each.fileno() < 0 for each in listeners)
