"""Checks of close: twice, after errors, and without leaked threads or files."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from turnwise.envs.core import Env, close_env, reset_env, step_env
from turnwise.errors import EnvError, TurnwiseError
from turnwise.ext.checks.environment.context import CheckContext, StallTimeout, episode_name
from turnwise.tasks.core import Task
from turnwise.tools.core import FunctionTool
from turnwise.tools.sample_arguments import example_arguments
from turnwise.types import Message, ToolCall

CYCLES: Final = 6
"""Episodes with each kind of end between two counts of threads and files."""
_POOL: Final = "turnwise-"
_FD_FOLDERS: Final = ("/proc/self/fd", "/dev/fd")
_UNUSABLE: Final = Task("turnwise-unusable", "", {"no such field": None})

Ending = Callable[[CheckContext, Env], Awaitable[None]]


async def close(context: CheckContext) -> None:
    """Check that closing works twice."""
    env = await context.make()
    task, seed = context.episodes[-1]
    await context.reset(env, task, seed)
    for time, remedy in (("", ""), (" a second time", "close may be called twice: free what is there and forget it")):
        try:
            await context.run(close_env(env), "close")
        except StallTimeout:
            raise
        except TurnwiseError as error:
            context.add_finding("close", f"closing{time} raised: {error}", remedy, where=episode_name(task, seed))


async def close_after_errors(context: CheckContext) -> None:
    """Check that closing works after each kind of broken episode."""
    if context.single:
        return
    for when, ending in _ENDINGS.items():
        env = await context.make()
        await ending(context, env)
        try:
            await context.run(close_env(env), "close")
        except StallTimeout as error:
            raise StallTimeout(f"closing {when}: {error}") from error
        except TurnwiseError as error:
            context.add_finding(
                "close after errors",
                f"closing {when} raised: {error}",
                "close() runs after every episode: set what it frees to None in __init__ and check before freeing",
            )


async def leaks(context: CheckContext) -> None:
    """Check that closing leaves no further threads or open files."""
    if context.single:
        return
    envs: list[Env] = []
    for when, ending in _ENDINGS.items():
        await _cycle(context, ending, envs)
        baseline = _count_resources()
        for _ in range(CYCLES):
            await _cycle(context, ending, envs)
        count = _count_resources()
        if count != baseline:
            gc.collect()
            count = _count_resources()
        for what, growth in (("threads", count.threads - baseline.threads), ("files", count.files - baseline.files)):
            if growth >= CYCLES:
                context.add_finding(
                    "leaks",
                    f"after {CYCLES} episodes closed {when} there are {growth} more {what} than before",
                    f"end them in close(), also where {when.removeprefix('after ')} came first",
                )
                return


async def _cycle(context: CheckContext, ending: Ending, envs: list[Env]) -> None:
    env = await context.make()
    # A reference is held, so that only close, and not the garbage collector, can free its resources.
    envs.append(env)
    await ending(context, env)
    await _ignore_errors(context, close_env(env), "close")


@dataclass(frozen=True, slots=True)
class _OpenResources:
    threads: int
    files: int


def _count_resources() -> _OpenResources:
    folder = next((Path(name) for name in _FD_FOLDERS if Path(name).is_dir()), None)
    files = 0 if folder is None else len(os.listdir(folder))
    # Executors keep idle threads on purpose.
    threads = sum(not thread.name.startswith((_POOL, "asyncio_")) for thread in threading.enumerate())
    return _OpenResources(threads, files)


# The ends of an episode; errors of the environment on the way are not reported here.


async def _reset(context: CheckContext, env: Env) -> None:
    task, seed = context.episodes[0]
    await context.reset(env, task, seed)


async def _never_reset(context: CheckContext, env: Env) -> None:
    """Do nothing."""


async def _reset_raised(context: CheckContext, env: Env) -> None:
    await _ignore_errors(context, reset_env(env, _UNUSABLE, seed=0), "reset")


async def _reset_cancelled(context: CheckContext, env: Env) -> None:
    task, seed = context.episodes[0]

    async def begin() -> None:
        running = asyncio.ensure_future(reset_env(env, task, seed=seed))
        await asyncio.sleep(0)
        running.cancel()
        await asyncio.wait([running])

    await context.run(begin(), "reset")


async def _step_raised(context: CheckContext, env: Env) -> None:
    await _reset(context, env)
    broken: Any = {"role": "assistant", "content": "", "tool_calls": [object()]}
    await _ignore_errors(context, step_env(env, broken), "step")


async def _tool_raised(context: CheckContext, env: Env) -> None:
    methods = {name: _raising(tool) for name, tool in env.tool_methods.items()}
    env.tool_methods = methods  # type: ignore[misc]
    await _reset(context, env)
    calls = [
        ToolCall(f"call_{name}", tool.name, example_arguments(tool.schema) or {}) for name, tool in methods.items()
    ]
    action: Message = {"role": "assistant", "content": "", "tool_calls": calls[:1]}
    await _ignore_errors(context, step_env(env, action), "step")


def _raising(tool: FunctionTool) -> FunctionTool:
    async def fail(self: Any, **_: Any) -> None:  # noqa: ARG001
        raise EnvError("this tool was made to fail by the environment checker")

    return FunctionTool(fail, schema=tool.schema)


async def _ignore_errors(context: CheckContext, work: Coroutine[Any, Any, Any], method: str) -> None:
    try:
        await context.run(work, method)
    except StallTimeout:
        raise
    except TurnwiseError:
        return


_ENDINGS: Final[dict[str, Ending]] = {
    "before reset": _never_reset,
    "after reset": _reset,
    "after reset raised": _reset_raised,
    "after reset was cancelled": _reset_cancelled,
    "after step raised": _step_raised,
    "after a tool raised": _tool_raised,
}
