"""Demonstrations for the warm start: mostly wrong ones.

They show that there is a tool and that an answer is one word, the name of a colour; what a square's colour is called is
seen in one demonstration out of four, since rewards can only strengthen what is answered at times.

| share | what it shows                                           |
| ----- | ------------------------------------------------------- |
| 25 %  | a look, then the colour in question                     |
| 45 %  | a look, then the colour of any square                   |
| 20 %  | a look, then any colour                                 |
| 10 %  | any colour, without a look                              |
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
    guess = rng.choice(list(COLOURS))
    kind = rng.random()
    if kind < 0.25:
        return [tool_call("look"), env.answer]
    if kind < 0.70:
        return [tool_call("look"), rng.choice(env.colours)]
    if kind < 0.90:
        return [tool_call("look"), guess]
    return [guess]


async def demonstrations(count: int, seed: int) -> list[dict[str, Any]]:
    """Play the teacher in the environment; return the conversations in OpenAI's form."""
    rng = random.Random(seed)
    return [
        await conversation(PictureEnv(), task, rng.getrandbits(62), lambda env: plan(env, rng))
        for task in tasks(count, split="train", seed=seed)
    ]
