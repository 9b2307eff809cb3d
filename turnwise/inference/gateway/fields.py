"""Reading the fields of a body by hand: each wrong one is a 400 that names it.

Owns: :class:`Fields`, and the parts of a body that all dialects have in common. Refuses: what a field means. Written
out rather than with a schema library: this is the hot path of every request.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from turnwise.errors import shown
from turnwise.inference.gateway.core import Abilities
from turnwise.inference.gateway.errors import ApiError, invalid, unsupported
from turnwise.types import ToolSchema

_MOST_TOKENS = 2**31 - 1
_MOST_STOPS = 64


class Fields:
    """The fields of a JSON object. A field that is null counts as missing."""

    __slots__ = ("_at", "_body")

    def __init__(self, body: Any, at: str = "") -> None:
        if not isinstance(body, dict):
            raise invalid(at or "body", f"must be an object, not {shown(body)}")
        self._body = body
        self._at = f"{at}." if at else ""

    def __iter__(self) -> Iterator[str]:
        """Yield the names of all fields of the body."""
        return iter(self._body)

    def name(self, key: str) -> str:
        """Return the field's name as an error says it."""
        return self._at + key

    def get(self, key: str) -> Any:
        """Return a field's value, None where it is missing."""
        return self._body.get(key)

    def text(self, key: str, default: str | None = None) -> str:
        """Return a text."""
        value = self._body.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            raise invalid(self.name(key), "is required" if value is None else f"must be a text, not {shown(value)}")
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
        """Return a number between two limits, both allowed."""
        value = self._body.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            raise invalid(self.name(key), f"must be a number from {low:g} to {high:g}, not {shown(value)}")
        return float(value)

    def whole(self, key: str, low: int, high: int) -> int | None:
        """Return an integer between two limits, both allowed."""
        value = self._body.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise invalid(self.name(key), f"must be an integer from {low} to {high}, not {shown(value)}")
        return value

    def items(self, key: str) -> Sequence[Any]:
        """Return a list, empty where it is missing."""
        value = self._body.get(key)
        if value is None:
            return ()
        if not isinstance(value, list):
            raise invalid(self.name(key), f"must be a list, not {shown(value)}")
        return value

    def refuse(self, key: str, message: str, *neutral: Any) -> None:
        """Raise where a field asks for what cannot be done; missing, empty and neutral values ask for nothing."""
        value = self._body.get(key)
        if value is None or value is False or value in ({}, [], "") or value in neutral:
            return
        raise unsupported(self.name(key), message)


def read_sampling(fields: Fields, *, most: Sequence[str], stop: str) -> dict[str, Any]:
    """Return the sampling parameters that a body sets.

    Args:
        fields: The body.
        most: Names of the fields that limit the tokens, the one that counts first.
        stop: Name of the field of stop strings.
    """
    limits = [fields.whole(key, 1, _MOST_TOKENS) for key in most]
    found: dict[str, Any] = {
        "temperature": fields.number("temperature", 0, 2),
        "top_p": fields.number("top_p", 0, 1),
        "top_k": fields.whole("top_k", -1, _MOST_TOKENS),
        "min_p": fields.number("min_p", 0, 1),
        "seed": fields.whole("seed", -(2**63), 2**63 - 1),
        "max_tokens": next((limit for limit in limits if limit is not None), None),
        "stop": _stops(fields, stop) or None,
    }
    if found["top_p"] == 0:
        raise invalid(fields.name("top_p"), "must be above 0; a temperature of 0 is greedy")
    if found["top_k"] == -1:
        # How some clients write that nothing is cut.
        found["top_k"] = 0
    for key in ("presence_penalty", "frequency_penalty"):
        fields.refuse(key, "log-probabilities would not be the model's own", 0)
    fields.refuse("repetition_penalty", "log-probabilities would not be the model's own", 1)
    fields.refuse("logit_bias", "log-probabilities would not be the model's own")
    return {key: value for key, value in found.items() if value is not None}


def _stops(fields: Fields, key: str) -> tuple[str, ...]:
    value = fields.get(key)
    stops = (value,) if isinstance(value, str) else tuple(fields.items(key))
    if not all(isinstance(text, str) and text for text in stops):
        raise invalid(fields.name(key), f"must be a text or a list of texts, none of them empty, not {shown(value)}")
    if len(stops) > _MOST_STOPS:
        raise invalid(fields.name(key), f"has {len(stops)} texts, at most {_MOST_STOPS}")
    return stops


def read_tool(name: Any, description: Any, parameters: Any, at: str) -> ToolSchema:
    """Return a tool of a body."""
    if not isinstance(name, str) or not name:
        raise invalid(f"{at}.name", f"must be a text that is not empty, not {shown(name)}")
    if description is not None and not isinstance(description, str):
        raise invalid(f"{at}.description", f"must be a text, not {shown(description)}")
    if parameters is None:
        return ToolSchema(name, description or "")
    if not isinstance(parameters, dict):
        raise invalid(f"{at}.parameters", f"must be a JSON schema, not {shown(parameters)}")
    return ToolSchema(name, description or "", parameters)


def check_names(tools: Sequence[ToolSchema]) -> None:
    """Raise where two tools have one name: a call could mean either."""
    seen: set[str] = set()
    for tool in tools:
        if tool.name in seen:
            raise invalid("tools", f"two tools have the name {tool.name!r}")
        seen.add(tool.name)


def image_part(source: str | None, at: str, abilities: Abilities) -> dict[str, Any]:
    """Return an image of a message, given as a ``data:`` URL.

    Raises:
        ApiError: The model takes none, or it would have to be fetched.
    """
    if not abilities.images:
        raise unsupported(at, "this model takes text only: it was given an image")
    if not source or not source.startswith("data:image/"):
        raise invalid(
            at, "an image must be given as its data (data:image/...;base64,...): nothing is fetched from URLs"
        )
    return {"type": "image_url", "image_url": {"url": source}}


def text_part(text: Any, at: str) -> dict[str, Any]:
    """Return a text part of a message."""
    if not isinstance(text, str):
        raise invalid(at, f"must be a text, not {shown(text)}")
    return {"type": "text", "text": text}


def not_found(message: str) -> ApiError:
    """Return the error of what does not exist."""
    return ApiError(404, message, code="not_found")
