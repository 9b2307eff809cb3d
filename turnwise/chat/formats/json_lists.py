r"""Calls as lists of JSON: after a marker, in a section, as the whole answer, or with a marker and a name for each.

- Mistral: ``[TOOL_CALLS][{"name": "f", "arguments": {...}, "id": "abcdefghi"}]``; later ``[TOOL_CALLS]f[ARGS]{...}``
  and ``[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{...}``.
- Nemotron Nano 2, Apriel, Hunyuan, Command A: ``<TOOLCALL>[{"name": "f", "arguments": {...}}]</TOOLCALL>``.
- Apertus: ``<|tools_prefix|>[{"f": {...}}]<|tools_suffix|>``, where the key is the name.
- MiniMax M1: ``<tool_calls>\n{"name": "f", "arguments": {...}}\n</tool_calls>``, an object a line.
- xLAM: ``[{"name": "f", "arguments": {...}}]`` as the whole answer.

Each complete object counts even if what follows was cut.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import ClassVar

from turnwise.chat.formats import tags
from turnwise.chat.formats.core import Block, ChatFormat, Probe, Region
from turnwise.chat.formats.derive import json_keys, json_span, last_marker
from turnwise.chat.formats.json_calls import JsonCalls, decode_at, decode_whole, named_arguments, skip_blanks
from turnwise.chat.formats.tags import Tag
from turnwise.types import Json, ToolCall, ToolSchema

_LIST, _LINES = "list", "lines"


class JsonSection(ChatFormat):
    """Calls as JSON objects in one section; each complete object counts even if what follows was cut."""

    name: ClassVar[str] = "json_section"
    defaults: ClassVar[Mapping[str, str]] = {
        "open": "<tool_calls>",
        "close": "</tool_calls>",
        "layout": _LIST,
        "name": "name",
        "arguments": "arguments",
        "id": "",
    }

    __slots__ = ("_begin", "_calls", "_end", "_is_list")

    def __init__(self, markers: Mapping[str, str], added: Mapping[str, int]) -> None:
        super().__init__(markers, added)
        self._begin, self._end = self._mark("open"), self._mark("close")
        self._is_list = self.markers.get("layout", _LIST) == _LIST
        self._calls = JsonCalls(self.markers["name"], self.markers["arguments"], self.markers["id"])

    @classmethod
    def detect(cls, probe: Probe) -> dict[str, str] | None:
        """Return the markers if one section holds all calls, each of which is an object."""
        span = json_span(probe.one, probe.arguments)
        if probe.one is None or span is None:
            return None
        is_list = isinstance(span.value, list)
        call: Json = span.value[0] if isinstance(span.value, list) and len(span.value) == 1 else span.value
        prefix, suffix = probe.one[: span.start].strip(), probe.one[span.end :].strip()
        if (bool(prefix) != bool(suffix)) or not (is_list or cls._shares_section(probe, suffix)):
            return None
        keys = ("", "") if call == {probe.FIRST: probe.arguments} else json_keys(call, probe.FIRST, probe.arguments)
        if keys is None or not isinstance(call, dict):
            return None
        return {
            "open": last_marker(prefix, probe.added) or prefix,
            "close": suffix,
            "layout": _LIST if is_list else _LINES,
            "name": keys[0],
            "arguments": keys[1],
            "id": next((key for key, value in call.items() if value == probe.ids[0]), ""),
        }

    @staticmethod
    def _shares_section(probe: Probe, suffix: str) -> bool:
        """Return whether two objects stand between one pair of markers, with nothing but white space between them."""
        first, second = json_span(probe.two, probe.arguments), json_span(probe.two, {probe.KEY: probe.VALUE})
        if probe.two is None or first is None or second is None or not suffix:
            return False
        return not probe.two[first.end : second.start].strip()

    def openers(self) -> tuple[str, ...]:
        """Return the marker of the section; without one, the list is the whole text."""
        return (self._mark("open"),)

    def begins_call(self, text: str) -> bool | None:
        """Return whether a text begins a list, or an object that lacks its bracket."""
        return text.startswith(("[", "{"))

    def block(self, region: Region) -> Block | None:
        """Parse the section."""
        text, limit = region.text, region.limit
        calls, position, error = self._objects(text, skip_blanks(text, region.start + len(self._begin)), limit)
        if not self._begin and not self._is_call(text, region, limit):
            return None
        if not error and self._end and not text.startswith(self._end, position):
            error = f"the calls were not closed with {self.markers['close']}"
        if not error:
            return Block(position + len(self._end), tuple(calls))
        close = text.find(self._end, position, limit) if self._end else -1
        raw = self.marks.plain(text[position : close if close >= 0 else limit])
        calls.append(self._calls.broken(raw, error))
        return Block(close + len(self._end) if close >= 0 else limit, tuple(calls), closed=close >= 0)

    def _is_call(self, text: str, region: Region, limit: int) -> bool:
        """Return whether a list without markers is one of calls rather than an answer in JSON."""
        inner = skip_blanks(text, region.start + text.startswith("[", region.start))
        try:
            value, _ = decode_at(text, inner, strict=False)
        except ValueError:
            value = None
        return self._calls.is_call(value, region.tools) or (
            not isinstance(value, dict) and self._calls.attempted(text[inner:limit])
        )

    def _objects(self, text: str, position: int, limit: int) -> tuple[list[ToolCall], int, str]:
        """Parse objects from ``position`` on; return the calls, the position behind them, and what is wrong there."""
        calls: list[ToolCall] = []
        if self._is_list and not text.startswith("[", position):
            return calls, position, "the calls are not in a list"
        position = skip_blanks(text, position + self._is_list)
        while position < limit:
            if self._is_list and text[position] == "]":
                return calls, skip_blanks(text, position + 1), ""
            if not self._is_list and text.startswith(self._end, position):
                return calls, position, "" if calls else "there is no call"
            try:
                _, end = decode_at(text, position, strict=False)
            except ValueError as error:
                return calls, position, f"the call is not valid JSON: {error}"
            if end > limit:
                break
            calls.append(self._read(self.marks.plain(text[position:end])))
            position = skip_blanks(text, end)
            if self._is_list and text.startswith(",", position):
                position = skip_blanks(text, position + 1)
            elif self._is_list and not text.startswith("]", position):
                break
        return calls, position, "the list of calls was not closed with ]" if self._is_list else "the calls have no end"

    def _read(self, raw: str) -> ToolCall:
        """Parse one object, whose key may be the name."""
        if self.markers["name"]:
            return self._calls.read(raw)
        try:
            value = decode_whole(raw)
        except ValueError as error:
            return ToolCall("", "", {}, raw, f"the call is not valid JSON: {error}")
        (name, arguments), *more = value.items() if isinstance(value, dict) and value else (("", None),)
        if more or not name or not isinstance(arguments, dict):
            return ToolCall("", "", {}, raw, "the call is not an object of a name and its arguments")
        return ToolCall("", name, arguments, json.dumps(arguments, ensure_ascii=False))


class Mistral(JsonSection):
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

    __slots__ = ("_before_id", "_separator")

    def __init__(self, markers: Mapping[str, str], added: Mapping[str, int]) -> None:
        super().__init__(markers, added)
        self._separator, self._before_id = self._mark("separator"), self._mark("before_id")

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
        return super().block(region) if text.startswith("[", position) else self._named(text, position, limit)

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
