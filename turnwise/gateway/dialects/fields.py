"""The fields of a request body, read with errors that name the field, and the parts that the wire APIs share."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from turnwise.errors import shown
from turnwise.gateway.errors import Lenient, invalid, unsupported
from turnwise.types import Json, ToolSchema

if TYPE_CHECKING:
    from turnwise.gateway.dialects.core import Abilities

_MOST_TOKENS = 2**31 - 1
_MOST_STOPS = 64
_RUN_BY_THE_PROVIDER = re.compile(
    r"(web_search|web_fetch|file_search|code_interpreter|code_execution|image_generation|programmatic_tool_calling|"
    r"tool_search|advisor|mcp)(_|$)"
)


class Fields:
    """The fields of a JSON object; null counts as missing."""

    __slots__ = ("_at", "_body")

    def __init__(self, body: Any, at: str = "") -> None:
        if not isinstance(body, dict):
            raise invalid(at or "body", f"must be an object, not {shown(body)}")
        self._body = body
        self._at = f"{at}." if at else ""

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of all fields."""
        return iter(self._body)

    def name(self, key: str) -> str:
        """Return a field's full name, for error messages."""
        return self._at + key

    def get(self, key: str) -> Any:
        """Return a field's value, or None."""
        return self._body.get(key)

    def text(self, key: str, default: str | None = None) -> str:
        """Return a string."""
        value = self._body.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            raise invalid(self.name(key), "is required" if value is None else f"must be a string, not {shown(value)}")
        return value

    def flag(self, key: str, *, default: bool = False) -> bool:
        """Return a boolean."""
        value = self._body.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise invalid(self.name(key), f"must be true or false, not {shown(value)}")
        return value

    def number(self, key: str, low: float, high: float) -> float | None:
        """Return a number in [``low``, ``high``]."""
        value = self._body.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            raise invalid(self.name(key), f"must be a number from {low:g} to {high:g}, not {shown(value)}")
        return float(value)

    def integer(self, key: str, low: int, high: int) -> int | None:
        """Return an integer in [``low``, ``high``]."""
        value = self._body.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise invalid(self.name(key), f"must be an integer from {low} to {high}, not {shown(value)}")
        return value

    def items(self, key: str) -> Sequence[Any]:
        """Return a list, empty if missing."""
        value = self._body.get(key)
        if value is None:
            return ()
        if not isinstance(value, list):
            raise invalid(self.name(key), f"must be a list, not {shown(value)}")
        return value


def read_sampling(fields: Fields, *, limit_fields: Sequence[str], stop: str) -> dict[str, Any]:
    """Return the sampling parameters of a body; ``limit_fields`` are the token limit fields by precedence."""
    limits = [fields.integer(key, 1, _MOST_TOKENS) for key in limit_fields]
    sampling: dict[str, Any] = {
        "temperature": fields.number("temperature", 0, 2),
        "top_p": fields.number("top_p", 0, 1),
        "top_k": fields.integer("top_k", -1, _MOST_TOKENS),
        "min_p": fields.number("min_p", 0, 1),
        "seed": fields.integer("seed", -(2**63), 2**63 - 1),
        "max_tokens": next((limit for limit in limits if limit is not None), None),
        "stop": _stops(fields, stop) or None,
    }
    if sampling["top_p"] == 0:
        raise invalid(fields.name("top_p"), "must be above 0; for greedy sampling use temperature 0")
    if sampling["top_k"] == -1:
        # Some clients write -1 for no limit.
        sampling["top_k"] = 0
    return {key: value for key, value in sampling.items() if value is not None}


def _stops(fields: Fields, key: str) -> tuple[str, ...]:
    value = fields.get(key)
    stops = (value,) if isinstance(value, str) else tuple(fields.items(key))
    if not all(isinstance(text, str) and text for text in stops):
        raise invalid(fields.name(key), f"must be a non-empty string or a list of them, not {shown(value)}")
    if len(stops) > _MOST_STOPS:
        raise invalid(fields.name(key), f"has {len(stops)} strings; at most {_MOST_STOPS} are allowed")
    return stops


def read_tool(name: Any, description: Any, parameters: Any, at: str, field: str = "parameters") -> ToolSchema:
    """Parse a tool; ``field`` is the dialect's name of its parameters."""
    if not isinstance(name, str) or not name:
        raise invalid(f"{at}.name", f"must be a non-empty string, not {shown(name)}")
    if description is not None and not isinstance(description, str):
        raise invalid(f"{at}.description", f"must be a string, not {shown(description)}")
    if parameters is None:
        return ToolSchema(name, description or "")
    if not isinstance(parameters, dict):
        raise invalid(f"{at}.{field}", f"must be a JSON schema, not {shown(parameters)}")
    required, properties = parameters.get("required", []), parameters.get("properties", {})
    if not (isinstance(required, list) and all(isinstance(key, str) for key in required)):
        raise invalid(f"{at}.{field}.required", f"must be a list of names, not {shown(required)}")
    if not isinstance(properties, dict):
        raise invalid(f"{at}.{field}.properties", f"must be an object, not {shown(properties)}")
    return ToolSchema(name, description or "", parameters)


def leave_out_tool(tool: Fields, key: str, kind: str, abilities: Abilities) -> Lenient:
    """Return ``server_tools`` for a tool that the provider runs: the model must not see what it cannot call.

    Raises ApiError unless such tools are left out, and for other tools without a schema, named by the field ``key``.
    """
    if not _RUN_BY_THE_PROVIDER.match(kind):
        reason = f"{shown(kind)}: its schema is not in the request; describe it as a function or custom tool"
        raise unsupported(tool.name(key), reason)
    if "server_tools" not in abilities.lenient:
        reason = (
            f"{shown(kind)} is run by the provider's own servers, and nothing is run here; offer a tool that the agent "
        )
        raise unsupported(tool.name(key), f"{reason}runs, or remove it (lenient: [server_tools] leaves it out)")
    return "server_tools"


def check_names(tools: Sequence[ToolSchema]) -> None:
    """Raise ApiError if two tools share a name."""
    seen: set[str] = set()
    for tool in tools:
        if tool.name in seen:
            raise invalid("tools", f"two tools have the name {tool.name!r}")
        seen.add(tool.name)


def image_part(source: str | None, at: str, abilities: Abilities) -> dict[str, Any]:
    """Return an image given as a ``data:`` URL. Raises ApiError if unsupported, or if it would have to be fetched."""
    if not abilities.images:
        raise unsupported(at, "this model accepts text only, and the message has an image")
    if not source or not source.startswith("data:image/"):
        raise invalid(at, "an image must be given as its data (data:image/...;base64,...): URLs are not fetched")
    return {"type": "image_url", "image_url": {"url": source}}


def text_part(text: Any, at: str) -> dict[str, Any]:
    """Return a text part of a message."""
    if not isinstance(text, str):
        raise invalid(at, f"must be a string, not {shown(text)}")
    return {"type": "text", "text": text}


def echoed_call(call_id: Any, name: Any, arguments: Json) -> dict[str, Any]:
    """Return an agent's echo of a call in OpenAI's form."""
    if isinstance(arguments, Mapping):
        unread = arguments.get("__unparsedToolInput")
        if isinstance(unread, Mapping) and len(arguments) == 1:
            # Claude Code's form of arguments that it could not parse.
            arguments = str(unread.get("raw", ""))
    elif arguments is not None and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {
        "id": call_id if isinstance(call_id, str) else "",
        "type": "function",
        "function": {"name": name if isinstance(name, str) else "", "arguments": arguments},
    }
