"""What agent loops know as a tokenizer: the renderer of their session, by the names that they use.

Owns: :class:`LoopTokenizer`. Refuses: everything that would decide anew how messages become ids; special tokens inside
of messages stay text here as they do everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from turnwise.errors import AgentError, RenderError
from turnwise.inference.canonical import canonical_messages
from turnwise.inference.core import Renderer
from turnwise.inference.template_args import template_arguments
from turnwise.inference.template_text import TemplateText
from turnwise.types import Message, ToolSchema, as_ids


@runtime_checkable
class TextRenderer(Protocol):
    """What a renderer needs besides its contract."""

    text: TemplateText
    """Whole conversations, and text that is no message."""


class LoopTokenizer:
    """A tokenizer as agent loops use one.

    Args:
        renderer: Of the session.

    Attributes:
        renderer: The same.

    Raises:
        AgentError: The renderer encodes no text.
    """

    def __init__(self, renderer: Renderer) -> None:
        if not isinstance(renderer, TextRenderer):
            kind = type(renderer).__qualname__
            raise AgentError(f"an agent loop needs a renderer with 'text', which {kind} has not")
        self.renderer = renderer
        self._text = renderer.text

    @property
    def eos_token_id(self) -> int:
        """An id that ends a turn; the least where there are several (``renderer.stop_ids``)."""
        return min(self.renderer.stop_ids)

    @property
    def pad_token_id(self) -> int:
        """The same: nothing is padded here."""
        return self.eos_token_id

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:  # noqa: ARG002 - none are added
        """Return the ids of a text. Special tokens that stand in it become their ids; none are put around it."""
        return [int(number) for number in self._text.encode(text)]

    def decode(self, ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        """Return the text of ids."""
        numbers = [ids] if isinstance(ids, int) else [int(number) for number in ids]
        return self._text.decode_plain(numbers) if skip_special_tokens else self.renderer.decode(as_ids(numbers))

    def batch_decode(self, rows: Sequence[Sequence[int]], skip_special_tokens: bool = False) -> list[str]:
        """Return the text of each row of ids."""
        return [self.decode(row, skip_special_tokens) for row in rows]

    def apply_chat_template(
        self,
        conversation: Sequence[Message],
        tools: Sequence[ToolSchema | Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        return_dict: bool = False,
        **template_args: Any,
    ) -> Any:
        """Return the ids of a conversation, as the session renders it.

        Args:
            conversation: The messages.
            tools: What the model is told that it may call: schemas, or OpenAI's form of them.
            add_generation_prompt: Whether it ends where the assistant is to speak.
            tokenize: False returns its text.
            return_dict: Whether the ids stand in ``{"input_ids": ...}``.
            **template_args: Arguments of the template (``enable_thinking``).

        Raises:
            AgentError: A tool is none, or the template does not render this.
        """
        schemas = [_schema(tool) for tool in tools or ()]
        renderer = self.renderer.under(template_arguments(template_args)) if template_args else self.renderer
        try:
            messages = canonical_messages(conversation)
            if add_generation_prompt:
                found = renderer.render(messages, schemas)
            else:
                text = renderer.text if isinstance(renderer, TextRenderer) else self._text
                found = text.closed(messages, schemas)
        except RenderError as error:
            raise AgentError(f"apply_chat_template: {error}") from error
        ids = [int(number) for number in found]
        if not tokenize:
            return self.decode(ids)
        return {"input_ids": ids, "attention_mask": [1] * len(ids)} if return_dict else ids


def _schema(tool: ToolSchema | Mapping[str, Any]) -> ToolSchema:
    if isinstance(tool, ToolSchema):
        return tool
    function = tool.get("function", tool)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise AgentError(f"apply_chat_template: {tool!r} is no tool: give a ToolSchema, or OpenAI's form of one")
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    return ToolSchema(function["name"], function.get("description") or "", dict(parameters))
