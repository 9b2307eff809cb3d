"""Demonstrations for the warm start: short trails, mostly walked wrong.

None is longer than four signs, so all of them fit into the context whole. Four out of five are wrong, but in what they
do, never in what they copy: every place of a call and of an answer stands in the last sign.

| share | what it shows                                                         |
| ----- | --------------------------------------------------------------------- |
| 20 %  | one call per sign, then where the trail ends                          |
| 45 %  | one call per sign, then the same in a sentence, which is not an exact answer |
| 35 %  | all signs but the last, then where that one stands                    |
"""

from __future__ import annotations

import random
from typing import Any

from trail_env import TrailEnv, tasks

from turnwise.envs.demonstrations import conversation
from turnwise.envs.solution import tool_call
from turnwise.types import ToolCall

LONGEST = 4


def plan(env: TrailEnv, rng: random.Random) -> list[ToolCall | str]:
    """Draw what the teacher does in an episode."""
    path = env.trail
    calls: list[ToolCall | str] = [tool_call("read_sign", place=sign) for sign in path.places]
    kind = rng.random()
    if kind < 0.20:
        return [*calls, path.end]
    if kind < 0.65 or len(calls) == 1:
        return [*calls, f"I think it is {path.end}."]
    return [*calls[:-1], path.places[-1]]


async def demonstrations(count: int, seed: int) -> list[dict[str, Any]]:
    """Play the teacher in the environment; return the conversations in OpenAI's form."""
    rng = random.Random(seed)
    return [
        await conversation(TrailEnv(), task, rng.getrandbits(62), lambda env: plan(env, rng))
        for task in tasks(count, split="train", seed=seed, steps=LONGEST, least=1)
    ]
