"""One session at a socket of its own: what comes there reaches that session's routes, and nothing else of a gateway.

Owns: :class:`Hatch`, and the options of the servers of this process. Refuses: where the socket is.

It is meant for those who must not reach more than their own session, such as a program in a sandbox: routes of other
sessions, of controllers and of rewarders are not there, whatever tokens and keys a request holds.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any, Final, Self

from turnwise.errors import MissingExtraError
from turnwise.inference.asgi import Application, Receive, Scope, Send
from turnwise.inference.gateway.config import GatewayLimits

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
    from turnwise.inference.http_guard import guarded

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


class Hatch:
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
