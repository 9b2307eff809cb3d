"""Demonstrations for the warm start: mostly wrong ones.

Four out of five are wrong, so that reinforcement learning has something to do; but they are wrong in what they do,
never in what they copy. Every number of a call and of an answer stands in the conversation where a right one would find
it, because copying digits has to be learned before rewards can teach when to do what.

| share | what it shows                                                             |
| ----- | ------------------------------------------------------------------------- |
| 18 %  | one call per operation, then the result                                   |
| 38 %  | one call per operation, then the result in a sentence, which is not a number |
| 34 %  | all calls but the last, then the result so far                            |
| 10 %  | at once, the number that the problem begins with                          |
"""

from __future__ import annotations

import random
from typing import Any

from turnwise.envs.demonstrations import conversation
from turnwise.envs.solution import tool_call
from turnwise.ext.environments.calculator import CalculatorEnv, tasks
from turnwise.types import ToolCall


def plan(env: CalculatorEnv, rng: random.Random) -> list[ToolCall | str]:
    """Draw what the teacher does in an episode."""
    problem = env.problem
    values = [problem.start, *problem.results]
    calls: list[ToolCall | str] = [
        tool_call("calculate", expression=f"{value} {sign} {number}")
        for value, (sign, number) in zip(values, problem.steps, strict=False)
    ]
    kind = rng.random()
    if kind < 0.18:
        return [*calls, str(problem.answer)]
    if kind < 0.56:
        return [*calls, f"I think it is {problem.answer}."]
    if kind < 0.90:
        return [*calls[:-1], str(values[-2])]
    return [f"I think it is {problem.start}."]


async def demonstrations(count: int, seed: int) -> list[dict[str, Any]]:
    """Play the teacher in the environment; return the conversations in OpenAI's form."""
    rng = random.Random(seed)
    return [
        await conversation(CalculatorEnv(), task, rng.getrandbits(62), lambda env: plan(env, rng))
        for task in tasks(count, split="train", seed=seed)
    ]
