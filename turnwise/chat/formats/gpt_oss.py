"""gpt-oss (harmony): a turn is a sequence of messages, each with a channel, some with a recipient.

``<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.f
<|constrain|>json<|message|>{...}<|call|>``. The analysis channel is reasoning, a message with a recipient is a call,
everything else is content. A call is closed by the token that ends its message.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Protocol

from turnwise.chat.formats import tags
from turnwise.chat.formats.core import INSIDE_REASONING, ChatFormat, Parsed, Probe, TurnText
from turnwise.chat.formats.derive import split_added
from turnwise.chat.formats.json_calls import named_arguments
from turnwise.chat.formats.live import Kind, Live, StreamedTurn, partial_match_start
from turnwise.chat.formats.tags import Tag
from turnwise.chat.tokens import Marks
from turnwise.types import Guide, ToolCall, ToolSchema

_RECIPIENT = re.compile(r"to=(\S+)")


class GptOss(ChatFormat):
    """Messages with channels."""

    name: ClassVar[str] = "gpt_oss"
    defaults: ClassVar[Mapping[str, str]] = {
        "start": "<|start|>",
        "channel": "<|channel|>",
        "message": "<|message|>",
        "end": "<|end|>",
        "call": "<|call|>",
        "return": "<|return|>",
        "constrain": "<|constrain|>",
        "analysis": "analysis",
        "recipient": "functions.",
    }
    extra_stops: ClassVar[tuple[str, ...]] = ("<|call|>", "<|return|>")
    whole_turn: ClassVar[bool] = True

    __slots__ = ("_channel", "_ends", "_message", "_split", "_start")

    def __init__(self, markers: Mapping[str, str], added: Mapping[str, int]) -> None:
        super().__init__(markers, added)
        self._start, self._channel, self._message = self._mark("start"), self._mark("channel"), self._mark("message")
        self._ends = tuple(self._mark(key) for key in ("end", "call", "return"))
        self._split = re.compile("|".join(map(re.escape, (self._start, *self._ends))))

    @classmethod
    def detect(cls, probe: Probe) -> dict[str, str] | None:
        """Return the markers if reasoning, calls and answers are messages with a channel."""
        answer = split_added(probe.answer.rstrip(), probe.added)
        reason = split_added((probe.reason or "").rstrip(), probe.added)
        call = split_added(probe.one or "", probe.added)
        if len(answer) != 5 or answer[3] != probe.TEXT or probe.THOUGHT not in reason or not call:
            return None
        channel, _, message, _, stop = answer
        at = reason.index(probe.THOUGHT)
        # start ROLE channel CHANNEL message THOUGHT end start ROLE channel CHANNEL message TEXT stop
        if len(reason[at:]) != 9 or at < 3 or reason[at - 3] != channel or reason[at + 4] != channel:
            return None
        recipient = re.match(rf"\s*to=(\S*?){probe.FIRST}$", call[0])
        expected = {channel, message, stop, reason[at + 1], reason[at + 2], probe.call_close}
        if recipient is None or len(call) < 4 or not expected <= set(probe.added):
            return None
        return {
            **cls.defaults,
            "channel": channel,
            "message": message,
            "return": stop,
            "end": reason[at + 1],
            "start": reason[at + 2],
            "call": probe.call_close or "",
            "analysis": reason[at - 2].strip(),
            "recipient": recipient[1],
        }

    @property
    def reasons(self) -> bool:
        """Return whether there is an analysis channel."""
        return True

    def opened_by(self, prefix: str) -> bool:
        """Return whether a generation prompt ends inside a reasoning message."""
        header, _, _, closed = self._last_message(prefix)
        return not closed and self._reasons(header)

    def reasoning_open(self, turn: TurnText) -> bool:
        """Return whether the turn ends inside a reasoning message."""
        header, body, ended_by, _ = self._last_message(self._with_prefix(turn))
        ends = (None, self._mark("return")) if turn.stopped else (None,)
        return self._reasons(header) and body is not None and ended_by in ends

    def calls_tag(self, tools: Sequence[ToolSchema], limit: int | None) -> Tag | None:  # noqa: ARG002
        """Return the tag of one call, whose end is the turn's; the recipient may precede or follow the channel."""
        constrain = self.markers["constrain"]
        marked = [tags.marked(constrain, self._added)] if constrain in self._added else []
        after_channel = tags.sequence(tags.text(" "), *marked, tags.text("json"), self._marked("message"))
        templates = tags.sequence(self._marked("channel"), tags.text("commentary json"), self._marked("message"))
        to = [tags.text(f" to={self.markers['recipient']}{tool.name}") for tool in tools]
        arguments = [tags.arguments(tool, self._controls()) for tool in tools]
        return tags.either(
            tags.sequence(
                self._marked("channel"),
                tags.text("commentary"),
                tags.either(
                    *(tags.sequence(name, after_channel, body) for name, body in zip(to, arguments, strict=True))
                ),
            ),
            *(tags.sequence(name, templates, body) for name, body in zip(to, arguments, strict=True)),
        )

    def guide_tag(self, guide: Guide, prefix: str, calls: Tag | None) -> Tag:
        """Return the tag of a turn: reasoning messages, then the constrained one."""
        channel, message = self._marked("channel"), self._marked("message")
        final = (channel, tags.text("final"), message)

        def beside(calls: Tag) -> Tag:
            return tags.either(tags.sequence(*final, tags.free(*self._controls())), calls)

        if guide.schema is None or (calls is not None and not guide.text):
            body = tags.guided_tag(guide, calls, beside, ())
        else:
            schema_turn = tags.sequence(*final, tags.json_value(guide.schema, self._controls()))
            body = schema_turn if calls is None else tags.either(schema_turn, calls)
        role = tags.text(
            self.marks.plain(self._open_message(prefix)).removeprefix(self.markers["start"]) or "assistant"
        )
        next_message = (self._marked("end"), self._marked("start"), role)
        thought = tags.free(*self._controls())
        thoughts = tags.star(
            tags.sequence(channel, tags.text(self.markers["analysis"]), message, thought, *next_message)
        )
        return tags.sequence(thoughts, body)

    def _controls(self) -> list[str]:
        """Return the markers, which text must not contain."""
        return [marker for marker in self.markers.values() if marker in self._added]

    def live(self, prefix: str) -> Live:
        """Return the incremental parser of a turn after this generation prompt."""
        ends = (self._start, *self._ends)
        return _LiveMessages(self.marks, self._open_message(prefix), self._split, ends, self._message, self._kind)

    def _kind(self, header: str, *, has_body: bool, first: bool) -> Kind | None:
        """Return the kind of a message by its header, None for a call; ``first``: it is the first of the turn."""
        if self._reasons(header):
            return "reasoning" if has_body else None
        recipient = _RECIPIENT.search(self.marks.plain(header))
        if recipient is not None and recipient[1] != "assistant":
            return None
        if recipient is None and self._mentions_tool(header):
            return None
        return "text" if has_body or (first and self._channel not in header) else None

    def _open_message(self, prefix: str) -> str:
        start = prefix.rfind(self._start)
        return prefix[start:] if start >= 0 else ""

    def _with_prefix(self, turn: TurnText) -> str:
        return self._open_message(turn.prefix) + turn.text

    def _messages(self, text: str) -> list[tuple[str, str | None, str | None]]:
        """Return (header, body or None, end marker or None) of each message of a text."""
        messages: list[tuple[str, str | None, str | None]] = []
        position = 0
        while position < len(text):
            end = self._split.search(text, position + (1 if text.startswith(self._start, position) else 0))
            stop = end.start() if end else len(text)
            piece = text[position:stop].removeprefix(self._start)
            header, separator, body = piece.partition(self._message)
            if piece:
                ended_by = end[0] if end and end[0] in self._ends else None
                messages.append((header, body if separator else None, ended_by))
            position = len(text) if end is None else (end.end() if end[0] in self._ends else stop)
        return messages

    def _last_message(self, text: str) -> tuple[str, str | None, str | None, bool]:
        messages = self._messages(text)
        if not messages:
            return "", None, None, True
        header, body, ended_by = messages[-1]
        return header, body, ended_by, ended_by is not None

    def _reasons(self, header: str) -> bool:
        channel = header.partition(self._channel)[2].split()
        return bool(channel) and self.marks.plain(channel[0]).startswith(self.markers["analysis"])

    def parse(self, turn: TurnText, tools: Sequence[ToolSchema]) -> Parsed:  # noqa: ARG002 - arguments are JSON
        """Parse the messages of a turn."""
        parsed = Parsed()
        content: list[str] = []
        thoughts: list[str] = []
        text_of_turn, offset, at = self._with_prefix(turn), len(self._open_message(turn.prefix)), 0
        messages = self._messages(text_of_turn)
        for number, (header, body, ended_by) in enumerate(messages):
            is_last = number == len(messages) - 1
            recipient = _RECIPIENT.search(self.marks.plain(header))
            reasons = self._reasons(header)
            text = self.marks.plain(body or "")
            if body is not None:
                start = text_of_turn.index(self._message + body, at) + len(self._message)
                at = start + len(body)
            if reasons:
                thoughts.append(text)
                if body and at > offset:
                    parsed.spans.append((max(start - offset, 0), at - offset))
            if recipient is None or recipient[1] == "assistant":
                if self._mentions_tool(header) and body is not None and not reasons:
                    error = f"the header of the call does not name the tool as to={self.markers['recipient']}NAME"
                    parsed.calls.append(ToolCall("", "", {}, text, error))
                elif not reasons and body is not None:
                    content.append(text)
                elif body is None and self._channel not in header and number == 0:
                    # A model that left the format out: plain text is an answer, but not the role's name.
                    content.append(self.marks.plain(header).removeprefix("assistant"))
                continue
            closed = ended_by is not None or turn.stopped or not is_last
            if not closed:
                continue
            call = self._call(recipient[1], body, unclosed=ended_by is None and not (is_last and turn.stopped))
            parsed.calls.append(replace(call, error=INSIDE_REASONING) if reasons else call)
        parsed.content = "\n".join(filter(None, (text.strip() for text in content)))
        parsed.reasoning = "\n".join(filter(None, (text.strip() for text in thoughts)))
        return parsed

    def _mentions_tool(self, header: str) -> bool:
        """Return whether a header without a recipient holds the prefix of tools."""
        return bool(self.markers["recipient"]) and self.markers["recipient"] in self.marks.plain(header)

    def _call(self, recipient: str, body: str | None, *, unclosed: bool) -> ToolCall:
        name = recipient.removeprefix(self.markers["recipient"]).split("<", 1)[0]
        text = self.marks.plain(body or "").strip()
        if body is None or unclosed:
            return ToolCall("", name, {}, text, f"the call was not closed with {self.markers['call']}")
        return named_arguments(name, text)


