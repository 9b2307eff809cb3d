r"""GLM, MiniMax, Qwen 3 Coder and DeepSeek V3.2: calls as tags, with a name, keys and unquoted values.

- GLM: ``<tool_call>f\n<arg_key>k</arg_key>\n<arg_value>v</arg_value>\n</tool_call>``; turns have no closing token.
- MiniMax (a complete invocation counts even if the section was cut):
  ``<minimax:tool_call>\n<invoke name="f">\n<parameter name="k">v</parameter>\n</invoke>\n</minimax:tool_call>``.
- MiniMax M3: ``]<]minimax[>[<invoke name="f">]<]minimax[>[<key>a]<]minimax[>[</key>]<]minimax[>[</invoke>``, with
  nested elements for objects, and ``<item>`` for lists.
- Qwen 3 Coder: ``<tool_call>\n<function=f>\n<parameter=k>\nv\n</parameter>\n</function>\n</tool_call>``.
"""

from __future__ import annotations

import ast
import contextlib
import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from turnwise.chat.formats import tags
from turnwise.chat.formats.core import OUTSIDE_CALLS, Block, ChatFormat, Probe, Region
from turnwise.chat.formats.derive import common_start, first_marker, last_marker, split_added
from turnwise.chat.formats.json_calls import decode_whole
from turnwise.chat.formats.tags import Shape, Tag, choices_of, parameter_types, shapes, type_of, types_of
from turnwise.chat.tokens import Marks
from turnwise.types import Json, ToolCall, ToolSchema


def coerce(text: str, types: frozenset[str]) -> Json:
    """Return the value of a parameter's text; without known types, JSON is parsed and all else is text."""
    if types == {"string"}:
        return text
    stripped = text.strip()
    try:
        value = decode_whole(stripped)
    except ValueError:
        value = _parse_word(stripped, types)
    if not types:
        return value if value is not _NOTHING and not isinstance(value, str) else text
    if value is not _NOTHING and not isinstance(value, str):
        converted = _as_type(value, types)
        if converted is not _NOTHING:
            return converted
    return text


_NOTHING = object()


def _parse_word(text: str, types: frozenset[str]) -> Json:
    word = text.lower()
    if "boolean" in types and word in ("true", "false"):
        return word == "true"
    if "null" in types and word in ("null", "none"):
        return None
    if types & {"object", "array"}:
        # Models that are trained on Python write its literals. What is not JSON either stays text.
        with contextlib.suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            return decode_whole(json.dumps(ast.literal_eval(text), allow_nan=False))
    return _NOTHING


def _as_type(value: Json, types: frozenset[str]) -> Json:
    """Return the value in one of the allowed types, or ``_NOTHING``."""
    kind = type_of(value)
    if kind in types:
        return value
    if kind == "integer" and "number" in types:
        return value
    if kind == "number" and "integer" in types and math.isfinite(value) and value == math.floor(value):
        return int(value)
    return _NOTHING


KEYS = ("section_open", "section_close", "open", "close", "head", "first", "value", "json", "next", "end", "empty")
"""Parts of the grammar: a call is ``open head NAME first KEY value VALUE next KEY value VALUE end close``, or
``open head NAME empty close``; all calls may be between ``section_open`` and ``section_close``. Where ``json`` is not
empty, it stands for ``value`` before all but strings."""
_ITEM, _DEPTH = "item", 64
_MARK = "\ud800-\udbff"
_TAG_START = re.compile(rf"[{_MARK}]|</?[^\s<>=\"'{_MARK}]+")


