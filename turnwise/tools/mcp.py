"""Tools of MCP servers, over standard input and output or streamable HTTP."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Final, TextIO, cast
from urllib.parse import urlsplit, urlunsplit

from pydantic import SecretStr, ValidationError

from turnwise.errors import (
    ConfigError,
    EnvError,
    ToolError,
    ToolSchemaError,
    first_of,
    nearest,
    requires_extra,
    undo_on_error,
    undo_on_error_async,
)
from turnwise.tools.config import MCPServerConfig
from turnwise.tools.core import AgentData, BaseTool
from turnwise.tools.response import ToolResponse
from turnwise.tools.secrets import Secrets, with_secrets
from turnwise.types import ToolSchema

with requires_extra("mcp", "mcp", "using the tools of an MCP server"):
    import httpx2
    import mcp_types
    from mcp import Client, MCPError, StdioServerParameters
    from mcp.client.stdio import stdio_client
    from mcp.client.streamable_http import streamable_http_client

CONNECT_S: Final = 30.0
"""Seconds for connecting to a server and listing its tools."""
_CLOSE_S: Final = 10.0
_LOG_END: Final = 500
_LOG_MOST: Final = 1 << 20
_MOST_PAGES: Final = 100


class Endpoint:
    """The address of an MCP server: a process to start or a URL."""

    def __init__(self, config: MCPServerConfig) -> None:
        self.config = config
        self.name = " ".join(config.command) if config.command else _without_login(config.url or "")
        values = with_secrets({"env": config.env, "headers": config.headers}, f"MCP server {self.name!r}")
        self._secrets = Secrets((), values)
        self._values = {key: _revealed(value) for key, value in values.items()}

    def transport(self, log: TextIO, gone: asyncio.Event) -> AbstractAsyncContextManager[Any]:
        """Return a transport; ``log`` receives standard error, ``gone`` is set when the server ended the session."""
        config = self.config
        if config.command:
            parameters = StdioServerParameters(
                command=config.command[0], args=config.command[1:], env=self._values["env"]
            )
            return _watched(stdio_client(parameters, errlog=log), gone)
        return _http(config.url or "", self._values["headers"], config.timeout, gone)

    def error(self, text: str, error: BaseException | None = None) -> EnvError:
        """Return an error that names the server, with secrets redacted."""
        reason = "" if error is None else f": {_first(error)}"
        return EnvError(self._secrets.redact(f"MCP server {self.name!r} {text}{reason}"))


class Connection:
    """One connection, held by its own task because transports must be closed by the task that opened them.

    With ``reconnects`` a lost connection is reopened; without, the server's state is lost with it.
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
        """Return a connected client; EnvError if the server is unreachable or a lost connection may not be reopened."""
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
            raise self._endpoint.error("ended in the middle of the episode, and the episode's state in it is lost")
        await self._end()
        client = self._client = await self._begin()
        self._used = True
        return client

    async def list_tools(self) -> list[mcp_types.Tool]:
        """Return the server's tools. Raises EnvError."""
        client = await self.open()
        tools: list[mcp_types.Tool] = []
        cursor: str | None = None
        try:
            async with asyncio.timeout(CONNECT_S):
                for _ in range(_MOST_PAGES):
                    page = await client.list_tools(cursor=cursor)
                    tools += page.tools
                    cursor = page.next_cursor
                    if cursor is None:
                        return tools
        except TimeoutError:
            raise self._endpoint.error(f"did not list its tools within {CONNECT_S:g} s") from None
        except (MCPError, ValidationError) as error:
            raise self._endpoint.error("did not list its tools", error) from None
        raise self._endpoint.error(f"lists its tools on more than {_MOST_PAGES} pages")

    async def call(self, tool: str, arguments: dict[str, Any]) -> mcp_types.CallToolResult:
        """Call a tool, once. Raises ToolError (refused) or EnvError; a lost connection is reopened by the next call."""
        client = await self.open()
        try:
            return await client.call_tool(tool, arguments)
        except asyncio.CancelledError:
            self._suspect = True
            raise
        except MCPError as error:
            # Over HTTP an invalid request is one of a session that the server does not know any more.
            forgotten = error.code == mcp_types.INVALID_REQUEST and not self._endpoint.config.command
            if error.code == mcp_types.CONNECTION_CLOSED or (forgotten and self._gone.is_set()):
                self._gone.set()
                raise self._endpoint.error(f"was lost during a call of {tool!r}{self._tail()}") from None
            raise ToolError(error.message) from None
        except (RuntimeError, ValidationError) as error:
            raise self._endpoint.error(f"answered a call of {tool!r} with an invalid message", error) from None

    async def close(self) -> None:
        """Close the connection; idempotent."""
        opening, self._opening = self._opening, None
        if opening is not None and not opening.done():
            opening.cancel()
            await asyncio.wait({opening})
        await self._end()

    def _forget_log(self) -> None:
        """Truncate the log of a verbose server; later output is appended from the start."""
        if not self._log.closed and os.fstat(self._log.fileno()).st_size > _LOG_MOST:
            os.ftruncate(self._log.fileno(), 0)

    def _lost(self) -> bool:
        return self._gone.is_set() or self._keeper is None or self._keeper.done()

    async def _answers(self, client: Client) -> bool:
        # A call was abandoned. Does the server still answer?
        config = self._endpoint.config
        try:
            async with asyncio.timeout(min(CONNECT_S, config.timeout)):
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

        try:
            waiting: set[asyncio.Future[Any]] = {ready, self._keeper}
            await asyncio.wait(waiting, timeout=CONNECT_S, return_when=asyncio.FIRST_COMPLETED)
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
        why = "cannot be reached" if error is not None else f"was not connected within {CONNECT_S:g} s"
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
            keeper.exception()  # retrieved: the cause was already reported by the call that failed
        self._keeper = None
        self._log.close()

    def _tail(self) -> str:
        if self._log.closed:
            return ""
        self._log.flush()
        self._log.seek(0, 2)
        self._log.seek(max(0, self._log.tell() - _LOG_END))
        text = " ".join(self._log.read().split())
        return f" (its standard error ends with: {text})" if text else ""


