"""Messages to ids and ids to messages, for any Hugging Face chat template.

Owns: :class:`TemplateRenderer`, which needs a model's own template and tokenizer and nothing else, and
:func:`load_renderer`. Refuses: whatever it cannot prove. An extension that the template might write differently is
declined with its reason, a message that the template cannot say is an error, and no sampled id is ever encoded again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from turnwise.errors import RenderError
from turnwise.inference.canonical import Canonical, Canonicalizer
from turnwise.inference.core import Renderer
from turnwise.inference.delta import Declined, Shape, Skeletons, kind_of
from turnwise.inference.formats.core import TurnText
from turnwise.inference.formats.detect import Choice, configured, detect, stored
from turnwise.inference.model_dir import FORMAT_FILE, ModelFiles, read_model_dir
from turnwise.inference.probing import TemplateFacts, Wire, short_id, wire_call
from turnwise.inference.readback import difference, shown, spoken
from turnwise.inference.template import ChatTemplate
from turnwise.inference.tokens import Tokens
from turnwise.types import Message, TokenIds, ToolSchema, as_ids

SpecialInText = Literal["escape", "template"]
_TOOL_SETS = 64
_PREFIXES = 1024
_MARK = "qzmark"


class TemplateRenderer:
    """A :class:`~turnwise.inference.core.Renderer` made of a chat template and a tokenizer.

    Args:
        facts: The template and what was found out about it.
        tokens: The tokenizer.
        choice: The chat format and its proof.
        eos_ids: Ids that end a turn, by the model's configuration.
        special_in_text: ``escape``: the strings of added tokens inside messages stay text. ``template``: they become
            control ids, as the template alone would have it.

    Attributes:
        stop_ids: Ids that end a turn.
        media: Empty: a chat template and a tokenizer place text only.
        why: Why the last :meth:`extend` returned None.

    Raises:
        RenderError: Nothing ends a turn.
    """

    __slots__ = (
        "_choice", "_closing", "_eos", "_escape", "_facts", "_format", "_generation", "_prefixes", "_skeletons",
        "_tokens", "_tools", "media", "stop_ids", "why",
    )  # fmt: skip

    def __init__(
        self,
        facts: TemplateFacts,
        tokens: Tokens,
        choice: Choice,
        *,
        eos_ids: Sequence[int] = (),
        special_in_text: SpecialInText = "escape",
    ) -> None:
        if special_in_text not in ("escape", "template"):
            raise RenderError(f"special_in_text: {special_in_text!r} is unknown; allowed: escape, template")
        self._facts = facts
        self._tokens = tokens
        self._choice = choice
        self._format = choice.format
        self._escape = special_in_text == "escape"
        self._eos = tuple(eos_ids)
        own = [*facts.stop_tokens(), *(token for token in self._format.extra_stops if token in tokens.added)]
        self.stop_ids = frozenset([*self._eos, *(tokens.added[token] for token in own)])
        if not self.stop_ids:
            raise RenderError(
                "nothing ends a turn: the template closes turns with no token, and neither generation_config.json nor "
                "tokenizer_config.json names an end-of-text token; set eos_token in tokenizer_config.json"
            )
        self.media: frozenset[str] = frozenset()
        self.why = ""
        ended = [tokens.decode([number]) for number in sorted(self.stop_ids)]
        self._skeletons = Skeletons(facts, tokens, list(filter(None, dict.fromkeys([*own, *ended]))))
        self._closing = tokens.encode(self._format.closing) if self._format.closing else []
        self._generation = len(tokens.encode(facts.prompt[len(facts.head) :])) + 2
        self._prefixes: dict[bytes, str] = {}
        self._tools: list[tuple[tuple[ToolSchema, ...], list[dict[str, Any]]]] = []

    @property
    def escaped(self) -> int:
        """How many strings of added tokens were kept as text so far."""
        return self._tokens.escaped

    # Messages to ids

    def count(self, text: str) -> int:
        """Return how many ids a text takes inside a message, its escapes included."""
        return self._tokens.count(text, escape=self._escape)

    def render(self, messages: Sequence[Canonical], tools: Sequence[ToolSchema]) -> TokenIds:
        """Return the whole prompt, generation prompt included, as int32 of shape [tokens].

        A call whose arguments do not parse is rendered as its raw text.

        Raises:
            RenderError: The template raised on these messages.
        """
        text = self._render_text(messages, self._json_tools(tools)[0])
        return as_ids(self._tokens.encode(text))

    def _render_text(self, messages: Sequence[Canonical], tools: Sequence[Mapping[str, Any]]) -> str:
        wires = [self._wire(message) for message in messages]
        raws = [self._text(call.arguments) for message in messages for call in message.calls if call.value is None]
        if not raws:
            return self._facts.template.render(wires, tools, generate=True)
        try:
            text = self._facts.template.render(wires, tools, generate=True)
        except RenderError:
            text = ""
        if text and all(raw in text for raw in raws):
            return text
        # This template has no place for arguments that are no object: the call is said as text.
        wires = [self._wire(spoken(message)) for message in messages]
        return self._facts.template.render(wires, tools, generate=True)

    def extend(
        self,
        tail: TokenIds,
        completion: TokenIds,
        last: Canonical,
        new: Sequence[Canonical],
        tools: Sequence[ToolSchema],
    ) -> TokenIds | None:
        """Return the ids that follow ``tail + completion`` when ``new`` is said next; see the contract."""
        try:
            return as_ids(self._following(tail, completion.tolist(), last, new, tools))
        except Declined as declined:
            self.why = str(declined.args[0])
            return None

    def _following(
        self,
        tail: TokenIds,
        ids: list[int],
        last: Canonical,
        new: Sequence[Canonical],
        tools: Sequence[ToolSchema],
    ) -> list[int]:
        """Return the close of the turn, as far as its ids lack it, the new messages and the generation prompt."""
        stopped = bool(ids) and ids[-1] in self.stop_ids
        if not self.stop_ids.isdisjoint(ids[:-1]):
            raise Declined("ids_after_stop")
        thinking = self._format.reasons and self._format.reasoning_open(self._turn_text(ids, tail))
        if thinking and stopped:
            raise Declined("stop_in_reasoning")
        if any(call.value is None for message in new for call in message.calls):
            raise Declined("no_bridge")
        json_tools, number = self._json_tools(tools)
        shape: Shape = (tuple(map(kind_of, new)), len(last.calls), number)
        calls = [
            (self._text(call.name), self._call_id(call.id, call.name, index)) for index, call in enumerate(last.calls)
        ]
        text, delta = self._skeletons.tail(calls, [self._wire(message) for message in new], json_tools, shape)
        following = self._tokens.encode(text[delta.lead :] if stopped else text)
        if not following or not ids or not self._tokens.is_added(following[0]):
            repeated = False
        else:
            repeated = following[0] == ids[-1] or (stopped and delta.closes)
        if repeated:
            return following[1:]
        return self._closing + following if thinking else following

    def completion(self, message: Message, tools: Sequence[ToolSchema]) -> TokenIds:
        """Return what a model would sample to say ``message``, its stop id included.

        Raises:
            RenderError: The template cannot say it: it refuses, or what it writes reads back as something else.
        """
        canonical = Canonicalizer().reduce(0, message)
        if canonical.role != "assistant":
            raise RenderError(f"a completion is an assistant's message, this one has the role {canonical.role!r}")
        said = self._facts.said(self._wire(canonical), self._json_tools(tools)[0])
        if said is None:
            raise RenderError(f"this chat template cannot say {shown(canonical)} behind its generation prompt")
        called = bool(canonical.calls)
        stop = self._facts.stop_behind(called=called)
        stop_id = self._tokens.added[stop] if stop is not None else min(self.stop_ids)
        ids = as_ids([*self._tokens.encode(self._facts.cut(said, called=called)), stop_id])
        prompt = as_ids(self._tokens.encode(self._facts.prompt[len(self._facts.head) :]))
        wrong = difference(canonical, self.parse(ids, prompt, tools), message, self._tokens.seen)
        if wrong:
            raise RenderError(
                f"this chat template (format {self._format.name}) cannot say {shown(canonical)}: read back, its "
                f"{wrong} differs; what it writes is {self._tokens.decode(ids.tolist())[:300]!r}"
            )
        return ids

    def drops(self, messages: Sequence[Canonical], tools: Sequence[ToolSchema]) -> bool:
        """Return whether the template drops reasoning that these messages carry."""
        marked = 0
        wires = []
        for message in messages:
            wire = self._wire(message)
            if message.reasoning:
                wire["reasoning_content"] = wire["thinking"] = f"{_MARK}{marked}{_MARK}"
                marked += 1
            wires.append(wire)
        if not marked:
            return False
        text = self._facts.template.render(wires, self._json_tools(tools)[0], generate=True)
        return any(f"{_MARK}{number}{_MARK}" not in text for number in range(marked))

    # Ids to messages

    def parse(self, completion: TokenIds, tail: TokenIds, tools: Sequence[ToolSchema]) -> Message:
        """Return the assistant message that these ids mean. Never raises on sampled ids, whatever they are."""
        parsed = self._format.parse(self._turn_text(completion.tolist(), tail), tools)
        return parsed.message()

    def _turn_text(self, ids: list[int], tail: TokenIds) -> TurnText:
        marks = self._format.marks
        prefix = self._prefix(tail[-self._generation :])
        end = len(ids)
        if not self.stop_ids.isdisjoint(ids):
            end = next(index for index, number in enumerate(ids) if number in self.stop_ids)
        stopped = end < len(ids)
        if stopped and marks.holds(ids[end]):
            end += 1
        return TurnText(marks.read(self._tokens, ids[:end]), prefix, self._format.opened_by(prefix), stopped)

    def _prefix(self, ids: TokenIds) -> str:
        """Return the text before a completion: nearly always that of the same generation prompt."""
        key = ids.tobytes()
        text = self._prefixes.get(key)
        if text is None:
            if len(self._prefixes) >= _PREFIXES:
                self._prefixes.clear()
            text = self._prefixes[key] = self._format.marks.read(self._tokens, ids.tolist())
        return text

    def decode(self, ids: TokenIds) -> str:
        """Return the text of ids, special tokens included (to show, never to re-encode)."""
        return self._tokens.decode(ids.tolist())

    # What it is

    def describe(self) -> dict[str, Any]:
        """Return the chat format and how it was decided: what is printed at start and saved with a run."""
        variables = self._facts.template.variables
        return {
            "format": self._format.name,
            "markers": dict(self._format.markers),
            "source": self._choice.source,
            "proof": list(self._choice.proof),
            "unproven": list(self._choice.unproven),
            "stop_ids": {str(number): self._tokens.decode([number]) for number in sorted(self.stop_ids)},
            "template": self._facts.template.digest,
            "template_kwargs": {key: value for key, value in variables.items() if not key.endswith("_token")},
            "arguments": "text" if self._facts.text_arguments else "object",
            "special_in_text": "escape" if self._escape else "template",
        }

    # The form that templates expect

    def _text(self, text: str) -> str:
        return self._tokens.escape(text) if self._escape else self._tokens.clean(text)

    def _value(self, value: Any) -> Any:
        """Return a JSON value whose strings are safe to render."""
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, dict):
            return {self._text(key): self._value(item) for key, item in value.items()}
        return [self._value(item) for item in value] if isinstance(value, list) else value

    def _call_id(self, call_id: str, name: str, index: int) -> str:
        own = self._format.call_id(call_id, name, index)
        return self._text(short_id(own) if self._facts.short_ids else own)

    def _wire(self, message: Canonical) -> Wire:
        wire: Wire = {"role": message.role, "content": self._text(message.text)}
        if message.name is not None:
            wire["name"] = self._text(message.name)
        if message.reasoning:
            # Templates read reasoning under either name.
            wire["reasoning_content"] = wire["thinking"] = self._text(message.reasoning)
        if message.calls:
            wire["tool_calls"] = [
                wire_call(
                    self._text(call.name),
                    self._facts.arguments(self._value(call.arguments if call.value is None else call.value)),
                    self._call_id(call.id, call.name, index),
                )
                for index, call in enumerate(message.calls)
            ]
        if message.role == "tool":
            index = message.answers[1] if message.answers is not None else 0
            wire["tool_call_id"] = self._call_id(message.call_id, message.call_name, max(index, 0))
            wire["name"] = self._text(message.call_name)
        return wire

    def _json_tools(self, tools: Sequence[ToolSchema]) -> tuple[list[dict[str, Any]], int]:
        """Return tools as JSON and a number that names them; the same tools give the same number."""
        if not tools:
            return [], -1
        wanted = tuple(tools)
        for number, (known, as_json) in enumerate(self._tools):
            if known == wanted:
                return as_json, number
        if len(self._tools) >= _TOOL_SETS:
            # Numbers name proofs, which are forgotten together with them.
            self._tools.clear()
            self._skeletons.forget()
        self._tools.append((wanted, [self._value(tool.to_json()) for tool in wanted]))
        return self._tools[-1][1], len(self._tools) - 1


def load_renderer(
    model_dir: str | os.PathLike[str],
    *,
    format: str = "auto",  # noqa: A002 - the name of the config key
    special_in_text: SpecialInText = "escape",
    template_kwargs: Mapping[str, Any] | None = None,
    chat_template: str | None = None,
    now: datetime | None = None,
) -> TemplateRenderer:
    """Return the renderer of a model's folder.

    Args:
        model_dir: A folder in Hugging Face's layout; the network is never asked.
        format: The chat format, or ``auto``: the one that the folder's ``turnwise_format.json`` names, else the one
            that is proven by rendering.
        special_in_text: What becomes of the strings of special tokens inside messages.
        template_kwargs: Arguments of the template (``enable_thinking``, ``reasoning_effort``), fixed for this renderer.
        chat_template: Jinja text to use instead of the folder's own.
        now: The date that the template may write; default: today, fixed from now on.

    Raises:
        RenderError: The folder, its template or tokenizer cannot be used, or no format could be decided.
        MissingExtraError: The folder has no ``tokenizer.json`` and transformers is not installed.
    """
    files = read_model_dir(model_dir)
    source = chat_template or files.template
    if source is None:
        raise RenderError(f"{files.path} has no chat template; give one as chat_template")
    return make_renderer(
        files,
        source,
        format=format,
        special_in_text=special_in_text,
        template_kwargs=template_kwargs,
        now=now,
        tool_source=None if chat_template else files.tool_template,
    )


def make_renderer(
    files: ModelFiles,
    source: str,
    *,
    format: str = "auto",  # noqa: A002 - the name of the config key
    special_in_text: SpecialInText = "escape",
    template_kwargs: Mapping[str, Any] | None = None,
    now: datetime | None = None,
    tool_source: str | None = None,
) -> TemplateRenderer:
    """Return the renderer of a template's text and a model's files. Arguments and errors of :func:`load_renderer`."""
    tokens = Tokens(files.tokenizer)
    template = ChatTemplate(
        source, tool_source=tool_source, variables={**files.special, **(template_kwargs or {})}, now=now
    )
    facts = TemplateFacts(template, tokens)
    if format != "auto":
        choice = configured(format, facts, tokens)
    elif files.saved_format is not None:
        choice = stored(files.saved_format, str(files.path / FORMAT_FILE), facts, tokens)
    else:
        choice = detect(facts, tokens)
    return TemplateRenderer(facts, tokens, choice, eos_ids=files.eos_ids, special_in_text=special_in_text)


def save_format(renderer: Renderer, model_dir: str | os.PathLike[str]) -> Path:
    """Write the chat format of a renderer into a model's folder, so that it is loaded with it.

    Returns:
        The file.
    """
    path = Path(model_dir) / FORMAT_FILE
    about = renderer.describe()
    kept = {key: about[key] for key in ("format", "markers", "template") if key in about}
    path.write_text(json.dumps(kept, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
    return path
