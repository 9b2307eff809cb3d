"""The model summarises its conversation, in the session that it is recorded in, and goes on from the summary.

Owns: :func:`compacted`. Refuses: deciding when, and what becomes of a conversation that could not be summarised
(``conversation.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from turnwise.agents.context.config import CompactionConfig
from turnwise.tools.response import failure
from turnwise.types import Message, text_of

if TYPE_CHECKING:
    from turnwise.agents.context.conversation import Conversation

_SHARE = 8


@dataclass(slots=True)
class Compacted:
    """What came of asking for a summary.

    Attributes:
        messages: The conversation to go on with.
        done: Whether it is a summary with what stayed; else the model gave none, and it is the conversation as it was,
            with the questions for a summary where the model answered them by calls.
        cut: Whether a length limit cut the summary.
        turn: The turn that answered last, or None where the question had no room.
    """

    messages: list[Message]
    done: bool = False
    cut: bool = False
    turn: str | None = None


async def compacted(talk: Conversation, config: CompactionConfig) -> Compacted:
    """Ask for a summary of a conversation and return what it is replaced by.

    The question extends the branch. Where it has no room behind the last turns, they are left out of it, and stay as
    they are behind the summary.

    Raises:
        TurnwiseError: As ``Session.chat``.
    """
    turns = [index for index, message in enumerate(talk.messages) if message["role"] == "assistant"]
    # At least one turn must go.
    keep = min(config.keep_turns, len(turns) - 1)
    kept_from = turns[-keep] if keep > 0 else len(talk.messages)
    room = _room(talk, config)
    asked = _question(talk, turns, room, config)
    if asked is None:
        return Compacted(talk.messages)
    end, question = asked
    behind = talk.messages[end:]
    params = replace(talk.session.params, max_tokens=room)
    result, fork = Compacted(talk.messages), talk.fork
    for _ in range(config.attempts):
        message = await talk.session.chat(question, talk.tools, params, fork=fork or "compaction")
        fork = None
        result.turn = message["turn_id"]
        calls, text = message.get("tool_calls") or (), text_of(message).strip()
        if text and not calls:
            beginning = _with_summary(talk.head, config.summary.replace("{summary}", text))
            cut = message["finish_reason"] == "length"
            return Compacted([*beginning, *talk.messages[min(kept_from, end) :]], True, cut, result.turn)
        question = [*question, message, *(_refused(call.id, call.name) for call in calls)]
        if calls:
            # The model is to read what became of its calls, so the conversation goes on from here.
            result.messages = [*question, *behind]
        else:
            question.append({"role": "user", "content": config.prompt})
        if talk.measure(question) + room > talk.limit:
            break
    return result


def _room(talk: Conversation, config: CompactionConfig) -> int:
    """Return how many tokens a summary may have."""
    wanted = [config.max_tokens or max(1, talk.limit // _SHARE), talk.session.limits.max_tokens_per_turn]
    return min(tokens for tokens in wanted if tokens is not None)


def _question(
    talk: Conversation, turns: Sequence[int], room: int, config: CompactionConfig
) -> tuple[int, list[Message]] | None:
    """Return up to where the conversation is summarised, and the request that asks for it; None where nothing fits."""
    for end in (len(talk.messages), *reversed(turns[1:])):
        question: list[Message] = [*talk.messages[:end], {"role": "user", "content": config.prompt}]
        if talk.measure(question) + room <= talk.limit:
            return end, question
    return None


def _with_summary(head: Sequence[Message], text: str) -> list[Message]:
    """Return the beginning of a conversation with a summary of what followed.

    It goes into the last user message: many chat templates take no two of them in a row.
    """
    last = head[-1] if head else None
    if last is None or last["role"] != "user":
        return [*head, {"role": "user", "content": text}]
    content = last.get("content")
    if isinstance(content, list):
        return [*head[:-1], {**last, "content": [*content, {"type": "text", "text": f"\n\n{text}"}]}]
    return [*head[:-1], {**last, "content": f"{content}\n\n{text}" if content else text}]


def _refused(call_id: str, name: str) -> Message:
    answer = failure(
        "unusable_call", "this call was not executed: a summary was asked for. Write it as text", tool=name
    )
    return {"role": "tool", "tool_call_id": call_id, "name": name, "content": answer.content()}
