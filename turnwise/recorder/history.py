"""Incremental canonicalization: messages of earlier requests are not reduced again."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from turnwise.errors import SessionError
from turnwise.model.canonical import Canonical, Canonicalizer, Recognise, canonical_tools
from turnwise.recorder.matching import ToolsKey
from turnwise.types import Message, ToolCall, ToolSchema

# Number of conversations cached per session: an agent and the sub-agents that it alternates with.
_CONVERSATIONS = 4
# Keys of an assistant message that agents over HTTP do not send back.
_LOCAL_KEYS = ("turn_id", "finish_reason")


@dataclass(slots=True)
class CachedRequest:
    """The last request of one conversation: copies of its messages, canonical forms, and switches by message index."""

    messages: list[Mapping[str, Any]]
    forms: list[Canonical]
    switches: list[tuple[int, list[Switch]]]


class History:
    """Cache of the canonical forms of growing conversations.

    Its entries are replaced, never edited: two threads may use it.
    """

    __slots__ = ("_conversations", "_files", "_last_returned", "_recognise")

    def __init__(self, recognise: Recognise | None = None) -> None:
        self._recognise = recognise
        # The one copy of each image's bytes, by digest.
        self._files: dict[str, bytes] = {}
        # Most recently used last.
        self._conversations: list[CachedRequest] = []
        # The last returned message, with and without the keys that only this package adds, and its canonical form.
        self._last_returned: tuple[tuple[Mapping[str, Any], ...], Canonical] | None = None

    def register_returned(self, message: Message, form: Canonical) -> None:
        """Register the last returned message, which most agents send back; all calls of ``form`` have ids."""
        self._last_returned = (message, {key: value for key, value in message.items() if key not in _LOCAL_KEYS}), form

    def intern_bytes(self, digest: str, data: bytes) -> bytes:
        """Return the one copy of a file's bytes."""
        return self._files.setdefault(digest, data)

    def closest(self, messages: Sequence[Message]) -> tuple[CachedRequest, int]:
        """Return the remembered request with the longest common prefix, and its length."""
        best, longest = CachedRequest([], [], []), 0
        for conversation in reversed(self._conversations):
            shared = _shared_prefix(conversation, messages)
            if shared > longest:
                best, longest = conversation, shared
            if longest == len(conversation.messages):
                break
        return best, longest

    def reduce(self, messages: Sequence[Message], closest: tuple[CachedRequest, int] | None = None) -> list[Canonical]:
        """Return the canonical form of a request's messages; ``closest`` as by :meth:`closest`.

        Raises SessionError if there are none, the last one is an assistant message, or one cannot be placed.
        """
        if not messages:
            raise SessionError("messages is empty: a request needs at least one message")
        conversation, shared = closest or self.closest(messages)
        result = conversation.forms[:shared]
        reducer = Canonicalizer(self._recognise, self.intern_bytes)
        reducer.resume(messages, result[:])
        # Agents edit lists and messages in place: the cache holds copies.
        fresh: list[Mapping[str, Any]] = []
        for index in range(shared, len(messages)):
            message: Mapping[str, Any] = messages[index]
            returned = self._returned_last(message)
            if returned is not None:
                copied, form = returned
                reducer.skip(message, form)
            else:
                form = reducer.reduce(index, message)
                copied = snapshot(message if type(message) is dict else dict(message))
                if copied.get("role") == form.role:
                    copied["role"] = form.role  # one string object shared by all messages
            fresh.append(copied)
            result.append(form)
        if result[-1].role == "assistant":
            raise SessionError(
                f"messages[{len(result) - 1}] is an assistant message: continuing one (prefill) is not supported; "
                "end the request with a user or tool message"
            )
        self._remember(conversation, shared, fresh, result)
        return result

    def _returned_last(self, message: Mapping[str, Any]) -> tuple[Mapping[str, Any], Canonical] | None:
        """Return a copy of the message and its form if it is the one returned last."""
        if self._last_returned is None or message.get("role") != "assistant":
            return None
        variants, form = self._last_returned
        return next(((variant, form) for variant in variants if _equal_messages(variant, message)), None)

    def _remember(
        self, conversation: CachedRequest, shared: int, fresh: list[Mapping[str, Any]], forms: list[Canonical]
    ) -> None:
        switches = [entry for entry in conversation.switches if entry[0] < shared]
        for index, remembered in enumerate(fresh, shared):
            switches_of_message = list(switches_of(remembered.get("tool_calls")))
            if switches_of_message:
                switches.append((index, switches_of_message))
        # A conversation that shares less than half is a separate one.
        unrelated = [
            cached for cached in self._conversations if cached is not conversation or shared * 2 < len(cached.messages)
        ]
        self._conversations = [
            *unrelated[-(_CONVERSATIONS - 1) :],
            CachedRequest(conversation.messages[:shared] + fresh, list(forms), switches),
        ]


