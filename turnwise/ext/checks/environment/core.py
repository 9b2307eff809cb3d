"""check_env: runs all checks of an environment in the order of their dependencies."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Literal

from turnwise.envs.core import Env, close_env, run_method
from turnwise.envs.results import Remark
from turnwise.envs.wrappers import Wrapper
from turnwise.errors import ConfigError, RegistryError, TaskError, TurnwiseError
from turnwise.ext.checks.environment import contract, forks, policies, prompts, repeats
from turnwise.ext.checks.environment import contract as failures
from turnwise.ext.checks.environment import repeats as cost
from turnwise.ext.checks.environment.context import (
    ESTIMATE,
    CheckContext,
    CheckReport,
    EnvSource,
    Examined,
    PromptIds,
    StallTimeout,
    TokenCounter,
    Worker,
    estimated_tokens,
    made,
)
from turnwise.tasks.core import Task
from turnwise.tasks.reader import load_tasks

AT_ONCE: Final = 4
"""How many tasks are looked at at the same time."""


def looks_at_tasks(env: Env) -> bool:
    """Return whether an environment implements ``check_task``."""
    inner = env.unwrapped if isinstance(env, Wrapper) else env
    return type(inner).check_task is not Env.check_task


async def each_task(exam: CheckContext) -> None:
    """Check every task by the environment's ``check_task``."""
    rows = exam.of.rows
    if not rows or exam.single or not looks_at_tasks(exam.first):
        return
    turn = asyncio.Semaphore(AT_ONCE)

    async def look(task: Task) -> list[str]:
        async with turn:
            env = await exam.make()
            try:
                return list(await exam.run(run_method(env, env.check_task, task), "check_task"))
            except StallTimeout as error:
                return [f"{error}: give it more time (--timeout)"]
            except TurnwiseError as error:
                return [f"it cannot be checked: {error}"]
            finally:
                await exam.run(close_env(env), "close")

    found = await asyncio.gather(*map(look, rows))
    for task, problems in zip(rows, found, strict=True):
        for problem in problems:
            remark = isinstance(problem, Remark)
            remedy = "nothing has to be done" if remark else "fix the row, or remove it"
            severity: Literal["error", "warning"] = "warning" if remark else "error"
            exam.find("tasks", f"task {task.id!r}: {problem}", remedy, severity=severity)
    exam.report.figures["tasks looked at"] = float(len(rows))
    broken = [[each for each in problems if not isinstance(each, Remark)] for problems in found]
    exam.report.figures["broken tasks"] = float(sum(map(bool, broken)))


Check = Callable[[CheckContext], Awaitable[None]]

DEFAULT_TASKS: Final = 3
"""How many of an environment's own tasks are played where none are given."""

# What each check needs: after a finding of one of these it would only say the same again.
CHECKS: Final[dict[str, tuple[Check, tuple[str, ...]]]] = {
    "signature": (contract.signature, ()),
    "rewards": (contract.rewards, ("signature",)),
    "tools": (contract.tools, ("signature",)),
    "reset": (contract.reset, ("signature",)),
    "group": (repeats.group, ("reset", "json")),
    "final messages": (contract.finals, ("reset",)),
    "calls": (contract.calls, ("tools", "reset")),
    "single calls": (contract.single_calls, ("reset", "calls")),
    "determinism": (repeats.determinism, ("group", "calls", "final messages", "json")),
    "reuse": (repeats.reuse, ("determinism",)),
    "isolation": (repeats.isolation, ("determinism", "reuse")),
    "fork": (forks.fork, ("determinism", "reuse")),
    "close": (failures.close, ("reset",)),
    "close after errors": (failures.close_after_errors, ("tools", "close")),
    "leaks": (failures.leaks, ("close", "close after errors")),
    "tools shown": (prompts.tools_shown, ("tools", "reset")),
    "lengths": (prompts.lengths, ("reset", "calls", "final messages")),
    "answers": (prompts.answers, ("reset", "json")),
    "null policy": (policies.null, ("calls", "final messages", "score")),
    "repeat policy": (policies.repeat, ("calls", "final messages", "score")),
    "random policy": (policies.random_calls, ("calls", "final messages", "score", "null policy")),
    "reference": (policies.reference, ("calls", "final messages", "score")),
    "tasks": (each_task, ("signature",)),
    "cost": (cost.cost, ("calls", "final messages")),
}


