"""Calls with literals as arguments: in Python's syntax, and in Gemma's.

- A list in Python's syntax, ``[f(a=1, b='x'), g()]``, with or without markers around it. Each complete call counts even
  if the list was cut. A list of anything else is content.
- Gemma 4, FunctionGemma: ``<|tool_call>call:f{key:<|"|>text<|"|>,count:3,rows:[1,2]}<tool_call|>``, with tokens as
  quotes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from turnwise.chat.formats.core import Block, ChatFormat, Probe, Region
from turnwise.chat.formats.json_calls import skip_blanks
from turnwise.chat.formats.tagged import coerce
from turnwise.chat.formats.tags import parameter_types
from turnwise.types import Json, ToolCall, ToolSchema

_NAME = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*", re.ASCII)
_NUMBER = re.compile(r"[+-]?(?:\d[\d_]*)?(?:\.\d+|\.)?(?:[eE][+-]?\d+)?")
_WORDS: dict[str, Json] = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0", "\n": ""}
_HEX = {"x": 2, "u": 4, "U": 8}
_DEPTH = 64


class Unreadable(ValueError):
    """No literal or call at a position; ``at_end``: whether the text ended too early."""

    def __init__(self, message: str, *, at_end: bool) -> None:
        super().__init__(message)
        self.at_end = at_end


class Reader:
    """Parser of calls and literals from ``position`` on."""

    __slots__ = ("_end", "_text", "position")

    def __init__(self, text: str, position: int, end: int) -> None:
        self._text = text
        self._end = end
        self.position = position

    def peek(self) -> str:
        """Skip white space and return the next character, empty at the end."""
        while self.position < self._end and self._text[self.position].isspace():
            self.position += 1
        return self._text[self.position] if self.position < self._end else ""

    def take(self, character: str) -> bool:
        """Consume a character if it is the next one."""
        if self.peek() != character:
            return False
        self.position += 1
        return True

    def need(self, character: str) -> None:
        """Consume a character. Raises Unreadable if another one follows."""
        if not self.take(character):
            following = self.peek()
            raise Unreadable(
                f"expected {character!r}, found {following!r}" if following else f"{character!r} is missing",
                at_end=not following,
            )

    def name(self) -> str:
        """Parse a dotted name; empty if there is none."""
        self.peek()
        match = _NAME.match(self._text, self.position, self._end)
        if match is None:
            return ""
        self.position = match.end()
        return match[0]

    def call(self) -> tuple[str, dict[str, Any]]:
        """Parse name and arguments of a call."""
        name = self.name()
        if not name:
            raise Unreadable("a call begins with its name", at_end=not self.peek())
        self.need("(")
        arguments: dict[str, Any] = {}
        while not self.take(")"):
            key = self.name()
            if not key or self.peek() != "=":
                following = self.peek()
                raise Unreadable("arguments are written as name=value", at_end=not following)
            self.need("=")
            arguments[key] = self.value(0)
            if not self.take(","):
                self.need(")")
                break
        return name, arguments

    def value(self, depth: int) -> Json:
        """Parse a literal."""
        if depth > _DEPTH:
            raise Unreadable("it is nested too deeply", at_end=False)
        first = self.peek()
        if first in ("'", '"') and first:
            return self._string(first)
        if first in ("[", "(") and first:
            return self._items("]" if first == "[" else ")", depth)
        if first == "{":
            return self._mapping(depth)
        word = self.name()
        if word:
            if word not in _WORDS:
                raise Unreadable(f"{word!r} is not a literal", at_end=self.position >= self._end)
            return _WORDS[word]
        return self._number()

    def _items(self, close: str, depth: int) -> list[Json]:
        self.position += 1
        items: list[Json] = []
        while not self.take(close):
            items.append(self.value(depth + 1))
            if not self.take(","):
                self.need(close)
                break
        return items

    def _mapping(self, depth: int) -> dict[str, Json]:
        self.position += 1
        mapping: dict[str, Json] = {}
        while not self.take("}"):
            key = self._key(depth + 1)
            self.need(":")
            mapping[key] = self.value(depth + 1)
            if not self.take(","):
                self.need("}")
                break
        return mapping

    def _key(self, depth: int) -> str:
        key = self.value(depth)
        if not isinstance(key, str):
            raise Unreadable("keys are strings", at_end=False)
        return key

    def _number(self) -> int | float:
        match = _NUMBER.match(self._text, self.position, self._end)
        text = match[0].replace("_", "") if match else ""
        at_end = self.position + len(match[0] if match else "") >= self._end
        try:
            value: int | float = int(text) if text.lstrip("+-").isdigit() else float(text)
        except ValueError:
            raise Unreadable("expected a value", at_end=at_end) from None
        if value in (float("inf"), float("-inf")):
            raise Unreadable(f"{text} is too large", at_end=False)
        self.position += len(match[0]) if match else 0
        return value

    def _string(self, quote: str) -> str:
        triple = quote * 3
        close = triple if self._text.startswith(triple, self.position) else quote
        position = self.position + len(close)
        pieces: list[str] = []
        while position < self._end:
            if self._text.startswith(close, position):
                self.position = position + len(close)
                return "".join(pieces)
            character = self._text[position]
            if character != "\\":
                pieces.append(character)
                position += 1
                continue
            piece, position = self._escape(position + 1)
            pieces.append(piece)
        raise Unreadable("the string is not closed", at_end=True)

    def _escape(self, position: int) -> tuple[str, int]:
        """Return the character of an escape sequence and the next position; unknown ones stay as they are."""
        if position >= self._end:
            raise Unreadable("the string is not closed", at_end=True)
        kind = self._text[position]
        if kind in _HEX:
            digits = self._text[position + 1 : min(position + 1 + _HEX[kind], self._end)]
            try:
                number = int(digits, 16)
            except ValueError:
                return "\\" + kind, position + 1
            if len(digits) == _HEX[kind] and number < 0x110000 and not 0xD800 <= number < 0xE000:
                return chr(number), position + 1 + _HEX[kind]
            return "\\" + kind, position + 1
        if kind in "'\"\\":
            return kind, position + 1
        return _ESCAPES.get(kind, "\\" + kind), position + 1


_BEGINS = re.compile(r"\[\s*[A-Za-z_][\w.]*\(", re.ASCII)
_MAY_BEGIN = re.compile(r"\[\s*(?:[A-Za-z_][\w.]*)?\Z", re.ASCII)


class _Literals(ChatFormat):
    """Base of both formats."""

    __slots__ = ("_begin", "_end")

    def __init__(self, markers: Mapping[str, str], added: Mapping[str, int]) -> None:
        super().__init__(markers, added)
        self._begin = self._mark("open")
        self._end = self._mark("close")

    def openers(self) -> tuple[str, ...]:
        """Return the marker, if there is one; else calls are the whole text."""
        return (self._mark("open"),)

    def _plain(self, arguments: dict[str, object]) -> dict[str, object]:
        """Return arguments with the markers in strings spelled out."""
        return {key: self._spell(value) for key, value in arguments.items()}

    def _spell(self, value: object) -> object:
        if isinstance(value, str):
            return self.marks.plain(value)
        if isinstance(value, list):
            return [self._spell(item) for item in value]
        return self._plain(value) if isinstance(value, dict) else value


class Pythonic(_Literals):
    """Calls in Python's syntax."""

    name: ClassVar[str] = "pythonic"
    defaults: ClassVar[Mapping[str, str]] = {"open": "", "close": ""}

    __slots__ = ()

    @classmethod
    def detect(cls, probe: Probe) -> dict[str, str] | None:
        """Return the markers around a list of calls in Python's syntax."""
        if probe.one is None:
            return None
        match = re.search(rf"\[\s*{probe.FIRST}\s*\(", probe.one)
        if match is None:
            return None
        reader = Reader(probe.one, match.start() + 1, len(probe.one))
        try:
            name, arguments = reader.call()
            reader.need("]")
        except Unreadable:
            return None
        prefix, suffix = probe.one[: match.start()].strip(), probe.one[reader.position :].strip()
        if name != probe.FIRST or arguments != probe.arguments or bool(prefix) != bool(suffix):
            return None
        return {"open": prefix, "close": suffix}

    def _unmarked_call(self, content: str, tools: Sequence[ToolSchema]) -> str:
        """Return the calls of tools that begin a line, with or without the bracket of their list; or ``""``."""
        names = "|".join(re.escape(tool.name) for tool in tools)
        match = re.search(rf"^\[?\s*(?:{names})\w*\s*[(=]", content, re.MULTILINE) if names else None
        return content[match.start() :] if match else ""

    def begins_call(self, text: str) -> bool | None:
        """Return whether the first item of a list is a name with an opening parenthesis."""
        if _BEGINS.match(text):
            return True
        return None if _MAY_BEGIN.match(text) else False

    def block(self, region: Region) -> Block | None:
        """Parse the calls of a list."""
        text, start, limit = region.text, region.start, region.limit
        if not self._begin:
            return self._list(text, start, limit, None) if _BEGINS.match(text, start) else None
        inner = start + len(self._begin)
        close = text.find(self._end, inner, limit)
        next_open = text.find(self._begin, inner, limit)
        if close < 0 or 0 <= next_open < close:
            end = next_open if next_open >= 0 else limit
            block = self._list(text, inner, end, None)
            if not block.closed:
                return Block(end, block.calls, closed=False)
            raw = self.marks.plain(text[inner:end]).strip()
            unclosed = ToolCall("", "", {}, raw, f"the calls were not closed with {self.markers['close']}")
            return Block(end, (*block.calls, unclosed), closed=False)
        return Block(close + len(self._end), self._list(text, inner, close, close).calls)

    def _list(self, text: str, start: int, limit: int, close: int | None) -> Block:
        """Parse a list; ``close`` is where it must end, None for at its own bracket."""
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
                raise Unreadable("there is more text after the list of calls", at_end=False)
        except Unreadable as error:
            raw = self.marks.plain(text[begin:limit]).strip()
            broken = ToolCall("", name, {}, raw, f"the call cannot be parsed: {error}")
            return Block(limit, (*calls, broken), closed=False)
        return Block(reader.position, tuple(calls))


