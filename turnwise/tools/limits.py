"""How much of a tool's text a model gets to see.

Owns: :class:`OutputLimit`: so many characters or tokens, which part of a longer text is kept, and the marker that says
what is gone. Refuses: knowing a tokenizer; who has one hands in how it counts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, get_args

from turnwise.errors import ToolSchemaError

Unit: TypeAlias = Literal["characters", "tokens"]
Keep: TypeAlias = Literal["ends", "head", "tail", "middle"]
CountTokens: TypeAlias = Callable[[str], int]
"""How many tokens of a model a text takes."""

CHARACTERS_OF_A_TOKEN: Final = 4
"""What :func:`estimated_tokens` reckons with, in bytes of UTF-8."""
_LONGEST: Final = 32
_ENOUGH: Final = 32
_INTERPOLATIONS: Final = 6


@dataclass(frozen=True, slots=True)
class OutputLimit:
    """How much of a text is kept, and which part.

    Attributes:
        amount: The most that a text may have after it was cut, its marker included.
        unit: ``characters``, or ``tokens`` of the model in use. Where no model is in sight (a tool that is called by
            hand) tokens are estimated: four bytes of UTF-8 are one.
        keep: What is kept of a longer text. ``ends``: the head and the tail, what lies between them is cut. ``head``
            and ``tail``: that end. ``middle``: the middle, both ends are cut.

    Raises:
        ToolSchemaError: The amount is no positive integer, or a word is unknown.
    """

    amount: int
    unit: Unit = "characters"
    keep: Keep = "ends"

    def __post_init__(self) -> None:
        if isinstance(self.amount, bool) or not isinstance(self.amount, int) or self.amount < 1:
            raise ToolSchemaError(f"OutputLimit.amount is {self.amount!r}: it must be an integer of at least 1")
        for name, value, allowed in (("unit", self.unit, get_args(Unit)), ("keep", self.keep, get_args(Keep))):
            if value not in allowed:
                raise ToolSchemaError(f"OutputLimit.{name} is {value!r}: allowed are {', '.join(allowed)}")

    def cut(self, text: str, count_tokens: CountTokens | None = None) -> str:
        """Return a text that keeps the limit.

        A text that fits is returned as it is (but one with more than 32 characters a token counts as longer). A longer
        one says by a marker how many characters are gone where; a limit that has no room for the marker keeps bare
        text.

        Args:
            text: Any text.
            count_tokens: Counts tokens; None estimates them.
        """
        if self.unit == "tokens" and len(text) < self.amount and text.isascii():
            # A token is at least one byte; one may stand for a prefix that tokenizers add. So nothing is counted.
            return text
        if self.unit == "characters":
            return text if len(text) <= self.amount else self._cut_characters(text)
        return self._cut_tokens(text, count_tokens or estimated_tokens)

    def _cut_characters(self, text: str) -> str:
        # The longest marker that can come is reserved, so that the count in it may have fewer digits.
        markers = 2 if self.keep == "middle" else 1
        kept = self.amount - markers * len(_between(len(text)))
        return _kept(text, kept, self.keep) if kept >= 2 else _bare(text, self.amount, self.keep)

    def _cut_tokens(self, text: str, count: CountTokens) -> str:
        # Texts that are far too long are cut by characters first: tokenizers take time in the length of a text.
        most = _LONGEST * self.amount + 1024
        if len(text) <= most:
            tokens = count(text)
            if tokens <= self.amount:
                return text
        else:
            tokens = most
        largest = min(len(text), most)
        found = self._search(lambda size: _kept(text, size, self.keep), largest, tokens, count)
        return found or self._search(lambda size: _bare(text, size, self.keep), largest, tokens, count)

    def _search(self, shorter: Callable[[int], str], largest: int, tokens: int, count: CountTokens) -> str:
        """Return the longest text found that keeps the limit; empty where none does.

        A longer text may have fewer tokens than a shorter one, so what is returned was counted itself.
        """
        low, low_tokens, high, high_tokens = 0, 0, largest + 1, max(tokens, self.amount + 1)
        best = ""
        for number in range(64):
            if high - low <= 1 or (best and self.amount - low_tokens <= self.amount // _ENOUGH):
                break
            size = (low + high) // 2
            if number < _INTERPOLATIONS and high_tokens > low_tokens:
                share = (self.amount - low_tokens) / (high_tokens - low_tokens)
                size = min(max(low + int((high - low) * share), low + 1), high - 1)
            text = shorter(size)
            tokens = count(text)
            if tokens <= self.amount:
                low, low_tokens, best = size, tokens, text
            else:
                high, high_tokens = size, tokens
        return best


def estimated_tokens(text: str) -> int:
    """Return about how many tokens a text takes, where no tokenizer is at hand: a quarter of its bytes in UTF-8."""
    return math.ceil(len(text.encode("utf-8", "replace")) / CHARACTERS_OF_A_TOKEN)


def as_limit(value: int | OutputLimit | None) -> OutputLimit | None:
    """Return what stands in ``max_output``: a number is one of characters, of which both ends are kept."""
    return _characters(value) if isinstance(value, int) else value


@functools.lru_cache(maxsize=256)
def _characters(amount: int) -> OutputLimit:
    return OutputLimit(amount)


def _kept(text: str, size: int, keep: Keep) -> str:
    """Return ``size`` characters of a text, and markers where something is gone."""
    head, tail = _span(len(text), size, keep)
    if keep == "ends":
        return text[:head] + _between(tail - head) + text[tail:]
    before = f"[... {head} characters cut ...]\n" if head else ""
    after = f"\n[... {len(text) - tail} characters cut ...]" if tail < len(text) else ""
    return before + text[head:tail] + after


def _bare(text: str, size: int, keep: Keep) -> str:
    # Two ends without a marker between them would read as one text.
    head, tail = _span(len(text), size, "head" if keep == "ends" else keep)
    return text[head:tail]


def _span(length: int, size: int, keep: Keep) -> tuple[int, int]:
    """Return where the kept part begins and ends; for ``ends`` where the cut part does."""
    size = min(size, length)
    if keep == "ends":
        tail = size // 2
        return size - tail, length - tail
    start = {"head": 0, "tail": length - size, "middle": (length - size) // 2}[keep]
    return start, start + size


def _between(count: int) -> str:
    return f"\n[... {count} characters cut ...]\n"