def derive(probe: Probe) -> dict[str, str] | None:
    """Return the grammar of a template, or None if it writes calls in another way."""
    positions = _positions(probe)
    if positions is None or probe.bare is None or probe.one is None:
        return None
    name, key, value, number_key, number = positions
    one = probe.one
    prefix = one[:name]
    suffix = one[number + len(str(probe.NUMBER)) :]
    first = one[name + len(probe.FIRST) : key]
    separator = one[key + len(probe.KEY) : value]
    following = one[value + len(probe.VALUE) : number_key]
    other_separator = one[number_key + len(probe.NUMBER_KEY) : number]
    typed = separator != other_separator
    if not (first and separator and following) or first.startswith("{"):
        return None
    if typed and not common_start(separator, other_separator).strip():
        return None
    if probe.FIRST not in probe.bare:
        return None
    empty = probe.bare.split(probe.FIRST, 1)[1]
    # A tag with an attribute for the name is the call's opening marker itself.
    opener = first_marker(prefix, probe.added) or prefix.strip()
    closer = last_marker(suffix, probe.added)
    if not opener or not closer:
        return None
    grammar = {"section_open": "", "section_close": "", "open": opener, "close": closer}
    prefix, suffix, empty = _behind(prefix, opener), _ahead(suffix, closer), _ahead(empty, closer)
    if probe.two is not None and probe.two.count(opener) == 1:
        # One pair of markers around all calls: each call has its own pair within.
        inner = last_marker(suffix, probe.added)
        head = prefix.strip()
        if not inner or not head:
            return None
        grammar |= {"section_open": opener, "section_close": closer, "open": head, "close": inner}
        prefix, suffix, empty = "", _ahead(suffix, inner), _ahead(empty, inner)
    return grammar | {
        "head": prefix.lstrip(),
        "first": first,
        "value": separator,
        "json": other_separator if typed else "",
        "next": following,
        "end": suffix,
        "empty": empty,
    }


def _positions(probe: Probe) -> list[int] | None:
    """Return the positions of name, key, value, key and value in a call, in this order, or None."""
    if probe.one is None:
        return None
    words = [probe.FIRST, probe.KEY, probe.VALUE, probe.NUMBER_KEY, str(probe.NUMBER)]
    if any(probe.one.count(word) != 1 for word in words):
        return None
    positions = [probe.one.index(word) for word in words]
    quoted = probe.one[positions[2] - 1 : positions[2]] in ('"', "'")
    return positions if positions == sorted(positions) and not quoted else None


def _behind(text: str, marker: str) -> str:
    return text.lstrip().removeprefix(marker)


def _ahead(text: str, marker: str) -> str:
    return text.rstrip().removesuffix(marker)


def _loose(text: str) -> str:
    """Return a pattern for a text, with any white space where it has some, and between two tags."""
    return r"\s*".join(re.escape(part) for part in re.split(rf"\s+|(?<=[>{_MARK}])(?=[<{_MARK}])", text))


def _padded(text: str, *, at_end: bool) -> str:
    """Return a pattern for a text adjacent to a value: white space on that side is the template's or none."""
    core = text.rstrip() if at_end else text.lstrip()
    pad = text[len(core) :] if at_end else text[: len(text) - len(core)]
    loose = f"(?:{re.escape(pad)})?" if pad else ""
    return _loose(core) + loose if at_end else loose + _loose(core)


class CallParser(ABC):
    """Parser of calls between markers of their own, alone or in one section."""

    def __init__(self, markers: Mapping[str, str], marks: Marks) -> None:
        self.plain = marks.plain
        self.open, self.close = marks.of(markers["open"]), marks.of(markers["close"])
        section = (marks.of(markers["section_open"]), marks.of(markers["section_close"]))
        self.section = section if section[0] else None
        self._markers = markers

    @abstractmethod
    def read(self, inner: str, tools: Sequence[ToolSchema]) -> ToolCall:
        """Parse the text between a call's own markers."""

    def one(self, text: str, start: int, limit: int, tools: Sequence[ToolSchema]) -> Block:
        """Parse the call whose opening marker is at ``start``."""
        inner = start + len(self.open)
        close = text.find(self.close, inner, limit)
        next_open = text.find(self.open, inner, limit)
        if close < 0 or 0 <= next_open < close:
            end = next_open if next_open >= 0 else limit
            broken = self.read(text[inner:end], tools)
            error = f"the call was not closed with {self.plain(self.close)}"
            return Block(end, (ToolCall("", broken.name, {}, broken.raw, error),), closed=False)
        return Block(close + len(self.close), (self.read(text[inner:close], tools),))

    def block(self, region: Region) -> Block:
        """Parse the block at the start of a region: one call, or a section of them."""
        text, start, limit, tools = region.text, region.start, region.limit, region.tools
        if not self.section:
            return self.one(text, start, limit, tools)
        opener, closer = self.section
        position = start + len(opener)
        calls: list[ToolCall] = []
        while True:
            begin = text.find(self.open, position, limit)
            close = text.find(closer, position, limit)
            between = text[position : min((at for at in (begin, close) if at >= 0), default=position)]
            if between.strip():
                calls.append(ToolCall("", "", {}, self.plain(between).strip(), OUTSIDE_CALLS))
            if begin < 0 or 0 <= close < begin:
                if close >= 0:
                    return Block(close + len(closer), tuple(calls))
                raw = self.plain(text[position:limit]).strip()
                unclosed = ToolCall("", "", {}, raw, f"the calls were not closed with {self.plain(closer)}")
                return Block(limit, (*calls, unclosed), closed=False)
            block = self.one(text, begin, limit if close < 0 else close, tools)
            calls += block.calls
            position = block.end
            if not block.closed and block.end >= limit:
                return Block(limit, tuple(calls), closed=False)


