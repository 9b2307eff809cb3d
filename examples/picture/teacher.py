"""Demonstrations for the warm start: mostly wrong ones, as those of ``../lookup/teacher.py``.

Every call is right, and every colour that is said is one of the picture's; what is wrong is when it is said.

| share | what it shows                                                                   |
| ----- | ------------------------------------------------------------------------------- |
| 18 %  | a look, then the right colour                                                   |
| 40 %  | a look, then the right colour in a sentence, which is not an exact answer       |
| 30 %  | two looks, then the right colour in a sentence                                  |
| 12 %  | at once, a colour                                                               |
"""

from __future__ import annotations

import random
from typing import Any

from turnwise.envs.demonstrations import conversation
from turnwise.envs.library.picture import COLOURS, PictureEnv, tasks
from turnwise.envs.solution import tool_call
from turnwise.types import ToolCall


def plan(env: PictureEnv, rng: random.Random) -> list[ToolCall | str]:
    """Draw what the teacher does in an episode."""
    look = tool_call("look")
    kind = rng.random()
    if kind < 0.18:
        return [look, env.answer]
    if kind < 0.58:
        return [look, f"It looks {env.answer}."]
    if kind < 0.88:
        return [look, look, f"It looks {env.answer}."]
    return [rng.choice(list(COLOURS))]


async def demonstrations(count: int, seed: int) -> list[dict[str, Any]]:
    """Play the teacher in the environment; return the conversations in OpenAI's form."""
    rng = random.Random(seed)
    return [
        await conversation(PictureEnv(), task, rng.getrandbits(62), lambda env: plan(env, rng))
        for task in tasks(count, split="train", seed=seed)
    ]
