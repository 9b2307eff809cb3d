"""A gateway inside this process: addresses of sessions that somebody here records.

It is meant for those who must not reach more than their own session, such as a program in a sandbox: routes of other
sessions, of controllers and of rewarders are not there, whatever tokens and keys a request holds.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from dataclasses import dataclass
from typing import Any, Final, NoReturn, Self

from turnwise.errors import ConfigError, InferenceError, MissingExtraError, TurnwiseError
from turnwise.gateway.app import GatewayApp
from turnwise.gateway.config import GatewayLimits, SessionSettings
from turnwise.gateway.dialects.core import Reader
from turnwise.gateway.dialects.openai_chat import abilities_of
from turnwise.gateway.endpoints import EndpointRouter, EndpointTemplate, Place
from turnwise.gateway.errors import ApiError
from turnwise.gateway.proxy.app import HostedApp
from turnwise.gateway.proxy.endpoint import Endpoint
from turnwise.gateway.sessions import FIXED_SAMPLING, GatewaySession, Sessions
from turnwise.inference.process import Application, Receive, Scope, Send
from turnwise.model.core import Renderer
from turnwise.recorder.session import Session

_CONNECTIONS: Final = 32


def server_options(app: Application, limits: GatewayLimits, connections: int) -> Any:
    """Return a ``uvicorn.Config`` for an application in this process.

    Raises:
        MissingExtraError: A package of the extra ``serve`` is missing.
    """
    try:
        import uvicorn
    except ImportError as error:
        raise MissingExtraError("uvicorn", "serve", "a gateway") from error
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
    """Serves one session at a listening socket; made by :meth:`open`.

    Attributes:
        url: The base URL of the session for who connects there.
    """

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
            token: What opens the session there.
            listener: The socket, which is closed with the hatch.
            limits: What agents may use.
        """
        host, port = listener.getsockname()[:2]
        options = server_options(_only(app, token), limits, min(limits.connections, _CONNECTIONS))
        options.load()
        hatch = cls(f"http://{host}:{port}/s/{token}", options)
        listener.setblocking(False)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        hatch._server = await asyncio.get_running_loop().create_server(hatch._protocol, sock=listener)
        return hatch

    def close(self) -> None:
        """Stop listening and end all connections. Closing twice is no error."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
        for connection in list(self._state.connections):
            connection.transport.abort()

    def _protocol(self) -> asyncio.Protocol:
        made: asyncio.Protocol = self._options.http_protocol_class(
            config=self._options, server_state=self._state, app_state={}
        )
        return made


def _only(app: Application, token: str) -> Application:
    """Return an application that knows the routes below one token."""

    async def one(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            parts = [part for part in scope["path"].split("/") if part]
            # Who asks for anything else is told what an address is told that has ended.
            below = [token, *parts[parts.index(token) + 1 :]] if token in parts else ["-"]
            scope = {**scope, "path": "/".join(("", "s", *below))}
        await app(scope, receive, send)

    return one


@dataclass(frozen=True, slots=True)
class Door:
    """The address of a session.

    Attributes:
        url: Its base URL, which holds a token that cannot be guessed: ``ANTHROPIC_BASE_URL``, and with ``/v1`` behind
            it ``OPENAI_BASE_URL``. Any API key will do.
        entry: What the gateway holds of it.
        gateway: Who serves it; None where that is another process.
    """

    url: str
    entry: GatewaySession
    gateway: LocalGateway | None = None

    @property
    def failure(self) -> TurnwiseError | None:
        """Why the last request through this door was refused: nothing is left, nothing can be rendered, the server
        failed. None once another one succeeds.
        """
        return self.entry.spent or self.entry.unrendered or self.entry.session.failure

    async def answer_at(self, listener: socket.socket) -> str:
        """Answer at another socket, too, until the door is shut: this session alone can be reached there.

        Args:
            listener: A socket that listens, such as one inside a sandbox; it is closed with the door.

        Returns:
            The session's base URL for who connects there.

        Raises:
            InferenceError: The session is recorded by another process.
        """
        if self.gateway is None:
            listener.close()
            raise InferenceError("a session that another process records can be reached at its own address only")
        return await self.gateway.answer_at(self, listener)

    async def settled(self) -> None:
        """Wait until what became of the requests through this door is known here; where they are recorded, it is."""

    async def wait_exhausted(self) -> None:
        """Wait until a request is refused because all turns or tokens are used: who asks again is told the same."""
        await self.entry.exhausted.wait()


class LocalGateway:
    """Serves sessions of this process to agents that speak a wire API. It listens once the first door is opened."""

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
    ) -> None:
        """Describe a gateway; nothing is started.

        Args:
            renderer: Reads the turns of all sessions.
            context_length: Most tokens of prompt and completion, as ``/v1/models`` says it.
            model: The model's name there; agents may ask for any.
            host: Address to bind.
            port: Port to bind; 0 takes a free one.
            form: What addresses look like.
            limits: What agents may use.
            endpoint: The hosted endpoint that requests are passed on to; the sessions are then recorded as text.
            guides: Whether the engine behind the sessions holds completions to grammars.
        """
        self._renderer = renderer
        self._host = host
        self._wanted = port
        self.form = form or EndpointTemplate()
        self._sessions = Sessions(_opens_none, limits or GatewayLimits())
        # Nobody is told it: sessions are made and ended here.
        key = secrets.token_urlsafe(32)
        app = (
            HostedApp(self._sessions, admin_key=key, endpoint=endpoint)
            if endpoint is not None
            else GatewayApp(
                self._sessions,
                admin_key=key,
                model=model,
                context_length=context_length,
                abilities=abilities_of(renderer, guides=guides),
                # Who opened a session has said how it is sampled.
                fixed=FIXED_SAMPLING,
            )
        )
        # A hatch asks for its own session only, so that nothing there needs an address taken apart.
        self._plain: Application = app
        self._app = EndpointRouter(app)
        self._others: dict[str, Application] = {}
        self._hatches: dict[str, list[SessionSocket]] = {}
        self._starting = asyncio.Lock()
        self._serving: asyncio.Task[None] | None = None
        self._stop = _nothing
        self._port = 0

    @property
    def port(self) -> int:
        """The port that is listened on; 0 while none is."""
        return self._port

    @property
    def url(self) -> str:
        """The base URL of what is listened on."""
        return f"http://{self._reached_at}:{self._port}"

    def mount(self, prefix: str, app: Application) -> None:
        """Let another application answer what is below ``/prefix``, on the same port."""
        self._others[prefix] = app

    async def start(self) -> None:
        """Listen, unless it does already.

        Raises:
            InferenceError: The port cannot be bound.
            MissingExtraError: A package of the extra ``serve`` is missing.
        """
        async with self._starting:
            if self._serving is None:
                self._start()

    async def open(self, session: Session, place: Place | None = None) -> Door:
        """Open the door of a session.

        Args:
            session: The session.
            place: Whose it is, for what its address says besides the token.

        Raises:
            ConfigError: The renderer cannot read turns while they are sampled.
            InferenceError: No port can be bound, or the session has a door.
            MissingExtraError: A package of the extra ``serve`` is missing.
        """
        if not isinstance(self._renderer, Reader):
            kind = type(self._renderer).__qualname__
            raise ConfigError(f"an address needs a renderer with 'live' and 'decode', which {kind} has not")
        await self.start()
        try:
            entry = self._sessions.adopt(session, self._renderer)
        except ApiError as error:
            raise InferenceError(error.message) from error
        place = place or Place(session.id, "0")
        self._app.before[entry.token] = self.form.before(place, entry.token)
        return Door(self.form.url(place, entry.token, host=self._reached_at, port=self._port), entry, self)

    async def answer_at(self, door: Door, listener: socket.socket) -> str:
        """Answer an open door's session at another socket, too; see :meth:`Door.answer_at`."""
        try:
            hatch = await SessionSocket.open(self._plain, door.entry.token, listener, self._sessions.limits)
        except BaseException:  # also a cancellation: the socket is closed
            listener.close()
            raise
        self._hatches.setdefault(door.entry.token, []).append(hatch)
        return hatch.url

    async def shut(self, door: Door) -> None:
        """Shut a door: what is being sampled for who stands in it is cancelled when this returns."""
        self._app.before.pop(door.entry.token, None)
        await self._sessions.release(door.entry)
        for hatch in self._hatches.pop(door.entry.token, ()):
            hatch.close()

    @property
    def _reached_at(self) -> str:
        """The host as a URL of this machine writes it; one that stands for all addresses is reached at its own."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._host, self._host)
        return f"[{host}]" if ":" in host else host

    async def close(self) -> None:
        """Stop listening. Closing twice is no error."""
        serving, self._serving = self._serving, None
        if serving is not None:
            self._stop()
            await asyncio.gather(serving, return_exceptions=True)

    def _start(self) -> None:
        from turnwise.inference.process import bind, deaf_server

        limits = self._sessions.limits
        options = server_options(self._dispatch, limits, limits.connections)
        listener = bind(self._host, self._wanted)
        listener.listen(2048)
        self._port = listener.getsockname()[1]
        server = deaf_server(options)

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


def _opens_none(session_id: str, _: SessionSettings) -> NoReturn:
    raise ApiError(403, f"session {session_id!r} is opened by the process that records it, not over HTTP")


def _nothing() -> None:
    pass
