"""The gateway process (``python -m turnwise.gateway.server``) and its handle."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import secrets
import signal
import sys
from collections.abc import AsyncIterator
from datetime import datetime
from pathlib import Path
from typing import Any

from turnwise.append_file import lock_directory, write_private
from turnwise.config import Section, dump_config
from turnwise.errors import ConfigError, requires_extra
from turnwise.gateway.app import GatewayApp, SessionApp
from turnwise.gateway.config import GatewayConfig, SessionSettings, base_url
from turnwise.gateway.dialects.core import Reader
from turnwise.gateway.dialects.response_format import abilities_of
from turnwise.gateway.proxy.app import HostedApp
from turnwise.gateway.proxy.endpoint import Endpoint
from turnwise.gateway.proxy.session import TextSettings
from turnwise.gateway.sessions import FIXED_SAMPLING, Sessions
from turnwise.inference.guard.turnwise_guard import Guard
from turnwise.inference.process import HTTPProcess, LaunchedServer, ServerProcess, process_main
from turnwise.inference.replica import ENGINE_CLOSE_TIMEOUT, ENGINE_LAUNCH_TIMEOUT
from turnwise.inference.replica_set import ReplicaSet, client_of
from turnwise.model.core import LLMClient, Renderer
from turnwise.placement.core import Inherited
from turnwise.recorder.ledger import LedgerClient, LedgerWriter
from turnwise.recorder.session import Session, SessionLimits
from turnwise.recorder.token_session import TokenSession
from turnwise.seeding import stable_hash
from turnwise.trajectory_file import TRAJECTORIES
from turnwise.types import SamplingParams

_log = logging.getLogger("turnwise.gateway")
_OBJECTS_BETWEEN_COLLECTIONS = 200_000
_MIN_KEY_LENGTH = 16


class GatewaySpec(Section):
    """Arguments of a gateway process.

    Attributes:
        config: Gateway settings.
        report_fd: Inherited descriptor for one JSON line once requests are accepted.
        lifeline_fd: Inherited descriptor whose end of file ends the process.
    """

    config: GatewayConfig
    report_fd: int | None = None
    lifeline_fd: int | None = None


async def serve_gateway(spec: GatewaySpec) -> int:
    """Serve until SIGTERM or SIGINT and return the signal; open sessions end with ``cancelled``.

    Raises:
        ConfigError: The configuration cannot be used.
        RenderError: The model directory has no usable tokenizer or chat template.
        InferenceError: The server does not start or respond, or the port cannot be bound.
        MissingExtraError: A package of the extra ``serve`` is missing.
    """
    config = spec.config
    process = HTTPProcess(config.host, config.port, config.log_level, spec.lifeline_fd)
    # Only now it is known that uvicorn is there.
    from turnwise.gateway.http_guard import guarded

    async with contextlib.AsyncExitStack() as stack:
        app, report = await (_served if config.hosted is None else _hosted)(config, stack)
        sweeper = asyncio.create_task(_sweep(app.sessions))
        stack.callback(sweeper.cancel)
        _log.info("controllers need the admin key, which is in %s", config.out / "admin.key")
        what = f"the gateway of {config.url or config.model}"
        # Requests and sessions leave no reference cycles: collections pass over what was loaded, and are seldom.
        gc.collect()
        gc.freeze()
        gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS)
        limits = config.limits
        protocol = guarded(limits.connections, limits.head_bytes, limits.head_seconds, limits.write_seconds)
        guard = Guard(app, config.allowed_hosts)
        return await process.serve(guard, what=what, report_fd=spec.report_fd, report=report, protocol=protocol)


async def _served(config: GatewayConfig, stack: contextlib.AsyncExitStack) -> tuple[SessionApp, dict[str, Any]]:
    """Return the application in front of an inference server, and its report."""
    renderer = config.renderer.load(config.directory)
    key = _prepare(config, stack)
    model = await stack.enter_async_context(_model(config))
    ledger = LedgerWriter(config.out / "ledger.jsonl")
    stack.callback(ledger.close)
    client = LedgerClient(model, ledger)
    info = await client.model_info()
    context = min(info.context_length, config.context_length or info.context_length)
    sessions = open_sessions(config, client, renderer, context, ledger)
    stack.push_async_callback(sessions.close)
    app = GatewayApp(
        sessions,
        admin_key=key,
        model=config.name or config.directory.resolve().name,
        context_length=context,
        abilities=abilities_of(renderer, guides=info.guides, lenient=config.lenient),
        fixed=FIXED_SAMPLING if config.fixed_sampling else frozenset(),
    )
    return app, {"max_model_len": context, "admin_key": key}


async def _hosted(config: GatewayConfig, stack: contextlib.AsyncExitStack) -> tuple[SessionApp, dict[str, Any]]:
    """Return the application in front of a hosted endpoint, and its report."""
    assert config.hosted is not None
    endpoint = Endpoint(base_url(config.url), config.hosted, config.hosted.key())
    stack.push_async_callback(endpoint.close)
    await endpoint.check()
    key = _prepare(config, stack)
    settings = TextSettings(config.max_turns, config.max_total_tokens, config.echo)
    sessions = Sessions(settings.open, config.limits, config.out / TRAJECTORIES)
    stack.push_async_callback(sessions.close)
    return HostedApp(sessions, admin_key=key, endpoint=endpoint), {"admin_key": key}


def _prepare(config: GatewayConfig, stack: contextlib.ExitStack | contextlib.AsyncExitStack) -> str:
    """Create the gateway's directory, lock it until the stack closes, and return its admin key.

    Raises ConfigError if another gateway uses it.
    """
    stack.enter_context(lock_directory(config.out, ConfigError, "the gateway in"))
    key = admin_key(config.out / "admin.key")
    write_private(config.out / "config.yaml", dump_config(config))
    return key


def open_sessions(
    config: GatewayConfig, client: LLMClient, renderer: Renderer, context: int, ledger: LedgerWriter
) -> Sessions:
    """Return the configured sessions, with those that a killed gateway left open.

    Raises ConfigError if the renderer does not support streaming; FormatError or DiskError as :class:`Sessions`.
    """
    if not isinstance(renderer, Reader):
        raise ConfigError(f"a gateway needs a renderer with 'live' and 'decode', not {type(renderer).__qualname__}")
    reader: Reader = renderer
    limits = SessionLimits(
        context_length=context,
        max_tokens_per_turn=config.max_tokens_per_turn,
        max_total_tokens=config.max_total_tokens,
        max_turns=config.max_turns,
    )
    params = SamplingParams(temperature=config.temperature, top_p=config.top_p, top_k=config.top_k, min_p=config.min_p)

    def open_session(session_id: str, settings: SessionSettings, began: datetime) -> tuple[Session, Reader]:
        seed = settings.seed
        if seed is None and config.seed is not None:
            seed = stable_hash("session", config.seed, session_id)
        session = TokenSession(
            client,
            renderer,
            id=session_id,
            limits=settings.limits(limits),
            params=settings.params(params),
            seed=seed,
            one_temperature=config.fixed_sampling if settings.fixed_sampling is None else settings.fixed_sampling,
            reasoning=settings.reasoning or config.reasoning,
            echo=settings.echo or config.echo,
            began=began,
        )
        return session, reader

    return Sessions(open_session, config.limits, config.out / TRAJECTORIES, ledger)


def admin_key(file: Path) -> str:
    """Return the key of an owner-only file, created if missing. Raises ConfigError for an unsafe file or key."""
    with contextlib.suppress(FileExistsError):
        handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(handle, "w", encoding="ascii") as fresh:
            fresh.write(secrets.token_urlsafe(32) + "\n")
    if file.stat().st_mode & 0o077:
        raise ConfigError(f"{file} is readable by other users: chmod 600 it")
    key = file.read_text(encoding="utf-8").strip()
    if len(key) < _MIN_KEY_LENGTH:
        raise ConfigError(f"{file} holds fewer than {_MIN_KEY_LENGTH} characters: delete it to have a new key made")
    return key


@contextlib.asynccontextmanager
async def _model(config: GatewayConfig) -> AsyncIterator[LLMClient]:
    """Yield the client."""
    if config.urls:
        client = client_of(config.urls, config.inference, config.directory)
        try:
            yield client
        finally:
            await client.close()
        return
    fleet = ReplicaSet(config.inference, config.directory, logs=config.out / "logs")
    try:
        await fleet.launch()
        try:
            yield fleet.client
        finally:
            await fleet.client.close()
    finally:
        await fleet.close()


async def _sweep(sessions: Sessions) -> None:
    while True:
        await asyncio.sleep(sessions.limits.sweep_seconds)
        if count := await sessions.sweep():
            _log.info("%d idle sessions ended", count)


def run_gateway(spec: GatewaySpec) -> int:
    """Run :func:`serve_gateway` on a new event loop; errors and result are the same."""
    with requires_extra("uvloop", "serve", "a gateway"):
        import uvloop
    return uvloop.run(serve_gateway(spec))


def main(arguments: list[str] | None = None) -> int:
    """Entry point of the process; returns its exit code."""
    # Texts are encoded one by one here, which is a fifth quicker where the tokenizer keeps no threads for batches.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return process_main("turnwise.gateway.server", GatewaySpec, _exit_code, arguments)


def _exit_code(spec: GatewaySpec) -> int:
    signal_number = run_gateway(spec)
    return 128 + signal_number if signal_number == signal.SIGINT else 0


if __name__ == "__main__":
    sys.exit(main())


class GatewayProcess(LaunchedServer):
    """A gateway in its own process, which ends with this one."""

    def __init__(self, config: GatewayConfig, *, log_file: str | Path | None = None) -> None:
        """Configure a gateway; :meth:`launch` starts it. Default ``log_file``: ``config.out``/``logs/gateway.log``."""
        self._config = config
        self.admin_key = ""
        process = ServerProcess(
            f"the gateway of {config.url or config.model}",
            log_file=Path(log_file or config.out / "logs" / "gateway.log"),
            # The start of the slowest engine.
            launch_timeout=ENGINE_LAUNCH_TIMEOUT,
            # It writes open sessions first, and ends the servers that it launched.
            close_timeout=ENGINE_CLOSE_TIMEOUT + 10,
        )
        super().__init__(process, config.host, config.port)

    @property
    def admin_headers(self) -> dict[str, str]:
        """Headers of the controllers' routes; valid after :meth:`launch`."""
        return {"authorization": f"Bearer {self.admin_key}"}

    async def launch(self) -> None:
        """Start it and wait until it is ready. Raises InferenceError with the end of its log."""
        config = self._config

        def command(inherited: Inherited) -> list[str]:

            spec = GatewaySpec(config=config, report_fd=inherited.report, lifeline_fd=inherited.lifeline)
            module = "turnwise.gateway.server"
            return [sys.executable, "-m", module, "--config-json", spec.model_dump_json()]

        reported: dict[str, Any] = await self._process.start(
            command, lambda environment: {**environment, "TOKENIZERS_PARALLELISM": "false"}
        )
        self._port = int(reported["port"])
        self.admin_key = str(reported["admin_key"])

    async def close(self) -> None:
        """Stop it and wait for its process; open sessions end with ``cancelled``. Idempotent."""
        await self._process.end()
