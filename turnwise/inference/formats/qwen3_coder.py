r"""Qwen3-Coder, Qwen 3.5 and later: a function tag that holds parameter tags, values without quotes.

``<tool_call>\\n<function=f>\\n<parameter=k>\\nv\\n</parameter>\\n</function>\\n</tool_call>``
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from turnwise.inference.formats.core import Block, ChatFormat, Probe, Region
from turnwise.inference.formats.tagged import Tagged, derive, tagged_block, tagged_calls
from turnwise.inference.formats.tags import Tag
from turnwise.types import ToolSchema


class Qwen3Coder(ChatFormat):
    """Calls as tags whose names hold the function's and the parameters' names."""

    name: ClassVar[str] = "qwen3_coder"
    defaults: ClassVar[Mapping[str, str]] = {
        "section_open": "",
        "section_close": "",
        "open": "<tool_call>",
        "close": "</tool_call>",
        "head": "<function=",
        "first": ">\n<parameter=",
        "value": ">\n",
        "next": "\n</parameter>\n<parameter=",
        "end": "\n</parameter>\n</function>\n",
        "empty": ">\n</function>\n",
    }

    __slots__ = ("_call",)

    def __init__(self, markers: Mapping[str, str], added: Mapping[str, int]) -> None:
        super().__init__(markers, added)
        self._call = Tagged(self.markers, self.marks)

    @classmethod
    def detect(cls, probe: Probe) -> dict[str, str] | None:
        """Return the grammar where a tag stands before the name and calls have no common section."""
        markers = derive(probe)
        return markers if markers and markers["head"] and not markers["section_open"] else None

    def openers(self) -> tuple[str, ...]:
        """Each call begins with its own marker."""
        return (self._mark("open"),)

    def calls_tag(self, tools: Sequence[ToolSchema], most: int | None) -> Tag | None:
        """Return the tag of calls, their parameters in the order of the schema."""
        return tagged_calls(self.markers, self._added, tools, most)

    def block(self, region: Region) -> Block | None:
        """Read one call."""
        return tagged_block(self._call, region)
