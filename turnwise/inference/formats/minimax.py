r"""MiniMax M2: invocations with quoted names, all of them in one section.

``<minimax:tool_call>\\n<invoke name="f">\\n<parameter name="k">v</parameter>\\n</invoke>\\n</minimax:tool_call>``. An
invocation is a call's own block: it stands although the section was cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from turnwise.inference.formats.core import Block, ChatFormat, Probe, Region
from turnwise.inference.formats.tagged import Tagged, derive, tagged_block, tagged_calls
from turnwise.inference.formats.tags import Tag
from turnwise.types import ToolSchema


class MiniMax(ChatFormat):
    """Calls as elements of one section."""

    name: ClassVar[str] = "minimax"
    defaults: ClassVar[Mapping[str, str]] = {
        "section_open": "<minimax:tool_call>",
        "section_close": "</minimax:tool_call>",
        "open": '<invoke name="',
        "close": "</invoke>",
        "head": "",
        "first": '">\n<parameter name="',
        "value": '">',
        "next": '</parameter>\n<parameter name="',
        "end": "</parameter>\n",
        "empty": '">\n',
    }

    __slots__ = ("_call",)

    def __init__(self, markers: Mapping[str, str], added: Mapping[str, int]) -> None:
        super().__init__(markers, added)
        self._call = Tagged(self.markers, self.marks)

    @classmethod
    def detect(cls, probe: Probe) -> dict[str, str] | None:
        """Return the grammar where one pair of markers stands around all calls."""
        markers = derive(probe)
        return markers if markers and markers["section_open"] else None

    def openers(self) -> tuple[str, ...]:
        """The section begins with its marker."""
        return (self._mark("section_open"),)

    def calls_tag(self, tools: Sequence[ToolSchema], most: int | None) -> Tag | None:
        """Return the tag of calls, their parameters in the order of the schema."""
        return tagged_calls(self.markers, self._added, tools, most)

    def block(self, region: Region) -> Block | None:
        """Read the section, call by call."""
        return tagged_block(self._call, region)
