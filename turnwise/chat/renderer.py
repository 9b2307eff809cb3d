"""Loading of a model's renderer, and saving of its chat format."""

from __future__ import annotations

import itertools
import json
import os
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal

import orjson

from turnwise.chat.formats.core import ChatFormat, Plain, TurnText
from turnwise.chat.formats.detect import Choice, configured_format, detect, stored_format
from turnwise.chat.formats.live import LiveTurn
from turnwise.chat.formats.tags import Tag, unenforced_keyword
from turnwise.chat.incremental_render import CannotExtend, Shape, TurnSuffix, kind_of
from turnwise.chat.media import MediaPlacer, media_in
from turnwise.chat.model_dir import FORMAT_FILE, ModelFiles, check_trained, read_model_dir, write_templates
from turnwise.chat.processor import load_processor
from turnwise.chat.template import ChatTemplate, TemplateFacts, template_digest
from turnwise.chat.template_text import TemplateForm, TemplateText, round_trip_difference, shown
from turnwise.chat.tokens import Tokens
from turnwise.errors import ConfigError, RenderError, StructuredOutputError, nearest
from turnwise.errors import shown as shown_value
from turnwise.model.canonical import (
    Canonical,
    Canonicalizer,
    TemplateArguments,
    argument_values,
    takes,
    template_arguments,
)
from turnwise.model.core import Renderer, StructuralTags
from turnwise.model.media import MediaProcessor
from turnwise.types import Guide, Media, Message, TokenIds, ToolSchema, as_ids


class FormatTags:
    """Structural tags of a chat format; ``prefix`` returns the end of a context with markers as private characters."""

    def __init__(self, chat_format: ChatFormat, prefix: Callable[[TokenIds], str]) -> None:
        self._format = chat_format
        self._prefix = prefix

    def tagged(self, guide: Guide, tail: TokenIds, tools: Sequence[ToolSchema]) -> Guide:
        """Return ``guide`` with its structural tag, for a completion after ``tail``. Raises StructuredOutputError."""
        keyword = None if guide.schema is None else unenforced_keyword(guide.schema)
        if keyword is not None:
            raise StructuredOutputError(
                f"decoding cannot enforce {keyword!r} of a JSON schema: remove it, and check it afterwards"
            )
        tag = self._format.guide_tag(guide, self._prefix(tail), self._calls(guide, tools))
        try:
            return replace(guide, tag=orjson.dumps({"type": "structural_tag", "format": tag}).decode())
        except TypeError as error:
            raise StructuredOutputError(
                f"the schema cannot be sent to the engine ({error}): reduce its nesting"
            ) from error

    def _calls(self, guide: Guide, tools: Sequence[ToolSchema]) -> Tag | None:
        if not guide.calls:
            return None
        tool_by_name = {tool.name: tool for tool in tools}
        missing = [name for name in guide.calls if name not in tool_by_name]
        if missing:
            raise StructuredOutputError(
                f"a call of {missing[0]!r} is required, which is not one of the tools {sorted(tool_by_name)}"
            )
        calls = self._format.calls_tag([tool_by_name[name] for name in guide.calls], guide.most)
        if calls is None:
            raise StructuredOutputError(
                f"the chat format {self._format.name} has no grammar that calls can be constrained to"
            )
        return calls


SpecialInText = Literal["escape", "template"]
_PREFIXES = 1024
_VARIANTS = 256
_MARK = "qzmark"