class RequestTools:
    """The tools of the last request and their comparison key."""

    __slots__ = ("_last",)

    def __init__(self) -> None:
        # Replaced as a whole: two threads may use it.
        self._last: tuple[tuple[ToolSchema, ...], ToolsKey, list[Switch]] = ((), (), [])

    def holds(self, tools: tuple[ToolSchema, ...]) -> bool:
        """Return whether these are the tools of the last request."""
        tools_before, _, switches = self._last
        return tools == tools_before and same_switches(switches, [tool.parameters for tool in tools])

    def update(self, tools: tuple[ToolSchema, ...]) -> tuple[tuple[ToolSchema, ...], ToolsKey]:
        """Return copies of a request's tools, which later edits do not reach, and their key."""
        if not self.holds(tools):
            copies = copy.deepcopy(tools)
            switches = list(switches_of([tool.parameters for tool in copies]))
            self._last = copies, canonical_tools(copies), switches
        return self._last[:2]


def _shared_prefix(conversation: CachedRequest, messages: Sequence[Message]) -> int:
    """Return the length of the common prefix of a request and a remembered one."""
    seen = conversation.messages
    shared = min(len(seen), len(messages))
    # A list is compared at once, which is the usual case: the last request's messages and some more.
    if list(messages[:shared]) != (seen if shared == len(seen) else seen[:shared]):
        shared = next((index for index in range(shared) if seen[index] != messages[index]), shared)
    for index, switches in conversation.switches:
        if index >= shared:
            break
        if not same_switches(switches, messages[index]["tool_calls"]):
            return index
    return shared


def _equal_messages(seen: Mapping[str, Any], message: Mapping[str, Any]) -> bool:
    """Whether two messages are equal; ``==`` alone takes True and 1 for the same argument."""
    return seen == message and same_switches(switches_of(seen.get("tool_calls")), message.get("tool_calls"))


def snapshot(value: Any) -> Any:
    """Return a deep copy, fast for the types that messages are made of."""
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
Switch = tuple[tuple[Any, ...], bool]
"""The path to a boolean, or to a number equal to one, and whether it is a boolean."""


def switches_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[Switch]:
    """Yield the switches of a value: parts that ``==`` takes as equal although the arguments differ (True and 1)."""
    if isinstance(value, (bool, int, float)):
        if value == 0 or value == 1:
            yield path, isinstance(value, bool)
    elif isinstance(value, ToolCall):
        yield from switches_of(value.arguments, (*path, _ARGUMENTS))
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from switches_of(item, (*path, key))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from switches_of(item, (*path, index))


def same_switches(switches: Iterable[Switch], equal: Any) -> bool:
    """Return whether a value equal by ``==`` has booleans at the same paths."""
    for path, boolean in switches:
        value = equal
        for key in path:
            value = value.arguments if key is _ARGUMENTS else value[key]
        if isinstance(value, bool) is not boolean:
            return False
    return True
