"""A gateway on a loopback port, over a scripted model, in the test's own event loop."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import aiohttp
import uvicorn

from support.chat.model_dirs import renderer_for
from support.rollout.audited import assert_sound
from turnwise.chat.renderer import TemplateRenderer
from turnwise.gateway.app import GatewayApp
from turnwise.gateway.config import GatewayLimits, SessionSettings
from turnwise.gateway.dialects.core import Abilities
from turnwise.gateway.http_guard import guarded
from turnwise.gateway.sessions import Sessions
from turnwise.inference.process import bind, server_without_signal_handlers
from turnwise.inference.scripted import Line, Script, ScriptedClient
from turnwise.model.core import LLMClient
from turnwise.recorder.ledger import LedgerClient, LedgerWriter
from turnwise.recorder.session import Session, SessionLimits
from turnwise.recorder.token_session import TokenSession
from turnwise.rollout.audit import audit_files
from turnwise.trajectory import Trajectory
from turnwise.types import SamplingParams, ToolSchema

ADMIN = "the-admin-key"
ADMIN_HEADERS = {"authorization": f"Bearer {ADMIN}"}


@dataclass
class Answering:
    """A gateway that answers at ``url``."""

    url: str
    http: aiohttp.ClientSession

    async def open(self, **fields: Any) -> dict[str, Any]:
        """Open a session; ``base`` is its URL."""
        async with self.http.post("/sessions", json=fields, headers=ADMIN_HEADERS) as answer:
            body: dict[str, Any] = await answer.json()
            assert answer.status == 200, body
        return {**body, "base": self.url + body["path"]}


@dataclass
class Served(Answering):
    """A gateway in front of a model."""

    app: GatewayApp
    client: LLMClient
    renderer: TemplateRenderer

    def session(self, opened: dict[str, Any]) -> Session:
        """The recorder behind a session."""
        return self.app.sessions.of_id(opened["id"]).session


@contextlib.asynccontextmanager
async def serving(
    script: Script | Sequence[Line] = (),
    *,
    family: str = "qwen3",
    tools: Sequence[ToolSchema] = (),
    limits: GatewayLimits | None = None,
    session_limits: SessionLimits | None = None,
    abilities: Abilities | None = None,
    client: LLMClient | None = None,
    finished: Path | None = None,
    out: Path | None = None,
    fixed: frozenset[str] = frozenset(),
    renderer: TemplateRenderer | None = None,
) -> AsyncIterator[Served]:
    """Serve until the block is left, then hold what all its sessions left against what the model was asked.

    ``out``: a gateway's directory, for one that is started again; without it nothing is kept.
    """
    renderer = renderer or renderer_for(family)
    llm = client or ScriptedClient(renderer, script, tools=tools)
    bounds = session_limits or SessionLimits(context_length=100_000)
    folder = tempfile.TemporaryDirectory(prefix="turnwise-gateway-")
    book = LedgerWriter((out or Path(folder.name)) / "ledger.jsonl")
    finished = out / "trajectories.twz" if out is not None else finished
    ledger = LedgerClient(llm, book)
    recorders: list[Session] = []

    def open_session(session_id: str, settings: SessionSettings, began: datetime) -> Any:
        session = TokenSession(
            ledger,
            renderer,
            id=session_id,
            limits=settings.limits(bounds),
            params=settings.params(SamplingParams()),
            seed=settings.seed,
            one_temperature=bool(settings.fixed_sampling),
            reasoning=settings.reasoning or "keep",
            echo=settings.echo or "same",
            began=began,
        )
        recorders.append(session)
        return session, renderer

    sessions = Sessions(open_session, limits or GatewayLimits(), finished, book)
    app = GatewayApp(sessions, admin_key=ADMIN, model="tiny", context_length=100_000, abilities=abilities, fixed=fixed)
    try:
        async with listening(app, http=_protocol(sessions.limits)) as url, aiohttp.ClientSession(url) as http:
            yield Served(url, http, app, llm, renderer)
    finally:
        await sessions.close()
    await ledger.close()
    book.close()
    if out is not None:
        assert audit_files(out).contradictions == []
    else:
        _assert_recorded(Path(folder.name), recorders)
    folder.cleanup()


@contextlib.asynccontextmanager
async def listening(app: Any, **options: Any) -> AsyncIterator[str]:
    """Serve an ASGI application on a loopback port; ``options`` are uvicorn's."""
    with bind("127.0.0.1", 0) as listener:
        listener.listen(2048)
        config = uvicorn.Config(
            app, log_config=None, lifespan="off", ws="none", access_log=False, timeout_graceful_shutdown=1, **options
        )
        server = server_without_signal_handlers(config)
        running = asyncio.ensure_future(server.serve(sockets=[listener]))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await running


def _assert_recorded(folder: Path, recorders: Sequence[Session]) -> None:
    trajectories = [
        Trajectory(recorder.id, recorder.id, "g", "t", segments=recorder.segments()) for recorder in recorders
    ]
    assert_sound(folder, *trajectories)


def _protocol(limits: GatewayLimits) -> Any:
    return guarded(limits.connections, limits.head_bytes, limits.head_seconds, limits.write_seconds)
