"""Rows of a format as episodes: what the answers to them, or their solutions, earn."""

from __future__ import annotations

from turnwise.envs.core import close_env, reset_env, step_env
from turnwise.envs.registration import make
from turnwise.envs.solution import play_solution
from turnwise.tasks import Task
from turnwise.types import Message, ToolCall


async def reward_of(task: Task, *messages: Message) -> float:
    """Return the reward of an episode; without messages, of the reference solution."""
    assert task.env is not None
    env = make(task.env)
    try:
        await reset_env(env, task, seed=0)
        if not messages:
            return sum(result.reward for _, result in await play_solution(env))
        results = [await step_env(env, message) for message in messages]
        assert results[-1].terminated
        return sum(step.reward for step in results)
    finally:
        await close_env(env)


def says(text: str, *calls: ToolCall) -> Message:
    message: Message = {"role": "assistant", "content": text}
    return {**message, "tool_calls": list(calls)} if calls else message
