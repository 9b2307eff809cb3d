"""After errors: an environment closes whatever happened before, and leaves no thread and no file behind."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from turnwise.envs.core import Env, invoke
from turnwise.envs.doctor.exam import Exam, place
from turnwise.envs.doctor.worker import Stalled
from turnwise.errors import EnvError, TurnwiseError
from turnwise.tasks import Task
from turnwise.tools.core import FunctionTool
from turnwise.tools.example import example_arguments
from turnwise.types import Message, ToolCall

CYCLES: Final = 6
"""How often each way of ending is played before threads and files are counted again."""
_POOL: Final = "turnwise-"
_FD_FOLDERS: Final = ("/proc/self/fd", "/dev/fd")
_UNUSABLE: Final = Task("turnwise-unusable", "", {"no such field": None})

Ending = Callable[[Exam, Env], Awaitable[None]]


async def close(exam: Exam) -> None:
    """Closing works, and closing twice is no error."""
    env = await exam.make()
    task, seed = exam.episodes[-1]
    await exam.begin(env, task, seed)
    for time, remedy in (("", ""), (" a second time", "close may be called twice: free what is there and forget it")):
        try:
            await exam.call(env, "close")
        except Stalled:
            raise
        except TurnwiseError as error:
            exam.find("close", f"closing{time} raised: {error}", remedy, where=place(task, seed))


async def close_after_errors(exam: Exam) -> None:
    """Closing works after each way in which an episode can break."""
    if exam.single:
        return
    for when, ending in _ENDINGS.items():
        env = await exam.make()
        await ending(exam, env)
        try:
            await exam.call(env, "close")
        except Stalled as error:
            raise Stalled(f"closing {when}: {error}") from error
        except TurnwiseError as error:
            exam.find(
                "close after errors",
                f"closing {when} raised: {error}",
                "close() runs after every episode: set what it frees to None in __init__ and look before freeing",
            )


async def leaks(exam: Exam) -> None:
    """After closing, whatever happened before, no more threads run and no more files are open than before."""
    if exam.single:
        return
    kept: list[Env] = []
    for when, ending in _ENDINGS.items():
        await _cycle(exam, ending, kept)
        before = _held()
        for _ in range(CYCLES):
            await _cycle(exam, ending, kept)
        after = _held()
        if after != before:
            gc.collect()
            after = _held()
        for what, one, other in (("threads", before.threads, after.threads), ("files", before.files, after.files)):
            if other - one >= CYCLES:
                exam.find(
                    "leaks",
                    f"after {CYCLES} episodes closed {when} there are {other - one} more {what} than before",
                    f"end them in close(), also where {when.removeprefix('after ')} came first",
                )
                return


async def _cycle(exam: Exam, ending: Ending, kept: list[Env]) -> None:
    env = await exam.make()
    # Kept: what only the garbage collector frees is not freed by close.
    kept.append(env)
    await ending(exam, env)
    await _try(exam, env, "close")


@dataclass(frozen=True, slots=True)
class _Held:
    threads: int
    files: int


def _held() -> _Held:
    folder = next((Path(each) for each in _FD_FOLDERS if Path(each).is_dir()), None)
    files = 0 if folder is None else len(os.listdir(folder))
    # Idle threads of the executors are kept on purpose.
    return _Held(sum(not each.name.startswith((_POOL, "asyncio_")) for each in threading.enumerate()), files)


# The ways in which an episode ends. Whether the environment raises on the way is its own matter here.


async def _reset(exam: Exam, env: Env) -> None:
    task, seed = exam.episodes[0]
    await exam.begin(env, task, seed)


async def _never_reset(exam: Exam, env: Env) -> None:
    """Nothing happened."""


async def _reset_raised(exam: Exam, env: Env) -> None:
    await _try(exam, env, "reset", _UNUSABLE, seed=0)


async def _reset_cancelled(exam: Exam, env: Env) -> None:
    task, seed = exam.episodes[0]

    async def begin() -> None:
        running = asyncio.ensure_future(invoke(env, "reset", task, seed=seed))
        await asyncio.sleep(0)
        running.cancel()
        await asyncio.wait([running])

    await exam.run(begin(), "reset")


async def _step_raised(exam: Exam, env: Env) -> None:
    await _reset(exam, env)
    broken: Any = {"role": "assistant", "content": "", "tool_calls": [object()]}
    await _try(exam, env, "step", broken)


async def _tool_raised(exam: Exam, env: Env) -> None:
    methods = {name: _raising(tool) for name, tool in env.tool_methods.items()}
    env.tool_methods = methods  # type: ignore[misc]
    await _reset(exam, env)
    calls = [
        ToolCall(f"call_{name}", tool.name, example_arguments(tool.schema) or {}) for name, tool in methods.items()
    ]
    action: Message = {"role": "assistant", "content": "", "tool_calls": calls[:1]}
    await _try(exam, env, "step", action)


def _raising(tool: FunctionTool) -> FunctionTool:
    async def fail(self: Any, **_: Any) -> None:  # noqa: ARG001
        raise EnvError("the doctor made this tool fail")

    return FunctionTool(fail, schema=tool.schema)


async def _try(exam: Exam, env: Env, method: str, *args: Any, **kwargs: Any) -> None:
    try:
        await exam.call(env, method, *args, **kwargs)
    except Stalled:
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
