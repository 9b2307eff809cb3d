"""Pythonic calls: a list of calls in Python's syntax, ``[f(a=1, b='x'), g()]``, with markers around it or alone.

Each call is its own block: it stands although the list was cut. A list of anything else is content.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar

from turnwise.inference.formats.core import Block, ChatFormat, Probe, Region
from turnwise.inference.formats.literals import Reader, Unreadable
from turnwise.types import ToolCall

_BEGINS = re.compile(r"\[\s*[A-Za-z_][\w.]*\(", re.ASCII)
_MAY_BEGIN = re.compile(r"\[\s*(?:[A-Za-z_][\w.]*)?\Z", re.ASCII)


class Pythonic(ChatFormat):
    """Calls as Python would write them."""

    name: ClassVar[str] = "pythonic"
    defaults: ClassVar[Mapping[str, str]] = {"open": "", "close": ""}

    __slots__ = ("_begin", "_end")

    def __init__(self, markers: Mapping[str, str], added: Mapping[str, int]) -> None:
        super().__init__(markers, added)
        self._begin = self._mark("open")
        self._end = self._mark("close")

    @classmethod
    def detect(cls, probe: Probe) -> dict[str, str] | None:
        """Return the markers around a list of calls in Python's syntax."""
        if probe.one is None:
            return None
        found = re.search(rf"\[\s*{probe.FIRST}\s*\(", probe.one)
        if found is None:
            return None
        reader = Reader(probe.one, found.start() + 1, len(probe.one))
        try:
            name, arguments = reader.call()
            reader.need("]")
        except Unreadable:
            return None
        before, after = probe.one[: found.start()].strip(), probe.one[reader.position :].strip()
        if name != probe.FIRST or arguments != probe.arguments or bool(before) != bool(after):
            return None
        return {"open": before, "close": after}

    def openers(self) -> tuple[str, ...]:
        """The marker, if there is one; else the list is the whole text."""
        return (self._mark("open"),)

    def begins_call(self, text: str) -> bool | None:
        """A list whose first item is a name and an opening parenthesis is one of calls."""
        if _BEGINS.match(text):
            return True
        return None if _MAY_BEGIN.match(text) else False

    def block(self, region: Region) -> Block | None:
        """Read the calls of a list."""
        text, start, limit = region.text, region.start, region.limit
        if not self._begin:
            return self._list(text, start, limit, None) if _BEGINS.match(text, start) else None
        inner = start + len(self._begin)
        close = text.find(self._end, inner, limit)
        again = text.find(self._begin, inner, limit)
        if close < 0 or 0 <= again < close:
            end = again if again >= 0 else limit
            block = self._list(text, inner, end, None)
            if not block.closed:
                return Block(end, block.calls, closed=False)
            raw = self.marks.plain(text[inner:end]).strip()
            unclosed = ToolCall("", "", {}, raw, f"the calls were not closed with {self.markers['close']}")
            return Block(end, (*block.calls, unclosed), closed=False)
        return Block(close + len(self._end), self._list(text, inner, close, close).calls)

    def _list(self, text: str, start: int, limit: int, close: int | None) -> Block:
        """Read a list; ``close`` is where it must end, None where it ends with its own bracket."""
        reader = Reader(text, start, limit)
        calls: list[ToolCall] = []
        begin = start
        name = ""
        try:
            reader.need("[")
            while not reader.take("]"):
                reader.peek()
                begin = reader.position
                name = Reader(text, begin, limit).name()
                called, arguments = reader.call()
                raw = self.marks.plain(text[begin : reader.position])
                calls.append(ToolCall("", called, self._plain(arguments), raw))
                begin, name = reader.position, ""
                if not reader.take(","):
                    reader.need("]")
                    break
            if close is not None and reader.peek():
                raise Unreadable("there is more text behind the list of calls", at_end=False)
        except Unreadable as error:
            raw = self.marks.plain(text[begin:limit]).strip()
            broken = ToolCall("", name, {}, raw, f"the call cannot be read: {error}")
            return Block(limit, (*calls, broken), closed=False)
        return Block(reader.position, tuple(calls))

    def _plain(self, arguments: dict[str, object]) -> dict[str, object]:
        """Return arguments whose strings spell markers out."""
        return {key: self._spell(value) for key, value in arguments.items()}

    def _spell(self, value: object) -> object:
        if isinstance(value, str):
            return self.marks.plain(value)
        if isinstance(value, list):
            return [self._spell(item) for item in value]
        return self._plain(value) if isinstance(value, dict) else value
