"""Messages in a template's form, and whole conversations to ids."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

from turnwise.chat.formats.core import ChatFormat
from turnwise.chat.template import ChatTemplate, TemplateFacts, Wire, short_id, wire_call
from turnwise.chat.tokens import Tokens
from turnwise.errors import RenderError
from turnwise.model.canonical import Canonical, Canonicalizer, canonical_arguments
from turnwise.types import Message, TokenIds, ToolCall, ToolSchema, as_ids

_TOOL_SETS = 64


class TemplateForm:
    """Converts messages and tools to the form that one template accepts.

    Args:
        facts: The probed template.
        tokens: The tokenizer.
        chat_format: Syntax of the model's own call ids.
        escape: Whether added tokens spelled in messages stay text.
        forget: Called when the numbering of tool sets restarts.
    """

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
        """Like :meth:`value`, for what is not part of a message: escapes are not counted."""
        escaped_before = self._tokens.escaped
        safe = self.value(value)
        self._tokens.escaped = escaped_before
        return safe

    def call_id(self, call_id: str, name: str, index: int) -> str:
        """Return a call id in the template's form."""
        format_id = self._format.call_id(call_id, name, index)
        return self.text(short_id(format_id) if self._facts.short_ids else format_id)

    def message(self, message: Canonical) -> Wire:
        """Return a message in the template's form."""
        wire: Wire = {"role": message.role, "content": self._content(message)}
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

    def _content(self, message: Canonical) -> str | list[dict[str, Any]]:
        if not message.media:
            return self.text(message.text)
        return [
            {"type": "text", "text": self.text(part)} if isinstance(part, str) else {"type": part.kind}
            for part in message.parts()
        ]

    def tools(self, tools: Sequence[ToolSchema]) -> tuple[list[dict[str, Any]], int]:
        """Return a prompt's tools as JSON and the number of the tool set; equal tools have equal numbers."""
        tools = [tool for tool in tools if not tool.deferred]
        if not tools:
            return [], -1
        written = _written(tools)
        numbered = self._tools.get(written)
        if numbered is None:
            if len(self._tools) >= _TOOL_SETS:  # Numbers name proofs, which are forgotten together with them.
                self._tools.clear()
                self._forget()
            numbered = [self.uncounted(tool.to_json()) for tool in tools], len(self._tools)
            self._tools[written] = numbered
        return numbered


def _written(tools: Sequence[ToolSchema]) -> bytes:
    """Return a key of all that a template may write of tools; ``==`` ignores True vs 1 and the order of keys."""
    try:
        return orjson.dumps(tools)
    except TypeError:  # Numbers of more than 64 bits, half surrogate pairs.
        return json.dumps([tool.to_json() for tool in tools]).encode()


def unparsable_calls_as_text(message: Canonical) -> Canonical:
    """Return a message with its unparsable calls as text."""
    readable = tuple(call for call in message.calls if call.value is not None)
    if len(readable) == len(message.calls):
        return message
    raws = [call.arguments for call in message.calls if call.value is None]
    return Canonical(message.role, "\n".join(filter(None, [message.text, *raws])), message.reasoning, readable)


def round_trip_difference(expected: Canonical, parsed: Message, message: Message, seen: Callable[[str], str]) -> str:
    """Return which part of a message parses back differently, or ``""``.

    Args:
        expected: The canonical message.
        parsed: What was parsed.
        message: The message before canonicalization: it tells which calls are meant to be invalid.
        seen: Returns a text as the tokenizer normalises it.
    """
    read = Canonicalizer().reduce(0, parsed)

    def same(one: str, other: str) -> bool:
        return one.strip() == other.strip() or seen(one).strip() == other.strip()

    if not same(expected.text, read.text):
        return "content"
    if not same(expected.reasoning, read.reasoning):
        return "reasoning_content"
    if len(read.calls) != len(expected.calls):
        return "tool_calls"
    unusable_calls = [isinstance(call, ToolCall) and call.error is not None for call in message.get("tool_calls") or ()]
    errors = [call.error is not None for call in parsed.get("tool_calls") or ()]
    for call, back, unusable, error in zip(expected.calls, read.calls, unusable_calls, errors, strict=True):
        if unusable or call.value is None:
            if not error:
                return f"call of {call.name!r}, which is meant to be unusable,"
        elif error or not same(call.name, back.name) or not _same_arguments(call.arguments, back.arguments, seen):
            return f"call of {call.name!r}"
    return ""


def _same_arguments(one: str, other: str, seen: Callable[[str], str]) -> bool:
    """Compare canonical JSON after normalisation, which may change the order of keys."""
    return one == other or canonical_arguments(seen(one))[0] == other


def shown(message: Canonical) -> str:
    """Describe a message for an error."""
    parts = [f"the text {message.text[:80]!r}"] if message.text else []
    if message.reasoning:
        parts.append(f"the reasoning {message.reasoning[:80]!r}")
    parts += [f"a call of {call.name!r} with {call.arguments[:80]}" for call in message.calls]
    return " and ".join(parts) or "an empty message"


class TemplateText:
    """Renders conversations and encodes text; all ids are int32 of shape [tokens]."""

    def __init__(self, template: ChatTemplate, tokens: Tokens, form: TemplateForm) -> None:
        self._template = template
        self._tokens = tokens
        self._form = form

    def prompt(self, messages: Sequence[Canonical], tools: Sequence[ToolSchema]) -> TokenIds:
        """Return the ids of a conversation with generation prompt, one marker for each image.

        Raises RenderError if the template raises.
        """
        text = self._render(messages, self._form.tools(tools)[0], generate=True)
        return as_ids(self._tokens.encode(text, prompt=True))

    def closed(self, messages: Sequence[Canonical], tools: Sequence[ToolSchema]) -> TokenIds:
        """Return the ids of a conversation without generation prompt. Raises RenderError if the template raises."""
        return as_ids(self._tokens.encode(self._render(messages, self._form.tools(tools)[0], generate=False)))

    def encode(self, text: str) -> TokenIds:
        """Return the ids of a text; special tokens spelled in it become control ids."""
        return as_ids(self._tokens.encode(self._tokens.clean(text)))

    def decode_plain(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids without special tokens."""
        return self._tokens.decode_plain(token_ids)

    def _render(self, messages: Sequence[Canonical], tools: Sequence[Mapping[str, Any]], *, generate: bool) -> str:
        wires = [self._form.message(message) for message in messages]
        raws = [self._form.text(call.arguments) for message in messages for call in message.calls if call.value is None]
        if not raws:
            return self._template.render(wires, tools, generate=generate)
        try:
            text = self._template.render(wires, tools, generate=generate)
        except RenderError:
            text = ""
        if text and all(raw in text for raw in raws):
            return text
        # This template has no place for arguments that are not an object: the call is rendered as text.
        wires = [self._form.message(unparsable_calls_as_text(message)) for message in messages]
        return self._template.render(wires, tools, generate=generate)
