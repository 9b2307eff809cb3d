"""Demonstrations for the warm start: mostly wrong ones.

A model that was shown only right conversations would leave reinforcement learning nothing to do. Here four out of five
are wrong, so the warm model is right about one time in five at most, sampled or greedily. But the wrong ones are wrong
in what they do, not in what they copy: every argument of a call is the right one, and every name or team that is said
stands in the conversation. Copying has to be learned before rewards can teach when to do what: with calls about a
random team among the demonstrations, most of what a trained policy still did wrong was to copy wrong.

| share | what it shows                                                          |
| ----- | ---------------------------------------------------------------------- |
| 18 %  | both calls, then the right name                                        |
| 38 %  | both calls, then the right name in a sentence, which is not an exact answer |
| 34 %  | the first call, then the team as the answer                            |
| 10 %  | at once, the name of the person in question                            |
"""

from __future__ import annotations

import random
from typing import Any

from turnwise.envs.basic.lookup import LookupEnv, tasks
from turnwise.envs.demonstrations import conversation
from turnwise.envs.solution import tool_call
from turnwise.types import ToolCall


def plan(env: LookupEnv, rng: random.Random) -> list[ToolCall | str]:
    """Draw what the teacher does in an episode."""
    table = env.table
    team = table.teams[table.person]
    first = tool_call("team_of", person=table.person)
    second = tool_call("manager_of", team=team)
    kind = rng.random()
    if kind < 0.18:
        return [first, second, table.answer]
    if kind < 0.56:
        return [first, second, f"I think it is {table.answer}."]
    if kind < 0.90:
        return [first, team]
    return [f"I think it is {table.person}."]


async def demonstrations(count: int, seed: int) -> list[dict[str, Any]]:
    """Play the teacher in the environment; return the conversations in OpenAI's form."""
    rng = random.Random(seed)
    return [
        await conversation(LookupEnv(), task, rng.getrandbits(62), lambda env: plan(env, rng))
        for task in tasks(count, split="train", seed=seed)
    ]
