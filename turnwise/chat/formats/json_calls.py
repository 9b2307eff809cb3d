"""Parsing of JSON calls, with error messages that a model can use."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from itertools import islice
from typing import Any, NoReturn

from turnwise.types import Json, ToolCall, ToolSchema


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text} is too large")
    return value


_DECODER = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite)
_PLACES = 4
"""How many places of a call are tried to find the text of its arguments, which are the first in all but odd calls."""
_BLANK = re.compile(r"\s*")
_BETWEEN = re.compile(r"[\s,;]*")
_JSON_LINE = re.compile(r"^[\[{]", re.MULTILINE)


def skip_blanks(text: str, position: int) -> int:
    """Return the first position from ``position`` on that is not white space."""
    match = _BLANK.match(text, position)
    return match.end() if match else position


def decode_at(text: str, position: int, *, strict: bool = True) -> tuple[Json, int]:
    """Return the JSON value at ``position`` (after white space) and its end. Raises ValueError, worded for the model.

    Unless ``strict``, lone surrogates are accepted: text with markers as private characters is parsed so first.
    """
    try:
        value, end = _DECODER.raw_decode(text, skip_blanks(text, position))
        if strict and "\\u" in text[position:end]:
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} at character {error.pos - position}") from None
    except UnicodeEncodeError:
        raise ValueError("a lone surrogate is not valid text") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return value, end


def decode_whole(text: str) -> Json:
    """Return the JSON value of a text, ignoring white space around it. Raises ValueError."""
    value, end = decode_at(text, 0)
    if skip_blanks(text, end) != len(text):
        raise ValueError(f"there is more text after the JSON value, at character {end}")
    return value


def arguments_of(value: Json) -> dict[str, Any]:
    """Return a call's arguments as an object, ``{}`` for None and blank text. Raises ValueError."""
    if isinstance(value, str):
        value = decode_whole(value) if value.strip() else None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"the arguments are a JSON {_kind(value)}, not an object")
    return value


def _kind(value: Json) -> str:
    kinds = {bool: "boolean", int: "number", float: "number", str: "string", list: "array", dict: "object"}
    return kinds.get(type(value), "null")


def _names_tool(value: Json, tools: Sequence[ToolSchema]) -> bool:
    """Return whether a JSON object holds the name of a tool and an object of arguments, under whatever keys."""
    if not isinstance(value, dict) or not any(isinstance(item, dict) for item in value.values()):
        return False
    return any(tool.name == item for tool in tools for item in value.values())


def bare_call(text: str, tools: Sequence[ToolSchema]) -> str:
    """Return the end of a text that is nothing but calls of tools as JSON, without a format's markers; or ``""``."""
    start = _JSON_LINE.search(text) if tools else None
    if start is None:
        return ""
    position, calls = start.start(), []
    while position < len(text):
        try:
            value, position = decode_at(text, position)
        except ValueError:
            return ""
        calls += value if isinstance(value, list) else [value]
        match = _BETWEEN.match(text, position)
        position = match.end() if match else position
    return text[start.start() :] if calls and all(_names_tool(call, tools) for call in calls) else ""


def named_arguments(name: str, raw: str, call_id: str = "") -> ToolCall:
    """Return a call by name, with its arguments as JSON text."""
    raw = raw.strip()
    if not name:
        return ToolCall(call_id, "", {}, raw, "the call has no name")
    try:
        return ToolCall(call_id, name, arguments_of(decode_whole(raw) if raw else None), raw)
    except ValueError as error:
        return ToolCall(call_id, name, {}, raw, f"the arguments are not valid JSON: {error}")


class JsonCalls:
    """Parser of calls that are objects with these keys of name, arguments and the model's own call id (or empty)."""

    __slots__ = ("_arguments", "_arguments_at", "_attempt", "_broken", "_id", "_name")

    def __init__(self, name_key: str, arguments_key: str, id_key: str = "") -> None:
        self._name = name_key
        self._arguments = arguments_key
        self._id = id_key
        name, arguments = (re.escape(json.dumps(key, ensure_ascii=False)) for key in (name_key, arguments_key))
        self._arguments_at = re.compile(rf"{arguments}\s*:\s*")
        self._attempt = re.compile(rf"\s*\{{?\s*\W?\s*{name_key}\b.{{0,200}}?\b{arguments_key}\b", re.DOTALL)
        self._broken = re.compile(rf'\s*\{{\s*{name}\s*:\s*"([^"\\]*)"\s*(?:,\s*{arguments}\s*:\s*(.*))?', re.DOTALL)

    def attempted(self, text: str) -> bool:
        """Return whether a text begins like a call: with its name and the key of its arguments."""
        return self._attempt.match(text) is not None

    def is_call(self, value: Json, tools: Sequence[ToolSchema]) -> bool:
        """Return whether a JSON value is a call rather than an answer in JSON; one of a tool also by a wrong key."""
        if not isinstance(value, dict):
            return False
        return (isinstance(value.get(self._name), str) and self._arguments in value) or _names_tool(value, tools)

    def read(self, raw: str) -> ToolCall:
        """Parse a call; with ``error`` if it is invalid."""
        try:
            value = decode_whole(raw)
        except ValueError as error:
            return self.broken(raw, f"the call is not valid JSON: {error}")
        return self.from_value(value, raw)

    def broken(self, raw: str, error: str) -> ToolCall:
        """Return an unusable call with whatever can be recognised."""
        raw = raw.strip()
        match = self._broken.match(raw)
        if match is None:
            return ToolCall("", "", {}, raw, error)
        arguments = match[2]
        if arguments is None:
            return ToolCall("", match[1], {}, raw, error)
        return ToolCall("", match[1], {}, arguments.rstrip().removesuffix("}").rstrip(), error)

    def from_value(self, value: Json, raw: str) -> ToolCall:
        """Return the call of a parsed value; ``raw`` is its text."""
        if not isinstance(value, dict):
            return ToolCall("", "", {}, raw.strip(), f"the call is a JSON {_kind(value)}, not an object")
        name, call_id = value.get(self._name), value.get(self._id) if self._id else None
        identity = call_id if isinstance(call_id, str) else ""
        text = self._arguments_text(value, raw)
        if not isinstance(name, str) or not name:
            return ToolCall(identity, "", {}, text, f"the call has no {json.dumps(self._name)}")
        extra = value.keys() - {self._name, self._arguments, self._id or "id", "type"}
        if self._arguments not in value and extra:
            return ToolCall(identity, name, {}, text, f"the call has no {json.dumps(self._arguments)}")
        try:
            return ToolCall(identity, name, arguments_of(value.get(self._arguments)), text)
        except ValueError as error:
            return ToolCall(identity, name, {}, text, str(error))

    def _arguments_text(self, value: dict[str, Any], raw: str) -> str:
        """Return the arguments as sampled, or the whole text if they cannot be located."""
        if self._arguments not in value:
            return raw.strip()
        arguments = value[self._arguments]
        for match in islice(self._arguments_at.finditer(raw), _PLACES):
            try:
                value_at, end = decode_at(raw, match.end())
            except ValueError:
                continue
            if value_at == arguments:
                return raw[match.end() : end]
        return raw.strip()
