r"""DeepSeek V3 and Kimi K2: a section of calls, each with a header and a JSON object.

``<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{...}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>``
and ``<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{...}<|tool_call_end|>
<|tool_calls_section_end|>``. A closed call counts even if the section was cut.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import ClassVar

from turnwise.chat.formats import tags
from turnwise.chat.formats.core import Block, ChatFormat, Probe, Region
from turnwise.chat.formats.derive import first_marker, json_span, last_marker
from turnwise.chat.formats.json_calls import named_arguments
from turnwise.chat.formats.tags import Tag
from turnwise.types import ToolCall, ToolSchema


def _derive(probe: Probe) -> dict[str, str] | None:
    """Return the markers of a call: before its name, before its JSON, and after it."""
    span = json_span(probe.one, probe.arguments)
    second = json_span(probe.two, {probe.KEY: probe.VALUE})
    first = json_span(probe.two, probe.arguments)
    if probe.one is None or probe.two is None or span is None or span.value != probe.arguments:
        return None
    if first is None or second is None or probe.FIRST not in probe.one[: span.start]:
        return None
    head_text, tail_text = probe.one[: span.start].strip(), probe.one[span.end :].strip()
    between = probe.two[first.end : second.start]
    section, close = first_marker(head_text, probe.added), last_marker(tail_text, probe.added)
    if section not in probe.added or close not in probe.added or section in between:
        return None
    head = head_text.removeprefix(section).strip()
    tail = tail_text.removesuffix(close).strip()
    opener, closer = first_marker(head, probe.added), last_marker(tail, probe.added)
    if opener not in probe.added or closer not in probe.added or opener not in between or closer not in between:
        return None
    before_name, before_json = head.removeprefix(opener).split(probe.FIRST, 1)
    return {
        "section_open": section,
        "section_close": close,
        "open": opener,
        "close": closer,
        "before_name": before_name.strip(),
        "before_json": before_json.strip(),
        "after_json": tail.removesuffix(closer).strip(),
    }


class _Reader:
    """Parser of a section, given the parser of a header."""

    __slots__ = ("_after", "_before", "_close", "_ids", "_name", "_open", "_plain", "_section")

    def __init__(self, chat_format: ChatFormat, *, ids: bool) -> None:
        marks, markers = chat_format.marks, chat_format.markers
        self._plain = marks.plain
        self._section = (marks.of(markers["section_open"]), marks.of(markers["section_close"]))
        self._open, self._close = marks.of(markers["open"]), marks.of(markers["close"])
        self._name = marks.of(markers["before_name"])
        self._before, self._after = marks.of(markers["before_json"]), markers["after_json"]
        self._ids = ids

    def block(self, text: str, start: int, limit: int) -> Block:
        position = start + len(self._section[0])
        calls: list[ToolCall] = []
        while True:
            begin = text.find(self._open, position, limit)
            end = text.find(self._section[1], position, limit)
            if begin < 0 or 0 <= end < begin:
                if end >= 0:
                    return Block(end + len(self._section[1]), tuple(calls))
                rest = self._plain(text[position:limit]).strip()
                error = f"the calls were not closed with {self._plain(self._section[1])}"
                return Block(limit, (*calls, ToolCall("", "", {}, rest, error)), closed=False)
            inner = begin + len(self._open)
            close = text.find(self._close, inner, limit)
            next_open = text.find(self._open, inner, limit)
            ends = [at for at in (close, next_open, end) if at >= 0]
            if close < 0 or min(ends) != close:
                stop = min(ends, default=limit)
                error = f"the call was not closed with {self._plain(self._close)}"
                raw = self._plain(text[inner:stop]).strip()
                calls.append(ToolCall("", self.read(text[inner:stop]).name, {}, raw, error))
                if stop >= limit:
                    return Block(limit, tuple(calls), closed=False)
                position = stop
                continue
            calls.append(self.read(text[inner:close]))
            position = close + len(self._close)

    def read(self, inner: str) -> ToolCall:
        at = inner.find(self._before) if self._before else inner.find("{")
        if at < 0:
            return ToolCall("", "", {}, self._plain(inner).strip(), "the call has no arguments")
        header = self._plain(inner[:at]).strip()
        body = self._plain(inner[at:]).strip().removeprefix(self._plain(self._before)).strip()
        if self._after:
            body = body.removesuffix(self._after)
        if self._ids:
            name = re.sub(r":\d+$", "", header).removeprefix(self._name)
            return named_arguments(name, body, header)
        name = header.split(self._plain(self._name))[-1].strip() if self._name else header
        return named_arguments(name, body)


class _Headed(ChatFormat):
    """Base of both formats."""

    __slots__ = ()

    numbered: ClassVar[bool]
    """Whether a number follows the name."""

    def calls_tag(self, tools: Sequence[ToolSchema], limit: int | None) -> Tag | None:
        excludes = [self.markers[key] for key in ("section_open", "section_close", "open", "close")]
        # A fence is on its own lines.
        line = [tags.text("\n")] if self.markers["after_json"] else []
        header = [tags.text(":"), tags.pattern("[0-9]{1,2}")] if self.numbered else line
        json_prefix = [self._marked("before_json"), *line] if self.markers["before_json"] else []
        json_suffix = [*line, self._marked("after_json")] if self.markers["after_json"] else []
        kind = [self._marked("before_name")] if self.markers["before_name"] else []
        called = tags.either(
            *(
                tags.sequence(tags.text(tool.name), *header, *json_prefix, tags.arguments(tool, excludes), *json_suffix)
                for tool in tools
            )
        )
        call = tags.sequence(self._marked("open"), *kind, called, self._marked("close"))
        calls = tags.repeated(call, tags.BLANK, limit)
        return tags.sequence(self._marked("section_open"), calls, self._marked("section_close"))


class DeepSeek(_Headed):
    """Calls with a header of type and name, and JSON in a code fence."""

    name: ClassVar[str] = "deepseek"
    numbered: ClassVar[bool] = False
    defaults: ClassVar[Mapping[str, str]] = {
        "section_open": "<｜tool▁calls▁begin｜>",
        "section_close": "<｜tool▁calls▁end｜>",
        "open": "<｜tool▁call▁begin｜>",
        "close": "<｜tool▁call▁end｜>",
        "before_name": "function<｜tool▁sep｜>",
        "before_json": "```json",
        "after_json": "```",
    }

    __slots__ = ("_reader",)

    def __init__(self, markers: Mapping[str, str], added: Mapping[str, int]) -> None:
        super().__init__(markers, added)
        self._reader = _Reader(self, ids=False)

    @classmethod
    def detect(cls, probe: Probe) -> dict[str, str] | None:
        """Return the markers if the header holds the name but not the call id."""
        if probe.one is None or probe.ids[0] in probe.one:
            return None
        return _derive(probe)

    def openers(self) -> tuple[str, ...]:
        """Return the section's opening marker."""
        return (self._mark("section_open"),)

    def block(self, region: Region) -> Block | None:
        """Parse the section."""
        return self._reader.block(region.text, region.start, region.limit)