_KEY = re.compile(r"[^,:{}\[\]\s]+")
_TOOL = re.compile(r"[\w.-]+")


class _QuotedReader(Reader):
    """Parser of Gemma's literals: keys without quotes, and a token as quote."""

    __slots__ = ("_quote",)

    def __init__(self, text: str, position: int, end: int, quote: str) -> None:
        super().__init__(text, position, end)
        self._quote = quote

    def value(self, depth: int) -> Json:
        """Parse a literal."""
        self.peek()
        if self._text.startswith(self._quote, self.position):
            return self._between_quotes()
        if self.peek() in ("'", '"', "("):
            raise Unreadable(f"texts stand between {self._quote}", at_end=False)
        return super().value(depth)

    def _key(self, depth: int) -> str:
        del depth
        self.peek()
        if self._text.startswith(self._quote, self.position):
            return self._between_quotes()
        match = _KEY.match(self._text, self.position, self._end)
        if match is None:
            raise Unreadable("a key is missing", at_end=not self.peek())
        self.position = match.end()
        return match[0]

    def _between_quotes(self) -> str:
        start = self.position + len(self._quote)
        end = self._text.find(self._quote, start, self._end)
        if end < 0:
            raise Unreadable(f"a text is not closed with {self._quote}", at_end=True)
        self.position = end + len(self._quote)
        return self._text[start:end]


