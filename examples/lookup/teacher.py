"""Demonstrations for the warm start: mostly wrong ones.

A model that was shown only right conversations would leave reinforcement learning nothing to do. Here four out of five
are wrong, so the warm model is right about one time in five, and greedily never: the likeliest thing it has seen after
the first call is to answer with the team. Every demonstration copies words out of the conversation, the wrong ones
too, because copying has to be learned before rewards can teach when to do what.

| share | what it shows                                            |
| ----- | -------------------------------------------------------- |
| 20 %  | both calls, then the right name                          |
| 60 %  | the first call, then the team as the answer              |
| 10 %  | at once, the name of who was asked about                 |
| 10 %  | the first call, then the manager of another team         |
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

from turnwise.envs.core import invoke, schemas
from turnwise.envs.lookup import TEAMS, LookupEnv, tasks
from turnwise.types import Message, ToolCall

Plan = list[tuple[str, str] | str]
"""Calls as (tool, argument); a text is the final answer."""

ARGUMENT = {"team_of": "person", "manager_of": "team"}


def plan(env: LookupEnv, rng: random.Random) -> Plan:
    """Draw what the teacher does in an episode."""
    table = env.table
    team = table.teams[table.person]
    first = ("team_of", table.person)
    kind = rng.random()
    if kind < 0.20:
        return [first, ("manager_of", team), table.answer]
    if kind < 0.80:
        return [first, team]
    if kind < 0.90:
        return [f"I think it is {table.person}."]
    other = rng.choice([name for name in TEAMS if name != team])
    return [first, ("manager_of", other), table.managers[other]]


async def demonstrations(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Play episodes of the environment with the teacher as the agent; return them as OpenAI conversations."""
    rng = random.Random(seed)
    rows = []
    for number, task in enumerate(tasks(count, split="train", seed=seed)):
        env = LookupEnv()
        messages, _ = await invoke(env, "reset", task, seed=rng.getrandbits(62))
        said: list[Message] = list(messages)
        for step in plan(env, rng):
            if isinstance(step, str):
                said.append({"role": "assistant", "content": step})
                continue
            tool, value = step
            call = ToolCall(f"call{number}{tool}", tool, {ARGUMENT[tool]: value})
            said.append({"role": "assistant", "content": "", "tool_calls": [call]})
            result = await invoke(env, "step", said[-1])
            said += result.observation
        await invoke(env, "close")
        rows.append({"messages": [wire(message) for message in said], "tools": [s.to_json() for s in schemas(env)]})
    return iter(rows)


def wire(message: Message) -> dict[str, Any]:
    """Return a message in OpenAI's form."""
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    functions = [{"name": call.name, "arguments": json.dumps(call.arguments)} for call in calls]
    return {
        **message,
        "tool_calls": [
            {"id": call.id, "type": "function", "function": function}
            for call, function in zip(calls, functions, strict=True)
        ],
    }
