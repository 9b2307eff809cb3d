"""Tools of an MCP server, over its standard input and output or over streamable HTTP.

Owns: :class:`MCPServer`, the connections to one server, :class:`MCPTool`, one of its tools, and what a result means.
Refuses: holding connections; that is ``mcp_connection.py``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from turnwise.errors import ConfigError, MissingExtraError, ToolError, ToolSchemaError
from turnwise.tools.agent_data import AgentData
from turnwise.tools.config import MCPServerConfig
from turnwise.tools.core import BaseTool
from turnwise.tools.mcp_connection import Connection, Endpoint
from turnwise.tools.registry import nearest
from turnwise.tools.response import ToolResponse
from turnwise.types import ToolSchema

try:
    import mcp_types
except ImportError as missing:
    raise MissingExtraError("mcp", "mcp", "using the tools of an MCP server") from missing


class MCPServer:
    """The connections to one server: one for all episodes, or one for each (``scope``).

    Attributes:
        name: What messages call it.
    """

    def __init__(self, config: MCPServerConfig) -> None:
        """Take the configuration; nothing is started.

        Raises:
            ConfigError: It names an environment variable that is not set.
        """
        self.config = config
        self._endpoint = Endpoint(config)
        self.name = self._endpoint.name
        self._shared = Connection(self._endpoint, reconnects=True)
        self._of_episodes: dict[str, tuple[Connection, int]] = {}

    async def tools(self) -> list[MCPTool]:
        """Connect and return the tools that the configuration offers.

        Raises:
            EnvError: The server cannot be reached, or did not answer in time.
            ConfigError: ``include`` names a tool that it does not have, or a tool cannot be offered.
        """
        listed = {tool.name: tool for tool in await self._shared.list_tools()}
        include = self.config.include
        unknown = [name for name in include or () if name not in listed]
        if unknown:
            raise ConfigError(
                f"MCP server {self.name!r}: include names {', '.join(map(repr, unknown))}"
                f"{nearest(unknown[0], listed)}; its tools are {', '.join(listed) or 'none'}"
            )
        if self.config.scope == "episode":
            await self._shared.close()
        return [MCPTool(self, tool) for name, tool in listed.items() if include is None or name in include]

    async def join(self, episode: str) -> None:
        """Connect for a tool of an episode, where each has a connection of its own.

        Raises:
            EnvError: The server cannot be reached.
        """
        if self.config.scope == "run":
            return
        connection, users = self._of_episodes.get(episode) or (Connection(self._endpoint, reconnects=False), 0)
        self._of_episodes[episode] = (connection, users + 1)
        try:
            await connection.open()
        except BaseException:  # also a cancellation: the episode leaves the connection
            await self.leave(episode)
            raise

    async def leave(self, episode: str) -> None:
        """Close the connection of an episode when its last tool leaves."""
        if episode not in self._of_episodes:
            return
        connection, users = self._of_episodes[episode]
        if users > 1:
            self._of_episodes[episode] = (connection, users - 1)
            return
        del self._of_episodes[episode]
        await connection.close()

    async def call(self, episode: str, tool: str, arguments: dict[str, Any]) -> mcp_types.CallToolResult:
        """Call a tool.

        Raises:
            ToolError: The server refused the call.
            EnvError: The call got no answer, or one that breaks the protocol.
        """
        connection = self._of_episodes[episode][0] if self.config.scope == "episode" else self._shared
        return await connection.call(tool, arguments)

    async def close(self) -> None:
        """Close all connections."""
        left = [connection for connection, _ in self._of_episodes.values()]
        self._of_episodes.clear()
        for connection in (self._shared, *left):
            await connection.close()


class MCPTool(BaseTool):
    """A tool of an MCP server. Its schema is the server's, whole; its errors are answered to the model."""

    def __init__(self, server: MCPServer, tool: mcp_types.Tool) -> None:
        """Take the tool as the server lists it.

        Raises:
            ConfigError: It cannot be offered to a model.
        """
        config = server.config
        schema = ToolSchema(f"{config.prefix}{tool.name}", tool.description or "", tool.input_schema)
        try:
            # Its secrets stand in the configuration, so that no answer of the server shows them in an error.
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
        """Connect, where the episode has a connection of its own."""
        agent_data = agent_data or AgentData()
        made, response = await super().create(instance_id)
        await self._server.join(agent_data.request_id)
        self._episodes[made] = agent_data.request_id
        return made, response

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **_: Any
    ) -> tuple[ToolResponse, float | None, dict[str, float]]:
        """Call the tool.

        Raises:
            ToolError: The server says that the call failed.
            EnvError: The call got no answer.
        """
        result = await self._server.call(self._episodes[instance_id], self._tool, parameters)
        response = response_of(result)
        if result.is_error:
            raise ToolError(response.text or "the tool failed and did not say why")
        return response, None, {}

    async def release(self, instance_id: str, **_: Any) -> None:
        """Leave the episode's connection."""
        await self._server.leave(self._episodes.pop(instance_id))


def response_of(result: mcp_types.CallToolResult) -> ToolResponse:
    """Return the result of a call as a response.

    Texts, embedded texts and links are joined by line breaks; images and audio are ``data:`` addresses. Structured
    content is shown, as JSON, where there is no text.
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