class Gemma(_Literals):
    """Calls in Gemma's notation, each between its own markers."""

    name: ClassVar[str] = "gemma"
    defaults: ClassVar[Mapping[str, str]] = {
        "open": "<|tool_call>",
        "close": "<tool_call|>",
        "before_name": "call:",
        "quote": '<|"|>',
    }

    __slots__ = ()

    @classmethod
    def detect(cls, probe: Probe) -> dict[str, str] | None:
        """Return the markers if the name precedes a brace and a quoted value."""
        pattern = rf"\s*(\S+?)(\w+:){probe.FIRST}\{{(?:.*,)?{probe.KEY}:(\W\S*?\W){probe.VALUE}\3.*\}}(\S+)"
        match = re.match(pattern, probe.one or "", re.DOTALL)
        if match is None or str(probe.NUMBER) not in match[0]:
            return None
        return {"open": match[1], "close": match[4], "before_name": match[2], "quote": match[3]}

    def block(self, region: Region) -> Block | None:
        """Parse one call."""
        text, limit = region.text, region.limit
        inner = region.start + len(self._begin)
        close, next_open = text.find(self._end, inner, limit), text.find(self._begin, inner, limit)
        if close < 0 or 0 <= next_open < close:
            end = next_open if next_open >= 0 else limit
            error = f"the call was not closed with {self.markers['close']}"
            return Block(end, (self._broken(text[inner:end], error),), closed=False)
        return Block(close + len(self._end), (self._read(text, inner, close, region.tools),))

    def _broken(self, inner: str, error: str) -> ToolCall:
        raw = self.marks.plain(inner).strip()
        name = _TOOL.match(raw.removeprefix(self.markers["before_name"]))
        return ToolCall("", name[0] if name else "", {}, raw, error)

    def _read(self, text: str, start: int, end: int, tools: Sequence[ToolSchema]) -> ToolCall:
        begin = skip_blanks(text, start) + len(self.markers["before_name"])
        name = _TOOL.match(text, begin, end)
        if not text.endswith(self.markers["before_name"], start, begin) or name is None:
            return self._broken(text[start:end], f"the call does not begin with {self.markers['before_name']}NAME")
        reader = _QuotedReader(text, name.end(), end, self._mark("quote"))
        try:
            arguments = reader.value(0)
            if not isinstance(arguments, dict):
                raise Unreadable("there is no { behind the name", at_end=False)
            arguments = self._plain(arguments)
            if reader.peek():
                raise Unreadable("there is more text behind the arguments", at_end=False)
        except Unreadable as error:
            return self._broken(text[start:end], self.marks.plain(f"the call cannot be parsed: {error}"))
        types = parameter_types(tools, name[0])
        for key, value in arguments.items():
            # FunctionGemma quotes all values.
            if isinstance(value, str) and types.get(key):
                arguments[key] = coerce(value, types[key])
        return ToolCall("", name[0], arguments, self.marks.plain(text[name.end() : end]).strip())