class Kimi(_Headed):
    """Calls whose header is the model's own call id: ``functions.NAME:NUMBER``."""

    name: ClassVar[str] = "kimi"
    numbered: ClassVar[bool] = True
    defaults: ClassVar[Mapping[str, str]] = {
        "section_open": "<|tool_calls_section_begin|>",
        "section_close": "<|tool_calls_section_end|>",
        "open": "<|tool_call_begin|>",
        "close": "<|tool_call_end|>",
        "before_name": "functions.",
        "before_json": "<|tool_call_argument_begin|>",
        "after_json": "",
    }

    __slots__ = ("_reader",)

    def __init__(self, markers: Mapping[str, str], added: Mapping[str, int]) -> None:
        super().__init__(markers, added)
        self._reader = _Reader(self, ids=True)

    @classmethod
    def detect(cls, probe: Probe) -> dict[str, str] | None:
        """Return the markers if the header is the call id."""
        if probe.one is None or probe.ids[0] not in probe.one:
            return None
        markers = _derive(probe)
        if markers is None or not markers["before_json"].startswith(":0"):
            return None
        return markers | {"before_json": markers["before_json"].removeprefix(":0").strip()}

    def openers(self) -> tuple[str, ...]:
        """Return the section's opening marker."""
        return (self._mark("section_open"),)

    def block(self, region: Region) -> Block | None:
        """Parse the section."""
        return self._reader.block(region.text, region.start, region.limit)

    def call_id(self, call_id: str, name: str, index: int) -> str:
        """Return the model's own id if it is one, else an id of its syntax."""
        own_prefix = self.markers["before_name"] + name
        return call_id if re.fullmatch(re.escape(own_prefix) + r":\d+", call_id) else f"{own_prefix}:{index}"
