"""Canonical form of messages, tools and template arguments: what two requests are compared by.

Images are compared by the SHA-256 of their bytes, wherever and however a message gives them
(:mod:`turnwise.images`). Values are compared as canonical JSON: Python takes ``True`` and ``1`` for equal,
a chat template does not.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from turnwise.errors import RenderError, SessionError, shown
from turnwise.images import TEXT_PARTS, MediaBytes, MessageMedia, media_of_part
from turnwise.types import Json, Media, Message, ToolCall, ToolSchema

# Deeper values exhaust the stack of whoever walks them (files take 254 levels, a copy some 300).
_MAX_DEPTH = 100

Recognise = Callable[[Sequence[str], "Canonical"], "Canonical | None"]
"""Given the ids of an assistant message's calls and what it says: the turn that it is, where the ids tell."""

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


@dataclass(frozen=True, slots=True)
class CanonicalCall:
    """A tool call, compared by name and arguments; ``value`` and ``id`` are for rendering only.

    Attributes:
        arguments: Canonical JSON, or the stripped text where it does not parse.
        value: Parsed arguments with sorted keys; None where they do not parse to an object.
    """

    name: str
    arguments: str
    value: dict[str, Any] | None = field(compare=False)
    id: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Canonical:
    """A message reduced to what is compared and rendered.

    Attributes:
        role: ``system``, ``user``, ``assistant`` or ``tool``.
        text: The text parts, joined.
        name: Name of a system or user message, or of a tool message that matches no call; else None.
        answers: Tool message: index of the call it answers in the last non-empty assistant turn; -1 for none.
        call_id: Tool message: the call id to render.
        call_name: Tool message: the tool name to render.
        turn: Assistant message identified by its call ids: the ``turn_id`` of that turn.
        media: Images, in order, each with its place in ``text``.
    """

    role: str
    text: str
    reasoning: str = ""
    calls: tuple[CanonicalCall, ...] = ()
    name: str | None = None
    answers: int | None = None
    call_id: str = field(default="", compare=False)
    call_name: str = field(default="", compare=False)
    turn: str | None = field(default=None, compare=False)
    media: tuple[MessageMedia, ...] = ()

    @property
    def empty(self) -> bool:
        """Whether the message has neither text nor calls (reasoning alone counts as empty)."""
        return not self.calls and not self.text.strip()

    def parts(self) -> list[str | MessageMedia]:
        """Return texts, none of them empty, and media in the order in which the message holds them."""
        parts: list[str | MessageMedia] = []
        start = 0
        for media in self.media:
            if media.at > start:
                parts.append(self.text[start : media.at])
            parts.append(media)
            start = media.at
        if start < len(self.text):
            parts.append(self.text[start:])
        return parts

    def to_template(self) -> dict[str, Any]:
        """Return the message in the form of chat templates (OpenAI's, with arguments as an object).

        Images are parts with their digest instead of their bytes: ``{"type": "image", "sha256": ...}``.
        """
        message: dict[str, Any] = {"role": self.role, "content": self.text}
        if self.media:
            message["content"] = [
                {"type": "text", "text": part} if isinstance(part, str) else {"type": part.kind, "sha256": part.digest}
                for part in self.parts()
            ]
        if self.name is not None:
            message["name"] = self.name
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments if call.value is None else call.value},
                }
                for call in self.calls
            ]
        if self.role == "tool":
            message["tool_call_id"] = self.call_id
            message["name"] = self.call_name
        return message


