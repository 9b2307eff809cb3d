"""Messages of MCP's tools (JSON-RPC): requests of programs, and the responses to them.

Stateless, without the SDK of the extra ``mcp``: a black-box program needs no extra for its tools.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from turnwise.tools.response import content_block
from turnwise.types import ToolSchema
from turnwise.version import __version__

_VERSIONS: Final = ("2025-11-25", "2025-06-18", "2025-03-26")
_UNKNOWN_METHOD, _INVALID_REQUEST, _INVALID_PARAMS, _NOT_JSON = -32601, -32600, -32602, -32700
_CALL_IDS: Final = ("claudecode/toolUseId", "turnwise/toolCallId")
"""Keys of ``_meta`` in which clients name the model's call that they execute."""


@dataclass(frozen=True, slots=True)
class McpCall:
    """A ``tools/call`` request.

    Attributes:
        call_id: Id of the model's tool call; empty where the client does not send it.
    """

    id: Any
    name: str
    arguments: Any
    call_id: str


def read_mcp_call(message: Any) -> McpCall | None:
    """Return the tool call in a message, or None for other messages."""
    if not isinstance(message, dict) or message.get("method") != "tools/call" or "id" not in message:
        return None
    params = message.get("params")
    if not isinstance(params, dict) or not isinstance(params.get("name"), str):
        return None
    meta = params.get("_meta")
    ids = [meta.get(key) for key in _CALL_IDS] if isinstance(meta, dict) else []
    call_id = next((call_id for call_id in ids if isinstance(call_id, str)), "")
    arguments = params.get("arguments")
    return McpCall(message["id"], params["name"], {} if arguments is None else arguments, call_id)


def mcp_answer(message: Any, tools: Sequence[ToolSchema]) -> dict[str, Any] | None:
    """Return the response to a message other than a tool call, or None for notifications."""
    if not isinstance(message, dict) or not isinstance(message.get("method"), str):
        # A client's response to a request that was never sent needs no answer either.
        is_answer = isinstance(message, dict) and ("result" in message or "error" in message)
        return None if is_answer else _error(None, _INVALID_REQUEST, "a JSON-RPC request needs a 'method'")
    method, number = message["method"], message.get("id")
    if number is None:
        return None
    params = message.get("params")
    match method:
        case "initialize":
            version = params.get("protocolVersion") if isinstance(params, dict) else None
            return _result(
                number,
                {
                    "protocolVersion": version if version in _VERSIONS else _VERSIONS[0],
                    "capabilities": {"tools": {}},
                    "serverInfo": {"name": "turnwise", "version": __version__},
                },
            )
        case "ping":
            return _result(number, {})
        case "tools/list":
            return _result(number, {"tools": [_listed(tool) for tool in tools]})
        case "tools/call":
            return _error(number, _INVALID_PARAMS, "tools/call needs a 'name'")
    return _error(number, _UNKNOWN_METHOD, f"this server offers tools only: there is no method {method!r}")


def mcp_result(call: McpCall, content: str | Sequence[dict[str, Any]], *, error: bool) -> dict[str, Any]:
    """Return the MCP response of a tool call."""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return _result(call.id, {"content": [_block(part) for part in parts], "isError": error})


def mcp_not_json() -> dict[str, Any]:
    """Return the response to a body that is not JSON."""
    return _error(None, _NOT_JSON, "the body is not JSON")


def _listed(tool: ToolSchema) -> dict[str, Any]:
    return {"name": tool.name, "description": tool.description, "inputSchema": tool.parameters}


def _block(part: dict[str, Any]) -> dict[str, Any]:
    kind, content, mime_type = content_block(part)
    if kind == "text":
        return {"type": "text", "text": content}
    return {"type": kind, "data": content, "mimeType": mime_type}


def _result(number: Any, result: dict[str, Any]) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": number, "result": result}


def _error(number: Any, code: int, message: str) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": number, "error": {"code": code, "message": message}}
