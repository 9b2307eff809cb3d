"""Demonstrations for the warm start: how a search is written, mostly without an exact answer.

| share | what it shows                                                            |
| ----- | ------------------------------------------------------------------------ |
| 20 %  | a search for the work, one for its maker, the answer                       |
| 40 %  | the same, with the answer in a sentence, which is not an exact one           |
| 30 %  | a search for the work, then its maker in the place of a town                 |
| 10 %  | a town without a search: a guess, right one time in twenty                   |

What they copy is right in all of them.
"""

from __future__ import annotations

import random
from typing import Any

from env import TOWNS, SmallSearch, tasks

from turnwise.envs.demonstrations import conversation
from turnwise.envs.solution import tool_call
from turnwise.types import ToolCall


def plan(env: SmallSearch, rng: random.Random) -> list[ToolCall | str]:
    """Draw what the teacher does in an episode."""
    data = env.task.data
    calls: list[ToolCall | str] = [tool_call("search", query=data["work"]), tool_call("search", query=data["maker"])]
    kind = rng.random()
    if kind < 0.2:
        return [*calls, data["answer"]]
    if kind < 0.6:
        return [*calls, f"I think it is {data['answer']}."]
    return [calls[0], data["maker"]] if kind < 0.9 else [rng.choice(TOWNS)]


async def demonstrations(count: int, seed: int) -> list[dict[str, Any]]:
    """Play the teacher over the training corpora; return the conversations in OpenAI's form."""
    rng = random.Random(seed)
    return [
        await conversation(SmallSearch(), task, number, lambda env: plan(env, rng))
        for number, task in enumerate(tasks(count, seed=seed + 1))
    ]
