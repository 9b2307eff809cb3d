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
from turnwise.chat.formats.tagged import CallParser
from turnwise.chat.formats.tags import Tag
from turnwise.chat.tokens import Marks
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


class _HeadedCall(CallParser):
    """Parser of a header and the JSON behind it; ``numbered``: the header is the call's id, which ends in a number."""

    def __init__(self, markers: Mapping[str, str], marks: Marks, *, numbered: bool) -> None:
        super().__init__(markers, marks)
        self._before_json = marks.of(markers["before_json"])
        self._numbered = numbered

    def read(self, inner: str, tools: Sequence[ToolSchema]) -> ToolCall:  # noqa: ARG002 - arguments are JSON
        """Parse a header and its JSON."""
        plain, name_prefix = self.plain, self._markers["before_name"]
        at = inner.find(self._before_json) if self._before_json else inner.find("{")
        if at < 0:
            return ToolCall("", "", {}, plain(inner).strip(), "the call has no arguments")
        header = plain(inner[:at]).strip()
        body = plain(inner[at:]).strip().removeprefix(self._markers["before_json"]).strip()
        body = body.removesuffix(self._markers["after_json"])
        if self._numbered:
            return named_arguments(re.sub(r":\d+$", "", header).removeprefix(name_prefix), body, header)
        return named_arguments(header.split(name_prefix)[-1].strip() if name_prefix else header, body)


class _Headed(ChatFormat):
    """Base of both formats; ``numbered``: the header is the call's id."""

    __slots__ = ("_call",)

    numbered: ClassVar[bool]

    def __init__(self, markers: Mapping[str, str], added: Mapping[str, int]) -> None:
        super().__init__(markers, added)
        self._call = _HeadedCall(self.markers, self.marks, numbered=self.numbered)

    def openers(self) -> tuple[str, ...]:
        """Return the section's opening marker."""
        return (self._mark("section_open"),)

    def block(self, region: Region) -> Block | None:
        """Parse the section."""
        return self._call.block(region)

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

    __slots__ = ()

    @classmethod
    def detect(cls, probe: Probe) -> dict[str, str] | None:
        """Return the markers if the header holds the name but not the call id."""
        if probe.one is None or probe.ids[0] in probe.one:
            return None
        return _derive(probe)


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

    __slots__ = ()

    @classmethod
    def detect(cls, probe: Probe) -> dict[str, str] | None:
        """Return the markers if the header is the call id."""
        if probe.one is None or probe.ids[0] not in probe.one:
            return None
        markers = _derive(probe)
        if markers is None or not markers["before_json"].startswith(":0"):
            return None
        return markers | {"before_json": markers["before_json"].removeprefix(":0").strip()}

    def call_id(self, call_id: str, name: str, index: int) -> str:
        """Return the model's own id if it is one, else an id of its syntax."""
        own_prefix = self.markers["before_name"] + name
        return call_id if re.fullmatch(re.escape(own_prefix) + r":\d+", call_id) else f"{own_prefix}:{index}"