class Tagged(CallParser):
    """Parser of the inside of one call, by a grammar (:data:`KEYS`)."""

    def __init__(self, markers: Mapping[str, str], marks: Marks) -> None:
        super().__init__(markers, marks)
        part = {key: marks.of(markers[key]) for key in KEYS}
        self.head = part["head"]
        self._head = re.compile(r"\s*" + _loose(part["head"]))
        # White space before these belongs to a name or key, which is stripped: a pattern that begins with it would
        # take quadratic time on long runs of blanks.
        self._first = re.compile(_loose(part["first"].lstrip()))
        value, typed = (_padded(part[key].lstrip(), at_end=True) for key in ("value", "json"))
        self._value = re.compile(f"{value}|(?P<json>{typed})" if typed else value)
        self._next = re.compile(_padded(part["next"], at_end=False))
        self._end = re.compile(_padded(part["end"], at_end=False) + r"\s*\Z")
        # The tags around keys and values: within a name, key or value they show that another tag is missing.
        tag_starts = sorted(set(_TAG_START.findall(part["value"] + part["next"])))
        self._walls = re.compile("|".join(re.escape(tag) + r"(?![\w:.-])" for tag in tag_starts) or "(?!)")
        self._empty = re.compile(_loose(part["empty"].strip()) + r"\Z")

    def read(self, inner: str, tools: Sequence[ToolSchema]) -> ToolCall:
        """Parse the text between a call's own markers."""
        plain = self.plain
        raw = plain(inner).strip()
        head = self._head.match(inner)
        if head is None:
            return ToolCall("", "", {}, raw, f"the call does not begin with {self._markers['head'].strip()!r}")
        first = self._first.search(inner, head.end())
        if first is None:
            rest = inner[head.end() :].rstrip()
            empty = self._empty.search(rest)
            if empty is None:
                return ToolCall("", "", {}, raw, "the call's tags are not closed")
            return self._named(plain(rest[: empty.start()]).strip(), {}, raw)
        name = plain(inner[head.end() : first.start()]).strip()
        arguments: dict[str, Json] = {}
        types = parameter_types(tools, name)
        position = first.end()
        if self._walls.search(inner, head.end(), first.start()):
            return ToolCall("", "", {}, raw, "the call's tags are not closed")
        while True:
            value = self._value.search(inner, position)
            if value is None or self._walls.search(inner, position, value.start()):
                return ToolCall("", name, {}, raw, "a parameter has no value")
            key = plain(inner[position : value.start()]).strip()
            if any(mark in self._markers["value"] for mark in "<>\"'=\n" if mark in key):
                return ToolCall("", name, {}, raw, "a parameter has no value")
            following = self._next.search(inner, value.end())
            stop = following or self._end.search(inner, value.end())
            if stop is None or self._walls.search(inner, value.end(), stop.start()):
                return ToolCall("", name, {}, raw, f"the parameter {key!r} is not closed")
            text = plain(inner[value.end() : stop.start()])
            try:
                arguments[key] = self._read_value(value, text, types.get(key, frozenset()))
            except ValueError as error:
                return ToolCall("", name, {}, raw, f"the parameter {key!r} is not valid JSON: {error}")
            if following is None:
                return self._named(name, arguments, raw)
            position = following.end()

    def _read_value(self, separator: re.Match[str], text: str, types: frozenset[str]) -> Json:
        if not self._markers["json"]:
            return coerce(text, types)
        return decode_whole(text) if separator["json"] else text

    def without_opener(self, region: Region) -> Block | None:
        """Parse a call of an offered tool whose opening marker is missing: it begins with its head."""
        text, start, limit = region.text, region.start, region.limit
        if limit < len(text) or text[:start].rstrip().endswith(self.plain(self.open)):
            # Closed reasoning mentions a call; a marker that is spelled out of ordinary tokens opens none.
            return None
        ends = (text.find(marker, start + 1, limit) for marker in (self.close, self.open, self.head))
        end = min((at for at in ends if at >= 0), default=limit)
        call = self.read(text[start:end], region.tools)
        if all(tool.name != call.name for tool in region.tools):
            return None
        return Block(end + len(self.close) * text.startswith(self.close, end), (call,))

    @staticmethod
    def _named(name: str, arguments: dict[str, Json], raw: str) -> ToolCall:
        if not name or re.search(r"\s", name):
            return ToolCall("", "", {}, raw, "the call has no name")
        return ToolCall("", name, arguments, raw)