async def check_env(
    env: EnvSource,
    *,
    task: Task | None = None,
    tasks: Sequence[Task] | None = None,
    looked_at: Sequence[Task] | str | None = None,
    seeds: Sequence[int] = (0, 1),
    timeout: float = 30.0,
    context_length: int | None = None,
    count_tokens: TokenCounter | None = None,
    prompt: PromptIds | None = None,
) -> CheckReport:
    """Play short episodes with random tool calls in an environment, and report violations of its contract.

    Checks: signatures; that a reward can be earned; tool schemas; the shape of reset; equal starts in a group; any
    final message; calls of every kind, together and single; equal episodes from equal seeds, also in a reused
    environment and beside another one; forks that answer like their original and share nothing with it; close, also
    after errors, without leaked threads or files; tools in the rendered prompt; lengths against the context; answers
    leaked in the prompt; trivial policies at the floor and the reference solution at the maximum; every task
    (``check_task``); the cost of a step.

    Args:
        env: A registered name or reference, a spec, a class or function that makes one, or an environment (with fewer
            checks, since no second one can be made).
        task: Task for resets; by default the first of the environment's own, or none.
        tasks: Several of them.
        looked_at: Tasks for ``check_task``, or their source; by default ``tasks``, else all its own.
        seeds: At least one.
        timeout: Seconds for any one call; the first stall ends the examination.
        context_length: Tokens of prompt and completion, or None.
        count_tokens: Counts the tokens of a text; by default an estimate.
        prompt: Renders messages and tools to ids by the chat template.

    Returns:
        The report. Faults of the environment raise nothing.

    Raises:
        RegistryError: The environment is unknown.
        ConfigError: Its configuration cannot be loaded, or there is no seed or no time.
        TaskError: Its own tasks cannot be loaded.
    """
    _check_arguments(seeds, timeout)
    examined = Examined(env, (task,), tuple(seeds), timeout, context_length, count_tokens or estimated_tokens, prompt)
    worker = Worker()
    try:
        try:
            first = await worker.run(made(env, examined.toolbox), timeout, "making the environment")
        except (RegistryError, ConfigError):
            raise
        except TurnwiseError as error:
            return _not_made(examined, worker, env, error)
        if task is None:
            examined.tasks = tuple(tasks) if tasks else _own_tasks(first)
            examined.rows = _looked_at(first, looked_at or tasks)
        exam = CheckContext(examined, first, worker)
        exam.report.notes += [ESTIMATE] * (count_tokens is None)
        await _examine(exam)
        return exam.report
    finally:
        await examined.close(worker)


def _check_arguments(seeds: Sequence[int], timeout: float) -> None:
    if not seeds:
        raise ConfigError("check_env got no seeds: episodes are reset with a seed, so give at least one")
    if not timeout > 0:
        raise ConfigError(f"check_env: timeout is {timeout!r}: it must be more than 0 seconds")


def _not_made(examined: Examined, worker: Worker, env: EnvSource, error: TurnwiseError) -> CheckReport:
    exam = CheckContext(examined, Env(), worker)
    exam.report = CheckReport(_name(env))
    exam.find("construct", str(error))
    return exam.report


def _own_tasks(env: Env) -> tuple[Task | None, ...]:
    if env.default_tasks is None:
        return (None,)
    found = load_tasks(env.default_tasks, limit=DEFAULT_TASKS)
    if not found:
        raise TaskError(f"{type(env).__qualname__}.default_tasks {env.default_tasks!r}: it contains no tasks")
    return tuple(found)


def _looked_at(env: Env, given: Sequence[Task] | str | None) -> tuple[Task, ...]:
    chosen = (given or env.default_tasks or ()) if looks_at_tasks(env) else ()
    return tuple(load_tasks(chosen) if isinstance(chosen, str) else chosen)


def _name(env: EnvSource) -> str:
    return env if isinstance(env, str) else repr(env)


async def _examine(exam: CheckContext) -> None:
    report = exam.report
    stalled = False
    for name, (check, needs) in CHECKS.items():
        found = {each.check for each in report.errors}
        blocked = [need for need in needs if need in found or need in report.skipped]
        if stalled or blocked:
            report.skipped[name] = "a call did not return" if stalled else f"after a finding of {blocked[0]}"
            continue
        try:
            await check(exam)
        except StallTimeout as error:
            exam.find(name, str(error), "set a time-out on what it waits for")
            stalled = True
        except TurnwiseError as error:
            exam.find(name, str(error))
        report.checks.append(name)
    if not stalled:
        try:
            await exam.run(close_env(exam.first), "close")
        except TurnwiseError as error:
            exam.find("close", str(error))
