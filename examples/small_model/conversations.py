"""Demonstrations: a plan is played in an environment, and the conversation is written in OpenAI's form."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from turnwise.envs.core import Env, invoke, schemas
from turnwise.tasks import Task
from turnwise.types import Message, ToolCall

E = TypeVar("E", bound=Env)


async def conversation(env: E, task: Task, seed: int, plan: Callable[[E], Sequence[ToolCall | str]]) -> dict[str, Any]:
    """Play a plan, which is made when the episode has begun: calls of tools, and last the answer.

    The answer is written down and not played: what it is worth is the reward's affair.
    """
    messages, _ = await invoke(env, "reset", task, seed=seed)
    said: list[Message] = list(messages)
    for number, move in enumerate(plan(env)):
        if isinstance(move, str):
            said.append({"role": "assistant", "content": move})
            continue
        call = ToolCall(f"call{number}", move.name, move.arguments)
        said.append({"role": "assistant", "content": "", "tool_calls": [call]})
        result = await invoke(env, "step", said[-1])
        said += result.observation
    await invoke(env, "close")
    return {"messages": [wire(message) for message in said], "tools": [schema.to_json() for schema in schemas(env)]}


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
