r"""A chat format of another model: calls such as ``[[lookup key="a b" n=7]]``, each value as JSON.

``brackets.jinja`` is a chat template that writes them. The class parses what the template writes; nothing else needs to
be known about the model, since the markers and the end of a turn are read off the template:

    TURNWISE_EXTERNAL_MODULES=examples/extensions/chat_format.py turnwise eval lookup --model DIR \
        renderer.chat_template=examples/extensions/brackets.jinja

or, without the variable, ``renderer.format=examples/extensions/chat_format.py:Brackets``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, ClassVar, Final

from turnwise.chat.formats import register_format
from turnwise.chat.formats.core import Block, ChatFormat, Probe, Region
from turnwise.types import ToolCall

_NAME: Final = re.compile(r"[A-Za-z_][\w.-]*")
_KEY: Final = re.compile(r"\s+([A-Za-z_][\w.-]*)=")
_JSON: Final = json.JSONDecoder()


@register_format
class Brackets(ChatFormat):
    """Calls as a name with ``key=JSON`` arguments between two markers."""

    name: ClassVar[str] = "brackets"
    defaults: ClassVar[Mapping[str, str]] = {"open": "[[", "close": "]]"}

    __slots__ = ()

    @classmethod
    def detect(cls, probe: Probe) -> dict[str, str] | None:
        """Return the markers around a call that has this form, whatever they are."""
        written = f"{probe.FIRST} {probe.KEY}={json.dumps(probe.VALUE)} {probe.NUMBER_KEY}={probe.NUMBER}"
        before, found, after = (probe.one or "").partition(written)
        if not found or not before.strip() or not after.strip():
            return None
        return {"open": before.strip(), "close": after.strip()}

    def openers(self) -> tuple[str, ...]:
        """Return the marker that begins a call."""
        return (self._mark("open"),)

    def block(self, region: Region) -> Block | None:
        """Parse the call at the marker; what is wrong with it is an error that the model reads."""
        text, closing = region.text, self._mark("close")
        begin = region.start + len(self._mark("open"))
        named = _NAME.match(text, begin, region.limit)
        if named is None:
            # Two brackets in a text are no call.
            return None
        arguments: dict[str, Any] = {}
        position, error = named.end(), None
        while (key := _KEY.match(text, position, region.limit)) is not None:
            try:
                arguments[key[1]], position = _JSON.raw_decode(text, key.end())
            except ValueError as wrong:
                error, position = f"the value of {key[1]!r} is not JSON: {wrong}", key.end()
                break
        close = text.find(closing, position, region.limit)
        raw = self.marks.plain(text[named.end() : region.limit if close < 0 else close]).strip()
        if close < 0:
            unclosed = ToolCall("", named[0], {}, raw, f"the call was not closed with {self.markers['close']}")
            return Block(region.limit, (unclosed,), closed=False)
        if error is None and text[position:close].strip():
            error = f"{self.marks.plain(text[position:close]).strip()[:40]!r} is no argument: write key=JSON"
        return Block(close + len(closing), (ToolCall("", named[0], {} if error else arguments, raw, error),))
