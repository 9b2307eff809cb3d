"""Whether a message reads back as the message that was meant.

Owns: the comparison behind ``Renderer.completion``, and the words for messages that a template cannot say.
"""

from __future__ import annotations

from collections.abc import Callable

from turnwise.inference.canonical import Canonical, Canonicalizer, canonical_arguments
from turnwise.types import Message, ToolCall


def spoken(message: Canonical) -> Canonical:
    """Return a message whose unreadable calls are part of its text."""
    readable = tuple(call for call in message.calls if call.value is not None)
    if len(readable) == len(message.calls):
        return message
    raws = [call.arguments for call in message.calls if call.value is None]
    return Canonical(message.role, "\n".join(filter(None, [message.text, *raws])), message.reasoning, readable)


def difference(wanted: Canonical, found: Message, message: Message, seen: Callable[[str], str]) -> str:
    """Return which part of a message reads back as something else, or nothing.

    Args:
        wanted: What was meant.
        found: What was read.
        message: What was meant, before it was reduced: it knows which calls are meant to be unusable.
        seen: A text as the tokenizer shows it to a model.
    """
    read = Canonicalizer().reduce(0, found)

    def same(one: str, other: str) -> bool:
        return one.strip() == other.strip() or seen(one).strip() == other.strip()

    if not same(wanted.text, read.text):
        return "content"
    if not same(wanted.reasoning, read.reasoning):
        return "reasoning_content"
    if len(read.calls) != len(wanted.calls):
        return "tool_calls"
    spoiled = [isinstance(call, ToolCall) and call.error is not None for call in message.get("tool_calls") or ()]
    errors = [call.error is not None for call in found.get("tool_calls") or ()]
    for call, back, spoilt, error in zip(wanted.calls, read.calls, spoiled, errors, strict=True):
        if spoilt or call.value is None:
            if not error:
                return f"call of {call.name!r}, which is meant to be unusable,"
        elif error or not same(call.name, back.name) or not _same_arguments(call.arguments, back.arguments, seen):
            return f"call of {call.name!r}"
    return ""


def _same_arguments(one: str, other: str, seen: Callable[[str], str]) -> bool:
    """Compare canonical JSON; a normal form may change the order of keys."""
    return one == other or canonical_arguments(seen(one))[0] == other


def shown(message: Canonical) -> str:
    """Return a message in the words of an error."""
    parts = [f"the text {message.text[:80]!r}"] if message.text else []
    if message.reasoning:
        parts.append(f"the reasoning {message.reasoning[:80]!r}")
    parts += [f"a call of {call.name!r} with {call.arguments[:80]}" for call in message.calls]
    return " and ".join(parts) or "an empty message"