def tagged_calls(
    markers: Mapping[str, str], added: Mapping[str, int], tools: Sequence[ToolSchema], limit: int | None
) -> Tag:
    """Return the tag of 1 to ``limit`` calls, by a grammar (see :data:`KEYS`)."""
    grammar = _Grammar(markers, added)
    inner = tags.either(*(tags.sequence(tags.text(tool.name), grammar.parameters(tool)) for tool in tools))
    opening = [grammar.tag("open")]
    if markers["head"]:
        # An element that holds the name may be on its own line.
        opening += [tags.BLANK, grammar.tag("head")]
    calls = tags.repeated(tags.sequence(*opening, inner, grammar.tag("close")), tags.BLANK, limit)
    if not markers["section_open"]:
        return calls
    return tags.sequence(grammar.tag("section_open"), tags.BLANK, calls, tags.BLANK, grammar.tag("section_close"))


class _Grammar:
    """Writer of parameter tags: ``first KEY value VALUE wall``, then ``next`` and another one, or ``end``."""

    __slots__ = ("_added", "_markers", "_wall", "_word")

    def __init__(self, markers: Mapping[str, str], added: Mapping[str, int]) -> None:
        self._markers = markers
        self._added = added
        # The text after a value, whether or not another parameter follows.
        wall = ""
        for one, other in zip(*(split_added(markers[key], added) for key in ("next", "end")), strict=False):
            is_token = one in added or other in added
            wall += (one if one == other else "") if is_token else common_start(one, other)
            if one != other:
                break
        self._wall = wall
        self._word = (wall.split() or [""])[0]

    def tag(self, key: str) -> Tag:
        """Return the tag of a part; of ``next`` and ``end``, what follows a value's wall."""
        text = self._markers[key]
        return tags.marked(text[len(self._wall) :] if key in ("next", "end") else text, self._added)

    def parameters(self, tool: ToolSchema) -> Tag:
        return tags.either(*(self._shape(tool, shape) for shape in shapes(tool.parameters)))

    def _shape(self, tool: ToolSchema, shape: Shape) -> Tag:
        more_tag, empty_tag = self.tag("end"), self.tag("empty")
        for key, schema in reversed(shape.properties.items()):
            wall = tags.marked(self._wall, self._added)
            value = self._value(tool, schema)
            typed = bool(self._markers["json"]) and value["type"] == "json_schema"
            pair = (tags.text(key), self.tag("json" if typed else "value"), value, wall)
            first = tags.sequence(self.tag("first"), *pair, more_tag)
            more = tags.sequence(self.tag("next"), *pair, more_tag)
            if key in shape.required:
                more_tag, empty_tag = more, first
            else:
                more_tag, empty_tag = tags.either(more, more_tag), tags.either(first, empty_tag)
        return empty_tag

    def _value(self, tool: ToolSchema, schema: Any) -> Tag:
        """Return the tag of a value: raw text for strings, JSON for anything else."""
        choices = choices_of(schema, tool.parameters) or []
        if any(isinstance(choice, str) for choice in choices):
            return tags.either(
                *(tags.text(choice if isinstance(choice, str) else json.dumps(choice)) for choice in choices)
            )
        types = types_of(schema, tool.parameters)
        if not types or "string" in types:
            return tags.free(self._word)
        shared: dict[str, Json] = {
            word: tool.parameters[word] for word in ("$defs", "definitions") if word in tool.parameters
        }
        return tags.json_value({**shared, **schema}, (self._word,))


