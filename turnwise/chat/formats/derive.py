"""Derivation of call syntax from what a template writes for known calls."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from turnwise.chat.formats.core import CLOSE, OPEN, Probe
from turnwise.chat.formats.json_calls import decode_at
from turnwise.chat.tokens import alternatives
from turnwise.types import Json

_TAG = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]")


@dataclass(frozen=True, slots=True)
class JsonSpan:
    """A JSON value and its position in a text."""

    value: Json
    start: int
    end: int


def holds(value: Json, arguments: Mapping[str, Any]) -> bool:
    """Return whether the arguments occur somewhere in a JSON value."""
    if value == arguments:
        return True
    if isinstance(value, dict):
        return any(holds(item, arguments) for item in value.values())
    return isinstance(value, list) and any(holds(item, arguments) for item in value)


def json_span(text: str | None, arguments: Mapping[str, Any]) -> JsonSpan | None:
    """Return the outermost JSON value of a text that holds the arguments, or None."""
    if text is None:
        return None
    for match in re.finditer(r"[\[{]", text):
        try:
            value, end = decode_at(text, match.start())
        except ValueError:
            continue
        if holds(value, arguments):
            return JsonSpan(value, match.start(), end)
    return None


def json_keys(call: Json, name: str, arguments: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the keys of a call's name and arguments in a JSON object."""
    if not isinstance(call, dict):
        return None
    name_key = next((key for key, value in call.items() if value == name), None)
    arguments_key = next((key for key, value in call.items() if value == dict(arguments)), None)
    return (name_key, arguments_key) if name_key is not None and arguments_key is not None else None


def common_start(one: str, other: str) -> str:
    """Return the common prefix of two texts."""
    for index, (first, second) in enumerate(zip(one, other, strict=False)):
        if first != second:
            return one[:index]
    return min(one, other, key=len)


def split_added(text: str, added: Mapping[str, int]) -> list[str]:
    """Split a text into added tokens and the text between them."""
    pattern = alternatives(added)
    return [piece for piece in re.split(f"({pattern.pattern})", text) if piece] if pattern else [text]


def common_prefix(one: str, other: str, added: Mapping[str, int]) -> str:
    """Return the common prefix of two texts, without a part of an added token."""
    common = ""
    for first, second in zip(split_added(one, added), split_added(other, added), strict=False):
        if first != second:
            return common if first in added or second in added else common + common_start(first, second)
        common += first
    return common


def first_marker(text: str, added: Mapping[str, int]) -> str:
    """Return the added token or tag at the start of a text, ignoring white space; else ``""``."""
    text = text.lstrip()
    token = max((token for token in added if text.startswith(token)), key=len, default="")
    match = _TAG.match(text)
    return token or (match[0] if match else "")


def last_marker(text: str, added: Mapping[str, int]) -> str:
    """Return the added token or tag at the end of a text, ignoring white space; else ``""``."""
    text = text.rstrip()
    token = max((token for token in added if text.endswith(token)), key=len, default="")
    tags = [match[0] for match in _TAG.finditer(text) if match.end() == len(text)]
    return token or (tags[0] if tags else "")


def reasoning_markers(probe: Probe) -> dict[str, str]:
    """Return the markers around reasoning, or none if they cannot be derived."""
    text = probe.reason
    if text is None or probe.THOUGHT not in text:
        return {}
    start = text.index(probe.THOUGHT)
    end = start + len(probe.THOUGHT)
    opener = last_marker(text[:start], probe.added)
    closer = first_marker(text[end:], probe.added)
    if not opener or not closer or opener == closer:
        return {}
    behind = text[end:].lstrip()[len(closer) :].lstrip()
    if behind and not behind.startswith((probe.TEXT, probe.FIRST)) and first_marker(behind, probe.added):
        # Markup between reasoning and answer: not a pair of markers.
        return {}
    return {OPEN: opener, CLOSE: closer}
