"""Agents of every kind that a user writes, and tasks that choose among them by name; for runs of tests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from openai import AsyncOpenAI

from turnwise.agents import Episode, rollout
from turnwise.compat.lightning import LLM, LitAgent, Rollout
from turnwise.types import ToolCall

NAMES = ("loop", "proxied", "silent")
# What stands in a file of agents: verl's spelling and two of ours.
FILE = """
- name: loop
  _target_: {loop}
  max_calls: 3
- {{name: proxied, class: "support.custom_agents:proxied", config: {{turns: 3}}}}
- {{name: silent, target: "support.custom_agents:Silent"}}
"""


def tasks(n: int = 6) -> Iterator[dict[str, Any]]:
    """Yield tasks of lookup, one kind of agent after the other."""
    for number in range(n):
        yield {"id": f"task-{number}", "prompt": "go", "agent": NAMES[number % len(NAMES)]}


@rollout
async def proxied(task: dict[str, Any], llm: LLM, rollout: Rollout, episode: Episode, *, turns: int) -> float:
    """Talks to its endpoint with the official client; rewards each call, and the answer by itself."""
    assert (task["id"], rollout.mode) in {(f"task-{n}", mode) for n in range(9) for mode in ("train", "val")}
    client = AsyncOpenAI(base_url=llm.get_base_url(rollout.rollout_id, rollout.attempt.attempt_id), api_key=llm.api_key)
    messages: list[Any] = list(episode.observation)
    tools = [tool.to_json() for tool in episode.tools]
    async with client:
        for _ in range(turns):
            answer = await client.chat.completions.create(model=llm.model, messages=messages, tools=tools)
            said = answer.choices[0].message
            messages.append(said.model_dump(exclude_none=True))
            if not said.tool_calls:
                return 0.1 + 0.01 * len(said.content or "")
            for call in said.tool_calls:
                made = ToolCall(call.id, call.function.name, json.loads(call.function.arguments or "{}"))
                response = await episode.call(made)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": response.text})
    return 0.0


class Silent(LitAgent[dict[str, Any]]):
    """Never asks the model; what it is worth depends on the attempt."""

    async def rollout_async(self, task: dict[str, Any], resources: dict[str, LLM], rollout: Rollout) -> float:
        """Return half a point."""
        return 0.5
