"""Old answers of tools make room: each is replaced by a note that says how to get it again.

Owns: :func:`droppable` and :func:`dropped`, pure readings of a conversation. Refuses: deciding when
(``conversation.py``), and changing a message in place: what was sent is somebody's.
"""

from __future__ import annotations

from collections.abc import Sequence

from turnwise.agents.context.config import DropConfig
from turnwise.types import Message, text_of


def droppable(messages: Sequence[Message], config: DropConfig) -> list[int]:
    """Return where answers stand that may be dropped, the oldest first.

    No answer behind the last assistant message is among them: the model has not read it yet. Nor is one that is no
    longer than its note, such as a note.
    """
    names = _tools(messages)
    last = max((index for index, message in enumerate(messages) if message["role"] == "assistant"), default=0)
    answers = [index for index in names if names[index] not in config.exclude]
    old = answers[: max(0, len(answers) - config.keep)]
    return [
        index
        for index in old
        if index < last
        and (_has_media(messages[index]) or len(text_of(messages[index])) > len(_note(config, names[index])))
    ]


def dropped(messages: Sequence[Message], places: Sequence[int], config: DropConfig) -> list[Message]:
    """Return a conversation whose answers at these places are notes. Each call keeps its one answer."""
    names = _tools(messages)
    found = list(messages)
    for index in places:
        found[index] = {**messages[index], "content": _note(config, names[index])}
    return found


def _note(config: DropConfig, tool: str) -> str:
    return config.note.replace("{tool}", tool)


def _has_media(message: Message) -> bool:
    content = message.get("content")
    return isinstance(content, list) and any(part.get("type", "text") != "text" for part in content)


def _tools(messages: Sequence[Message]) -> dict[int, str]:
    """Return which tool each answer is of, by its place."""
    called: dict[str, str] = {}
    found = {}
    for index, message in enumerate(messages):
        called.update((call.id, call.name) for call in message.get("tool_calls") or ())
        if message["role"] == "tool":
            found[index] = message.get("name") or called.get(message.get("tool_call_id", ""), "the tool")
    return found
