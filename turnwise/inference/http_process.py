"""The outside of a server's process: its port, its report, its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from typing import Any, TypeAlias

import orjson

from turnwise.errors import InferenceError, MissingExtraError
from turnwise.inference.wire import BadRequest

_log = logging.getLogger(__name__)


class HTTPProcess:
    """Binds a port at once, and serves on it later. The process ends with its parent: see ``lifeline``.

    Args:
        host: Address to bind.
        port: Port to bind; 0 takes a free one.
        log_level: Of uvicorn.
        lifeline: Inherited descriptor whose end of file ends this process, or None.

    Raises:
        InferenceError: The port cannot be bound.
        MissingExtraError: A package of the extra ``serve`` is missing.
    """

    def __init__(self, host: str, port: int, log_level: str, lifeline: int | None) -> None:
        try:
            import uvicorn
        except ImportError as error:
            raise MissingExtraError("uvicorn", "serve", "an inference server") from error
        if lifeline is not None:
            _watch_parent(lifeline)
        self._began = time.monotonic()
        self._uvicorn = uvicorn
        self._log_level = log_level
        self._listener = bind(host, port)
        self.port: int = self._listener.getsockname()[1]
        self.address = f"{f'[{host}]' if ':' in host else host}:{self.port}"

    def run(
        self,
        app: Any,
        on_loop: Callable[[], None],
        *,
        what: str,
        report_fd: int | None = None,
        report: Mapping[str, Any] | None = None,
    ) -> None:
        """Serve until SIGTERM or SIGINT.

        Args:
            app: An ASGI application.
            on_loop: Called on the event loop before the first request.
            what: What is served, for the log.
            report_fd: Inherited descriptor that one line of JSON (port, pid, ``report``) is written to.
            report: What else stands in that line.
        """
        server = self._uvicorn.Server(self._options(app))

        async def main() -> None:
            on_loop()
            await server.serve(sockets=[self._listener])

        self._open(what, report_fd, report)
        import uvloop

        uvloop.run(main())

    async def serve(
        self,
        app: Any,
        *,
        what: str,
        report_fd: int | None = None,
        report: Mapping[str, Any] | None = None,
        protocol: type[asyncio.Protocol] | None = None,
    ) -> int:
        """Serve until SIGTERM or SIGINT, and return which: the caller has an end of its own to see to.

        Args:
            app: An ASGI application.
            what: What is served, for the log.
            report_fd: Inherited descriptor that one line of JSON (port, pid, ``report``) is written to.
            report: What else stands in that line.
            protocol: Of the connections; see :func:`~turnwise.gateway.http_guard.guarded`.
        """
        server = deaf_server(self._options(app, protocol))
        ended: list[int] = []

        def stop(number: int) -> None:
            ended.append(number)
            server.handle_exit(number, None)

        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop, number)
        self._open(what, report_fd, report)
        await server.serve(sockets=[self._listener])
        return ended[0] if ended else signal.SIGTERM

    def _options(self, app: Any, protocol: type[asyncio.Protocol] | None = None) -> Any:
        return self._uvicorn.Config(
            app,
            log_config=None,
            log_level=self._log_level,
            access_log=False,
            lifespan="off",
            loop="uvloop",
            http=protocol or "httptools",
            ws="none",
            proxy_headers=False,
            timeout_keep_alive=3600,
            timeout_graceful_shutdown=1,
            server_header=False,
            date_header=False,
        )

    def _open(self, what: str, report_fd: int | None, report: Mapping[str, Any] | None) -> None:
        # From here on the kernel queues connections until the loop takes them.
        self._listener.listen(2048)
        _log.info("serving %s on %s after %.1f s", what, self.address, time.monotonic() - self._began)
        if report_fd is not None:
            os.write(report_fd, orjson.dumps({"port": self.port, "pid": os.getpid(), **(report or {})}) + b"\n")
            os.close(report_fd)


def deaf_server(options: Any) -> Any:
    """Return a ``uvicorn.Server`` that leaves the signals of its process alone.

    Args:
        options: Its ``uvicorn.Config``.
    """
    import uvicorn

    class Deaf(uvicorn.Server):  # type: ignore[misc]
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    return Deaf(options)


def _watch_parent(descriptor: int) -> None:
    """End this process, whatever it is doing, when the other end of the pipe is closed."""

    def wait() -> None:
        while os.read(descriptor, 4096):
            pass
        _log.info("the parent is gone")
        os._exit(0)

    threading.Thread(target=wait, name="lifeline", daemon=True).start()


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that is bound and does not listen yet; port 0 takes a free one.

    Raises:
        InferenceError: It cannot be bound.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Its connections inherit this. asyncio would not set it: it looks at the protocol's number, which is 0 here; and an
    # answer in two parts then waits 40 ms for the client's delayed acknowledgement.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        raise InferenceError(f"{host}:{port} cannot be bound ({error.strerror}): choose another port, or 0") from error
    return listener


Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

_JSON = [(b"content-type", b"application/json")]
_MAX_BODY = 256 * 2**20


async def read_body(receive: Receive) -> bytes:
    """Return a request's body; empty where the client went away before its end.

    Raises:
        BadRequest: It is too large.
    """
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return b""
        part = message.get("body", b"")
        size += len(part)
        if size > _MAX_BODY:
            raise BadRequest("body", f"the body has more than {_MAX_BODY} bytes")
        if not message.get("more_body"):
            return part if not parts else b"".join([*parts, part])
        parts.append(part)


async def answer_json(send: Send, status: int, body: bytes) -> None:
    """Answer a whole JSON body."""
    headers = [*_JSON, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