class _KindOf(Protocol):
    def __call__(self, header: str, *, has_body: bool, first: bool) -> Kind | None: ...


class _LiveMessages(Live):
    """Incremental parser of a sequence of messages.

    Args:
        marks: Markers of the format.
        begun: Part of the first message that the generation prompt wrote.
        split: Pattern of the markers that begin or end a message.
        ends: Those markers, the one that begins a message first.
        body: Marker before a body.
        kind: Returns the kind of a message by its header.
    """

    __slots__ = ("_body", "_ends", "_first", "_fresh", "_inside", "_kind", "_kind_of", "_split")

    def __init__(
        self, marks: Marks, open_message: str, split: re.Pattern[str], ends: tuple[str, ...], body: str, kind: _KindOf
    ) -> None:
        super().__init__(marks, open_message)
        self._split = split
        self._ends = ends
        self._body = body
        self._kind_of = kind
        self._first = True
        self._inside = False
        self._fresh = False
        self._kind: Kind | None = None

    def step(self, text: str) -> StreamedTurn | None:
        if self.position >= len(text):
            return None
        return self._read_body(text) if self._inside else self._read_header(text)

    def _read_header(self, text: str) -> StreamedTurn | None:
        begin, start = self._ends[0], self.position
        end = self._split.search(text, start + 1 if text.startswith(begin, start) else start)
        body = text.find(self._body, start, end.start() if end else len(text))
        if body < 0 and end is None:
            return None
        stop = body if end is None or body >= 0 else end.start()
        header = text[start:stop].removeprefix(begin)
        has_body = body >= 0
        self._kind = self._kind_of(header, has_body=has_body, first=self._first)
        self._first = self._first and not (header or has_body)
        if has_body:
            self._inside = self._fresh = True
            self.position = stop + len(self._body)
            return StreamedTurn("text", "")
        self.position = self._behind(end)
        # A model that left the format out: plain text is an answer, but not the role's name.
        return StreamedTurn("text", header.removeprefix("assistant") if self._kind else "", fresh=True)

    def _read_body(self, text: str) -> StreamedTurn | None:
        start = self.position
        end = self._split.search(text, start)
        stop = end.start() if end else partial_match_start(text, start, self._ends)
        if end is None and stop == start:
            return None
        self.position = stop if end is None else self._behind(end)
        self._inside = end is None
        fresh, self._fresh = self._fresh, self._fresh and stop == start
        return StreamedTurn(self._kind or "text", text[start:stop] if self._kind else "", fresh)

    def _behind(self, end: re.Match[str] | None) -> int:
        assert end is not None
        return end.start() if end[0] == self._ends[0] else end.end()
