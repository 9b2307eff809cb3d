r"""GLM 4.5 and later: a name, then pairs of key and value elements, values without quotes.

``<tool_call>f\\n<arg_key>k</arg_key>\\n<arg_value>v</arg_value>\\n</tool_call>``. A turn has no close of its own:
the model ends it with the token that opens the next message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from turnwise.inference.formats.core import Block, ChatFormat, Probe, Region
from turnwise.inference.formats.tagged import Tagged, derive, tagged_block, tagged_calls
from turnwise.inference.formats.tags import Tag
from turnwise.types import ToolSchema


class Glm(ChatFormat):
    """Calls as a name with key and value elements."""

    name: ClassVar[str] = "glm"
    defaults: ClassVar[Mapping[str, str]] = {
        "section_open": "",
        "section_close": "",
        "open": "<tool_call>",
        "close": "</tool_call>",
        "head": "",
        "first": "\n<arg_key>",
        "value": "</arg_key>\n<arg_value>",
        "next": "</arg_value>\n<arg_key>",
        "end": "</arg_value>\n",
        "empty": "\n",
    }
    extra_stops: ClassVar[tuple[str, ...]] = ("<|observation|>", "<|user|>")

    __slots__ = ("_call",)

    def __init__(self, markers: Mapping[str, str], added: Mapping[str, int]) -> None:
        super().__init__(markers, added)
        self._call = Tagged(self.markers, self.marks)

    @classmethod
    def detect(cls, probe: Probe) -> dict[str, str] | None:
        """Return the grammar where the name follows the opening marker and calls have no common section."""
        markers = derive(probe)
        return markers if markers and not markers["head"] and not markers["section_open"] else None

    def openers(self) -> tuple[str, ...]:
        """Each call begins with its own marker."""
        return (self._mark("open"),)

    def calls_tag(self, tools: Sequence[ToolSchema], most: int | None) -> Tag | None:
        """Return the tag of calls, their parameters in the order of the schema."""
        return tagged_calls(self.markers, self._added, tools, most)

    def block(self, region: Region) -> Block | None:
        """Read one call."""
        return tagged_block(self._call, region)