class TemplateRenderer:
    """A :class:`~turnwise.model.core.Renderer` made of a chat template and a tokenizer.

    Args:
        facts: The probed template.
        tokens: The tokenizer.
        choice: The chat format and its proof.
        eos_ids: Ids that end a turn, by the model's configuration.
        special_in_text: ``escape``: added tokens spelled in messages stay text; ``template``: they become control ids.
        fixed_arguments: Whether template arguments and date are fixed for the run.
        placer: Places images; None for a model of text only.

    Attributes:
        guides: Structured-output grammars of the chat format.
        arguments: Template arguments besides the run's own; see :meth:`under`.
        stop_ids: Ids that end a turn.
        text: Rendering of whole conversations, and encoding of plain text.
        media: Kinds of media that the model takes; empty for text only.
        placed: Media of the last :meth:`render` or :meth:`extend`, at their places in its ids.
        why: Why the last :meth:`extend` returned None.

    Raises:
        RenderError: No id ends a turn.
    """

    def __init__(
        self,
        facts: TemplateFacts,
        tokens: Tokens,
        choice: Choice,
        *,
        eos_ids: Sequence[int] = (),
        special_in_text: SpecialInText = "escape",
        fixed_arguments: bool = False,
        placer: MediaPlacer | None = None,
    ) -> None:
        if special_in_text not in ("escape", "template"):
            raise RenderError(f"special_in_text: {special_in_text!r} is unknown; allowed: escape, template")
        self._facts = facts
        self._tokens = tokens
        self._choice = choice
        self._format = choice.format
        self._escape = special_in_text == "escape"
        self._eos = tuple(eos_ids)
        stop_tokens = [*facts.stop_tokens(), *(token for token in self._format.extra_stops if token in tokens.added)]
        self.stop_ids = frozenset([*self._eos, *(tokens.added[token] for token in stop_tokens)])
        if not self.stop_ids:
            raise RenderError(
                "no token ends a turn: the template closes turns with no token, and neither generation_config.json nor "
                "tokenizer_config.json names an end-of-text token; set eos_token in tokenizer_config.json"
            )
        self._placer = placer or MediaPlacer(None, tokens)
        # A video is given as its frames.
        self.media = self._placer.kinds | ({"video"} if "image" in self._placer.kinds else frozenset())
        self.placed: tuple[Media, ...] = ()
        self.arguments: TemplateArguments = ()
        self.why = ""
        stop_texts = [tokens.decode([number]) for number in sorted(self.stop_ids)]
        stops = list(filter(None, dict.fromkeys([*stop_tokens, *stop_texts])))
        self._skeletons = TurnSuffix(facts, tokens, stops, self._placer.marker)
        self._closing = tokens.encode(self._format.closing) if self._format.closing else []
        self._generation = len(tokens.encode(facts.prompt[len(facts.head) :])) + 2
        self._prefixes: dict[bytes, str] = {}
        self._pieces: dict[int, str] = {}
        self.guides: StructuralTags = FormatTags(self._format, lambda tail: self._prefix(tail[-self._generation :]))
        self._form = form = TemplateForm(
            facts, tokens, self._format, escape=self._escape, forget=self._skeletons.forget
        )
        self.text = TemplateText(facts.template, tokens, form)
        self._fixed = fixed_arguments
        self._base = self
        reads, variables = facts.template.reads, facts.template.variables
        self._own = template_arguments({key: value for key, value in variables.items() if key in reads})
        self._variants: dict[tuple[TemplateArguments, tuple[str, ...]], TemplateRenderer] = {}

    @property
    def template(self) -> ChatTemplate:
        """The chat template."""
        return self._facts.template

    @property
    def room(self) -> int | None:
        """Ids that a text may have; see the contract."""
        return self._tokens.room

    @room.setter
    def room(self, room: int | None) -> None:
        self._tokens.room = room

    def __copy__(self) -> TemplateRenderer:
        """Return an equal renderer with separate caches and counters, which another thread may use."""
        other = self._of(self._facts.template, self._tokens.copy())
        other.arguments = self.arguments
        return other

    def _of(self, template: ChatTemplate, tokens: Tokens) -> TemplateRenderer:
        return TemplateRenderer(
            TemplateFacts(template, tokens),
            tokens,
            self._choice,
            eos_ids=self._eos,
            special_in_text="escape" if self._escape else "template",
            fixed_arguments=self._fixed,
            placer=self._placer,
        )

    @property
    def escaped(self) -> int:
        """Number of added-token strings kept as text so far."""
        return self._tokens.escaped

    # Arguments of the template

    @property
    def reads(self) -> frozenset[str]:
        """Template arguments that a conversation may set."""
        return frozenset() if self._fixed else self._facts.template.reads

    def takes(self, name: str, value: Any) -> bool:
        """Return whether the template accepts an argument; see :func:`~turnwise.model.canonical.takes`."""
        return takes(self.reads, self._facts.template.literals, name, value)

    def under(self, arguments: TemplateArguments) -> TemplateRenderer:
        """Return the renderer for these template arguments; see the contract."""
        return self._variant(arguments, self._facts.template.now)

    def at(self, now: datetime) -> TemplateRenderer:
        """Return the renderer for conversations that begin at ``now``; see the contract."""
        template = self._facts.template
        if self._fixed or template.dated or template.date(now) == template.date(template.now):
            return self
        return self._variant(self.arguments, now)

    def _variant(self, arguments: TemplateArguments, now: datetime) -> TemplateRenderer:
        base = self._base
        template = base._facts.template
        # Arguments equal to the run's change no prompt.
        arguments = tuple(argument for argument in arguments if argument not in base._own)
        key = (arguments, template.date(now))
        if key == (base.arguments, template.date(template.now)):
            return base
        variant = base._variants.get(key)
        if variant is None:
            variant = base._with(arguments, now)
            if len(base._variants) >= _VARIANTS:
                base._variants.pop(next(iter(base._variants)))
            base._variants[key] = variant
        return variant

    def _with(self, arguments: TemplateArguments, now: datetime) -> TemplateRenderer:
        values = argument_values(arguments)
        for name, value in values.items():
            if not self.takes(name, value):
                why = f"this chat template accepts {', '.join(sorted(self.reads)) or 'no arguments in requests'}"
                raise RenderError(f"template argument {name}={shown_value(value)}: {why}")
        template = self._facts.template.with_variables(self._form.uncounted(values), now)
        other = self._of(template, self._tokens)
        if other.stop_ids != self.stop_ids:
            raise RenderError(f"template arguments {values} change how the chat template ends turns")
        other._base, other.arguments = self, arguments
        return other

    # Messages to ids

    def count(self, text: str) -> int:
        """Return the number of ids of a text inside a message, escapes included."""
        return self._tokens.count(text, escape=self._escape)

    def render(self, messages: Sequence[Canonical], tools: Sequence[ToolSchema]) -> TokenIds:
        """Return the whole prompt, generation prompt included, as int32 of shape [tokens].

        Calls whose arguments do not parse are rendered as raw text. Raises RenderError if the template raises, or an
        image cannot be placed.
        """
        media = media_in(messages)
        self._placer.check(media)
        token_ids, self.placed = self._placer.fill(self.text.prompt(messages, tools), media)
        return token_ids

    def extend(
        self,
        tail: TokenIds,
        completion: TokenIds,
        last: Canonical,
        new: Sequence[Canonical],
        tools: Sequence[ToolSchema],
    ) -> TokenIds | None:
        """Return the ids that follow ``tail + completion`` when ``new`` is appended; see the contract."""
        media = media_in(new)
        self._placer.check(media)
        try:
            following = as_ids(self._following(tail, completion.tolist(), last, new, tools))
            token_ids, self.placed = self._placer.fill(following, media)
            return token_ids
        except CannotExtend as declined:
            self.why = str(declined.args[0])
            return None

    def _following(
        self,
        tail: TokenIds,
        token_ids: list[int],
        last: Canonical,
        new: Sequence[Canonical],
        tools: Sequence[ToolSchema],
    ) -> list[int]:
        """Return the missing close of the turn, the new messages and the generation prompt."""
        stopped = bool(token_ids) and token_ids[-1] in self.stop_ids
        if not self.stop_ids.isdisjoint(token_ids[:-1]):
            raise CannotExtend("ids_after_stop")
        thinking = self._format.reasons and self._format.reasoning_open(self._turn_text(token_ids, tail))
        if thinking and stopped:
            raise CannotExtend("stop_in_reasoning")
        if any(call.value is None for message in new for call in message.calls):
            raise CannotExtend("no_bridge")
        json_tools, number = self._form.tools(tools)
        shape: Shape = (tuple(map(kind_of, new)), len(last.calls), number)
        form = self._form
        calls = [(form.text(call.name), form.call_id(call.id, call.name, at)) for at, call in enumerate(last.calls)]
        text, delta = self._skeletons.tail(calls, [self._form.message(message) for message in new], json_tools, shape)
        following = self._tokens.encode(text[delta.lead :] if stopped else text)
        if not following or not token_ids or not self._tokens.is_added(following[0]):
            repeated = False
        else:
            repeated = following[0] == token_ids[-1] or (stopped and delta.closes)
        if repeated:
            return following[1:]
        return self._closing + following if thinking else following

    def completion(self, message: Message, tools: Sequence[ToolSchema]) -> TokenIds:
        """Return the ids a model would sample for ``message``, stop id included.

        Raises RenderError if the template refuses it, or its text parses to something else.
        """
        canonical = Canonicalizer().reduce(0, message)
        if canonical.role != "assistant":
            raise RenderError(f"a completion must be an assistant message, not one with the role {canonical.role!r}")
        text = self._facts.completion_text(self._form.message(canonical), self._form.tools(tools)[0])
        if text is None:
            raise RenderError(f"this chat template cannot render {shown(canonical)} after its generation prompt")
        called = bool(canonical.calls)
        stop = self._facts.stop_behind(called=called)
        stop_id = self._tokens.added[stop] if stop is not None else min(self.stop_ids)
        token_ids = as_ids([*self._tokens.encode(self._facts.cut(text, called=called)), stop_id])
        prompt = as_ids(self._tokens.encode(self._facts.prompt[len(self._facts.head) :]))
        wrong = round_trip_difference(canonical, self.parse(token_ids, prompt, tools), message, self._tokens.seen)
        if wrong:
            raise RenderError(
                f"this chat template (format {self._format.name}) cannot render {shown(canonical)}: parsed back, its "
                f"{wrong} differs; what it writes is {self._tokens.decode(token_ids.tolist())[:300]!r}"
            )
        return token_ids

    def drops(self, messages: Sequence[Canonical], tools: Sequence[ToolSchema]) -> frozenset[int]:
        """Return the indices of messages whose reasoning the template drops from the history."""
        marked = [index for index, message in enumerate(messages) if message.reasoning]
        if not marked:
            return frozenset()
        wires = [self._form.message(message) for message in messages]
        for index in marked:
            wires[index]["reasoning_content"] = wires[index]["thinking"] = f"{_MARK}{index}{_MARK}"
        text = self._facts.template.render(wires, self._form.tools(tools)[0], generate=True)
        return frozenset(index for index in marked if f"{_MARK}{index}{_MARK}" not in text)

    # Ids to messages

    def parse(self, completion: TokenIds, tail: TokenIds, tools: Sequence[ToolSchema]) -> Message:
        """Parse sampled ids into an assistant message. Never raises."""
        parsed = self._format.parse(self._turn_text(completion.tolist(), tail), tools)
        return parsed.message()

    def live(self, tail: TokenIds, stops: Sequence[str] = ()) -> LiveTurn:
        """Return the incremental parser of a completion after ``tail``, given the request's stop strings."""
        live = self._format.live(self._prefix(tail[-self._generation :]))
        return LiveTurn(self._tokens, live, self.stop_ids, stops, partial(self._reasoning_tokens, tail))

    def _reasoning_tokens(self, tail: TokenIds, completion: TokenIds) -> int:
        pieces: list[str] = []

        def read(token_ids: list[int]) -> str:
            pieces.extend(map(self._piece, token_ids))
            return "".join(pieces)

        spans = self._format.parse(self._turn_text(completion.tolist(), tail, read), ()).spans
        starts = [0, *itertools.accumulate(map(len, pieces[:-1]))]
        return sum(bisect_left(starts, end) - bisect_left(starts, start) for start, end in spans)

    def _piece(self, number: int) -> str:
        """Return the text of one id, cached; half a character counts as a character."""
        piece = self._pieces.get(number)
        if piece is None:
            piece = self._pieces[number] = self._format.marks.read(self._tokens, [number])
        return piece

    def _turn_text(
        self, token_ids: list[int], tail: TokenIds, read: Callable[[list[int]], str] | None = None
    ) -> TurnText:
        marks = self._format.marks
        prefix = self._prefix(tail[-self._generation :])
        end = len(token_ids)
        if token_ids and token_ids[-1] in self.stop_ids and self.stop_ids.isdisjoint(token_ids[:-1]):
            end -= 1
        elif not self.stop_ids.isdisjoint(token_ids):
            end = next(index for index, number in enumerate(token_ids) if number in self.stop_ids)
        stopped = end < len(token_ids)
        if stopped and marks.holds(token_ids[end]):
            end += 1
        text = read(token_ids[:end]) if read is not None else marks.read(self._tokens, token_ids[:end])
        return TurnText(text, prefix, self._format.opened_by(prefix), stopped)

    def _prefix(self, token_ids: TokenIds) -> str:
        """Return the text before a completion, cached: nearly always the same generation prompt."""
        key = token_ids.tobytes()
        text = self._prefixes.get(key)
        if text is None:
            if len(self._prefixes) >= _PREFIXES:
                self._prefixes.clear()
            text = self._prefixes[key] = self._format.marks.read(self._tokens, token_ids.tolist())
        return text

    def decode(self, token_ids: TokenIds) -> str:
        """Return the text of ids, special tokens included (for display, never to re-encode)."""
        return self._tokens.decode(token_ids.tolist())

    # Description

    def describe(self) -> dict[str, Any]:
        """Return the chat format and how it was chosen, as printed at start and saved with a run."""
        variables = self._facts.template.variables
        return {
            "format": self._format.name,
            "markers": dict(self._format.markers),
            "source": self._choice.source,
            "warning": self._choice.warning,
            "proof": list(self._choice.proof),
            "unproven": list(self._choice.unproven),
            "stop_ids": {str(number): self._tokens.decode([number]) for number in sorted(self.stop_ids)},
            "template": self._facts.template.digest,
            "template_kwargs": {key: value for key, value in variables.items() if not key.endswith("_token")},
            "arguments": "text" if self._facts.text_arguments else "object",
            "special_in_text": "escape" if self._escape else "template",
        }


