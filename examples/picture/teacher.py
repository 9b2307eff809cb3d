"""Demonstrations for the warm start: mostly wrong ones.

They are wrong in what they answer, not in what they see: what is said after a look is true of the picture. Seeing has
to be learned before rewards can teach what to answer, and heights that no picture shows keep a small model from
learning to read. A conversation that names all bars shows it four heights at once.

| share | what it shows                                  |
| ----- | ---------------------------------------------- |
| 30 %  | a look, then the bar in question               |
| 40 %  | a look, then all four bars, which is no answer |
| 20 %  | a look, then another bar                       |
| 10 %  | no look, but a guess                           |
"""

from __future__ import annotations

import random
from typing import Any

from picture_env import COLOURS, HIGHEST, PictureEnv, describe_bar, tasks

from turnwise.envs.demonstrations import conversation
from turnwise.envs.solution import tool_call
from turnwise.types import ToolCall


def plan(env: PictureEnv, rng: random.Random) -> list[ToolCall | str]:
    """Draw what the teacher does in an episode."""
    kind = rng.random()
    if kind < 0.30:
        return [tool_call("look"), env.answer]
    if kind < 0.70:
        return [tool_call("look"), ", ".join(describe_bar(env.chart, colour) for colour in COLOURS)]
    if kind < 0.90:
        return [
            tool_call("look"),
            describe_bar(env.chart, rng.choice([colour for colour in COLOURS if colour != env.colour])),
        ]
    return [f"{env.colour} {rng.randint(1, HIGHEST)}"]


async def demonstrations(count: int, seed: int) -> list[dict[str, Any]]:
    """Play the teacher in the environment; return the conversations in OpenAI's form."""
    rng = random.Random(seed)
    return [
        await conversation(PictureEnv(), task, rng.getrandbits(62), lambda env: plan(env, rng))
        for task in tasks(count, split="train", seed=seed)
    ]
