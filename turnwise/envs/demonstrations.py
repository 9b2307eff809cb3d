"""Demonstrations: a plan or the reference solution is played in an environment, as a conversation in OpenAI's form."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from turnwise.envs.core import Env, as_messages, close_env, reset_env, schemas, step_env
from turnwise.envs.solution import play_solution
from turnwise.tasks.core import Task
from turnwise.types import Message, ToolCall

E = TypeVar("E", bound=Env)


async def conversation(env: E, task: Task, seed: int, plan: Callable[[E], Sequence[ToolCall | str]]) -> dict[str, Any]:
    """Play a plan and return its conversation, ``{"messages": [...], "tools": [...]}``.

    Args:
        env: The environment, closed afterwards.
        task: The task.
        seed: The reset seed: equal seeds and tasks give equal conversations where the plan is the same.
        plan: Makes the plan when the episode has begun: calls of tools, and last the answer, which is written down and
            not played.
    """
    first_messages, _ = await reset_env(env, task, seed=seed)
    messages: list[Message] = list(first_messages)
    for number, move in enumerate(plan(env)):
        if isinstance(move, str):
            messages.append({"role": "assistant", "content": move})
            continue
        call = ToolCall(f"call{number}", move.name, move.arguments)
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        result = await step_env(env, messages[-1])
        messages += as_messages(result.observation)
    await close_env(env)
    return _record(env, messages)


async def solved_conversation(env: Env, task: Task | None, seed: int) -> dict[str, Any]:
    """Play the reference solution and return its conversation as :func:`conversation`.

    Args:
        env: The environment, closed afterwards.
        task: The task, or None where the environment needs none.
        seed: The reset seed.

    Raises:
        EnvError: The environment has no reference solution (``solve``), or it does not end the episode.
    """
    try:
        first_messages, _ = await reset_env(env, task, seed=seed)
        messages: list[Message] = list(first_messages)
        for message, result in await play_solution(env):
            messages += [message, *as_messages(result.observation)]
        return _record(env, messages)
    finally:
        await close_env(env)


def _record(env: Env, messages: Sequence[Message]) -> dict[str, Any]:
    return {"messages": [wire(message) for message in messages], "tools": [schema.to_json() for schema in schemas(env)]}


def wire(message: Message) -> dict[str, Any]:
    """Return a message in OpenAI's form, whose call arguments are JSON text."""
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
