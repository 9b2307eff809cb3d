"""The canonical form: what of a message may matter, and nothing else.

Owns: the reduction of messages to :class:`Canonical`, the equality that the recorder compares with, and the
form in which chat templates see messages. Equal meaning gives equal canonical messages, which give equal ids.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from turnwise.errors import SessionError
from turnwise.types import Json, Message, ToolCall, ToolSchema

# Deeper values exhaust the stack of whoever walks them (files take 254 levels, a copy some 300).
_MAX_DEPTH = 100

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


@dataclass(frozen=True, slots=True)
class CanonicalCall:
    """A call, compared by name and canonical arguments; ``id`` and ``value`` only help rendering.

    Attributes:
        name: The tool's name.
        arguments: Canonical JSON, or the stripped text where it does not parse.
        value: The parsed arguments, keys in canonical order; None where they do not parse to an object.
        id: The id to render.
    """

    name: str
    arguments: str
    value: dict[str, Any] | None = field(compare=False)
    id: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Canonical:
    """A message reduced to what may matter.

    Attributes:
        role: ``system``, ``user``, ``assistant`` or ``tool``.
        text: The joined text parts.
        reasoning: Reasoning of an assistant message, empty where it has none.
        calls: Calls of an assistant message.
        name: Name of a system or user message, or of a tool message that answers no call; else None.
        answers: For a tool message: (index of the assistant message among the messages, index of the call in
            it) that it answers; (-1, -1) where it answers none.
        call_id: For a tool message: the id to render.
        call_name: For a tool message: the tool's name to render.
    """

    role: str
    text: str
    reasoning: str = ""
    calls: tuple[CanonicalCall, ...] = ()
    name: str | None = None
    answers: tuple[int, int] | None = None
    call_id: str = field(default="", compare=False)
    call_name: str = field(default="", compare=False)

    def to_template(self) -> dict[str, Any]:
        """Return the form that chat templates expect (OpenAI's, with arguments as an object)."""
        message: dict[str, Any] = {"role": self.role, "content": self.text}
        if self.name is not None:
            message["name"] = self.name
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.name,
                        "arguments": call.arguments if call.value is None else call.value,
                    },
                }
                for call in self.calls
            ]
        if self.role == "tool":
            message["tool_call_id"] = self.call_id
            message["name"] = self.call_name
        return message


