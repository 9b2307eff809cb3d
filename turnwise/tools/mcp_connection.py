"""Connections to MCP servers: opened, held, noticed when they are lost, made anew.

Owns: :class:`Endpoint` (how a server is reached) and :class:`Connection`. Refuses: deciding that a call which got no
answer did nothing. Such a call is an EnvError, so its episode ends with an error and is tried again; the next call
connects anew.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Final, TextIO, cast
from urllib.parse import urlsplit, urlunsplit

from pydantic import SecretStr, ValidationError

from turnwise.errors import EnvError, MissingExtraError, ToolError
from turnwise.tools.config import MCPServerConfig
from turnwise.tools.secrets import Secrets, with_secrets

try:
    import httpx2
    import mcp_types
    from mcp import Client, MCPError, StdioServerParameters
    from mcp.client.stdio import stdio_client
    from mcp.client.streamable_http import streamable_http_client
except ImportError as missing:
    raise MissingExtraError("mcp", "mcp", "using the tools of an MCP server") from missing

_CLOSE_S: Final = 10.0
_REASON_S: Final = 0.2
_LOG_END: Final = 500
_LOG_MOST: Final = 1 << 20
_MOST_PAGES: Final = 100


class Endpoint:
    """A server as it is reached.

    Attributes:
        config: How.
        name: What messages call it.
    """

    def __init__(self, config: MCPServerConfig) -> None:
        """Take the configuration; nothing is started.

        Raises:
            ConfigError: It names an environment variable that is not set.
        """
        self.config = config
        self.name = " ".join(config.command) if config.command else _without_login(config.url or "")
        values = with_secrets({"env": config.env, "headers": config.headers}, f"MCP server {self.name!r}")
        self._secrets = Secrets((), values)
        self._values = {key: _revealed(value) for key, value in values.items()}

    def transport(self, log: TextIO, gone: asyncio.Event) -> AbstractAsyncContextManager[Any]:
        """Return a transport to the server.

        Args:
            log: Where a process writes what it says on its standard error.
            gone: Set when the server is known to have ended the session: what is sent after that is executed by nobody.
        """
        config = self.config
        if config.command:
            parameters = StdioServerParameters(
                command=config.command[0], args=config.command[1:], env=self._values["env"], cwd=config.cwd
            )
            return _watched(stdio_client(parameters, errlog=log), gone)
        return _http(config.url or "", self._values["headers"], config.timeout, gone)

    def error(self, text: str, error: BaseException | None = None) -> EnvError:
        """Return an error that names the server, and shows no secret."""
        reason = "" if error is None else f": {_first(error)}"
        return EnvError(self._secrets.redact(f"MCP server {self.name!r} {text}{reason}"))


class Connection:
    """One connection, held by a task of its own, since who opens a transport must be who closes it.

    Args:
        endpoint: To whom.
        reconnects: Whether a lost connection is made anew; otherwise what was kept there is lost with it.
    """

    def __init__(self, endpoint: Endpoint, *, reconnects: bool) -> None:
        self._endpoint = endpoint
        self._reconnects = reconnects
        self._client: Client | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()
        self._gone = asyncio.Event()
        self._suspect = False
        self._used = False
        self._opening: asyncio.Task[Client] | None = None

    async def open(self) -> Client:
        """Return a client that is connected.

        Raises:
            EnvError: The server cannot be reached, or a connection that must not be made anew was lost.
        """
        if self._client is None or self._suspect or self._lost():
            if self._opening is None or self._opening.done():
                self._opening = asyncio.create_task(self._open(), name=f"mcp open {self._endpoint.name}")
            # A server may take longer to start than a call may take: whose time is up leaves, and it starts for others.
            return await asyncio.shield(self._opening)
        self._forget_log()
        return self._client

    async def _open(self) -> Client:
        if self._client is not None and self._suspect and not self._lost() and not await self._answers(self._client):
            self._gone.set()
        self._suspect = False
        if self._client is not None and not self._lost():
            return self._client
        if self._used and not self._reconnects:
            raise self._endpoint.error("ended in the middle of the episode, and what it kept for it is gone")
        await self._end()
        client = self._client = await self._begin()
        self._used = True
        return client

    async def list_tools(self) -> list[mcp_types.Tool]:
        """Return the server's tools. Raises EnvError."""
        client = await self.open()
        found: list[mcp_types.Tool] = []
        cursor: str | None = None
        try:
            async with asyncio.timeout(self._endpoint.config.connect_timeout):
                for _ in range(_MOST_PAGES):
                    page = await client.list_tools(cursor=cursor)
                    found += page.tools
                    cursor = page.next_cursor
                    if cursor is None:
                        return found
        except TimeoutError:
            raise self._endpoint.error(
                f"did not list its tools within {self._endpoint.config.connect_timeout:g} s"
            ) from None
        except (MCPError, ValidationError) as error:
            raise self._endpoint.error("did not list its tools", error) from None
        raise self._endpoint.error(f"lists its tools on more than {_MOST_PAGES} pages")

    async def call(self, tool: str, arguments: dict[str, Any]) -> mcp_types.CallToolResult:
        """Call a tool. It is sent a second time only where it certainly reached nobody.

        Raises:
            ToolError: The server refused the call.
            EnvError: The call got no answer, or one that breaks the protocol.
        """
        client = await self.open()
        try:
            return await self._send(client, tool, arguments)
        except _NotDelivered:
            client = await self.open()
        try:
            return await self._send(client, tool, arguments)
        except _NotDelivered as error:
            raise self._endpoint.error(f"takes no calls of {tool!r}", error) from None

    async def close(self) -> None:
        """End the connection. A second time is no error."""
        opening, self._opening = self._opening, None
        if opening is not None and not opening.done():
            opening.cancel()
            await asyncio.wait({opening})
        await self._end()

    async def _send(self, client: Client, tool: str, arguments: dict[str, Any]) -> mcp_types.CallToolResult:
        try:
            return await client.call_tool(tool, arguments)
        except asyncio.CancelledError:
            self._suspect = True
            raise
        except MCPError as error:
            if error.code == mcp_types.CONNECTION_CLOSED:
                if await self._refused():
                    raise _NotDelivered(str(error)) from None
                raise self._endpoint.error(f"was lost during a call of {tool!r}{self._tail()}") from None
            if error.code == mcp_types.INVALID_REQUEST and self._gone.is_set() and not self._endpoint.config.command:
                # Over HTTP: the session is one that the server does not know any more.
                raise _NotDelivered(str(error)) from None
            raise ToolError(error.message) from None
        except (RuntimeError, ValidationError) as error:
            raise self._endpoint.error(f"answered a call of {tool!r} with what breaks the protocol", error) from None

    async def _refused(self) -> bool:
        """Note that the connection ended. Returns whether that was because nobody listened: nothing was delivered."""
        self._gone.set()
        if self._keeper is None:
            return False
        # The task that holds the connection learns a moment later why it ended; most often there is no reason.
        await asyncio.wait({self._keeper}, timeout=_REASON_S)
        error = self._keeper.exception() if self._keeper.done() and not self._keeper.cancelled() else None
        return isinstance(_innermost(error), httpx2.ConnectError)

    def _forget_log(self) -> None:
        """Keep the log of a server that says much from filling the disk. What is appended later stands first."""
        if not self._log.closed and os.fstat(self._log.fileno()).st_size > _LOG_MOST:
            os.ftruncate(self._log.fileno(), 0)

    def _lost(self) -> bool:
        return self._gone.is_set() or self._keeper is None or self._keeper.done()

    async def _answers(self, client: Client) -> bool:
        # A call was given up here. Does anybody still answer?
        config = self._endpoint.config
        try:
            async with asyncio.timeout(min(config.connect_timeout, config.timeout)):
                await client.list_tools()
        except (MCPError, TimeoutError):
            return False
        return True

    async def _begin(self) -> Client:
        self._stop, self._gone = asyncio.Event(), asyncio.Event()
        self._log = cast("TextIO", tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace"))  # noqa: SIM115
        descriptor = self._log.fileno()
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_APPEND)
        ready: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._keeper = asyncio.create_task(self._keep(ready), name=f"mcp {self._endpoint.name}")
        wait = self._endpoint.config.connect_timeout
        try:
            waiting: set[asyncio.Future[Any]] = {ready, self._keeper}
            await asyncio.wait(waiting, timeout=wait, return_when=asyncio.FIRST_COMPLETED)
        except BaseException:  # also a cancellation: the connection is ended
            self._keeper.cancel()
            await self._end()
            raise
        if ready.done():
            return ready.result()
        tail, keeper = self._tail(), self._keeper
        error = keeper.exception() if keeper.done() and not keeper.cancelled() else None
        keeper.cancel()  # it waits for a server that has had its time
        await self._end()
        why = "cannot be reached" if error is not None else f"was not connected within {wait:g} s"
        raise self._endpoint.error(f"{why}{tail}", error)

    async def _keep(self, ready: asyncio.Future[Client]) -> None:
        transport = self._endpoint.transport(self._log, self._gone)
        # Its cache of listings would answer for a server that is gone.
        async with Client(transport, cache=None) as client:
            ready.set_result(client)
            await self._stop.wait()

    async def _end(self) -> None:
        self._client, keeper = None, self._keeper
        if keeper is None:
            return
        self._stop.set()
        await asyncio.wait({keeper}, timeout=_CLOSE_S)
        if not keeper.done():
            keeper.cancel()
            await asyncio.wait({keeper}, timeout=_CLOSE_S)
        if keeper.done() and not keeper.cancelled():
            keeper.exception()  # read: what it was lost by has been said where it mattered
        self._keeper = None
        self._log.close()

    def _tail(self) -> str:
        """Return the end of what a process said on its standard error, as part of a message."""
        if self._log.closed:
            return ""
        self._log.flush()
        self._log.seek(0, 2)
        self._log.seek(max(0, self._log.tell() - _LOG_END))
        text = " ".join(self._log.read().split())
        return f" (its standard error ends with: {text})" if text else ""


