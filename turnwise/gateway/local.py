"""An in-process gateway, which gives external agents a URL for a session recorded here.

Agents, such as programs in a sandbox, reach their own session only: routes of other sessions, controllers and rewarders
do not exist here, whatever key a request holds.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, NoReturn, Self

from turnwise.errors import ConfigError, InferenceError, TurnwiseError, requires_extra, undo_on_error
from turnwise.gateway.app import GatewayApp
from turnwise.gateway.config import GatewayLimits, SessionSettings
from turnwise.gateway.dialects.core import Reader
from turnwise.gateway.dialects.response_format import abilities_of
from turnwise.gateway.endpoints import EndpointRouter, EndpointTemplate, Place
from turnwise.gateway.errors import LENIENT, ApiError, Lenient
from turnwise.gateway.proxy.app import HostedApp
from turnwise.gateway.proxy.endpoint import Endpoint
from turnwise.gateway.sessions import FIXED_SAMPLING, GatewaySession, Sessions
from turnwise.inference.guard.turnwise_guard import Guard
from turnwise.inference.process import Application, Receive, Scope, Send
from turnwise.model.core import Renderer
from turnwise.recorder.session import Session

_CONNECTIONS: Final = 32


def server_options(app: Application, limits: GatewayLimits, connections: int) -> Any:
    """Return an in-process application's ``uvicorn.Config``. Raises MissingExtraError without the extra ``serve``."""
    with requires_extra("uvicorn", "serve", "a gateway"):
        import uvicorn
    from turnwise.gateway.http_guard import guarded

    return uvicorn.Config(
        app,
        interface="asgi3",
        log_config=None,
        access_log=False,
        lifespan="off",
        http=guarded(connections, limits.head_bytes, limits.head_seconds, limits.write_seconds),
        ws="none",
        timeout_keep_alive=3600,
        timeout_graceful_shutdown=1,
        server_header=False,
        date_header=False,
    )


