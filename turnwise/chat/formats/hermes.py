r"""Hermes, Qwen 2.5, Qwen 3: one JSON object between two markers for each call.

``<tool_call>\n{"name": "f", "arguments": {...}}\n</tool_call>``
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from turnwise.chat.formats import tags
from turnwise.chat.formats.core import Block, ChatFormat, Probe, Region
from turnwise.chat.formats.derive import json_keys, json_span
from turnwise.chat.formats.json_calls import JsonCalls, decode_at, skip_blanks
from turnwise.chat.formats.tags import Tag
from turnwise.types import ToolSchema


class Hermes(ChatFormat):
    """Calls as JSON objects, each between its own markers."""

    name: ClassVar[str] = "hermes"
    defaults: ClassVar[Mapping[str, str]] = {
        "open": "<tool_call>",
        "close": "</tool_call>",
        "name": "name",
        "arguments": "arguments",
    }

    __slots__ = ("_begin", "_calls", "_end", "_spelled")

    def __init__(self, markers: Mapping[str, str], added: Mapping[str, int]) -> None:
        super().__init__(markers, added)
        self._begin = self._mark("open")
        self._end = self._mark("close")
        self._spelled = self._end == self.markers["close"]
        self._calls = JsonCalls(self.markers["name"], self.markers["arguments"])

    @classmethod
    def detect(cls, probe: Probe) -> dict[str, str] | None:
        """Return the markers if each call is an object between two markers."""
        span = json_span(probe.one, probe.arguments)
        if probe.one is None or span is None or not isinstance(span.value, dict):
            return None
        keys = json_keys(span.value, probe.FIRST, probe.arguments)
        opener, closer = probe.one[: span.start].strip(), probe.one[span.end :].strip()
        if keys is None or not opener or not closer:
            return None
        markers = {"open": opener, "close": closer, "name": keys[0], "arguments": keys[1]}
        if probe.two is not None:
            first = json_span(probe.two, probe.arguments)
            if first is None or "".join(probe.two[first.end :].split()).find("".join((closer + opener).split())) != 0:
                return None
        return markers

    def openers(self) -> tuple[str, ...]:
        """Return the call's opening marker."""
        return (self._mark("open"),)

    def block(self, region: Region) -> Block | None:
        """Parse one object between the markers."""
        text, start, limit = region.text, region.start, region.limit
        inner = start + len(self._begin)
        close = self._closing(text, inner, limit)
        next_open = text.find(self._begin, inner, limit)
        if close < 0 or 0 <= next_open < close:
            end = next_open if next_open >= 0 else limit
            raw = self.marks.plain(text[inner:end])
            call = self._calls.broken(raw, f"the call was not closed with {self.markers['close']}")
            return Block(end, (call,), closed=False)
        return Block(close + len(self._end), (self._calls.read(self.marks.plain(text[inner:close])),))

    def calls_tag(self, tools: Sequence[ToolSchema], limit: int | None) -> Tag | None:
        """Return the tag of objects, each between its markers."""
        name, arguments = self.markers["name"], self.markers["arguments"]
        excludes = self.markers["open"], self.markers["close"]
        objects = tags.either(*(tags.json_call(tool, name, arguments, excludes) for tool in tools))
        call = tags.sequence(self._marked("open"), tags.BLANK, objects, tags.BLANK, self._marked("close"))
        return tags.repeated(call, tags.BLANK, limit)

    def _closing(self, text: str, inner: int, limit: int) -> int:
        """Return where the closing marker is, after the object, whose strings may contain a plain-text marker."""
        if self._spelled:
            try:
                _, end = decode_at(text, inner, strict=False)
            except ValueError:
                return text.find(self._end, inner, limit)
            end = skip_blanks(text, end)
            if end < limit and text.startswith(self._end, end):
                return end
        return text.find(self._end, inner, limit)
