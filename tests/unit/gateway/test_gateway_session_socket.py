"""One session at a socket of its own: nothing else of the gateway can be reached there."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
import yarl

from support.chat.model_dirs import renderer_for
from turnwise.errors import InferenceError
from turnwise.gateway.local import LocalGateway, SessionEndpoint
from turnwise.inference.scripted import ScriptedClient
from turnwise.recorder.session import Session, SessionLimits
from turnwise.types import SamplingParams

BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "Go."}]}).encode()


@dataclass
class Open:
    """A gateway with two endpoints, the first of which is answered at a socket of its own, too.

    Attributes:
        gateway: The gateway; it has another application beside its sessions.
        own: The endpoint.
        other: The other one.
        url: The first session's address at its own socket.
    """

    gateway: LocalGateway
    own: SessionEndpoint
    other: SessionEndpoint
    url: yarl.URL

    def turns(self) -> tuple[int, int]:
        return self.own.entry.session.turns, self.other.entry.session.turns


@contextlib.asynccontextmanager
async def opened() -> AsyncIterator[Open]:
    renderer = renderer_for("qwen3")
    client = ScriptedClient(renderer, lambda _: "Yes.")
    limits, params = SessionLimits(context_length=4000), SamplingParams()
    gateway = LocalGateway(renderer, context_length=4000)

    async def beside(scope: Any, receive: Any, send: Any) -> None:
        del scope, receive
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"beside"})

    gateway.mount("beside", beside)
    try:
        async with asyncio.timeout(60):
            endpoints = [
                await gateway.open(Session(client, renderer, id=name, limits=limits, params=params))
                for name in ("own", "other")
            ]
            url = await endpoints[0].serve_at(socket.create_server(("127.0.0.1", 0)))
            yield Open(gateway, *endpoints, yarl.URL(url))
            for endpoint in endpoints:
                await gateway.shut(endpoint)
    finally:
        await gateway.close()


def request(method: str, path: str, body: bytes = BODY, **headers: str) -> bytes:
    head = [f"{method} {path} HTTP/1.1", "host: localhost", f"content-length: {len(body)}"]
    head += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*head, "", ""]).encode() + body


async def answers(url: yarl.URL, *requests: bytes) -> list[int]:
    """Send requests on one connection, all at once, and return the statuses of their answers."""
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(b"".join(requests))
    statuses = []
    for _ in requests:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        await reader.readexactly(length)
        statuses.append(int(head.split()[1]))
    writer.close()
    return statuses


async def test_the_session_answers_at_both() -> None:
    async with opened() as it:
        assert it.url.port != it.gateway.port
        assert await answers(it.url, request("POST", f"{it.url.path}/v1/chat/completions")) == [200]
        assert await answers(yarl.URL(it.own.url), request("POST", f"{it.url.path}/v1/chat/completions")) == [200]
        assert it.turns() == (2, 0)


async def test_session_socket_serves_no_other_route() -> None:
    async with opened() as it:
        entry, other = it.own.entry, it.other.entry
        chat = "v1/chat/completions"
        paths = [
            request("POST", f"/s/{other.token}/{chat}"),
            request("POST", f"/s/{other.token}/s/{other.token}/{chat}"),
            request("POST", f"/{chat}", authorization=f"Bearer {other.token}"),
            request("POST", f"/{chat}", x_api_key=other.token),
            request("POST", f"/s/{entry.token}/s/{other.token}/{chat}"),
            request("POST", f"/s/{entry.token}/../{other.token}/{chat}"),
            request("POST", f"/s/{entry.token}%2f..%2f{other.token}/{chat}"),
            request("GET", "/health", b""),
            request("GET", "/beside", b""),
            request("GET", f"/beside/{entry.token}/..", b""),
            request("GET", "/sessions/other", b""),
            request("POST", "/sessions", b"{}"),
            request("POST", "/sessions/own/finalize", b"{}"),
        ]
        assert await answers(it.url, *paths) == [404] * len(paths)
        assert it.turns() == (0, 0)
        # At the gateway's own socket some of them are there: it is the other one that keeps them out.
        there = await answers(yarl.URL(it.own.url), *(paths[index] for index in (0, 2, 7)))
        assert there == [200, 200, 200]
        assert it.turns() == (0, 2)


@pytest.mark.parametrize("session", ["own", "other"])
async def test_session_socket_takes_no_rewards(session: str) -> None:
    async with opened() as it:
        entry = (it.own if session == "own" else it.other).entry
        body = b'{"value": 1}'
        path, key = f"/sessions/{session}/rewards", f"Bearer {entry.reward_key}"
        forged = [request("POST", path, body, authorization=key)]
        forged += [request("POST", f"/s/{it.own.entry.token}{path}", body, authorization=key)]
        assert await answers(it.url, *forged) == [404, 404]
        assert entry.rewards == []
        # With the key, which no program is told, the gateway's own socket takes it.
        assert await answers(yarl.URL(it.own.url), forged[0]) == [200]
        assert len(entry.rewards) == 1


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with opened() as it:
        path = f"{it.url.path}/v1/chat/completions"
        mixed = [request("POST", path), request("GET", "/health", b""), request("POST", path)]
        assert await answers(it.url, *mixed) == [200, 404, 200]
        assert it.turns() == (2, 0)


@pytest.mark.long
async def test_connections_there_are_bounded_and_end_with_the_endpoint() -> None:
    async with opened() as it:
        connections = [await asyncio.open_connection(it.url.host, it.url.port) for _ in range(200)]
        assert await answers(it.url, request("GET", f"{it.url.path}/v1/models", b"")) == [200]
        # Those that asked for nothing made room.
        reads = [asyncio.create_task(reader.read()) for reader, _ in connections]
        done, _ = await asyncio.wait(reads, timeout=1)
        assert len(done) >= 200 - 32
        await it.gateway.shut(it.own)
        await asyncio.wait(reads)
        with pytest.raises(ConnectionError):
            await asyncio.open_connection(it.url.host, it.url.port)
        for _, writer in connections:
            writer.close()


async def test_a_session_recorded_elsewhere_has_no_other_socket() -> None:
    async with opened() as it:
        with pytest.raises(InferenceError, match="another process records"):
            await SessionEndpoint(it.own.url, it.own.entry).serve_at(socket.create_server(("127.0.0.1", 0)))
