"""gpt-oss (harmony): a turn is a row of messages, each with a channel, some with a recipient.

``<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.f
<|constrain|>json<|message|>{...}<|call|>``. What stands in the reasoning channel is reasoning, a message with a
recipient is a call, everything else is content. A call is closed by the token that ends its message.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from turnwise.inference.formats.core import INSIDE_REASONING, ChatFormat, Parsed, Probe, TurnText
from turnwise.inference.formats.derive import split_added
from turnwise.inference.formats.jsoncalls import named_arguments
from turnwise.types import ToolCall, ToolSchema

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
        """Return the markers where reasoning, calls and answers are messages with a channel."""
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
        wanted = {channel, message, stop, reason[at + 1], reason[at + 2], probe.call_close}
        if recipient is None or len(call) < 4 or not wanted <= set(probe.added):
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
        """Whether a turn can hold reasoning: its analysis channel."""
        return True

    def opened_by(self, prefix: str) -> bool:
        """Return whether a generation prompt ends inside a message of the reasoning channel."""
        header, _, _, closed = self._last(prefix)
        return not closed and self._reasons(header)

    def reasoning_open(self, turn: TurnText) -> bool:
        """Return whether the turn ends inside a message of the reasoning channel."""
        header, body, ended_by, _ = self._last(self._whole(turn))
        ends = (None, self._mark("return")) if turn.stopped else (None,)
        return self._reasons(header) and body is not None and ended_by in ends

    def _whole(self, turn: TurnText) -> str:
        """Return the text with the part of its first message that the generation prompt wrote."""
        start = turn.prefix.rfind(self._start)
        return turn.prefix[start:] + turn.text if start >= 0 else turn.text

    def _messages(self, text: str) -> list[tuple[str, str | None, str | None]]:
        """Return (header, body or None, what ended it or None) of each message of a text."""
        messages: list[tuple[str, str | None, str | None]] = []
        position = 0
        while position < len(text):
            end = self._split.search(text, position + (1 if text.startswith(self._start, position) else 0))
            stop = end.start() if end else len(text)
            piece = text[position:stop].removeprefix(self._start)
            header, found, body = piece.partition(self._message)
            if piece:
                ended_by = end[0] if end and end[0] in self._ends else None
                messages.append((header, body if found else None, ended_by))
            position = len(text) if end is None else (end.end() if end[0] in self._ends else stop)
        return messages

    def _last(self, text: str) -> tuple[str, str | None, str | None, bool]:
        messages = self._messages(text)
        if not messages:
            return "", None, None, True
        header, body, ended_by = messages[-1]
        return header, body, ended_by, ended_by is not None

    def _reasons(self, header: str) -> bool:
        channel = header.partition(self._channel)[2].split()
        return bool(channel) and self.marks.plain(channel[0]).startswith(self.markers["analysis"])

    def parse(self, turn: TurnText, tools: Sequence[ToolSchema]) -> Parsed:  # noqa: ARG002 - arguments are JSON
        """Return what the messages of a turn mean."""
        parsed = Parsed()
        content: list[str] = []
        thoughts: list[str] = []
        messages = self._messages(self._whole(turn))
        for number, (header, body, ended_by) in enumerate(messages):
            last = number == len(messages) - 1
            recipient = _RECIPIENT.search(self.marks.plain(header))
            reasons = self._reasons(header)
            text = self.marks.plain(body or "")
            if reasons:
                thoughts.append(text)
            if recipient is None or recipient[1] == "assistant":
                if not reasons and body is not None:
                    content.append(text)
                elif body is None and self._channel not in header and number == 0:
                    # A model that left the format out: plain text is an answer, but not the role's name.
                    content.append(self.marks.plain(header).removeprefix("assistant"))
                continue
            closed = ended_by is not None or turn.stopped or not last
            if not closed:
                continue
            call = self._call(recipient[1], body, unclosed=ended_by is None and not (last and turn.stopped))
            parsed.calls.append(replace(call, error=INSIDE_REASONING) if reasons else call)
        parsed.content = "\n".join(filter(None, (text.strip() for text in content)))
        parsed.reasoning = "\n".join(filter(None, (text.strip() for text in thoughts)))
        return parsed

    def _call(self, recipient: str, body: str | None, *, unclosed: bool) -> ToolCall:
        name = recipient.removeprefix(self.markers["recipient"]).split("<", 1)[0]
        text = self.marks.plain(body or "").strip()
        if body is None or unclosed:
            return ToolCall("", name, {}, text, f"the call was not closed with {self.markers['call']}")
        return named_arguments(name, text)
