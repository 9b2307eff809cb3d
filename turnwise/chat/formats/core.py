"""The contract of a chat format, which parses reasoning and tool calls of a sampled turn.

Rules for every format:

- A call counts once its own block is closed, even if the turn is cut later.
- An unfinished call at a cut is neither call nor content.
- Any other unusable call (not JSON, no name, unclosed although the model stopped, inside reasoning) is a
  :class:`ToolCall` with ``error``.
- Reasoning is open where prompt or completion opened it without a closing marker after it; a marker that is an added
  token counts only where its *id* occurs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from turnwise.chat.formats import tags
from turnwise.chat.formats.json_calls import bare_call, skip_blanks
from turnwise.chat.formats.live import Live, LiveScan
from turnwise.chat.formats.tags import Tag
from turnwise.chat.tokens import Marks
from turnwise.types import Guide, Message, ToolCall, ToolSchema

OPEN, CLOSE = "reasoning_open", "reasoning_close"
TEXT_OPEN = "text_open"
INSIDE_REASONING = "the call stands inside the reasoning, where calls are not executed"
OUTSIDE_CALLS = "the section of calls holds text outside its calls"


@dataclass(frozen=True, slots=True)
class Probe:
    """Texts that a template writes for known messages; None where it refuses one.

    Each spans from the end of the generation prompt to the close of the turn, exclusive, without the beginning that
    plain answers share (an empty reasoning block).

    Attributes:
        added: Added tokens of the tokenizer.
        answer: Content ``TEXT``, from the generation prompt on.
        reason: The same with reasoning ``THOUGHT``, from the end of the last user message on.
        bare: A call of ``FIRST`` without arguments.
        one: A call of ``FIRST`` with ``{KEY: VALUE, NUMBER_KEY: NUMBER}``.
        two: The same call and one of ``SECOND`` with ``{KEY: VALUE}``.
        call_close: The added token that ends a turn with calls, or None.
    """

    added: Mapping[str, int]
    answer: str
    reason: str | None
    bare: str | None
    one: str | None
    two: str | None
    ids: tuple[str, str]
    call_close: str | None

    TEXT: ClassVar[str] = "qzanswer"
    THOUGHT: ClassVar[str] = "qzthought"
    FIRST: ClassVar[str] = "qzfirst"
    SECOND: ClassVar[str] = "qzsecond"
    KEY: ClassVar[str] = "qzkey"
    VALUE: ClassVar[str] = "qzvalue"
    NUMBER_KEY: ClassVar[str] = "qznum"
    NUMBER: ClassVar[int] = 73019

    @property
    def arguments(self) -> dict[str, str | int]:
        """Arguments of the call of ``FIRST``."""
        return {self.KEY: self.VALUE, self.NUMBER_KEY: self.NUMBER}


@dataclass(frozen=True, slots=True)
class TurnText:
    """A completion as text, with markers as private characters.

    Attributes:
        text: Up to the stop id, exclusive unless it is a marker of the format.
        prefix: The generation prompt.
        opened: Whether reasoning is open at the start.
        stopped: Whether the model stopped (else it was cut).
    """

    text: str
    prefix: str
    opened: bool
    stopped: bool


@dataclass(slots=True)
class Parsed:
    """A parsed turn; ``spans`` are the (start, end) of reasoning in its text, without its markers."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)

    def message(self) -> Message:
        """Return the assistant message."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = self.calls
        return message


@dataclass(frozen=True, slots=True)
class Region:
    """The part of a turn in which a block is parsed.

    Attributes:
        text: The turn with its markers as private characters.
        start: Position of the opener, or of the first character for formats without openers.
        limit: Where the block must have ended.
        tools: Their schemas give the types of values.
    """

    text: str
    start: int
    limit: int
    tools: Sequence[ToolSchema]


@dataclass(frozen=True, slots=True)
class Block:
    """A parsed block of calls: its end, its calls, and whether it was closed."""

    end: int
    calls: tuple[ToolCall, ...]
    closed: bool = True


class ChatFormat(ABC):
    """One syntax of tool calls. Subclasses set ``name``, detect their markers and parse a block.

    Attributes:
        name: Value of the config key ``format``.
        defaults: Markers for templates that do not show their own.
        extra_stops: Stop tokens besides those of the template.
        whole_turn: Whether the format parses reasoning itself, without a pair of markers.
        ends: Roles of the markers behind a call's first part: one behind text shows a call that was not opened.
        closers: Those markers, if they are tags or added tokens.
        bare: Whether calls may be the whole text, without an opening marker.
        markers: Marker strings by their role in the format.
    """

    name: ClassVar[str]
    defaults: ClassVar[Mapping[str, str]] = {}
    extra_stops: ClassVar[tuple[str, ...]] = ()
    whole_turn: ClassVar[bool] = False
    ends: ClassVar[tuple[str, ...]] = ("section_close", "close")

    __slots__ = ("_added", "_close", "_open", "_openers", "bare", "closers", "markers", "marks")

    def __init__(self, markers: Mapping[str, str], added: Mapping[str, int]) -> None:
        self._added = added
        self.markers = dict(markers)
        self.marks = Marks(added, self.markers.values(), self.markers.get(TEXT_OPEN))
        self._open = self._mark(OPEN)
        self._close = self._mark(CLOSE)
        self._openers = tuple(filter(None, self.openers()))
        closers = [self.markers.get(role, "") for role in self.ends] if self._openers else []
        # Other texts, such as brackets, stand in ordinary answers.
        self.closers = tuple(self.marks.of(text) for text in closers if text[:1] == "<" or self.marks.of(text) != text)
        self.bare = not self._openers

    @classmethod
    @abstractmethod
    def detect(cls, probe: Probe) -> dict[str, str] | None:
        """Return the markers with which the template writes calls, or None if it does not use this format."""

    def openers(self) -> tuple[str, ...]:
        """Return the strings that open a block; empty if calls are the whole text."""
        return ()

    def block(self, region: Region) -> Block | None:  # noqa: ARG002 - a format without blocks reads none
        """Parse the block at ``region.start``; None if it is content after all.

        In an unclosed block the closed calls come first, the unfinished one, with its error, last.
        """
        return None

    def _mark(self, key: str) -> str:
        return self.marks.of(self.markers.get(key, ""))

    def call_id(self, call_id: str, name: str, index: int) -> str:  # noqa: ARG002 - most formats write any id
        """Return the id to render for call ``index`` of a message; formats with their own id syntax derive one."""
        return call_id

    @property
    def closing(self) -> str:
        """Marker that closes reasoning; empty if there is none, or the turn's close does it."""
        return self.markers.get(CLOSE, "")

    @property
    def reasons(self) -> bool:
        """Whether turns of this format can hold reasoning."""
        return bool(self._open)

    def opened_by(self, prefix: str) -> bool:
        """Return whether a text, with markers as private characters, leaves reasoning open."""
        if not self._open:
            return False
        opened = prefix.rfind(self._open)
        return opened >= 0 and prefix.find(self._close, opened + len(self._open)) < 0

    def reasoning_open(self, turn: TurnText) -> bool:
        """Return whether reasoning is open at the end of the turn."""
        if not self._open:
            return False
        last_close = turn.text.rfind(self._close)
        if turn.text.rfind(self._open) <= last_close and not (turn.opened and last_close < 0):
            return False
        # An opening marker inside a call opens nothing, which only a walk over the turn can tell.
        scan = _Scan(self, turn, (), (self._open, self._close), self._openers)
        scan.run()
        return scan.thinking

    def begins_call(self, text: str) -> bool | None:  # noqa: ARG002 - any text may, where nothing is known
        """Return whether a text begins a call, None while undecided; for streaming formats without openers."""
        return True

    def settled_by(self, prefix: str) -> bool:
        """Return whether a generation prompt closed the turn's reasoning."""
        return bool(self._close) and self._close in prefix

    def live(self, prefix: str) -> Live:
        """Return the incremental parser of a turn after this generation prompt."""
        return LiveScan(
            self.marks,
            (self._open, self._close),
            (*self._openers, *self.closers),
            self.begins_call,
            opened=self.opened_by(prefix),
            settled=self.settled_by(prefix),
            bare=self.bare,
        )

    def calls_tag(self, tools: Sequence[ToolSchema], limit: int | None) -> Tag | None:  # noqa: ARG002
        """Return the tag of 1 to ``limit`` calls of these tools; None if there is no such grammar."""
        return None

    def _text_and_calls_tag(self, calls: Tag) -> Tag:
        """Return the tag of text, calls, or text followed by calls."""
        text = tags.free(*map(self.marks.plain, self._openers))
        return tags.either(text, tags.sequence(text, calls))

    def guide_tag(self, guide: Guide, prefix: str, calls: Tag | None) -> Tag:
        """Return the tag of a turn after generation prompt ``prefix``; ``calls`` is the tag of its calls, if any."""
        markers = [*map(self.marks.plain, self._openers), self.markers.get(OPEN, ""), self.closing]
        body = tags.guided_tag(guide, calls, self._text_and_calls_tag, [marker for marker in markers if marker])
        if not self._open or self.settled_by(prefix):
            return tags.sequence(tags.BLANK, body)
        close = tags.sequence(tags.marked(self.closing, self._added), tags.BLANK)
        thought = tags.sequence(tags.free(*markers), close)
        if self.opened_by(prefix):
            return tags.sequence(thought, body)
        opener = tags.marked(self.markers[OPEN], self._added)
        return tags.sequence(tags.BLANK, tags.optional(tags.sequence(opener, thought)), body)

    def _marked(self, key: str) -> Tag:
        return tags.marked(self.markers[key], self._added)

    def parse(self, turn: TurnText, tools: Sequence[ToolSchema]) -> Parsed:
        """Parse a turn. Never raises, whatever was sampled."""
        parsed = _Scan(self, turn, tools, (self._open, self._close), self._openers).run()
        if not parsed.calls and (call := self._unmarked_call(parsed.content, tools)):
            opener = self.marks.plain(self._openers[0]) if self._openers else ""
            error = f"the call was not opened with {opener}" if opener else "there is text before the call"
            parsed.calls.append(ToolCall("", "", {}, call, error))
        return parsed

    def _unmarked_call(self, content: str, tools: Sequence[ToolSchema]) -> str:
        """Return the end of an answer that is calls without the markers of the format, or ``""``."""
        return bare_call(content, tools)