__all__ = ["TEMPLATES", "SpecialInText", "TemplateRenderer", "load_renderer", "save_format", "shipped_templates"]

TEMPLATES = Path(__file__).with_name("templates")
"""The folder of the chat templates that ship."""
# The headers of every template that ships; a tokenizer without them would read each as a handful of characters.
_HEADERS = ("<|im_start|>", "<|im_end|>")


def shipped_templates() -> list[str]:
    """Return the names of the shipped chat templates, as accepted by ``renderer.chat_template``."""
    return sorted(file.stem for file in TEMPLATES.glob("*.jinja"))


def load_renderer(
    model_dir: str | os.PathLike[str] | ModelFiles,
    *,
    format: str = "auto",  # noqa: A002 - the name of the config key
    special_in_text: SpecialInText = "escape",
    template_kwargs: Mapping[str, Any] | None = None,
    chat_template: str | Path | None = None,
    check_template: bool = True,
    now: datetime | None = None,
    fixed_arguments: bool = False,
    processor: MediaProcessor | None = None,
) -> TemplateRenderer:
    """Return the renderer of a model directory.

    Args:
        model_dir: Directory in Hugging Face's layout, never fetched from the network, or its contents.
        format: The chat format; ``auto``: that of ``turnwise_format.json``, else detected by rendering.
        special_in_text: Whether special tokens spelled in messages stay text.
        template_kwargs: Default template arguments (``enable_thinking``, ``reasoning_effort``).
        chat_template: Replaces the directory's own template: a file, a shipped name (:func:`shipped_templates`), or
            jinja text.
        check_template: Whether a trained model refuses a template other than that of its training.
        now: The date that the template writes in all conversations; default: the day when each begins.
        fixed_arguments: Whether conversations cannot change ``template_kwargs`` or the date.
        processor: Places images; None for that of the directory.

    Raises:
        ConfigError: ``chat_template`` is unreadable, unknown, or does not fit the tokenizer.
        RenderError: Directory, template or tokenizer cannot be used, no format was detected, or the model was trained
            with another template.
        MissingExtraError: There is no ``tokenizer.json`` and transformers is not installed, or the model takes images
            and Pillow is not installed.
    """
    files = model_dir if isinstance(model_dir, ModelFiles) else read_model_dir(model_dir)
    source = _template_text(chat_template, files)
    tool_source = files.tool_template if chat_template is None else None
    if check_template:
        check_trained(files.path, template_digest(source, tool_source), chat_template)
    processor = processor or load_processor(files.path)
    tokens = Tokens(files.tokenizer)
    variables = {**files.special, **(template_kwargs or {})}
    facts = TemplateFacts(ChatTemplate(source, tool_source=tool_source, variables=variables, now=now), tokens)
    choice = _choose_format(format, files, facts, tokens)
    if choice.format.name == Plain.name and choice.source != "config":
        choice = replace(choice, warning=_no_calls(files.path, chat_template, facts))
    try:
        return TemplateRenderer(
            facts,
            tokens,
            choice,
            eos_ids=files.eos_ids,
            special_in_text=special_in_text,
            fixed_arguments=fixed_arguments,
            placer=MediaPlacer(processor, tokens),
        )
    except RenderError as error:
        named = files.special.get("eos_token")
        lacks = "" if named is None else f" (its eos_token, {named!r}, is no token of its tokenizer)"
        raise RenderError(f"model {str(files.path)!r}: {error}{lacks}") from error


