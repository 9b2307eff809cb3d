"""An MCP server for tests.

``python mcp_program.py`` speaks over standard input and output, :func:`serving` over HTTP in the process of the test.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import mcp_types
import uvicorn
from mcp.server import Server
from mcp.server.stdio import stdio_server

COMMAND = [sys.executable, str(Path(__file__).resolve())]
PICTURE = (  # One red dot.
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"
)
TREE = {
    "type": "object",
    "properties": {
        "points": {
            "type": "array",
            "minItems": 1,
            "items": {"type": "object", "properties": {"x": {"type": "number", "default": 0}}, "required": ["x"]},
        },
        "mode": {"anyOf": [{"enum": ["fast", "exact"]}, {"type": "integer", "maximum": 9}]},
    },
    "required": ["points"],
    "additionalProperties": False,
}
TEXT = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
NOTHING = {"type": "object", "properties": {}}
SCHEMAS = {
    "echo": TEXT, "tree": TREE, "count": NOTHING, "fail": TEXT, "refuse": NOTHING, "die": NOTHING, "hang": NOTHING,
    "block": NOTHING, "shout": NOTHING,
    "picture": NOTHING, "structured": NOTHING, "mixed": NOTHING, "variable": TEXT,
}  # fmt: skip


class Tools:
    """What the tools of one server keep."""

    def __init__(self) -> None:
        self.counted = 0
        self.begun = asyncio.Event()

    async def list_tools(self, ctx, params) -> mcp_types.ListToolsResult:
        tools = [
            mcp_types.Tool(name=name, description=f"The tool {name}.", input_schema=schema)
            for name, schema in SCHEMAS.items()
        ]
        # On two pages.
        if params is None or params.cursor is None:
            return mcp_types.ListToolsResult(tools=tools[:4], next_cursor="rest")
        return mcp_types.ListToolsResult(tools=tools[4:])

    async def call_tool(self, ctx, params) -> mcp_types.CallToolResult:
        name, arguments = params.name, params.arguments or {}
        if name == "die":
            print("dying as asked", file=sys.stderr, flush=True)
            os._exit(3)
        if name == "hang":
            self.begun.set()
            await asyncio.Event().wait()
        if name == "block":
            threading.Event().wait()
        if name == "shout":
            print("x" * (3 << 20), file=sys.stderr, flush=True)
        if name == "refuse":
            raise types_error()
        if name == "fail":
            return mcp_types.CallToolResult(content=[text(arguments["text"])], is_error=True)
        self.counted += name == "count"
        return mcp_types.CallToolResult(**self.answers(name, arguments))

    def answers(self, name: str, arguments: dict) -> dict:
        picture = mcp_types.ImageContent(data=PICTURE, mime_type="image/png")
        note = mcp_types.TextResourceContents(uri="file:///note", text="a note")
        blob = mcp_types.BlobResourceContents(uri="file:///data", mime_type="application/zip", blob="QUJD")
        link = mcp_types.ResourceLink(uri="file:///more", name="more")
        mixed = [
            text("first"),
            mcp_types.EmbeddedResource(resource=note),
            mcp_types.EmbeddedResource(resource=blob),
            link,
        ]
        return {
            "echo": {"content": [text(arguments.get("text", ""))]},
            "tree": {"content": [text(str(arguments))]},
            "shout": {"content": [text("said")]},
            "count": {"content": [text(str(self.counted))]},
            "picture": {"content": [text("look"), picture]},
            "structured": {"content": [], "structured_content": {"degrees": 21.5}},
            "mixed": {"content": mixed},
            "variable": {"content": [text(os.environ.get(arguments.get("text", ""), "not set"))]},
        }[name]

    def server(self) -> Server:
        return Server("tools of a test", on_list_tools=self.list_tools, on_call_tool=self.call_tool)


def text(value: str) -> mcp_types.TextContent:
    return mcp_types.TextContent(text=value)


def types_error() -> Exception:
    from mcp import MCPError

    return MCPError(mcp_types.INVALID_PARAMS, "that is refused")


class _HTTP(uvicorn.Server):
    """A server that says when it serves."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    async def startup(self, sockets=None) -> None:
        await super().startup(sockets)
        self.up.set()


@asynccontextmanager
async def serving(server: Server, port: int = 0) -> AsyncIterator[str]:
    """Serve over HTTP; the address. Ends its sessions with it."""
    app = server.streamable_http_app()
    config = uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error", timeout_graceful_shutdown=0)
    http = _HTTP(config)
    task = asyncio.create_task(http.serve())
    await http.up.wait()
    try:
        yield f"http://127.0.0.1:{http.servers[0].sockets[0].getsockname()[1]}/mcp"
    finally:
        http.should_exit = True
        await task


async def main() -> None:
    server = Tools().server()
    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())


if __name__ == "__main__":
    asyncio.run(main())
