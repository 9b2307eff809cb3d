"""A gateway in front of a hosted endpoint, and scripted providers behind it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from support.gateway.server import ADMIN, ADMIN_HEADERS, Answering, listening
from turnwise.gateway.config import GatewayLimits, HostedConfig, base_url
from turnwise.gateway.proxy.app import HostedApp
from turnwise.gateway.proxy.endpoint import Endpoint
from turnwise.gateway.proxy.session import TextSession, TextSettings
from turnwise.gateway.sessions import Sessions
from turnwise.trajectory import Trajectory

KEY = "sk-the-providers-own-key-0123456789"


@dataclass
class Hosted(Answering):
    """A gateway in front of a hosted endpoint."""

    app: HostedApp

    def session(self, opened: dict[str, Any]) -> TextSession:
        """The recorder behind a session."""
        session = self.app.sessions.of_id(opened["id"]).session
        assert isinstance(session, TextSession)
        return session

    async def finalize(self, opened: dict[str, Any]) -> Trajectory:
        """End a session and return what it left."""
        async with self.http.post(f"/sessions/{opened['id']}/finalize", json={}, headers=ADMIN_HEADERS) as answer:
            assert answer.status == 200, await answer.text()
            body = await answer.read()
        return Trajectory.from_bytes(body[body.index(b'"trajectory":') + len(b'"trajectory":') : -1])


@contextlib.asynccontextmanager
async def hosting(
    upstream: str,
    *,
    config: HostedConfig | None = None,
    key: str = KEY,
    limits: GatewayLimits | None = None,
    settings: TextSettings | None = None,
    finished: Path | None = None,
) -> AsyncIterator[Hosted]:
    """Serve in front of an endpoint until the block is left."""
    endpoint = Endpoint(base_url(upstream), config or HostedConfig(), key)
    sessions = Sessions((settings or TextSettings()).open, limits or GatewayLimits(), finished)
    app = HostedApp(sessions, admin_key=ADMIN, endpoint=endpoint)
    try:
        async with listening(app) as url, aiohttp.ClientSession(url) as http:
            yield Hosted(url, http, app)
    finally:
        await sessions.close()
        await endpoint.close()


@dataclass
class Seen:
    """One request as an endpoint saw it."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Provider:
    """A provider that answers as it is told, and remembers what it was asked.

    Attributes:
        url: Where it is.
        seen: The requests.
        gone: Set when a client went away while it was answered.
    """

    url: str
    seen: list[Seen] = field(default_factory=list)
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def posted(self) -> list[Seen]:
        """The requests for answers, without those for the list of models."""
        return [request for request in self.seen if request.method == "POST"]


Respond = Callable[[web.Request], Awaitable[web.StreamResponse]]


@contextlib.asynccontextmanager
async def provider(respond: Respond) -> AsyncIterator[Provider]:
    """Serve a provider until the block is left."""

    async def handle(request: web.Request) -> web.StreamResponse:
        headers = {name.lower(): value for name, value in request.headers.items()}
        there.seen.append(Seen(request.method, request.path_qs, headers, await request.read()))
        try:
            return await respond(request)
        except (asyncio.CancelledError, ConnectionResetError):
            there.gone.set()
            raise

    app = web.Application(client_max_size=2**30)
    app.router.add_route("*", "/{rest:.*}", handle)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    there = Provider(f"http://127.0.0.1:{runner.addresses[0][1]}")
    try:
        yield there
    finally:
        await runner.cleanup()


async def streamed(request: web.Request, *pieces: bytes) -> web.StreamResponse:
    """Answer with a stream of events, one piece after the other."""
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    for piece in pieces:
        await response.write(piece)
    await response.write_eof()
    return response