class _NotDelivered(Exception):
    """A call certainly reached nobody."""


@asynccontextmanager
async def _watched(transport: AbstractAsyncContextManager[Any], gone: asyncio.Event) -> AsyncIterator[Any]:
    """A transport that says when the other side hangs up."""
    async with transport as (read, write):
        yield _Watched(read, gone), write


class _Watched:
    """A stream of messages that says when it ends."""

    def __init__(self, stream: Any, gone: asyncio.Event) -> None:
        self._stream = stream
        self._gone = gone

    async def receive(self) -> Any:
        try:
            return await self._stream.receive()
        except BaseException:  # whatever the transport raises ends the stream
            self._gone.set()
            raise

    async def aclose(self) -> None:
        await self._stream.aclose()

    def __aiter__(self) -> _Watched:
        return self

    async def __anext__(self) -> Any:
        try:
            return await self._stream.__anext__()
        except BaseException:  # whatever the transport raises ends the stream
            self._gone.set()
            raise

    async def __aenter__(self) -> _Watched:
        await self._stream.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> Any:
        return await self._stream.__aexit__(*error)


@asynccontextmanager
async def _http(url: str, headers: dict[str, str], timeout: float, gone: asyncio.Event) -> AsyncIterator[Any]:
    """A transport over streamable HTTP that says when the server does not know the session any more."""

    async def note(response: httpx2.Response) -> None:
        if response.status_code == 404 and "mcp-session-id" in response.request.headers:
            gone.set()

    # A call is bounded by its own time-out; this one only has to be longer.
    limits = httpx2.Timeout(30.0, read=timeout + 60.0)
    async with (
        httpx2.AsyncClient(headers=headers, timeout=limits, event_hooks={"response": [note]}) as client,
        streamable_http_client(url, http_client=client) as streams,
    ):
        yield streams


def _innermost(error: BaseException | None) -> BaseException | None:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _first(error: BaseException) -> str:
    error = _innermost(error) or error
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _revealed(values: Any) -> dict[str, str]:
    return {name: value.get_secret_value() if isinstance(value, SecretStr) else value for name, value in values.items()}


def _without_login(url: str) -> str:
    """Return an address without what may let somebody in: user and password, and the query."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment=""))