def clean(text: str) -> str:
    """Return a text without half surrogate pairs: neither tokenizers nor files take them."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def canonical_value(value: Json, depth: int = 0) -> Json:
    """Return ``value`` with sorted keys and every float without fraction as an integer.

    Args:
        value: What ``json.loads`` may return.
        depth: How many lists and objects stand around it.

    Raises:
        SessionError: JSON cannot express it, or it is nested more than 100 levels deep.
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
    """Return arguments as canonical JSON text and as an object.

    Blank or null arguments are ``{}``. What is no JSON is its stripped text, with None for the object.

    Raises:
        SessionError: An object holds what JSON cannot express, or is nested too deep. A text never raises.
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
    """Return a key for a list of tools: their order counts, the order of keys does not."""
    return tuple(
        (tool.name, tool.description, json.dumps(canonical_value(tool.parameters), ensure_ascii=False))
        for tool in tools or ()
    )


def _text(role: str, index: int, content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return clean(content)
    texts = []
    for part in content:
        kind = part.get("type", "text")
        if kind not in ("text", "input_text", "output_text"):
            raise SessionError(
                f"messages[{index}] ({role}) holds a part of type {kind!r}: this renderer places text only"
            )
        text = part.get("text", "")
        # A block of white space only is an artefact of clients that split and join blocks.
        if len(content) == 1 or text.strip():
            texts.append(text)
    return clean("".join(texts))


def _calls(message: Mapping[str, Any], index: int) -> tuple[CanonicalCall, ...]:
    calls = []
    for number, call in enumerate(message.get("tool_calls") or ()):
        if isinstance(call, ToolCall):
            # A call that could not be used has no arguments: it is compared and rendered by its raw text.
            source: Mapping[str, Any] | str | None = call.raw if call.error is not None else call.arguments
            name, call_id = call.name, call.id
        else:
            function = call.get("function", call)
            name, source, call_id = function.get("name", ""), function.get("arguments"), call.get("id") or ""
        arguments, value = canonical_arguments(source)
        calls.append(CanonicalCall(clean(name), arguments, value, call_id or f"m{index:05d}{number:03d}"))
    return tuple(calls)


class Canonicalizer:
    """Reduces a list of messages, one after the other.

    A tool message is reduced to the position of the call it names, so the reduction of a message depends on
    the assistant message before it; nothing else of the list matters. Reusable from any position: the session
    keeps the canonical form of the messages that did not change.
    """

    __slots__ = ("_answered", "_calls", "_turn")

    def __init__(self) -> None:
        self._turn = -1
        self._calls: tuple[CanonicalCall, ...] = ()
        self._answered: set[int] = set()

    def skip(self, index: int, canonical: Canonical) -> None:
        """Take note of a message whose canonical form is known already."""
        if canonical.role == "assistant":
            self._turn, self._calls, self._answered = index, canonical.calls, set()
        elif canonical.answers is not None and canonical.answers[0] == self._turn:
            self._answered.add(canonical.answers[1])

    def resume(self, known: Sequence[Canonical]) -> None:
        """Take note of messages whose canonical forms are known: only what follows the last turn matters."""
        start = next((index for index in reversed(range(len(known))) if known[index].role == "assistant"), 0)
        for index in range(start, len(known)):
            self.skip(index, known[index])

    def reduce(self, index: int, message: Message | Mapping[str, Any]) -> Canonical:
        """Return the canonical form of ``messages[index]``.

        Raises:
            SessionError: An unknown role, or media that cannot be placed.
        """
        role = _ROLES.get(message.get("role", ""))
        if role is None:
            raise SessionError(
                f"messages[{index}].role is {message.get('role')!r}; allowed: {', '.join(sorted(_ROLES))}"
            )
        text = _text(role, index, message.get("content"))
        if role == "assistant":
            reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
            canonical = Canonical(role, text, clean(str(reasoning)), _calls(message, index))
        elif role == "tool":
            canonical = self._tool(index, text, message)
        else:
            canonical = Canonical(role, text, name=message.get("name"))
        self.skip(index, canonical)
        return canonical

    def _tool(self, index: int, text: str, message: Message | Mapping[str, Any]) -> Canonical:
        named = message.get("tool_call_id")
        position = next((n for n, call in enumerate(self._calls) if named and call.id == named), None)
        if position is None:
            open_calls = [n for n in range(len(self._calls)) if n not in self._answered]
            position = open_calls[0] if open_calls else None
        if position is None:
            # It answers no call that could name it: what is rendered is made from what is compared.
            name = clean(message.get("name") or "")
            return Canonical("tool", text, name=name, answers=(-1, -1), call_id=f"m{index:05d}000", call_name=name)
        call = self._calls[position]
        return Canonical("tool", text, answers=(self._turn, position), call_id=call.id, call_name=call.name)


def canonical_messages(messages: Sequence[Message | Mapping[str, Any]]) -> list[Canonical]:
    """Return the canonical form of a whole list of messages."""
    reducer = Canonicalizer()
    return [reducer.reduce(index, message) for index, message in enumerate(messages)]


class History:
    """The canonical form of a conversation that grows: what is equal to the last request is not reduced again."""

    __slots__ = ("_forms", "_messages", "_said", "_switches")

    def __init__(self) -> None:
        self._messages: list[Mapping[str, Any]] = []
        self._forms: list[Canonical] = []
        # What ``==`` alone may take for something else in the calls of remembered messages.
        self._switches: list[tuple[int, list[_Switch]]] = []
        self._said: tuple[Message, Canonical] | None = None

    def said(self, message: Message, form: Canonical) -> None:
        """Take note of the message that an agent was given last: most agents hand back the very same.

        Args:
            message: The message, which nobody edits.
            form: Its canonical form; all its calls have ids.
        """
        self._said = (message, form)

    def reduce(self, messages: Sequence[Message]) -> list[Canonical]:
        """Return the canonical form of a request's messages.

        Raises:
            SessionError: There are none, the last one is an assistant message, or one cannot be placed.
        """
        if not messages:
            raise SessionError("messages is empty: a request needs at least one message")
        known = self._known(messages)
        result = self._forms[:known]
        reducer = Canonicalizer()
        reducer.resume(result)
        # Agents edit lists and messages in place: what is remembered is a copy.
        fresh: list[Mapping[str, Any]] = []
        for index in range(known, len(messages)):
            message: Mapping[str, Any] = messages[index]
            if self._said is not None and _same(self._said[0], message):
                copied, form = self._said
                reducer.skip(index, form)
            else:
                form = reducer.reduce(index, message)
                copied = snapshot(dict(message))
            fresh.append(copied)
            result.append(form)
        if result[-1].role == "assistant":
            raise SessionError(
                f"messages[{len(result) - 1}] is an assistant message: continuing one (prefill) is not supported; "
                "end the request with a user or tool message"
            )
        self._switches = [entry for entry in self._switches if entry[0] < known]
        for index, remembered in enumerate(fresh, known):
            found = list(_switches(remembered.get("tool_calls"), ()))
            if found:
                self._switches.append((index, found))
        self._messages = self._messages[:known] + fresh
        self._forms = list(result)
        return result

    def _known(self, messages: Sequence[Message]) -> int:
        """Return how many messages, from the first one on, are those of the last request."""
        seen = self._messages
        known = min(len(seen), len(messages))
        # A list is compared at once, which is the usual case: the last request's messages and some more.
        if list(messages[:known]) != seen[:known]:
            known = next((index for index in range(known) if seen[index] != messages[index]), known)
        for index, switches in self._switches:
            if index >= known:
                break
            if not _same_switches(switches, messages[index]["tool_calls"]):
                return index
        return known


def _same(seen: Mapping[str, Any], message: Mapping[str, Any]) -> bool:
    """Whether a message is the remembered one. ``==`` alone takes True and 1 for the same argument."""
    return seen == message and _same_switches(_switches(seen.get("tool_calls"), ()), message.get("tool_calls"))


def snapshot(value: Any) -> Any:
    """Return a copy that no edit of the original reaches; quick for the values that messages are made of."""
    kind = type(value)
    if kind is str or kind is int or kind is float or kind is bool or value is None:
        return value
    if kind is dict:
        return {key: snapshot(item) for key, item in value.items()}
    if kind is list:
        return [snapshot(item) for item in value]
    if kind is ToolCall:
        return ToolCall(value.id, value.name, snapshot(value.arguments), value.raw, value.error)
    return copy.deepcopy(value)


_ARGUMENTS: Any = object()
_Switch = tuple[tuple[Any, ...], bool]
"""Where a boolean or a number equal to one stands, and which of both it is."""


def _switches(value: Any, path: tuple[Any, ...]) -> Iterator[_Switch]:
    """Yield the switches of a value: what ``==`` takes for each other although they are different arguments."""
    if isinstance(value, (bool, int, float)):
        if value == 0 or value == 1:
            yield path, isinstance(value, bool)
    elif isinstance(value, ToolCall):
        yield from _switches(value.arguments, (*path, _ARGUMENTS))
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _switches(item, (*path, key))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _switches(item, (*path, index))


def _same_switches(switches: Iterable[_Switch], equal: Any) -> bool:
    """Return whether a value that is equal by ``==`` has booleans where the one with these switches has them."""
    for path, boolean in switches:
        value = equal
        for key in path:
            value = value.arguments if key is _ARGUMENTS else value[key]
        if isinstance(value, bool) is not boolean:
            return False
    return True
