"""Whole conversations in a chat template's words, and text that is no message.

Owns: :class:`TemplateText`. Refuses: going on from ids (``template_renderer.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from turnwise.errors import RenderError
from turnwise.inference.canonical import Canonical
from turnwise.inference.readback import spoken
from turnwise.inference.template import ChatTemplate
from turnwise.inference.template_form import TemplateForm
from turnwise.inference.tokens import Tokens
from turnwise.types import TokenIds, ToolSchema, as_ids


class TemplateText:
    """What a template and a tokenizer make of messages and of text. All ids are int32 of shape [tokens].

    Args:
        template: The template.
        tokens: The tokenizer.
        form: How messages are given to the template.
    """

    def __init__(self, template: ChatTemplate, tokens: Tokens, form: TemplateForm) -> None:
        self._template = template
        self._tokens = tokens
        self._form = form

    def prompt(self, messages: Sequence[Canonical], tools: Sequence[ToolSchema]) -> TokenIds:
        """Return the ids of a conversation, generation prompt included.

        Raises:
            RenderError: The template raised on these messages.
        """
        return as_ids(self._tokens.encode(self._render(messages, self._form.tools(tools)[0], generate=True)))

    def closed(self, messages: Sequence[Canonical], tools: Sequence[ToolSchema]) -> TokenIds:
        """Return the ids of a conversation without the generation prompt.

        Raises:
            RenderError: The template raised on these messages.
        """
        return as_ids(self._tokens.encode(self._render(messages, self._form.tools(tools)[0], generate=False)))

    def encode(self, text: str) -> TokenIds:
        """Return the ids of a text; special tokens that stand in it become their ids."""
        return as_ids(self._tokens.encode(self._tokens.clean(text)))

    def decode_plain(self, ids: Sequence[int]) -> str:
        """Return the text of ids without special tokens."""
        return self._tokens.decode_plain(ids)

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
        # This template has no place for arguments that are no object: the call is said as text.
        wires = [self._form.message(spoken(message)) for message in messages]
        return self._template.render(wires, tools, generate=generate)
