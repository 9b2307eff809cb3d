"""The limits of an episode, and what they leave for the results of tools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from turnwise.tools.response import CountTokens, OutputLimit
from turnwise.types import Message

MARKUP: Final = 64
"""Tokens that are reckoned for what a chat template writes around one message, in a context of at least 1,024."""
_ANSWER_SHARE: Final = 8


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """Limits of an episode, enforced by session and runner.

    Attributes:
        max_turns: Model calls per session.
        max_tokens_per_turn: Tokens of one completion, None up to the context.
        context_length: Tokens of prompt and completion together.
    """

    max_turns: int
    max_tokens_per_turn: int | None
    context_length: int


def tool_result_budget(room: int, context_length: int, max_tokens_per_turn: int | None, answers: int) -> int:
    """Return the token budget of a turn's tool results.

    Args:
        room: Tokens left of the context after the calling turn.
        context_length: Tokens of prompt and completion together.
        max_tokens_per_turn: Tokens of one completion; as many are reserved for the next, at most an eighth of the
            context.
        answers: Number of results.
    """
    eighth = max(1, context_length // _ANSWER_SHARE)
    markup = min(MARKUP, context_length // 16)
    return room - min(max_tokens_per_turn or eighth, eighth) - markup * (answers + 1)


def truncate_tool_results(texts: Sequence[str], room: int, count_tokens: CountTokens) -> list[str]:
    """Cut texts to ``room`` tokens together: shorter ones stay whole, longer ones get equal shares.

    Args:
        texts: The texts.
        room: Tokens. With less than one per text the context is full, and nothing is cut.
        count_tokens: Counts the tokens of a text.
    """
    # No text has more tokens than bytes (a prefix aside, which the markup covers): nearly always nothing is counted.
    if room < len(texts) or sum(len(text.encode("utf-8", "replace")) for text in texts) <= room:
        return list(texts)
    sizes = [count_tokens(text) for text in texts]
    if sum(sizes) <= room:
        return list(texts)
    fitted = list(texts)
    remaining = room
    for number, index in enumerate(sorted(range(len(texts)), key=sizes.__getitem__)):
        share = remaining // (len(texts) - number)
        if sizes[index] > share:
            fitted[index] = OutputLimit(share, "tokens").cut(texts[index], count_tokens)
            sizes[index] = share
        remaining -= sizes[index]
    return fitted


def fit_messages(messages: Sequence[Message], room: int, count_tokens: CountTokens) -> tuple[list[Message], int]:
    """Apply :func:`truncate_tool_results` to messages; return them and the number of results cut."""
    indices = [
        index
        for index, message in enumerate(messages)
        if message["role"] == "tool" and isinstance(message.get("content"), str)
    ]
    texts = [str(messages[index]["content"]) for index in indices]
    fitted: list[Message] = list(messages)
    cut = 0
    for index, text, shortened in zip(indices, texts, truncate_tool_results(texts, room, count_tokens), strict=True):
        if shortened != text:
            fitted[index] = {**messages[index], "content": shortened}
            cut += 1
    return fitted, cut
