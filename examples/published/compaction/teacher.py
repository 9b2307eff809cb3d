"""Demonstrations for the warm start: right calls on short trails, and summaries of which most say nothing.

A trail is walked in parts, as the agent will: after one to three signs the walker is asked for a summary, and continues
from that alone. Every call and every answer copies the right place; what is mostly wrong is the summary:

| share | the summary                     | what follows                       |
| ----- | ------------------------------- | ---------------------------------- |
| 25 %  | where the last sign points to   | the next sign, or the answer       |
| 75 %  | that signs were read            | the trail again from its beginning |
"""

from __future__ import annotations

import random
from typing import Any

from trail_env import TrailEnv, tasks

from turnwise.envs import close_env, reset_env, schemas, step_env
from turnwise.envs.core import as_messages
from turnwise.envs.demonstrations import wire
from turnwise.tasks import Task
from turnwise.types import Message, ToolCall

# As in train.yaml.
ASK = "Summary?"
SUMMARY = "Summary: {summary}"
EMPTY = "Signs were read."
INFORMATIVE = 0.25
WHOLE = 0.5
"""Of the trails that were walked to the end, those that are answered without a summary."""
LONGEST = 3
WORDS = 8
"""Of filler on a sign."""


async def walk(env: TrailEnv, begin: int, end: int) -> list[Message]:
    """Read the signs from one number to another; return the calls and what the signs say."""
    messages: list[Message] = []
    for number in range(begin, end):
        call = ToolCall(f"call{number}", "read_sign", {"place": env.trail.places[number]})
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages += as_messages((await step_env(env, messages[-1])).observation)
    return messages


async def parts(task: Task, seed: int, rng: random.Random) -> list[dict[str, Any]]:
    """Walk a trail in two parts; return the conversation up to the summary, and the one that continues from it."""
    env = TrailEnv()
    head, _ = await reset_env(env, task, seed=seed)
    signs = len(env.trail.places)
    split = rng.randint(1, signs)
    first = [*head, *await walk(env, 0, split)]
    if rng.random() < WHOLE and split == signs:
        conversations = [[*first, {"role": "assistant", "content": env.trail.end}]]
    else:
        informative = rng.random() < INFORMATIVE
        last = f"The trail ends at {env.trail.end}." if split == signs else f"Go on to {env.trail.places[split]}."
        summary = last if informative else EMPTY
        first += [{"role": "user", "content": ASK}, {"role": "assistant", "content": summary}]
        text = f"{head[-1]['content']}\n\n{SUMMARY.format(summary=summary)}"
        second: list[Message] = [*head[:-1], {**head[-1], "content": text}]
        second += await walk(env, split if informative else 0, signs)
        conversations = [first, [*second, {"role": "assistant", "content": env.trail.end}]]
    await close_env(env)
    tools = [schema.to_json() for schema in schemas(env)]
    return [{"messages": [wire(message) for message in messages], "tools": tools} for messages in conversations]


async def demonstrations(count: int, seed: int) -> list[dict[str, Any]]:
    """Walk trails of up to three signs; return ``count`` conversations in OpenAI's form."""
    rng = random.Random(seed)
    rows: list[dict[str, Any]] = []
    for task in tasks(count, split="train", seed=seed, steps=LONGEST, least=1, words=WORDS):
        rows += await parts(task, rng.getrandbits(62), rng)
        if len(rows) >= count:
            break
    return rows[:count]