@asynccontextmanager
async def _watched(transport: AbstractAsyncContextManager[Any], gone: asyncio.Event) -> AsyncIterator[Any]:
    async with transport as (read, write):
        yield _Watched(read, gone), write


class _Watched:
    """A message stream that signals its end."""

    def __init__(self, stream: Any, gone: asyncio.Event) -> None:
        self._stream = stream
        self._gone = gone

    async def receive(self) -> Any:
        with undo_on_error(self._gone.set):
            return await self._stream.receive()

    async def aclose(self) -> None:
        await self._stream.aclose()

    def __aiter__(self) -> _Watched:
        return self

    async def __anext__(self) -> Any:
        with undo_on_error(self._gone.set):
            return await self._stream.__anext__()

    async def __aenter__(self) -> _Watched:
        await self._stream.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> Any:
        return await self._stream.__aexit__(*error)


@asynccontextmanager
async def _http(url: str, headers: dict[str, str], timeout: float, gone: asyncio.Event) -> AsyncIterator[Any]:
    """A streamable HTTP transport that signals an unknown session."""

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


def _first(error: BaseException) -> str:
    first = first_of(error)
    return f"{type(first).__name__}: {first}" if str(first) else type(first).__name__


def _revealed(values: Any) -> dict[str, str]:
    return {name: value.get_secret_value() if isinstance(value, SecretStr) else value for name, value in values.items()}


def _without_login(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment=""))


class MCPServer:
    """The connections to one server: one for all episodes, or one per episode (``scope``)."""

    def __init__(self, config: MCPServerConfig) -> None:
        self.config = config
        self._endpoint = Endpoint(config)
        self.name = self._endpoint.name
        self._shared = Connection(self._endpoint, reconnects=True)
        self._of_episodes: dict[str, tuple[Connection, int]] = {}

    async def tools(self) -> list[MCPTool]:
        """Connect and return the offered tools. Raises EnvError, or ConfigError for an unknown or invalid tool."""
        tools_by_name = {tool.name: tool for tool in await self._shared.list_tools()}
        include = self.config.include
        unknown = [name for name in include or () if name not in tools_by_name]
        if unknown:
            raise ConfigError(
                f"MCP server {self.name!r}: include names {', '.join(map(repr, unknown))}"
                f"{nearest(unknown[0], tools_by_name)}; its tools are {', '.join(tools_by_name) or 'none'}"
            )
        if self.config.scope == "episode":
            await self._shared.close()
        return [MCPTool(self, tool) for name, tool in tools_by_name.items() if include is None or name in include]

    async def join(self, episode: str) -> None:
        """Open the connection of an episode, with ``scope: episode``. Raises EnvError."""
        if self.config.scope == "run":
            return
        connection, users = self._of_episodes.get(episode) or (Connection(self._endpoint, reconnects=False), 0)
        self._of_episodes[episode] = (connection, users + 1)
        async with undo_on_error_async(lambda: self.leave(episode)):
            await connection.open()

    async def leave(self, episode: str) -> None:
        """Close an episode's connection when its last tool is released."""
        if episode not in self._of_episodes:
            return
        connection, users = self._of_episodes[episode]
        if users > 1:
            self._of_episodes[episode] = (connection, users - 1)
            return
        del self._of_episodes[episode]
        await connection.close()

    async def call(self, episode: str, tool: str, arguments: dict[str, Any]) -> mcp_types.CallToolResult:
        """Call a tool. Raises ToolError or EnvError, as :meth:`Connection.call`."""
        connection = self._of_episodes[episode][0] if self.config.scope == "episode" else self._shared
        return await connection.call(tool, arguments)

    async def close(self) -> None:
        """Close all connections."""
        connections = [connection for connection, _ in self._of_episodes.values()]
        self._of_episodes.clear()
        for connection in (self._shared, *connections):
            await connection.close()


