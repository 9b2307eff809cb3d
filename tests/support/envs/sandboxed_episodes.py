"""Local sandboxes that every machine has, and episodes of environments in them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from support.sandboxes.counting_manager import CountingManager
from turnwise.envs.core import Env, StepResult, reset_env, step_env
from turnwise.errors import SandboxUnavailable
from turnwise.sandboxes.config import SandboxConfig
from turnwise.tasks import Task
from turnwise.types import ToolCall


@asynccontextmanager
async def some_boxes(isolation: str = "landlock") -> AsyncIterator[CountingManager]:
    """A manager of local sandboxes; where the kernel has no Landlock, of ones without isolation."""
    manager = CountingManager(SandboxConfig(config={"isolation": isolation}))
    try:
        await manager.probe()
    except SandboxUnavailable:
        if isolation != "landlock":
            raise
        manager = CountingManager(SandboxConfig(config={"isolation": "plain", "unsafe": True}))
        await manager.probe()
    try:
        yield manager
    finally:
        await manager.close()


async def answered(env: Env, task: Task, text: str) -> StepResult:
    """What an environment says of a message without calls."""
    await reset_env(env, task, seed=0)
    result: StepResult = await step_env(env, {"role": "assistant", "content": text})
    return result


async def called(env: Env, *calls: tuple[str, dict[str, Any]]) -> StepResult:
    """What an environment says of a message with calls."""
    tool_calls = [ToolCall(f"c{number}", name, arguments) for number, (name, arguments) in enumerate(calls)]
    result: StepResult = await step_env(env, {"role": "assistant", "content": "", "tool_calls": tool_calls})
    return result


def fenced(code: str | None) -> str:
    """An answer that is code."""
    return f"Here it is:\n\n```python\n{code or ''}\n```\n"
