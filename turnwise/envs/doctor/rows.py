"""Every task by itself: can it be solved, and is there anything to solve?"""

from __future__ import annotations

import asyncio
from typing import Final

from turnwise.envs.core import Env
from turnwise.envs.doctor.exam import Exam
from turnwise.envs.doctor.worker import Stalled
from turnwise.envs.wrapper import Wrapper
from turnwise.errors import TurnwiseError
from turnwise.tasks import Task

AT_ONCE: Final = 4
"""How many tasks are looked at at the same time."""


def looks_at_tasks(env: Env) -> bool:
    """Return whether an environment says what is wrong with a task."""
    inner = env.unwrapped if isinstance(env, Wrapper) else env
    return type(inner).check_task is not Env.check_task


async def tasks(exam: Exam) -> None:
    """Nothing is wrong with any task, where the environment can say so (``check_task``)."""
    rows = exam.of.rows
    if not rows or exam.single or not looks_at_tasks(exam.first):
        return
    turn = asyncio.Semaphore(AT_ONCE)

    async def look(task: Task) -> list[str]:
        async with turn:
            env = await exam.make()
            try:
                return list(await exam.call(env, "check_task", task))
            except Stalled as error:
                return [f"{error}: give it more time (--timeout)"]
            except TurnwiseError as error:
                return [f"it cannot be looked at: {error}"]
            finally:
                await exam.call(env, "close")

    found = await asyncio.gather(*map(look, rows))
    for task, problems in zip(rows, found, strict=True):
        for problem in problems:
            exam.find("tasks", f"task {task.id!r}: {problem}", "mend the row, or leave it out")
    exam.report.figures["tasks looked at"] = float(len(rows))
    exam.report.figures["broken tasks"] = float(sum(map(bool, found)))