class _Scan:
    """One scan of a turn: reasoning, blocks, and the text around them; ``thinking``: reasoning is open at the end."""

    def __init__(
        self,
        chat_format: ChatFormat,
        turn: TurnText,
        tools: Sequence[ToolSchema],
        reasoning: tuple[str, str],
        openers: tuple[str, ...],
    ) -> None:
        self._format = chat_format
        self._turn = turn
        self._text = turn.text
        self._tools = tools
        self._marks = reasoning
        self._openers = openers
        self._behind = 0
        self._content: list[str] = []
        self._thoughts: list[str] = []
        self._parsed = Parsed()
        self._settled = turn.opened or chat_format.settled_by(turn.prefix)
        self.thinking = False

    def run(self) -> Parsed:
        text, end = self._text, len(self._text)
        opener, closer = self._marks
        position = 0
        if self._turn.opened:
            position = self._think(0)
        while position < end:
            thought = text.find(opener, position) if opener else -1
            stray = text.find(closer, position) if closer else -1
            start = self._next_block(position, end, (*self._openers, *self._format.closers))
            first = min((at for at in (thought, stray, start) if at >= 0), default=end)
            if first == end:
                self._content.append(text[position:])
                break
            self._content.append(text[position:first])
            if first == thought:
                position = self._think(thought + len(opener))
            elif first == stray:
                self._behind = position = stray + len(closer)
                if not self._parsed.calls and not self._settled:
                    # Closed by the model but never opened: templates parse the text before it as reasoning.
                    self._thoughts += self._content
                    self._content.clear()
                    self._parsed.spans.append((0, first))
                self._settled = True
            else:
                position = self._block(start)
        plain = self._format.marks.plain
        self._parsed.content = plain("".join(self._content)).strip()
        self._parsed.reasoning = plain("".join(self._thoughts)).strip()
        return self._parsed

    def _next_block(self, position: int, limit: int, markers: tuple[str, ...]) -> int:
        starts = [at for at in (self._text.find(marker, position, limit) for marker in markers) if at >= 0]
        if self._format.bare and not self.thinking and not self._parsed.calls and not "".join(self._content).strip():
            start = skip_blanks(self._text, position)
            starts += [start] if start < limit else []
        return min(starts, default=-1)

    def _block(self, start: int) -> int:
        stray = next((closer for closer in self._format.closers if self._text.startswith(closer, start)), "")
        if stray:
            return self._unopened(start, start + len(stray))
        block = self._format.block(Region(self._text, start, len(self._text), self._tools))
        if block is None:
            self._content.append(self._text[start])
            return start + 1
        calls = block.calls
        if not block.closed and block.end >= len(self._text) and not self._turn.stopped:
            calls = calls[:-1]
        self._parsed.calls += calls
        self._behind = max(block.end, start + 1)
        return self._behind

    def _unopened(self, start: int, end: int) -> int:
        """Report a call that is closed but was never opened; its text stays content, which may have been streamed."""
        plain = self._format.marks.plain
        raw = plain(self._text[self._behind : start]).strip()
        self._content.append(self._text[start:end])
        self._behind = end
        if raw:
            error = f"the call before {plain(self._text[start:end])} was not opened with {plain(self._openers[0])}"
            self._parsed.calls.append(ToolCall("", "", {}, raw, error))
        return end

    def _think(self, position: int) -> int:
        text, closer = self._text, self._marks[1]
        close = text.find(closer, position)
        self.thinking = close < 0
        self._settled = True
        limit = len(text) if close < 0 else close
        self._thoughts.append(text[position:limit])
        self._parsed.spans.append((position, limit))
        at = position
        while self._openers and (at := self._next_block(at, limit, self._openers)) >= 0:
            block = self._format.block(Region(text, at, limit, self._tools))
            if block is None:
                at += 1
                continue
            calls = block.calls
            if not block.closed and block.end >= limit and (close >= 0 or not self._turn.stopped):
                # A mention of the marker, or a call that was cut: reasoning text either way.
                calls = calls[:-1]
            self._parsed.calls += [replace(call, error=INSIDE_REASONING) for call in calls]
            at = max(block.end, at + 1)
        self._behind = limit if close < 0 else close + len(closer)
        return self._behind


class Plain(ChatFormat):
    """Text and reasoning without calls."""

    name: ClassVar[str] = "plain"

    __slots__ = ()

    @classmethod
    def detect(cls, probe: Probe) -> dict[str, str] | None:
        """Return no markers if the template drops calls."""
        return {} if probe.one is None or probe.FIRST not in probe.one else None

    def begins_call(self, text: str) -> bool | None:  # noqa: ARG002
        """Return False."""
        return False

    def _unmarked_call(self, content: str, tools: Sequence[ToolSchema]) -> str:  # noqa: ARG002
        return ""