class TaggedFormat(ChatFormat):
    """Base of the formats whose calls are tags with unquoted values."""

    __slots__ = ("_call",)

    def __init__(self, markers: Mapping[str, str], added: Mapping[str, int]) -> None:
        super().__init__(markers, added)
        self._call = Tagged(self.markers, self.marks)

    def openers(self) -> tuple[str, ...]:
        """Return the opening marker of the section, or of a call where calls share no section."""
        return (self._mark("section_open") or self._mark("open"),)

    def calls_tag(self, tools: Sequence[ToolSchema], limit: int | None) -> Tag | None:
        """Return the tag of calls, with parameters in the order of the schema."""
        return tagged_calls(self.markers, self._added, tools, limit)

    def block(self, region: Region) -> Block | None:
        """Parse one call, or the section."""
        return self._call.block(region)


class Glm(TaggedFormat):
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
        "json": "",
        "next": "</arg_value>\n<arg_key>",
        "end": "</arg_value>\n",
        "empty": "\n",
    }
    extra_stops: ClassVar[tuple[str, ...]] = ("<|observation|>", "<|user|>")

    @classmethod
    def detect(cls, probe: Probe) -> dict[str, str] | None:
        """Return the grammar if the name follows the opening marker and calls share no section."""
        markers = derive(probe)
        return markers if markers and not markers["head"] and not markers["section_open"] else None


class MiniMax(TaggedFormat):
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
        "json": "",
        "next": '</parameter>\n<parameter name="',
        "end": "</parameter>\n",
        "empty": '">\n',
    }

    @classmethod
    def detect(cls, probe: Probe) -> dict[str, str] | None:
        """Return the grammar if one pair of markers encloses all calls."""
        markers = derive(probe)
        return markers if markers and markers["section_open"] else None


class Qwen3Coder(TaggedFormat):
    """Calls as tags that contain the names of function and parameters."""

    name: ClassVar[str] = "qwen3_coder"
    defaults: ClassVar[Mapping[str, str]] = {
        "section_open": "",
        "section_close": "",
        "open": "<tool_call>",
        "close": "</tool_call>",
        "head": "<function=",
        "first": ">\n<parameter=",
        "value": ">\n",
        "json": "",
        "next": "\n</parameter>\n<parameter=",
        "end": "\n</parameter>\n</function>\n",
        "empty": ">\n</function>\n",
    }

    @classmethod
    def detect(cls, probe: Probe) -> dict[str, str] | None:
        """Return the grammar if a tag precedes the name and calls share no section."""
        markers = derive(probe)
        return markers if markers and markers["head"] and not markers["section_open"] else None

    def openers(self) -> tuple[str, ...]:
        """Return the opening marker of a call, and its head: models leave the marker out at times."""
        return (*super().openers(), self._mark("head"))

    def block(self, region: Region) -> Block | None:
        """Parse one call."""
        if region.text.startswith(self._call.open, region.start):
            return super().block(region)
        return self._call.without_opener(region)