def _choose_format(name: str, files: ModelFiles, facts: TemplateFacts, tokens: Tokens) -> Choice:
    if name != "auto":
        return configured_format(name, facts, tokens)
    if files.saved_format is not None:
        return stored_format(files.saved_format, str(files.path / FORMAT_FILE), facts, tokens)
    return detect(facts, tokens)


def _no_calls(path: Path, chat_template: str | Path | None, facts: TemplateFacts) -> str:
    """Return the warning that a template writes no calls."""
    named = "its own chat template" if chat_template is None else f"renderer.chat_template {str(chat_template)[:80]!r}"
    why = f"raises on tool calls ({facts.call_error})" if facts.call_error else "drops tool calls"
    return (
        f"model {str(path)!r}: {named} {why}, so that the model's calls are neither read nor kept in the conversation; "
        f"set renderer.chat_template to one that writes calls ({', '.join(shipped_templates())}, or a jinja file), or "
        "renderer.format: plain where the model shall answer in text only"
    )


def _template_text(chat_template: str | Path | None, files: ModelFiles) -> str:
    if chat_template is None and files.template is None:
        raise RenderError(
            f"{files.path} has no chat template: name one as renderer.chat_template, a jinja file or one of "
            f"{', '.join(shipped_templates())}"
        )
    if chat_template is None:
        return str(files.template)
    if isinstance(chat_template, Path):
        try:
            return chat_template.read_bytes().decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"renderer.chat_template is {chat_template}: {error}") from error
    if any(mark in chat_template for mark in "{\n"):
        return chat_template
    names = shipped_templates()
    if chat_template not in names:
        raise ConfigError(
            f"renderer.chat_template is {chat_template!r}, which is not a shipped template"
            f"{nearest(chat_template, names)}: name one of {', '.join(names)}, or a jinja file (./{chat_template})"
        )
    added = {token.content for token in files.tokenizer.get_added_tokens_decoder().values()}
    missing = [token for token in _HEADERS if token not in added]
    if missing:
        raise ConfigError(
            f"renderer.chat_template is {chat_template!r}, which writes {' and '.join(_HEADERS)}, but the tokenizer of "
            f"{files.path} has no token {' and '.join(missing)}: name a jinja file with this model's own headers"
        )
    return (TEMPLATES / f"{chat_template}.jinja").read_bytes().decode("utf-8")


def save_format(renderer: Renderer, model_dir: str | os.PathLike[str]) -> Path:
    """Write a renderer's chat format and template into a model directory; return the format's file, with the digest."""
    path = Path(model_dir) / FORMAT_FILE
    if isinstance(renderer, TemplateRenderer):
        write_templates(path.parent, renderer.template.source, renderer.template.tool_source)
    description = renderer.describe()
    saved = {key: description[key] for key in ("format", "markers", "template") if key in description}
    path.write_text(json.dumps(saved, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
    return path
