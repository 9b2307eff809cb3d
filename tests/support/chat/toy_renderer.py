"""A reference renderer with one token id per character and one per marker."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

import numpy as np

from turnwise.errors import StructuredOutputError
from turnwise.model.canonical import Canonical, TemplateArguments, canonical_messages
from turnwise.types import Guide, Media, Message, TokenIds, ToolCall, ToolSchema

END, THINK, THINK_END, CALL, CALL_END, TOOLS = 1, 2, 3, 4, 5, 6
ROLES = {"system": 10, "user": 11, "assistant": 12, "tool": 13}
FIRST_CHARACTER = 100


class NoGuides:
    """Characters have no grammar."""

    def tagged(self, guide: Guide, tail: TokenIds, tools: Sequence[ToolSchema]) -> Guide:
        raise StructuredOutputError("the toy format has no grammar")


class ToyRenderer:
    """``[role] text [END]`` for each message, ``[assistant]`` as the generation prompt.

    A message that holds ``NOBRIDGE`` cannot be bridged to. Counts the ids that it made.
    """

    def __init__(self) -> None:
        self.stop_ids = frozenset([END])
        self.arguments: TemplateArguments = ()
        self.reads = frozenset({"mood"})
        self.media: frozenset[str] = frozenset()
        self.why = ""
        self.placed: tuple[Media, ...] = ()
        self.escaped = 0
        self.guides = NoGuides()
        self.encoded = 0
        self.room: int | None = None

    def count(self, text: str) -> int:
        return len(text)

    def takes(self, name: str, value: Any) -> bool:
        return name in self.reads

    def under(self, arguments: TemplateArguments) -> ToyRenderer:
        other = copy.copy(self)
        other.arguments = arguments
        return other

    def at(self, now: datetime) -> ToyRenderer:
        return self

    def text(self, text: str) -> list[int]:
        self.encoded += len(text)
        return [FIRST_CHARACTER + ord(character) for character in text]

    def _said(self, message: Canonical) -> list[int]:
        ids: list[int] = []
        if message.reasoning:
            ids += [THINK, *self.text(message.reasoning), THINK_END]
        ids += self.text(message.text)
        for call in message.calls:
            arguments = call.arguments if call.value is None else call.value
            ids += [CALL, *self.text(json.dumps({"name": call.name, "arguments": arguments})), CALL_END]
        return ids

    def _message(self, message: Canonical) -> list[int]:
        body = self._said(message) if message.role == "assistant" else self.text(message.text)
        if message.role == "tool":
            body = self.text(f"{message.call_id}={message.call_name}:") + body
        return [ROLES[message.role], *body, END]

    def render(self, messages: Sequence[Canonical], tools: Sequence[ToolSchema]) -> TokenIds:
        ids = [TOOLS, *self.text(",".join(tool.name for tool in tools)), END] if tools else []
        for name, value in self.arguments:
            ids += [TOOLS, *self.text(f"{name}={value}"), END]
        for message in messages:
            ids += self._message(message)
        return np.array([*ids, ROLES["assistant"]], np.int32)

    def extend(
        self,
        tail: TokenIds,
        completion: TokenIds,
        turn: Canonical,
        new: Sequence[Canonical],
        tools: Sequence[ToolSchema],
    ) -> TokenIds | None:
        if END in completion[:-1]:
            self.why = "ids_after_stop"
            return None
        if any("NOBRIDGE" in message.text for message in new):
            self.why = "no_bridge"
            return None
        ids = [] if completion[-1] == END else [END]
        for message in new:
            ids += self._message(message)
        return np.array([*ids, ROLES["assistant"]], np.int32)

    def parse(self, completion: TokenIds, tail: TokenIds, tools: Sequence[ToolSchema]) -> Message:
        text, reasoning, calls, section, current = "", "", [], "text", ""
        for token in completion.tolist():
            character = chr(max(0, token - FIRST_CHARACTER))
            if token == END:
                break
            if token == THINK:
                section = "think"
            elif token in (THINK_END, CALL_END):
                if token == CALL_END and section == "call":
                    calls.append(self._call(current))
                section, current = "text", ""
            elif token == CALL:
                section, current = "call", ""
            elif section == "think":
                reasoning += character
            elif section == "call":
                current += character
            else:
                text += character
        message: Message = {"role": "assistant", "content": text}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        return message

    def _call(self, raw: str) -> ToolCall:
        try:
            body = json.loads(raw)
            return ToolCall("", body["name"], body["arguments"], raw)
        except (ValueError, KeyError, TypeError):
            return ToolCall("", "", {}, raw, "not a call")

    def drops(self, messages: Sequence[Canonical], tools: Sequence[ToolSchema]) -> frozenset[int]:
        return frozenset()

    def completion(self, message: Message, tools: Sequence[ToolSchema]) -> TokenIds:
        return np.array([*self._said(canonical_messages([message])[0]), END], np.int32)

    def decode(self, ids: TokenIds) -> str:
        return "".join(chr(i - FIRST_CHARACTER) if i >= FIRST_CHARACTER else f"<{i}>" for i in ids.tolist())

    def describe(self) -> dict[str, Any]:
        return {"format": "toy"}


class ForgetfulRenderer(ToyRenderer):
    """Drops the reasoning of turns before the last user message, as many templates do."""

    def drops(self, messages: Sequence[Canonical], tools: Sequence[ToolSchema]) -> frozenset[int]:
        last_user = max((n for n, message in enumerate(messages) if message.role == "user"), default=-1)
        return frozenset(n for n, message in enumerate(messages) if n < last_user and message.reasoning)

    def render(self, messages: Sequence[Canonical], tools: Sequence[ToolSchema]) -> TokenIds:
        dropped = self.drops(messages, tools)
        kept_messages = [
            replace(message, reasoning="") if n in dropped else message for n, message in enumerate(messages)
        ]
        return super().render(kept_messages, tools)
