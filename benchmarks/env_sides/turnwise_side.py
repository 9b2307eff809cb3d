"""Our side of ``env_steps``: ``guess_number``, stepped in this process.

``direct`` calls ``step`` as a person does who writes the loop; ``invoked`` goes through ``step_env``, as the runner
does: it awaits or threads what must be, and holds each result to the contract.
"""

from __future__ import annotations

import asyncio
import sys
import time

from clock import EPISODES, GUESSES, HIGH, LIMIT, LOW, answer, report

from turnwise.envs import step_env
from turnwise.envs.basic.guess_number import GuessNumberEnv


def begun(seed: int) -> tuple[GuessNumberEnv, int]:
    """Return an environment whose hidden number lies above all guesses, and the next seed."""
    env = GuessNumberEnv(low=LOW, high=HIGH, guesses=LIMIT)
    while True:
        env.reset(seed=seed)
        seed += 1
        if env.number > max(GUESSES):
            return env, seed


def direct(episodes: int) -> tuple[float, int]:
    spent, steps, seed = 0.0, 0, 0
    for _ in range(episodes):
        env, seed = begun(seed)
        began = time.process_time()
        for guess in GUESSES:
            result = env.step({"role": "assistant", "content": answer(guess)})
        spent += time.process_time() - began
        steps += len(GUESSES)
        assert "higher" in str(result.observation)
        assert not (result.terminated)
        assert not (result.truncated)
    return spent, steps


async def play(episodes: int) -> tuple[float, int]:
    spent, steps, seed = 0.0, 0, 0
    for _ in range(episodes):
        env, seed = begun(seed)
        began = time.process_time()
        for guess in GUESSES:
            result = await step_env(env, {"role": "assistant", "content": answer(guess)})
        spent += time.process_time() - began
        steps += len(GUESSES)
        assert "higher" in str(result.observation)
        assert not (result.terminated)
        assert not (result.truncated)
    return spent, steps


def invoked(episodes: int) -> tuple[float, int]:
    return asyncio.run(play(episodes))


if __name__ == "__main__":
    count = int(EPISODES * float(sys.argv[1]))
    report(direct=(direct, count), invoked=(invoked, count))
