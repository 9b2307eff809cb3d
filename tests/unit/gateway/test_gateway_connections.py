"""Connections that ask for nothing, or slowly: they are closed in time, and no agent waits for them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import yarl

from support.gateway.gated_client import GatedClient
from support.gateway.server import Served, serving
from turnwise.gateway.config import GatewayLimits
from turnwise.gateway.http_guard import guarded

ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Go."}]}
HALF = b"POST /v1/messages HTTP/1.1\r\nhost: x\r\nx-slow: "
HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
Wire = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def connect(served: Served, *requests: bytes) -> Wire:
    url = yarl.URL(served.url)
    wire = await asyncio.open_connection(url.host, url.port)
    for data in requests:
        wire[1].write(data)
        await wire[1].drain()
    return wire


@contextlib.asynccontextmanager
async def connections(served: Served, count: int, *requests: bytes) -> AsyncIterator[list[Wire]]:
    wires = [await connect(served, *requests) for _ in range(count)]
    try:
        yield wires
    finally:
        for _, writer in wires:
            writer.close()


async def all_said(wire: Wire, seconds: float = 30) -> bytes:
    """What the server says until it closes."""
    async with asyncio.timeout(seconds):
        try:
            return await wire[0].read()
        except ConnectionResetError:
            return b""


async def answer_of(wire: Wire) -> bytes:
    """One answer on a connection that stays open."""
    async with asyncio.timeout(30):
        head = await wire[0].readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        return head + await wire[0].readexactly(length)


async def say_without_end(wire: Wire) -> None:
    """More than the kernel keeps for who does not read: 100 MB."""
    for _ in range(10_000):
        wire[1].write(b"x: " + b"a" * 10_000 + b"\r\n")
        await wire[1].drain()
        await asyncio.sleep(0)


async def ask(served: Served, opened: dict[str, Any]) -> int:
    async with served.http.post(f"{opened['path']}/v1/chat/completions", json=ASK) as answer:
        await answer.read()
        return answer.status


async def test_500_half_open_connections_keep_no_agent_from_its_answer() -> None:
    limits = GatewayLimits(head_seconds=600)
    async with serving(lambda _: "Yes.", limits=limits) as served:
        opened = await served.open()
        async with connections(served, 250), connections(served, 250, HALF):
            began = time.process_time()
            for _ in range(5):
                assert await ask(served, opened) == 200
            assert time.process_time() - began < 5


async def test_silence_and_half_a_head_end_in_time() -> None:
    async with (
        serving(lambda _: "Yes.", limits=GatewayLimits(head_seconds=0.2)) as served,
        connections(served, 5) as silent,
        connections(served, 5, HALF) as half,
    ):
        # Who asked for nothing is told nothing: it could take that for the answer to its next request.
        assert [await all_said(wire) for wire in silent] == [b""] * 5
        for wire in half:
            answers = await all_said(wire)
            assert answers.startswith(b"HTTP/1.1 408 ")
            assert b"connection: close" in answers
            assert b"0.2 s" in answers


async def test_a_head_that_drips_has_no_more_time_than_another() -> None:
    async with serving(lambda _: "Yes.", limits=GatewayLimits(head_seconds=0.3)) as served:
        reader, writer = await connect(served, b"GET /health HTTP/1.1\r\n")
        closed = asyncio.ensure_future(all_said((reader, writer)))
        with contextlib.suppress(ConnectionError):
            while not closed.done():
                writer.write(b"x: y\r\n")
                await writer.drain()
                await asyncio.wait([closed], timeout=0.02)
        # What it had sent when it was refused may have undone the answer on its way.
        assert (await closed)[:13] in (b"HTTP/1.1 408 ", b"")


async def test_an_idle_connection_is_kept_and_its_next_head_is_timed_again() -> None:
    async with serving(lambda _: "Yes.", limits=GatewayLimits(head_seconds=0.2)) as served:
        wire = await connect(served, HEALTH)
        assert (await answer_of(wire)).startswith(b"HTTP/1.1 200")
        # Longer than any head may take: an agent's tools run for minutes between two requests.
        with pytest.raises(TimeoutError):
            await all_said(wire, 0.5)
        wire[1].write(HEALTH)
        assert (await answer_of(wire)).startswith(b"HTTP/1.1 200")
        wire[1].write(HALF)
        assert (await all_said(wire)).startswith(b"HTTP/1.1 408 ")


async def test_line_breaks_between_requests_keep_no_connection_open() -> None:
    async with serving(lambda _: "Yes.", limits=GatewayLimits(head_seconds=0.2)) as served:
        wire = await connect(served, HEALTH)
        assert (await answer_of(wire)).startswith(b"HTTP/1.1 200")
        wire[1].write(b"\r\n")
        assert await all_said(wire) == b""


async def test_incomplete_next_head_does_not_close_an_answered_request() -> None:
    gated = GatedClient(gate_after=0)
    async with serving(client=gated, limits=GatewayLimits(head_seconds=0.1)) as served:
        opened = await served.open()
        body = b'{"model":"m","messages":[{"role":"user","content":"Go."}]}'
        head = b"POST %s/v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
        wire = await connect(served, head % (opened["path"].encode(), len(body)) + body, HALF)
        await gated.waiting.wait()
        with pytest.raises(TimeoutError):
            await all_said(wire, 0.5)
        gated.gate.set()
        answers = await all_said(wire)
        assert answers.startswith(b"HTTP/1.1 200"), answers
        assert b"HTTP/1.1 408 " in answers


async def test_requests_are_answered_however_they_come_in() -> None:
    async with serving(lambda _: "Yes.", limits=GatewayLimits(head_bytes=200)) as served:
        # Byte by byte; several at once, of which the last one only begins; and asking for another protocol.
        reader, writer = wire = await connect(served)
        writer.transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for number in range(len(HEALTH)):
            writer.write(HEALTH[number : number + 1])
            await asyncio.sleep(0)
        assert (await answer_of(wire)).startswith(b"HTTP/1.1 200")
        writer.write(HEALTH * 20 + HEALTH[:20])
        for _ in range(20):
            assert (await answer_of(wire)).startswith(b"HTTP/1.1 200")
        writer.write(HEALTH[20:])
        assert (await answer_of(wire)).startswith(b"HTTP/1.1 200")
        writer.write(HEALTH[:-2] + b"connection: upgrade\r\nupgrade: websocket\r\n\r\n")
        assert (await answer_of(wire)).startswith(b"HTTP/1.1 200")
        assert not reader.at_eof()
        assert (await all_said(await connect(served, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"))).startswith(
            b"HTTP/1.1 400"
        )


@pytest.mark.parametrize("at_once", [True, False])
async def test_a_head_has_a_size(at_once: bool) -> None:
    async with serving(lambda _: "Yes.", limits=GatewayLimits(head_bytes=4000, head_seconds=600)) as served:
        fits = b"GET /health HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 3800 + b"\r\n\r\n"
        wire = await connect(served, fits)
        assert (await answer_of(wire)).startswith(b"HTTP/1.1 200")
        large = [b"GET /health HTTP/1.1\r\nhost: x\r\n", *[b"x: " + b"y" * 500 + b"\r\n"] * 20, b"\r\n"]
        repeated = await connect(served, *([b"".join(large)] if at_once else large))
        answers = await all_said(repeated)
        assert answers.count(b"HTTP/1.1 ") == 1
        assert answers.startswith(b"HTTP/1.1 431 ") or not answers
        # A body may be larger than any head, also where it comes together with it.
        sent = b"POST /sessions HTTP/1.1\r\nhost: x\r\ncontent-length: 9000\r\n\r\n" + b" " * 9000
        wire[1].write(sent)
        assert (await answer_of(wire)).startswith(b"HTTP/1.1 401")
        # And one without an end takes no memory.
        endless = await connect(served, b"GET / HTTP/1.1\r\n")
        with pytest.raises(ConnectionError):
            await say_without_end(endless)


async def test_new_connection_replaces_an_idle_one() -> None:
    limits = GatewayLimits(connections=20, head_seconds=600)
    async with serving(lambda _: "Yes.", limits=limits) as served:
        opened = await served.open()
        async with connections(served, 200, HALF) as wires:
            assert await ask(served, opened) == 200
            # The oldest ones went.
            assert [await all_said(wire) for wire in wires[:100]] == [b""] * 100


async def test_idle_connections_make_room_too() -> None:
    async with serving(lambda _: "Yes.", limits=GatewayLimits(connections=5)) as served:
        wires = []
        for _ in range(40):
            wires.append(await connect(served, HEALTH))
            assert (await answer_of(wires[-1])).startswith(b"HTTP/1.1 200")
        assert [await all_said(wire) for wire in wires[:30]] == [b""] * 30


async def test_an_open_request_keeps_its_connection_and_others_are_told_to_wait() -> None:
    gated = GatedClient(gate_after=0)
    async with serving(client=gated, limits=GatewayLimits(connections=3)) as served:
        opened = await served.open()
        body = b'{"model":"m","messages":[{"role":"user","content":"Go."}]}'
        head = b"POST %s/v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
        request = head % (opened["path"].encode(), len(body)) + body
        async with connections(served, 3, HEALTH) as wires:
            for wire in wires:
                # It was idle before, which is when its place can be taken.
                await answer_of(wire)
                wire[1].write(request)
            running = served.app.sessions.of_id(opened["id"]).running
            async with asyncio.timeout(30):
                while len(running) < len(wires):  # noqa: ASYNC110 - there is no event to wait for
                    await asyncio.sleep(0)
            answers = await all_said(await connect(served, HEALTH))
            assert answers.startswith(b"HTTP/1.1 503 ")
            assert b"retry-after" in answers
            gated.gate.set()
            for wire in wires:
                assert (await answer_of(wire)).startswith(b"HTTP/1.1 200")
        assert await ask(served, opened) == 200


def test_no_more_connections_than_the_process_may_open_files(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    baseline = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, baseline[1]))
        guarded(1000, 2**16, 15.0)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (2256, baseline[1])
        monkeypatch.setattr(resource, "getrlimit", lambda _: (300, 300))
        monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
        assert guarded(1000, 2**16, 15.0).maximum == 22  # type: ignore[attr-defined]
        assert "300 open files allow 22 of 1000 connections" in caplog.text
    finally:
        monkeypatch.undo()
        resource.setrlimit(resource.RLIMIT_NOFILE, baseline)


@pytest.mark.parametrize("leaving", [False, True])
async def test_a_client_that_takes_nothing_of_its_answers_keeps_no_connection(leaving: bool) -> None:
    limits = GatewayLimits(connections=3, write_seconds=0.5, head_seconds=600, body_bytes=32 * 2**20)
    async with serving(lambda _: "Yes.", limits=limits) as served:
        opened = await served.open()
        # The answer repeats this: more than the kernel keeps for who does not read.
        body = b'{"model":"m","input":"Go.","metadata":{"x":"%s"}}' % (b"x" * (16 * 2**20))
        header = b"connection: close\r\n" if leaving else b""
        head = b"POST %s/v1/responses HTTP/1.1\r\nhost: x\r\n%scontent-length: %d\r\n\r\n"
        request = head % (opened["path"].encode(), header, len(body)) + body + HEALTH
        stuck = [await unread(served, request) for _ in range(limits.connections)]
        try:
            async with asyncio.timeout(60):
                while served.session(opened).turns < len(stuck):  # noqa: ASYNC110 - there is no event to wait for
                    await asyncio.sleep(0.01)
                while (await answer_or_refusal(served)).startswith(b"HTTP/1.1 503 "):  # noqa: ASYNC110 - nor for this
                    await asyncio.sleep(0.05)
        finally:
            for wire in stuck:
                wire.close()


async def unread(served: Served, request: bytes) -> socket.socket:
    """A client that asks, and reads nothing."""
    url = yarl.URL(served.url)
    client = socket.socket()
    client.setblocking(False)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, (url.host, url.port))
    await loop.sock_sendall(client, request)
    return client


async def answer_or_refusal(served: Served) -> bytes:
    wire = await connect(served, HEALTH)
    try:
        return await answer_of(wire)
    finally:
        wire[1].close()


@pytest.mark.parametrize("stream", [False, True])
async def test_client_that_ends_its_sending_side_gets_its_answer(stream: bool) -> None:
    client = GatedClient(gate_after=0)
    async with serving(client=client) as served:
        opened = await served.open()
        body = json.dumps({**ASK, "stream": stream}).encode()
        head = f"POST {opened['path']}/v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        reader, writer = await connect(served, head.encode() + body)
        writer.write_eof()
        await client.waiting.wait()
        for _ in range(2):
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.gate.set()
        answer = await all_said((reader, writer))
        assert answer.startswith(b"HTTP/1.1 200")
        assert b"All done." in answer or (stream and b"[DONE]" in answer)
        assert served.session(opened).turns == 1
        writer.close()


async def test_client_that_closes_while_it_waits_is_no_half_closed_one() -> None:
    client = GatedClient(gate_after=0)
    async with serving(client=client) as served:
        opened = await served.open()
        body = json.dumps(ASK).encode()
        head = f"POST {opened['path']}/v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        _, writer = await connect(served, head.encode() + body)
        await client.waiting.wait()
        writer.close()
        async with asyncio.timeout(30):
            await client.stopped.wait()
        assert served.session(opened).turns == 0
