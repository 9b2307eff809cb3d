"""What an MCP server of tools says, message by message.

Owns: the few messages of MCP (2025-03-26 to 2025-11-25) by which a client learns of tools and calls them; each is
answered by itself, so there are no sessions. Refuses: HTTP, and running tools. Environments as MCP servers of their
own, with an episode per session, are ``envs/mcp_server.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from turnwise import __version__
from turnwise.types import ToolSchema

_VERSIONS: Final = ("2025-11-25", "2025-06-18", "2025-03-26")
_UNKNOWN_METHOD, _INVALID_REQUEST, _INVALID_PARAMS, _NOT_JSON = -32601, -32600, -32602, -32700
_CALL_IDS: Final = ("claudecode/toolUseId", "turnwise/toolCallId")
"""Where clients say in ``_meta`` which call of the model they make."""


@dataclass(frozen=True, slots=True)
class AskedCall:
    """A call of a tool.

    Attributes:
        id: Of the request.
        name: Of the tool.
        arguments: As they came.
        call_id: The id under which the model made it; empty where the client does not say.
    """

    id: Any
    name: str
    arguments: Any
    call_id: str


def read_call(asked: Any) -> AskedCall | None:
    """Return the call that a message asks for, or None where it asks for something else."""
    if not isinstance(asked, dict) or asked.get("method") != "tools/call" or "id" not in asked:
        return None
    params = asked.get("params")
    if not isinstance(params, dict) or not isinstance(params.get("name"), str):
        return None
    meta = params.get("_meta")
    ids = [meta.get(key) for key in _CALL_IDS] if isinstance(meta, dict) else []
    call_id = next((each for each in ids if isinstance(each, str)), "")
    arguments = params.get("arguments")
    return AskedCall(asked["id"], params["name"], {} if arguments is None else arguments, call_id)


def answer(asked: Any, tools: Sequence[ToolSchema]) -> dict[str, Any] | None:
    """Return the answer to a message that calls no tool, or None where it wants none."""
    if not isinstance(asked, dict) or not isinstance(asked.get("method"), str):
        # An answer of the client's, to a question that nobody asked, wants none either.
        is_answer = isinstance(asked, dict) and ("result" in asked or "error" in asked)
        return None if is_answer else _error(None, _INVALID_REQUEST, "a JSON-RPC request needs a 'method'")
    method, number = asked["method"], asked.get("id")
    if number is None:
        return None
    params = asked.get("params")
    match method:
        case "initialize":
            wanted = params.get("protocolVersion") if isinstance(params, dict) else None
            return _result(
                number,
                {
                    "protocolVersion": wanted if wanted in _VERSIONS else _VERSIONS[0],
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


def result(call: AskedCall, content: str | Sequence[dict[str, Any]], *, error: bool) -> dict[str, Any]:
    """Return what a tool answered to a call."""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return _result(call.id, {"content": [_block(part) for part in parts], "isError": error})


def not_json() -> dict[str, Any]:
    """Return the answer to a body that is no JSON."""
    return _error(None, _NOT_JSON, "the body is no JSON")


def _listed(tool: ToolSchema) -> dict[str, Any]:
    return {"name": tool.name, "description": tool.description, "inputSchema": tool.parameters}


def _block(part: dict[str, Any]) -> dict[str, Any]:
    kind = part.get("type", "text")
    value = part.get(kind)
    if kind in ("image", "audio") and isinstance(value, str) and value.startswith("data:") and ";base64," in value:
        mime_type, _, data = value.removeprefix("data:").partition(";base64,")
        return {"type": kind, "data": data, "mimeType": mime_type}
    return {"type": "text", "text": value if isinstance(value, str) else f"[{kind}]"}


def _result(number: Any, found: dict[str, Any]) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": number, "result": found}


def _error(number: Any, code: int, message: str) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": number, "error": {"code": code, "message": message}}