class NestedCall(Tagged):
    """Parser of one call whose arguments are elements named by their keys, nested for objects and lists."""

    def __init__(self, markers: Mapping[str, str], marks: Marks) -> None:
        super().__init__(markers, marks)
        self._token = marks.of(markers["token"])
        self._element_tag = re.compile(re.escape(self._token) + r"<(/?)([^<>\s/]+)>")

    def read(self, inner: str, tools: Sequence[ToolSchema]) -> ToolCall:
        """Parse a call from its name on."""
        raw = self.plain(inner).strip()
        name, quote, body = inner.partition('">')
        if not quote or not name or self._token in name or re.search(r'[\s<>"]', name):
            return ToolCall("", "", {}, raw, "the call has no name")
        try:
            value, end = self._read_element(body, 0, 0, parameter_types(tools, name))
            if end < len(body) or (isinstance(value, str) and value.strip()) or isinstance(value, list):
                raise ValueError("there is text outside the arguments")
        except ValueError as error:
            return ToolCall("", name, {}, raw, f"the call cannot be parsed: {error}")
        return ToolCall("", name, value if isinstance(value, dict) else {}, raw)

    def _read_element(
        self, text: str, position: int, depth: int, types: Mapping[str, frozenset[str]]
    ) -> tuple[Json, int]:
        """Return the value from ``position`` on, and where it ends: at a closing tag, or the end of the text."""
        if depth > _DEPTH:
            raise ValueError("it is nested too deeply")
        pairs: list[tuple[str, Json]] = []
        while True:
            at = text.find(self._token, position)
            end = at if at >= 0 else len(text)
            between, tag = text[position:end], self._element_tag.match(text, end)
            if at >= 0 and tag is None:
                raise ValueError("a tag is missing")
            opens = tag is not None and not tag[1]
            if between.strip() and (pairs or opens):
                raise ValueError(f"there is text beside elements: {self.plain(between).strip()[:40]!r}")
            if tag is None or not opens:
                return (self._group(pairs) if pairs else self.plain(between)), end
            value, end = self._read_element(text, tag.end(), depth + 1, {})
            closing = self._element_tag.match(text, end)
            if closing is None or closing[2] != tag[2]:
                raise ValueError(f"<{tag[2]}> is not closed")
            pairs.append((tag[2], coerce(value, types.get(tag[2], frozenset())) if isinstance(value, str) else value))
            position = closing.end()

    @staticmethod
    def _group(pairs: list[tuple[str, Json]]) -> Json:
        """Return an object, or the list that items are."""
        if all(key == _ITEM for key, _ in pairs):
            return [value for _, value in pairs]
        if len({key for key, _ in pairs}) < len(pairs):
            raise ValueError("a key occurs twice")
        return dict(pairs)


class NestedTags(TaggedFormat):
    """Calls in one section, with nested elements as arguments, each tag behind a token."""

    name: ClassVar[str] = "nested_tags"
    defaults: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(KEYS, ""),
        "token": "]<]minimax[>[",
        "section_open": "]<]minimax[>[<tool_call>",
        "section_close": "]<]minimax[>[</tool_call>",
        "open": ']<]minimax[>[<invoke name="',
        "close": "]<]minimax[>[</invoke>",
    }

    def __init__(self, markers: Mapping[str, str], added: Mapping[str, int]) -> None:
        super().__init__(markers, added)
        self._call = NestedCall(self.markers, self.marks)

    @classmethod
    def detect(cls, probe: Probe) -> dict[str, str] | None:
        """Return the markers if an element named by the key holds the value, and one section all calls."""
        element = re.search(rf"(\S+?)<{probe.KEY}>{probe.VALUE}(\S+?)</{probe.KEY}>", probe.one or "")
        if element is None or element[1].rpartition('">')[2] != element[2] or element[2] not in probe.added:
            return None
        token = re.escape(element[2])
        pattern = rf'\s*({token}<\w+>)\s*({token}<\w+ name="){probe.FIRST}">.*({token}</\w+>)\s*({token}</\w+>)'
        match = re.match(pattern, probe.one or "", re.DOTALL)
        if match is None:
            return None
        section_open, opener, closer, section_close = match.groups()
        shared = {"section_open": section_open, "section_close": section_close, "open": opener, "close": closer}
        return {**cls.defaults, **shared, "token": element[2]}

    def calls_tag(self, tools: Sequence[ToolSchema], limit: int | None) -> Tag | None:  # noqa: ARG002
        """Return None: there is no grammar."""
        return None
