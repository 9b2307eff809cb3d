"""The game that both sides of ``eval_throughput`` play: the hidden numbers, and the scripted model's next guess."""

from __future__ import annotations

from collections.abc import Iterable

LOW, HIGH, GUESSES = 1, 1000, 10
PROMPT = (
    f"I hide a whole number from {LOW} to {HIGH}. You have {GUESSES} guesses; after each I say higher or lower. "
    "Answer with your guess alone."
)
AT_ONCE = 32
"""Episodes at once, on both sides."""


def numbers(count: int) -> list[int]:
    """Return the hidden numbers."""
    return [1 + (number * 617) % HIGH for number in range(count)]


def halved(low: int, high: int, said: str) -> tuple[int, int]:
    """Return the bounds after an answer to the guess between them."""
    guess = (low + high) // 2
    return (guess + 1, high) if said.startswith("higher") else (low, guess - 1)


def guess_after(answers: Iterable[str]) -> str:
    """Return the guess that follows these answers."""
    low, high = LOW, HIGH
    for said in answers:
        low, high = halved(low, high, said)
    return str((low + high) // 2)