class MCPTool(BaseTool):
    """A tool of an MCP server, with the server's schema; its errors are returned to the model."""

    def __init__(self, server: MCPServer, tool: mcp_types.Tool) -> None:
        config = server.config
        schema = ToolSchema(f"{config.prefix}{tool.name}", tool.description or "", tool.input_schema)
        try:
            # Its secrets are in the configuration, so that no answer of the server shows them in an error.
            super().__init__({"env": config.env, "headers": config.headers}, schema)
        except ToolSchemaError as error:
            raise ConfigError(f"MCP server {server.name!r}: {error}; or leave it out with include") from error
        self.concurrent = config.concurrent
        self.timeout = config.timeout
        self.media = tuple(config.media)
        self._server = server
        self._tool = tool.name
        self._episodes: dict[str, str] = {}

    async def create(
        self, instance_id: str | None = None, agent_data: AgentData | None = None, **_: Any
    ) -> tuple[str, ToolResponse]:
        """Open the episode's connection, with ``scope: episode``."""
        agent_data = agent_data or AgentData()
        instance, response = await super().create(instance_id)
        await self._server.join(agent_data.request_id)
        self._episodes[instance] = agent_data.request_id
        return instance, response

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **_: Any
    ) -> tuple[ToolResponse, float | None, dict[str, float]]:
        """Call the tool. Raises ToolError or EnvError, as :meth:`Connection.call`."""
        result = await self._server.call(self._episodes[instance_id], self._tool, parameters)
        response = response_of(result)
        if result.is_error:
            raise ToolError(response.text or "the tool failed without a message")
        return response, None, {}

    async def fork(self, instance_id: str, agent_data: AgentData) -> str:  # noqa: ARG002 - they share a connection
        """Join the shared connection, with ``scope: run``.

        Raises:
            EnvError: The episode has its own connection, whose state only the server could copy.
        """
        if self._server.config.scope == "episode":
            raise EnvError(
                f"tool {self.name!r} cannot fork: MCP server {self._server.name!r} has a connection for each episode "
                "(scope: episode), and MCP has no request that copies its state: leave it out, or use scope: run for a "
                "server that keeps none"
            )
        instance, _ = await self.create(agent_data=agent_data)
        return instance

    async def release(self, instance_id: str, **_: Any) -> None:
        """Release the episode's connection."""
        await self._server.leave(self._episodes.pop(instance_id))


def response_of(result: mcp_types.CallToolResult) -> ToolResponse:
    """Convert a call's result to a response.

    Texts, embedded texts and links are joined by line breaks; images and audio become ``data:`` URLs. Structured
    content is shown, as JSON, if the result has no text.
    """
    texts: list[str] = []
    media: dict[str, list[str]] = {"image": [], "audio": []}
    for block in result.content:
        if isinstance(block, mcp_types.TextContent):
            texts.append(block.text)
        elif isinstance(block, (mcp_types.ImageContent, mcp_types.AudioContent)):
            media[block.type].append(f"data:{block.mime_type};base64,{block.data}")
        elif isinstance(block, mcp_types.ResourceLink):
            texts.append(f"[{block.title or block.name}]({block.uri})")
        else:
            _embed(block.resource, texts, media)
    if not texts and result.structured_content is not None:
        texts = [json.dumps(result.structured_content, ensure_ascii=False)]
    return ToolResponse("\n".join(texts), image=media["image"] or None, audio=media["audio"] or None)


def _embed(
    resource: mcp_types.TextResourceContents | mcp_types.BlobResourceContents,
    texts: list[str],
    media: Mapping[str, list[str]],
) -> None:
    if isinstance(resource, mcp_types.TextResourceContents):
        texts.append(resource.text)
        return
    kind = (resource.mime_type or "").partition("/")[0]
    if kind in media:
        media[kind].append(f"data:{resource.mime_type};base64,{resource.blob}")
    else:
        size = len(resource.blob) * 3 // 4
        texts.append(f"[{resource.uri}: about {size} bytes of {resource.mime_type or 'an unknown type'}]")
