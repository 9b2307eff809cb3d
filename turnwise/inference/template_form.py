"""Messages and tools in the form that chat templates take.

Owns: :class:`TemplateForm`: which text is safe to render, how calls and their ids are written, and the numbers that
name sets of tools. Refuses: rendering.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import orjson

from turnwise.inference.canonical import Canonical
from turnwise.inference.formats.core import ChatFormat
from turnwise.inference.probing import TemplateFacts, Wire, short_id, wire_call
from turnwise.inference.tokens import Tokens
from turnwise.types import ToolSchema

_TOOL_SETS = 64


class TemplateForm:
    """Writes messages and tools as one template takes them.

    Args:
        facts: The template and what was found out about it.
        tokens: The tokenizer.
        chat_format: How the model's own call ids are written.
        escape: Whether the strings of added tokens stay text.
        forget: Called where numbers of tools are given anew.
    """

    __slots__ = ("_escape", "_facts", "_forget", "_format", "_tokens", "_tools")

    def __init__(
        self, facts: TemplateFacts, tokens: Tokens, chat_format: ChatFormat, *, escape: bool, forget: Callable[[], None]
    ) -> None:
        self._facts = facts
        self._tokens = tokens
        self._format = chat_format
        self._escape = escape
        self._forget = forget
        self._tools: dict[bytes, tuple[list[dict[str, Any]], int]] = {}

    def text(self, text: str) -> str:
        """Return a text that is safe to render."""
        return self._tokens.escape(text) if self._escape else self._tokens.clean(text)

    def value(self, value: Any) -> Any:
        """Return a JSON value whose strings are safe to render."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self.text(key): self.value(item) for key, item in value.items()}
        return [self.value(item) for item in value] if isinstance(value, list) else value

    def uncounted(self, value: Any) -> Any:
        """Return the same of a value that is no part of a message: what is escaped in it is not counted."""
        before = self._tokens.escaped
        safe = self.value(value)
        self._tokens.escaped = before
        return safe

    def call_id(self, call_id: str, name: str, index: int) -> str:
        """Return the id of a call as the template takes it."""
        own = self._format.call_id(call_id, name, index)
        return self.text(short_id(own) if self._facts.short_ids else own)

    def message(self, message: Canonical) -> Wire:
        """Return a message as the template takes it."""
        wire: Wire = {"role": message.role, "content": self.text(message.text)}
        if message.name is not None:
            wire["name"] = self.text(message.name)
        if message.reasoning:
            # Templates read reasoning under either name.
            wire["reasoning_content"] = wire["thinking"] = self.text(message.reasoning)
        if message.calls:
            wire["tool_calls"] = [
                wire_call(
                    self.text(call.name),
                    self._facts.arguments(self.value(call.arguments if call.value is None else call.value)),
                    self.call_id(call.id, call.name, index),
                )
                for index, call in enumerate(message.calls)
            ]
        if message.role == "tool":
            index = max(message.answers or 0, 0)
            wire["tool_call_id"] = self.call_id(message.call_id, message.call_name, max(index, 0))
            wire["name"] = self.text(message.call_name)
        return wire

    def tools(self, tools: Sequence[ToolSchema]) -> tuple[list[dict[str, Any]], int]:
        """Return tools as JSON and a number that names them; the same tools give the same number."""
        if not tools:
            return [], -1
        written = _written(tools)
        known = self._tools.get(written)
        if known is None:
            if len(self._tools) >= _TOOL_SETS:  # Numbers name proofs, which are forgotten together with them.
                self._tools.clear()
                self._forget()
            known = [self.uncounted(tool.to_json()) for tool in tools], len(self._tools)
            self._tools[written] = known
        return known


def _written(tools: Sequence[ToolSchema]) -> bytes:
    """Return what a template may write of tools, which ``==`` does not tell: True from 1, the order of keys."""
    try:
        return orjson.dumps(tools)
    except TypeError:  # Numbers of more than 64 bits, half surrogate pairs.
        return json.dumps([tool.to_json() for tool in tools]).encode()