def clean(text: str) -> str:
    """Replace lone surrogates, which neither tokenizers nor UTF-8 files accept."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def canonical_value(value: Json, depth: int = 0) -> Json:
    """Return ``value`` with sorted keys, and floats without a fraction as integers; ``depth`` is the nesting so far.

    Raises SessionError if it is not JSON, or nested more than 100 levels deep.
    """
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, bool) or value is None or isinstance(value, int):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return int(value) if value == math.floor(value) else value
    if depth >= _MAX_DEPTH:
        raise SessionError(f"tool arguments are nested more than {_MAX_DEPTH} levels deep: write them flatter")
    if isinstance(value, Mapping):
        # Cleaned before they are sorted: what is cleaned already must come out in the same order.
        cleaned = {clean(str(key)): item for key, item in value.items()}
        return {key: canonical_value(cleaned[key], depth + 1) for key in sorted(cleaned)}
    if isinstance(value, (list, tuple)):
        return [canonical_value(item, depth + 1) for item in value]
    raise SessionError(f"tool arguments hold a {type(value).__name__}, which JSON cannot express: {value!r}")


def canonical_arguments(arguments: Mapping[str, Any] | str | None) -> tuple[str, dict[str, Any] | None]:
    """Return call arguments as canonical JSON text and as an object; blank or null arguments are ``{}``.

    Text that is not JSON is returned stripped, with None for the object. Raises SessionError only for objects that are
    not JSON or nested too deep.
    """
    if isinstance(arguments, str):
        text = clean(arguments.strip())
        if not text:
            return "{}", {}
        try:
            value = canonical_value(json.loads(text))
        except (ValueError, RecursionError, SessionError):
            return text, None
    else:
        value = canonical_value(arguments)
    if value is None:
        return "{}", {}
    dumped = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return dumped, value if isinstance(value, dict) else None


def canonical_tools(tools: Sequence[ToolSchema] | None) -> tuple[tuple[str, str, str], ...]:
    """Return a comparison key for the tools of a prompt: their order counts, the order of JSON keys does not."""
    return tuple(
        (tool.name, tool.description, json.dumps(canonical_value(tool.parameters), ensure_ascii=False))
        for tool in tools or ()
        if not tool.deferred
    )


def _content(role: str, index: int, content: Any, keep: MediaBytes | None) -> tuple[str, tuple[MessageMedia, ...]]:
    """Return the joined text of a message's content, and its media."""
    if content is None:
        return "", ()
    if isinstance(content, str):
        return clean(content), ()
    texts: list[str] = []
    media: list[MessageMedia] = []
    length = 0
    for number, part in enumerate(content):
        if part.get("type", "text") in TEXT_PARTS:
            text = part.get("text", "")
            # A block of white space only is an artefact of clients that split and join blocks.
            if len(content) == 1 or text.strip():
                texts.append(clean(text))
                length += len(texts[-1])
        else:
            media += media_of_part(part, length, f"messages[{index}].content[{number}] ({role})", keep)
    if media and role in ("assistant", "system"):
        raise SessionError(
            f"messages[{index}] ({role}) holds an image: give images in user and tool messages, no model writes any"
        )
    return "".join(texts), tuple(media)


def _calls(message: Mapping[str, Any]) -> tuple[CanonicalCall, ...]:
    calls = []
    for call in message.get("tool_calls") or ():
        if isinstance(call, ToolCall):
            # A call that could not be used has no arguments: it is compared and rendered by its raw text.
            source: Mapping[str, Any] | str | None = call.raw if call.error is not None else call.arguments
            name, call_id = call.name, call.id
        else:
            function = call.get("function", call)
            name, source, call_id = function.get("name", ""), function.get("arguments"), call.get("id") or ""
        arguments, value = canonical_arguments(source)
        calls.append(CanonicalCall(clean(name), arguments, value, call_id))
    return tuple(calls)


def call_ids(message: Mapping[str, Any]) -> list[str]:
    """Return the call ids of an assistant message as sent; ``""`` for a missing id."""
    calls = message.get("tool_calls") or ()
    return [call.id if isinstance(call, ToolCall) else call.get("id") or "" for call in calls]


