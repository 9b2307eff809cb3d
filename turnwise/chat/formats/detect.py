"""Detection of a template's chat format, proven by parsing what the template renders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from turnwise.chat.formats import FORMATS, find_format
from turnwise.chat.formats.core import CLOSE, OPEN, TEXT_OPEN, ChatFormat, Parsed, Probe, TurnText
from turnwise.chat.formats.derive import common_prefix, reasoning_markers
from turnwise.chat.template import TemplateFacts, Wire
from turnwise.chat.tokens import Tokens
from turnwise.errors import ConfigError, RegistryError, RenderError
from turnwise.types import ToolCall, ToolSchema

_USUAL_MARKERS = ("<think>", "</think>")
_TOOLS = tuple(
    ToolSchema(
        name,
        "",
        {"type": "object", "properties": {Probe.KEY: {"type": "string"}, Probe.NUMBER_KEY: {"type": "integer"}}},
    )
    for name in (Probe.FIRST, Probe.SECOND)
)
_FIRST = ToolCall("", Probe.FIRST, {Probe.KEY: Probe.VALUE, Probe.NUMBER_KEY: Probe.NUMBER})
_SECOND = ToolCall("", Probe.SECOND, {Probe.KEY: Probe.VALUE})


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen chat format and its proof.

    Attributes:
        format: The format, with this template's markers.
        source: ``auto``, ``config`` or ``turnwise_format.json``.
        proof: Names of the conversations that were rendered and parsed back equal.
        unproven: Conversations that the template refuses, or that do not parse back.
        warning: Why calls cannot be read, and what to do, where nobody chose that; or ``""``.
    """

    format: ChatFormat
    source: str
    proof: tuple[str, ...]
    unproven: tuple[str, ...]
    warning: str = ""


def _conversations(facts: TemplateFacts) -> dict[str, tuple[Wire, Parsed]]:
    text, thought = Probe.TEXT, Probe.THOUGHT
    return {
        "answer": (facts.assistant(text), Parsed(text)),
        "one call": (facts.assistant(calls=1), Parsed(calls=[_FIRST])),
        "two calls": (facts.assistant(calls=2), Parsed(calls=[_FIRST, _SECOND])),
        "a call without arguments": (
            facts.assistant(calls=1, bare=True),
            Parsed(calls=[ToolCall("", Probe.FIRST, {})]),
        ),
        "text and a call": (facts.assistant(text, calls=1), Parsed(text, calls=[_FIRST])),
        "reasoning and an answer": (facts.assistant(text, thought=thought), Parsed(text, thought)),
        "reasoning and a call": (facts.assistant(thought=thought, calls=1), Parsed("", thought, [_FIRST])),
    }


def _equal(parsed: Parsed, expected: Parsed) -> bool:
    calls = [(call.name, call.arguments, call.error) for call in parsed.calls]
    return (
        parsed.content == expected.content
        and parsed.reasoning == expected.reasoning
        and calls == [(call.name, call.arguments, None) for call in expected.calls]
    )


def prove(chat_format: ChatFormat, facts: TemplateFacts, tokens: Tokens) -> tuple[list[str], list[str]]:
    """Parse what the template renders; return the conversations that parse back equal, and those that do not."""
    generation = facts.prompt[len(facts.head) :]
    agreed: list[str] = []
    unproven: list[str] = []
    for name, (message, expected) in _conversations(facts).items():
        text, prefix = facts.completion_text(message), generation
        if text is None and (turn := facts.turn(message)) is not None:
            # The generation prompt opens reasoning that a history leaves out: calls are read all the same.
            prefix, turn = generation.lstrip(), turn.lstrip()
            prefix = common_prefix(prefix, turn, tokens.added)
            text = turn[len(prefix) :]
        parses_back = text is not None and any(
            _equal(_read_back(chat_format, text, before, expected, facts, tokens), expected)
            # Some histories hold the opening marker of reasoning, but neither the reasoning nor its end.
            for before in (prefix, "")
        )
        (agreed if parses_back else unproven).append(name)
    return agreed, unproven


def _read_back(
    chat_format: ChatFormat, turn_text: str, prefix_text: str, expected: Parsed, facts: TemplateFacts, tokens: Tokens
) -> Parsed:
    marks = chat_format.marks
    prefix = marks.read(tokens, tokens.encode(prefix_text))
    text = marks.read(tokens, tokens.encode(facts.cut(turn_text, called=bool(expected.calls))))
    stop = facts.stop_behind(called=bool(expected.calls))
    if stop is not None and marks.holds(tokens.added[stop]):
        text += marks.of(stop)
    return chat_format.parse(TurnText(text, prefix, chat_format.opened_by(prefix), True), _TOOLS)


