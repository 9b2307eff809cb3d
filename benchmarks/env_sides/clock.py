"""What the sides of ``env_steps`` share: the game, the guesses, and how the time per step is reported.

Imports nothing but the standard library: each side runs in the Python of its own package.
"""

from __future__ import annotations

import json
from collections.abc import Callable

LOW, HIGH, LIMIT = 1, 1000, 20
# Guesses in words as a model writes them; all are below the hidden number on every side, so no guess ends the episode.
GUESSES = (5, 1, 8, 3, 10, 2, 7, 4, 9, 6)
EPISODES = 4000
SERVED_EPISODES = 60  # a step over a socket costs a hundred times as much


def answer(guess: int) -> str:
    """Return what the model says."""
    return f"The number may be \\boxed{{{guess}}}."


def report(**ways: tuple[Callable[[int], tuple[float, int]], int]) -> None:
    """Play each way once to warm up and once to measure; print its CPU microseconds per step, all in one JSON line.

    Args:
        **ways: By name, what plays so many episodes and returns (CPU seconds, steps), and how many.
    """
    found = {}
    for name, (play, episodes) in ways.items():
        play(max(1, episodes // 10))
        seconds, steps = play(max(1, episodes))
        found[name] = 1e6 * seconds / steps
    print(json.dumps(found))
