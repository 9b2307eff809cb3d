"""Gem's side of ``env_steps``: its own game of guessing a number, stepped in this process. Run by gem's own Python."""

from __future__ import annotations

import sys
import time

import gem
from clock import EPISODES, GUESSES, HIGH, LIMIT, LOW, answer, report


def play(episodes: int) -> tuple[float, int]:
    env = gem.make("game:GuessTheNumber-v0-hard", min_number=LOW, max_number=HIGH, max_turns=LIMIT)
    spent, steps = 0.0, 0
    seed = 0
    for _ in range(episodes):
        env.reset(seed=seed)
        # Its number is drawn inside; one that the guesses would hit is drawn again.
        while env.game_number <= max(GUESSES):
            seed += 1
            env.reset(seed=seed)
        seed += 1
        began = time.process_time()
        for guess in GUESSES:
            observation, _, terminated, truncated, _ = env.step(answer(guess))
        spent += time.process_time() - began
        steps += len(GUESSES)
        assert "higher" in observation
        assert not terminated
        assert not truncated
    return spent, steps


if __name__ == "__main__":
    report(direct=(play, int(EPISODES * float(sys.argv[1]))))