def _reasoning(facts: TemplateFacts, tokens: Tokens) -> dict[str, str]:
    """Return the template's reasoning markers, else the usual ones if the vocabulary has them."""
    derived = reasoning_markers(facts.probe)
    if derived:
        return derived
    generation = facts.prompt[len(facts.head) :]
    if all(token in tokens.added for token in _USUAL_MARKERS) or generation.rstrip().endswith(_USUAL_MARKERS[0]):
        return {OPEN: _USUAL_MARKERS[0], CLOSE: _USUAL_MARKERS[1]}
    return {}


def _build_format(
    format_class: type[ChatFormat], markers: Mapping[str, str], facts: TemplateFacts, tokens: Tokens
) -> ChatFormat:
    if format_class.whole_turn:
        return format_class(markers, tokens.added)
    reasoning = _reasoning(facts, tokens)
    return format_class({**markers, **reasoning, **_text_opener(facts, reasoning)}, tokens.added)


def _text_opener(facts: TemplateFacts, reasoning: Mapping[str, str]) -> dict[str, str]:
    """Return the added token that the template writes before an answer, besides the generation prompt."""
    opener = facts.last_added(facts.probe.answer.split(Probe.TEXT, 1)[0]) or ""
    in_prompt = opener in facts.prompt[len(facts.head) :]
    return {} if not opener or in_prompt or opener in reasoning.values() else {TEXT_OPEN: opener}


def _required_conversations(facts: TemplateFacts) -> list[str]:
    """Return the conversations that the template writes in full, which a format must parse back."""
    needed = ["answer"]
    if facts.probe.one is not None and Probe.FIRST in facts.probe.one:
        needed.append("one call")
    if facts.probe.two is not None:
        needed.append("two calls")
    return needed


def detect(facts: TemplateFacts, tokens: Tokens) -> Choice:
    """Return the only format that parses what the template renders. Raises RenderError for none or several."""
    choices: list[Choice] = []
    tried: list[str] = []
    needed = _required_conversations(facts)
    for name, format_class in FORMATS.items():
        markers = format_class.detect(facts.probe)
        if markers is None:
            continue
        chat_format = _build_format(format_class, markers, facts, tokens)
        agreed, unproven = prove(chat_format, facts, tokens)
        missing = [conversation for conversation in needed if conversation not in agreed]
        if missing:
            tried.append(f"{name} (does not read back: {', '.join(missing)})")
        else:
            choices.append(Choice(chat_format, "auto", tuple(agreed), tuple(unproven)))
    if len(choices) == 1:
        return choices[0]
    if choices:
        seen = f"{', '.join(choice.format.name for choice in choices)} all parse what the template writes"
    else:
        wrote = facts.probe.one is not None and Probe.FIRST in facts.probe.one
        description = f"a call is written as {(facts.probe.one or '')[:200]!r}" if wrote else "calls are not written"
        if facts.completion_text(facts.assistant(Probe.TEXT)) is None:
            description += f", and an answer does not follow the generation prompt: {facts.probe.answer[:200]!r}"
        seen = description + (f"; tried: {', '.join(tried)}" if tried else "")
    raise RenderError(
        f"format: auto cannot detect this model's chat format: {seen}. Set `format:` to one of {', '.join(FORMATS)}"
    )


def configured_format(name: str, facts: TemplateFacts, tokens: Tokens) -> Choice:
    """Return the configured format, with the template's own markers if it shows any.

    Raises:
        RenderError: There is no such format.
    """
    try:
        format_class = find_format(name)
    except (ConfigError, RegistryError) as error:
        raise RenderError(str(error)) from error
    markers = format_class.detect(facts.probe) or dict(format_class.defaults)
    chat_format = _build_format(format_class, markers, facts, tokens)
    agreed, unproven = prove(chat_format, facts, tokens)
    return Choice(chat_format, "config", tuple(agreed), tuple(unproven))


def stored_format(saved: Mapping[str, Any], path: str, facts: TemplateFacts, tokens: Tokens) -> Choice:
    """Return the format that a checkpoint was saved with. Raises RenderError for an invalid file."""
    name, markers = saved.get("format"), saved.get("markers")
    format_class = FORMATS.get(name) if isinstance(name, str) else None
    if format_class is None or not isinstance(markers, dict):
        raise RenderError(
            f"{path}: format {name!r} with markers {markers!r} is not one of {', '.join(FORMATS)}; name the module of "
            "a custom one in TURNWISE_EXTERNAL_MODULES"
        )
    missing = sorted(set(format_class.defaults) - set(markers))
    if missing or not all(isinstance(value, str) for value in markers.values()):
        raise RenderError(f"{path}: the markers of {name} must be strings and hold {', '.join(missing) or 'text'}")
    chat_format = format_class(markers, tokens.added)
    agreed, unproven = prove(chat_format, facts, tokens)
    return Choice(chat_format, path, tuple(agreed), tuple(unproven))