class Canonicalizer:
    """Reduces messages one after the other to their canonical form.

    A tool message is reduced to the position of the call it answers, which depends on the assistant message before it.

    Args:
        recognise: Identifies recorded turns by their call ids. With it, calls that were not sampled get ids made from
            their position, so that equal messages get equal ids; without it, ids stay as sent.
        keep: Returns the one copy of a file's bytes; without it, each image has its own.
    """

    __slots__ = ("_answered", "_before", "_calls", "_fresh", "_keep", "_named", "_recognise")

    def __init__(self, recognise: Recognise | None = None, keep: MediaBytes | None = None) -> None:
        self._recognise = recognise
        self._keep = keep
        self._calls: tuple[CanonicalCall, ...] = ()
        self._named: Sequence[str] = ()
        self._answered: set[int] = set()
        self._before: Sequence[Canonical] = ()
        self._fresh = 0

    def skip(self, message: Mapping[str, Any], canonical: Canonical) -> None:
        """Advance past a message whose canonical form is known."""
        self._fresh += len(canonical.calls)
        self._note(message, canonical)

    def resume(self, messages: Sequence[Mapping[str, Any]], forms: Sequence[Canonical]) -> None:
        """Advance past the first ``len(forms)`` of ``messages``, whose canonical forms are known."""
        self._before = forms
        turns = (index for index in reversed(range(len(forms))) if is_turn(forms[index]))
        for index in range(next(turns, 0), len(forms)):
            self._note(messages[index], forms[index])

    def reduce(self, index: int, message: Message | Mapping[str, Any]) -> Canonical:
        """Return the canonical form of ``messages[index]``.

        Raises SessionError for unknown roles, and for media that are no image given as data.
        """
        role = _ROLES.get(message.get("role", ""))
        if role is None:
            raise SessionError(
                f"messages[{index}].role is {message.get('role')!r}; allowed: {', '.join(sorted(_ROLES))}"
            )
        text, media = _content(role, index, message.get("content"), self._keep)
        if role == "assistant":
            reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
            canonical = self._assistant(Canonical(role, text, clean(str(reasoning)), _calls(message)))
        elif role == "tool":
            canonical = self._tool(text, media, message)
        else:
            name = message.get("name")
            canonical = Canonical(role, text, name=clean(name) if name else None, media=media)
        self.skip(message, canonical)
        return canonical

    def _note(self, message: Mapping[str, Any], canonical: Canonical) -> None:
        if is_turn(canonical):
            self._calls, self._answered = canonical.calls, set()
            # A recognised turn keeps the order of calls in which it was sampled.
            self._named = call_ids(message) if canonical.turn is None else [call.id for call in canonical.calls]
        elif canonical.answers is not None and canonical.answers >= 0:
            self._answered.add(canonical.answers)

    def _assistant(self, form: Canonical) -> Canonical:
        turn = self._recognise and self._recognise([call.id for call in form.calls], form)
        if turn:
            return turn
        calls = []
        for number, call in enumerate(form.calls):
            call_id = "" if self._recognise is not None else call.id
            calls.append(replace(call, id=call_id or self._issue_id("m", number)))
        return replace(form, calls=tuple(calls)) if calls else form

    def _issue_id(self, letter: str, number: int) -> str:
        """Return a call id of nine letters and digits, which every chat template accepts."""
        count = sum(len(form.calls) for form in self._before) + self._fresh
        return f"{letter}{count + number:08d}"

    def _tool(self, text: str, media: tuple[MessageMedia, ...], message: Message | Mapping[str, Any]) -> Canonical:
        named = message.get("tool_call_id")
        numbers = range(len(self._calls))
        unanswered = [number for number in numbers if number not in self._answered]
        candidates = [number for number in numbers if named and self._named[number] == named]
        position = next(
            (number for number in [*(n for n in candidates if n in unanswered), *candidates, *unanswered]), None
        )
        if position is None:
            # It answers no call that could name it: what is rendered is made from what is compared.
            name = clean(message.get("name") or "")
            issued_id = self._issue_id("n", 0)
            return Canonical("tool", text, name=name, answers=-1, call_id=issued_id, call_name=name, media=media)
        call = self._calls[position]
        return Canonical("tool", text, answers=position, call_id=call.id, call_name=call.name, media=media)


def is_turn(message: Canonical) -> bool:
    """Whether following tool messages answer the calls of this message."""
    return message.role == "assistant" and not message.empty


def unplaced(messages: Iterable[Canonical]) -> tuple[Media, ...]:
    """Return the images of messages, without a place in ids."""
    return tuple(Media(media.kind, media.data, 0, 0) for message in messages for media in message.media)


def canonical_messages(messages: Sequence[Message | Mapping[str, Any]]) -> list[Canonical]:
    """Return the canonical form of a list of messages."""
    reducer = Canonicalizer()
    return [reducer.reduce(index, message) for index, message in enumerate(messages)]


TemplateArguments: TypeAlias = tuple[tuple[str, str], ...]
"""Names and values, these as canonical JSON, ordered by name."""

SWITCHES = frozenset({"enable_thinking", "thinking"})
"""Arguments by which templates switch reasoning on and off: booleans."""
EFFORT = "reasoning_effort"
"""The argument by which templates say how much a model reasons: a word."""
_EFFORTS = frozenset({"low", "medium", "high"})
_MOST_CHARACTERS = 2**16


def template_arguments(arguments: Mapping[str, Any] | None) -> TemplateArguments:
    """Return template arguments in comparable form, without Nones. Raises RenderError if not JSON or too large."""
    if not arguments:
        return ()
    pairs = []
    for name, value in sorted(arguments.items()):
        if value is None:
            continue
        try:
            # Templates and files walk values level by level, as they do the arguments of tools.
            canonical_value(value)
            text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        except (SessionError, TypeError, ValueError, RecursionError):
            text = ""
        if not text or len(text) > _MOST_CHARACTERS:
            raise RenderError(
                f"template argument {name}: must be JSON of at most {_MOST_CHARACTERS} characters and {_MAX_DEPTH} "
                f"levels, not {shown(value)}"
            )
        pairs.append((name, text))
    return tuple(pairs)


def argument_values(arguments: TemplateArguments) -> dict[str, Any]:
    """Return template arguments as Python values."""
    return {name: json.loads(text) for name, text in arguments}


def takes(reads: Set[str], literals: Set[str], name: str, value: Any) -> bool:
    """Return whether a template accepts an argument.

    Args:
        reads: Argument names that the template reads.
        literals: String literals of the template.
        name: Argument name.
        value: Its value: a boolean for a reasoning switch; for an effort ``low``, ``medium``, ``high`` or a literal.
    """
    if name not in reads:
        return False
    if name in SWITCHES:
        return isinstance(value, bool)
    if name == EFFORT:
        return isinstance(value, str) and (value in _EFFORTS or value in literals)
    return True