class SessionSocket:
    """Serves one session on a listening socket; ``url`` is its base URL for clients of the socket."""

    def __init__(self, url: str, options: Any) -> None:
        from uvicorn.server import ServerState

        self.url = url
        self._options = options
        self._state = ServerState()
        self._server: asyncio.Server | None = None

    @classmethod
    async def open(cls, app: Application, token: str, listener: socket.socket, limits: GatewayLimits) -> Self:
        """Serve a session.

        Args:
            app: The gateway's application.
            token: The session's token.
            listener: A listening socket, closed with this object.
            limits: Limits for agents.
        """
        host, port = listener.getsockname()[:2]
        options = server_options(_restrict_to(app, token), limits, min(limits.connections, _CONNECTIONS))
        options.load()
        session_socket = cls(f"http://{host}:{port}/s/{token}", options)
        listener.setblocking(False)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        session_socket._server = await asyncio.get_running_loop().create_server(session_socket._protocol, sock=listener)
        return session_socket

    def close(self) -> None:
        """Stop listening and close all connections; idempotent."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
        for connection in list(self._state.connections):
            connection.transport.abort()

    def _protocol(self) -> asyncio.Protocol:
        protocol: asyncio.Protocol = self._options.http_protocol_class(
            config=self._options, server_state=self._state, app_state={}
        )
        return protocol


def _restrict_to(app: Application, token: str) -> Application:
    """Restrict an application to the routes below one token."""

    async def one(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            parts = [part for part in scope["path"].split("/") if part]
            # A request for anything else gets the response of an ended address.
            below = [token, *parts[parts.index(token) + 1 :]] if token in parts else ["-"]
            scope = {**scope, "path": "/".join(("", "s", *below))}
        await app(scope, receive, send)

    return one


@dataclass(frozen=True, slots=True)
class SessionEndpoint:
    """The HTTP endpoint of a session.

    Attributes:
        url: Base URL with an unguessable token: ``ANTHROPIC_BASE_URL``, or with ``/v1`` appended ``OPENAI_BASE_URL``.
            Any API key will do.
        entry: The gateway's session.
        gateway: The gateway; None if it is another process.
    """

    url: str
    entry: GatewaySession
    gateway: LocalGateway | None = None

    @property
    def failure(self) -> TurnwiseError | None:
        """Error of the last request (budget, rendering, server); None after a success."""
        return self.entry.budget_error or self.entry.request_error or self.entry.session.failure

    async def serve_at(self, listener: socket.socket) -> str:
        """Serve the session on another listening socket, too, and return its base URL there.

        The socket, such as one inside a sandbox, is closed with the endpoint. Raises InferenceError if another process
        records the session.
        """
        if self.gateway is None:
            listener.close()
            raise InferenceError("a session that another process records can be reached only at its address")
        return await self.gateway.serve_at(self, listener)

    async def wait_settled(self) -> None:
        """Wait until the outcome of all requests to this endpoint is known in this process."""

    async def wait_exhausted(self) -> None:
        """Wait until a request is refused because turns or tokens are exhausted for good."""
        await self.entry.exhausted.wait()


class LocalGateway:
    """Serves sessions of this process over the wire APIs; listens from the first open endpoint on."""

    def __init__(
        self,
        renderer: Renderer,
        *,
        context_length: int,
        model: str = "turnwise",
        host: str = "127.0.0.1",
        port: int = 0,
        form: EndpointTemplate | None = None,
        limits: GatewayLimits | None = None,
        endpoint: Endpoint | None = None,
        guides: bool = False,
        lenient: Collection[Lenient] = LENIENT,
    ) -> None:
        """Configure a gateway; nothing is started.

        Args:
            renderer: Renderer of all sessions.
            context_length: Maximum tokens of prompt plus completion, for ``/v1/models``.
            model: Model name there; agents may ask for any.
            host: Address to bind.
            port: Port to bind; 0 for a free one.
            form: Template of session URLs.
            limits: Limits for agents.
            endpoint: Hosted endpoint to forward requests to; sessions are then recorded as text.
            guides: Whether the engine supports structured output.
            lenient: What is ignored instead of refused.
        """
        self._renderer = renderer
        self._host = host
        self._requested_port = port
        self.form = form or EndpointTemplate()
        self._sessions = Sessions(_refuse_to_open, limits or GatewayLimits())
        # Never handed out: sessions are opened and ended in this process.
        key = secrets.token_urlsafe(32)
        app = (
            HostedApp(self._sessions, admin_key=key, endpoint=endpoint)
            if endpoint is not None
            else GatewayApp(
                self._sessions,
                admin_key=key,
                model=model,
                context_length=context_length,
                abilities=abilities_of(renderer, guides=guides, lenient=lenient),
                # The session's own settings determine its sampling.
                fixed=FIXED_SAMPLING,
            )
        )
        # A session socket reaches its own session only, so that nothing there needs an address taken apart.
        self._plain: Application = app
        self._app = EndpointRouter(app)
        self._others: dict[str, Application] = {}
        self._session_sockets: dict[str, list[SessionSocket]] = {}
        self._starting = asyncio.Lock()
        self._serving: asyncio.Task[None] | None = None
        self._stop = _nothing
        self._port = 0

    @property
    def port(self) -> int:
        """The listening port; 0 while not listening."""
        return self._port

    @property
    def url(self) -> str:
        """Base URL of the listening socket."""
        return f"http://{self._url_host}:{self._port}"

    def mount(self, prefix: str, app: Application) -> None:
        """Serve another application below ``/prefix`` on the same port."""
        self._others[prefix] = app

    async def start(self) -> None:
        """Start listening; idempotent. Raises InferenceError, or MissingExtraError without the extra ``serve``."""
        async with self._starting:
            if self._serving is None:
                self._start()

    async def open(self, session: Session, owner: Place | None = None, name: str | None = None) -> SessionEndpoint:
        """Open an endpoint for a session; ``owner`` fills the URL's fields. Errors as :meth:`start`.

        ``name`` distinguishes the forks of a session, which share its id.

        Raises ConfigError if the renderer does not support streaming, InferenceError if the session has an endpoint.
        """
        if not isinstance(self._renderer, Reader):
            kind = type(self._renderer).__qualname__
            raise ConfigError(f"an address needs a renderer with 'live' and 'decode', which {kind} lacks")
        await self.start()
        try:
            entry = self._sessions.adopt(session, self._renderer, name)
        except ApiError as error:
            raise InferenceError(error.message) from error
        owner = owner or Place(session.id, "0")
        self._app.prefixes[entry.token] = self.form.prefix(owner, entry.token)
        return SessionEndpoint(self.form.url(owner, entry.token, host=self._url_host, port=self._port), entry, self)

    async def serve_at(self, endpoint: SessionEndpoint, listener: socket.socket) -> str:
        """Serve an open endpoint's session on another socket, too; see :meth:`SessionEndpoint.serve_at`."""
        with undo_on_error(listener.close):
            session_socket = await SessionSocket.open(
                self._plain, endpoint.entry.token, listener, self._sessions.limits
            )
        self._session_sockets.setdefault(endpoint.entry.token, []).append(session_socket)
        return session_socket.url

    async def shut(self, endpoint: SessionEndpoint) -> None:
        """Close an endpoint, cancelling its requests in flight."""
        self._app.prefixes.pop(endpoint.entry.token, None)
        await self._sessions.release(endpoint.entry)
        for session_socket in self._session_sockets.pop(endpoint.entry.token, ()):
            session_socket.close()

    @property
    def _url_host(self) -> str:
        """Host in URL form; for a wildcard address that of this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._host, self._host)
        return f"[{host}]" if ":" in host else host

    async def close(self) -> None:
        """Stop listening; idempotent."""
        serving, self._serving = self._serving, None
        if serving is not None:
            self._stop()
            await asyncio.gather(serving, return_exceptions=True)

    def _start(self) -> None:
        from turnwise.inference.process import bind, server_without_signal_handlers

        limits = self._sessions.limits
        listener = bind(self._host, self._requested_port)
        with undo_on_error(listener.close):
            options = server_options(Guard(self._dispatch, self.form.hosts), limits, limits.connections)
        listener.listen(2048)
        self._port = listener.getsockname()[1]
        server = server_without_signal_handlers(options)

        def stop() -> None:
            server.should_exit = True

        self._stop = stop
        self._serving = asyncio.create_task(server.serve(sockets=[listener]))

    async def _dispatch(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._others and scope["type"] == "http":
            other = self._others.get(scope["path"].lstrip("/").partition("/")[0])
            if other is not None:
                await other(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _refuse_to_open(session_id: str, _: SessionSettings, began: datetime) -> NoReturn:  # noqa: ARG001
    raise ApiError(403, f"session {session_id!r} is opened by the process that records it, not over HTTP")


def _nothing() -> None:
    pass
