"""Llama 3: the whole answer is one JSON object, or several separated by semicolons.

``{"name": "f", "parameters": {...}}``, optionally after ``<|python_tag|>``. JSON without name and parameters is
content.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from turnwise.chat.formats import tags
from turnwise.chat.formats.core import Block, ChatFormat, Probe, Region
from turnwise.chat.formats.derive import json_keys, json_span
from turnwise.chat.formats.json_calls import JsonCalls, decode_at, skip_blanks
from turnwise.chat.formats.tags import Tag
from turnwise.types import ToolCall, ToolSchema


class Llama3Json(ChatFormat):
    """Calls as bare JSON objects."""

    name: ClassVar[str] = "llama3_json"
    defaults: ClassVar[Mapping[str, str]] = {"open": "<|python_tag|>", "name": "name", "arguments": "parameters"}
    extra_stops: ClassVar[tuple[str, ...]] = ("<|eom_id|>",)

    __slots__ = ("_begin", "_calls")

    def __init__(self, markers: Mapping[str, str], added: Mapping[str, int]) -> None:
        super().__init__(markers, added)
        # A marker that is not an added token here would be ordinary text.
        self._begin = self._mark("open") if self.markers["open"] in added else ""
        self.bare = True
        self._calls = JsonCalls(self.markers["name"], self.markers["arguments"])

    @classmethod
    def detect(cls, probe: Probe) -> dict[str, str] | None:
        """Return the keys if a call is an object with nothing after it."""
        span = json_span(probe.one, probe.arguments)
        if probe.one is None or span is None or probe.one[span.end :].strip():
            return None
        keys = json_keys(span.value, probe.FIRST, probe.arguments)
        opener = probe.one[: span.start].strip()
        if keys is None or (opener and opener not in probe.added):
            return None
        return {"open": opener or cls.defaults["open"], "name": keys[0], "arguments": keys[1]}

    def openers(self) -> tuple[str, ...]:
        """Return the marker where it is a token: calls without it are the whole text."""
        return (self._mark("open"),) if self.markers["open"] in self._added else ()

    def begins_call(self, text: str) -> bool | None:
        """Return True after the marker; an object may be a call."""
        return text.startswith(("{", '"name"')) or (bool(self._begin) and text.startswith(self._begin))

    def calls_tag(self, tools: Sequence[ToolSchema], limit: int | None) -> Tag | None:
        """Return the tag of objects separated by semicolons."""
        name, arguments = self.markers["name"], self.markers["arguments"]
        call = tags.either(*(tags.json_call(tool, name, arguments, ()) for tool in tools))
        return tags.repeated(call, tags.text("; "), limit)

    def _text_and_calls_tag(self, calls: Tag) -> Tag:
        """Return the tag of calls, or of text that does not begin like one."""
        return tags.either(calls, tags.pattern(r"[^{\s](.|\n)*"))

    def block(self, region: Region) -> Block | None:
        """Parse all objects from ``start`` on."""
        text, start, limit = region.text, region.start, region.limit
        tagged = bool(self._begin) and text.startswith(self._begin, start)
        position = start + len(self._begin) if tagged else start
        calls: list[ToolCall] = []
        end = position
        while position < limit:
            try:
                value, stop = decode_at(text, position, strict=False)
                if isinstance(value, str):
                    raise ValueError("it is a JSON string, not an object")
            except ValueError as error:
                raw = self.marks.plain(text[position:limit])
                if (tagged and not calls) or self._calls.attempted(raw):
                    call = self._calls.broken(raw, f"the call is not valid JSON: {error}")
                    return Block(limit, (*calls, call), closed=False)
                break
            raw = self.marks.plain(text[position:stop])
            if not tagged and not self._calls.is_call(value, region.tools):
                break
            calls.append(self._calls.read(raw))
            end = position = stop
            next_start = skip_blanks(text, stop)
            if text.startswith((";", ","), next_start):
                next_start = skip_blanks(text, next_start + 1)
            if self._begin and text.startswith(self._begin, next_start):
                next_start += len(self._begin)
            if not text.startswith(("{", '"'), next_start):
                break
            position = next_start
        return Block(end, tuple(calls)) if calls else None
