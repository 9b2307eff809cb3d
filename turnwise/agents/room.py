"""Answers of tools that would not fit into what is left of the context.

Owns: :func:`fitted`, which cuts them in the middle so that the model reads what fits and goes on, instead of an episode
that ends with its last answers unread. Refuses: what a tool's own limit decides (``tools/limits.py``), and messages of
others than tools.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from turnwise.tools.limits import CountTokens, OutputLimit
from turnwise.types import Message

MARKUP: Final = 64
"""Tokens that are reckoned for what a chat template writes around one message, in a context of at least 1,024."""
_ANSWER_SHARE: Final = 8


def room_for_answers(room: int, context_length: int, max_tokens_per_turn: int | None, answers: int) -> int:
    """Return how many tokens the texts of answers may take together.

    Args:
        room: Tokens left of the context behind the turn that called.
        context_length: Tokens of prompt and completion together.
        max_tokens_per_turn: Tokens of one completion. As many are kept free for the next one, but at most an eighth of
            the context.
        answers: How many answers there are.
    """
    eighth = max(1, context_length // _ANSWER_SHARE)
    markup = min(MARKUP, context_length // 16)
    return room - min(max_tokens_per_turn or eighth, eighth) - markup * (answers + 1)


def fitted(texts: Sequence[str], room: int, count_tokens: CountTokens) -> list[str]:
    """Return texts that take at most ``room`` tokens together: shorter ones whole, longer ones cut to equal shares.

    Args:
        texts: Any texts.
        room: Tokens. Where it is not even one for each text, nothing is cut: the context is full.
        count_tokens: Counts the tokens of a text.
    """
    # No text has more tokens than bytes (a prefix aside, which the markup covers): nearly always nothing is counted.
    if room < len(texts) or sum(len(text.encode("utf-8", "replace")) for text in texts) <= room:
        return list(texts)
    sizes = [count_tokens(text) for text in texts]
    if sum(sizes) <= room:
        return list(texts)
    found = list(texts)
    left = room
    for number, index in enumerate(sorted(range(len(texts)), key=sizes.__getitem__)):
        share = left // (len(texts) - number)
        if sizes[index] > share:
            found[index] = OutputLimit(share, "tokens").cut(texts[index], count_tokens)
            sizes[index] = share
        left -= sizes[index]
    return found


def fit_messages(messages: Sequence[Message], room: int, count_tokens: CountTokens) -> tuple[list[Message], int]:
    """Return messages whose tool answers fit (see :func:`fitted`), and how many of them were cut."""
    places = [
        index
        for index, message in enumerate(messages)
        if message["role"] == "tool" and isinstance(message.get("content"), str)
    ]
    texts = [str(messages[index]["content"]) for index in places]
    found: list[Message] = list(messages)
    cut = 0
    for index, before, after in zip(places, texts, fitted(texts, room, count_tokens), strict=True):
        if after != before:
            found[index] = {**messages[index], "content": after}
            cut += 1
    return found, cut
