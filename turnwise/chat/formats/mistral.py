"""Mistral: a marker and a JSON list of calls; in later models, a marker, name and arguments for each.

``[TOOL_CALLS][{"name": "f", "arguments": {...}, "id": "abcdefghi"}]``, ``[TOOL_CALLS]f[ARGS]{...}`` and
``[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{...}``. Each complete object counts even if what follows was cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from turnwise.chat.formats import tags
from turnwise.chat.formats.core import Block, ChatFormat, Probe, Region
from turnwise.chat.formats.derive import json_keys, json_span
from turnwise.chat.formats.json_calls import JsonCalls, decode_at, named_arguments, skip_blanks
from turnwise.chat.formats.tags import Tag
from turnwise.types import ToolCall, ToolSchema


class Mistral(ChatFormat):
    """Calls after one marker, as a list or one marker each."""

    name: ClassVar[str] = "mistral"
    ends: ClassVar[tuple[str, ...]] = ("before_id", "separator")
    defaults: ClassVar[Mapping[str, str]] = {
        "open": "[TOOL_CALLS]",
        "before_id": "",
        "separator": "",
        "name": "name",
        "arguments": "arguments",
        "id": "id",
    }

    __slots__ = ("_before_id", "_begin", "_calls", "_separator")

    def __init__(self, markers: Mapping[str, str], added: Mapping[str, int]) -> None:
        super().__init__(markers, added)
        self._begin = self._mark("open")
        self._separator, self._before_id = self._mark("separator"), self._mark("before_id")
        self._calls = JsonCalls(self.markers["name"], self.markers["arguments"], self.markers["id"])

    @classmethod
    def detect(cls, probe: Probe) -> dict[str, str] | None:
        """Return the markers if calls are in a list, or follow a marker and their name."""
        span = json_span(probe.one, probe.arguments)
        if probe.one is None or span is None or probe.one[span.end :].strip():
            return None
        prefix = probe.one[: span.start].strip()
        if isinstance(span.value, list) and len(span.value) == 1:
            keys = json_keys(span.value[0], probe.FIRST, probe.arguments)
            if keys is None or not prefix:
                return None
            # Some templates write only the end of an id: nine characters are what the models sample.
            written = {key: value for key, value in span.value[0].items() if isinstance(value, str) and value}
            id_key = next((key for key, value in written.items() if probe.ids[0].endswith(value)), "")
            return {**cls.defaults, "open": prefix, "name": keys[0], "arguments": keys[1], "id": id_key}
        opener, name, separator = (part.strip() for part in prefix.partition(probe.FIRST))
        before_id, has_id, after_id = separator.partition(probe.ids[0])
        if span.value != probe.arguments or not name or probe.FIRST in before_id + after_id:
            return None
        before_id, separator = (before_id, after_id) if has_id else ("", separator)
        if opener not in probe.added or any(part and part not in probe.added for part in (before_id, separator)):
            return None
        return {**cls.defaults, "open": opener, "before_id": before_id, "separator": separator, "id": ""}

    def openers(self) -> tuple[str, ...]:
        """Return the marker of a list or call."""
        return (self._mark("open"),)

    def calls_tag(self, tools: Sequence[ToolSchema], limit: int | None) -> Tag | None:
        """Return the tag of a list, recognised by its call ids, or of single calls, by their separator, or None."""
        name, arguments, call_id = (self.markers[key] for key in ("name", "arguments", "id"))
        opener = self._marked("open")
        excludes = (self.markers["open"],)
        if call_id:
            objects = [tags.json_call(tool, name, arguments, excludes, id_key=call_id) for tool in tools]
            calls = tags.repeated(tags.either(*objects), tags.text(", "), limit)
            return tags.sequence(opener, tags.optional(tags.text(" ")), tags.text("["), calls, tags.text("]"))
        if not self._separator:
            return None
        between = self._marked("separator")
        if self._before_id:
            between = tags.sequence(self._marked("before_id"), tags.pattern("[a-zA-Z0-9]{9}"), between)
        named = (tags.sequence(tags.text(tool.name), between, tags.arguments(tool, excludes)) for tool in tools)
        return tags.repeated(tags.sequence(opener, tags.either(*named)), None, limit)

    def block(self, region: Region) -> Block | None:
        """Parse what follows the marker."""
        text, limit = region.text, region.limit
        position = skip_blanks(text, region.start + len(self._begin))
        if text.startswith("[", position):
            return self._list(text, position, limit)
        return self._named(text, position, limit)

    def _list(self, text: str, start: int, limit: int) -> Block:
        calls: list[ToolCall] = []
        position = skip_blanks(text, start + 1)
        while position < limit and text[position] != "]":
            try:
                _, end = decode_at(text, position, strict=False)
            except ValueError as error:
                return self._broken(calls, text[position:limit], limit, f"the call is not valid JSON: {error}")
            if end > limit:
                break
            raw = self.marks.plain(text[position:end])
            calls.append(self._calls.read(raw))
            position = skip_blanks(text, end)
            if text.startswith(",", position):
                position = skip_blanks(text, position + 1)
            elif position < limit and text[position] != "]":
                rest = text[position:limit]
                return self._broken(calls, rest, limit, "the list of calls was not closed with ]")
        if position >= limit:
            return self._broken(calls, "", limit, "the list of calls was not closed with ]")
        return Block(position + 1, tuple(calls))

    def _broken(self, calls: list[ToolCall], rest: str, limit: int, error: str) -> Block:
        return Block(limit, (*calls, self._calls.broken(self.marks.plain(rest), error)), closed=False)

    def _named(self, text: str, start: int, limit: int) -> Block:
        next_open = text.find(self._begin, start, limit)
        end = next_open if next_open >= 0 else limit
        brace = text.find("{", start, end)
        at = text.find(self._separator, start, end) if self._separator else brace
        if at < 0 or brace < 0:
            raw = self.marks.plain(text[start:end]).strip()
            return Block(end, (ToolCall("", "", {}, raw, "the call has no arguments"),), closed=False)
        header, _, call_id = text[start:at].partition(self._before_id) if self._before_id else (text[start:at], "", "")
        name, call_id = self.marks.plain(header).strip(), self.marks.plain(call_id).strip()
        position = at + len(self._separator) if self._separator else at
        try:
            _, stop = decode_at(text, position, strict=False)
        except ValueError as error:
            raw = self.marks.plain(text[position:end]).strip()
            call = ToolCall(call_id, name, {}, raw, f"the arguments are not valid JSON: {error}")
            return Block(end, (call,), closed=False)
        stop = min(stop, end)
        return Block(stop, (named_arguments(name, self.marks.plain(text[position:stop]), call_id),))
