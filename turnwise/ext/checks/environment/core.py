"""check_env: runs all checks of an environment in the order of their dependencies."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Literal

from turnwise.envs.core import Env, close_env, run_method
from turnwise.envs.results import Remark
from turnwise.envs.wrappers import Wrapper
from turnwise.errors import ConfigError, RegistryError, TaskError, TurnwiseError
from turnwise.ext.checks.environment import closing, contract, cost, forks, policies, prompts, repeats
from turnwise.ext.checks.environment.context import (
    ESTIMATE,
    CheckContext,
    CheckReport,
    EnvSource,
    PromptIds,
    StallTimeout,
    Subject,
    TokenCounter,
    Worker,
    estimated_tokens,
    make_env,
)
from turnwise.tasks.core import Task
from turnwise.tasks.reader import load_tasks

CONCURRENT_TASKS: Final = 4
"""How many tasks are checked at the same time."""


def checks_tasks(env: Env) -> bool:
    """Return whether an environment implements ``check_task``."""
    base_env = env.unwrapped if isinstance(env, Wrapper) else env
    return type(base_env).check_task is not Env.check_task


async def check_tasks(context: CheckContext) -> None:
    """Check every task with the environment's ``check_task``."""
    rows = context.subject.rows
    if not rows or context.single or not checks_tasks(context.first):
        return
    turn = asyncio.Semaphore(CONCURRENT_TASKS)

    async def check_row(task: Task) -> list[str]:
        async with turn:
            env = await context.make()
            try:
                return list(await context.run(run_method(env, env.check_task, task), "check_task"))
            except StallTimeout as error:
                return [f"{error}: give it more time (--timeout)"]
            except TurnwiseError as error:
                return [f"it cannot be checked: {error}"]
            finally:
                await context.run(close_env(env), "close")

    results = await asyncio.gather(*map(check_row, rows))
    for task, problems in zip(rows, results, strict=True):
        for problem in problems:
            remark = isinstance(problem, Remark)
            remedy = "nothing has to be done" if remark else "fix the row, or remove it"
            severity: Literal["error", "warning"] = "warning" if remark else "error"
            context.add_finding("tasks", f"task {task.id!r}: {problem}", remedy, severity=severity)
    context.report.figures["tasks looked at"] = float(len(rows))
    broken_rows = [[problem for problem in problems if not isinstance(problem, Remark)] for problems in results]
    context.report.figures["broken tasks"] = float(sum(map(bool, broken_rows)))


Check = Callable[[CheckContext], Awaitable[None]]

DEFAULT_TASKS: Final = 3
"""How many of an environment's own tasks are played by default."""

# Each check and its prerequisites: after a finding of one of those it would only repeat it.
CHECKS: Final[dict[str, tuple[Check, tuple[str, ...]]]] = {
    "signature": (contract.signature, ()),
    "rewards": (contract.rewards, ("signature",)),
    "tools": (contract.tools, ("signature",)),
    "reset": (contract.reset, ("signature",)),
    "group": (repeats.group, ("reset", "json")),
    "final messages": (contract.final_messages, ("reset",)),
    "calls": (contract.calls, ("tools", "reset")),
    "single calls": (contract.single_calls, ("reset", "calls")),
    "determinism": (repeats.determinism, ("group", "calls", "final messages", "json")),
    "reuse": (repeats.reuse, ("determinism",)),
    "isolation": (repeats.isolation, ("determinism", "reuse")),
    "fork": (forks.fork, ("determinism", "reuse")),
    "close": (closing.close, ("reset",)),
    "close after errors": (closing.close_after_errors, ("tools", "close")),
    "leaks": (closing.leaks, ("close", "close after errors")),
    "tools shown": (prompts.tools_shown, ("tools", "reset")),
    "lengths": (prompts.lengths, ("reset", "calls", "final messages")),
    "answers": (prompts.answers, ("reset", "json")),
    "null policy": (policies.null, ("calls", "final messages", "score")),
    "repeat policy": (policies.repeat, ("calls", "final messages", "score")),
    "random policy": (policies.random_calls, ("calls", "final messages", "score", "null policy")),
    "reference": (policies.reference, ("calls", "final messages", "score")),
    "tasks": (check_tasks, ("signature",)),
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
        tasks: Tasks for resets, instead of ``task``.
        looked_at: Tasks for ``check_task``, or their source; by default ``tasks``, else all its own.
        seeds: At least one.
        timeout: Seconds for any one call; the first stall ends the check.
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
    subject = Subject(env, (task,), tuple(seeds), timeout, context_length, count_tokens or estimated_tokens, prompt)
    worker = Worker()
    try:
        try:
            first = await worker.run(make_env(env, subject.toolbox), timeout, "making the environment")
        except (RegistryError, ConfigError):
            raise
        except TurnwiseError as error:
            return _construction_failure(subject, worker, env, error)
        if task is None:
            subject.tasks = tuple(tasks) if tasks else _own_tasks(first)
            subject.rows = _rows_to_check(first, looked_at or tasks)
        context = CheckContext(subject, first, worker)
        context.report.notes += [ESTIMATE] * (count_tokens is None)
        await _run_checks(context)
        return context.report
    finally:
        await subject.close(worker)


def _check_arguments(seeds: Sequence[int], timeout: float) -> None:
    if not seeds:
        raise ConfigError("check_env got no seeds: episodes are reset with a seed, so give at least one")
    if not timeout > 0:
        raise ConfigError(f"check_env: timeout is {timeout!r}: it must be more than 0 seconds")


def _construction_failure(subject: Subject, worker: Worker, env: EnvSource, error: TurnwiseError) -> CheckReport:
    context = CheckContext(subject, Env(), worker)
    context.report = CheckReport(_name(env))
    context.add_finding("construct", str(error))
    return context.report


def _own_tasks(env: Env) -> tuple[Task | None, ...]:
    if env.default_tasks is None:
        return (None,)
    tasks = load_tasks(env.default_tasks, limit=DEFAULT_TASKS)
    if not tasks:
        raise TaskError(f"{type(env).__qualname__}.default_tasks {env.default_tasks!r}: it contains no tasks")
    return tuple(tasks)


def _rows_to_check(env: Env, source: Sequence[Task] | str | None) -> tuple[Task, ...]:
    rows = (source or env.default_tasks or ()) if checks_tasks(env) else ()
    return tuple(load_tasks(rows) if isinstance(rows, str) else rows)


def _name(env: EnvSource) -> str:
    return env if isinstance(env, str) else repr(env)


async def _run_checks(context: CheckContext) -> None:
    report = context.report
    stalled = False
    for name, (check, needs) in CHECKS.items():
        failed_checks = {finding.check for finding in report.errors}
        blocked = [need for need in needs if need in failed_checks or need in report.skipped]
        if stalled or blocked:
            report.skipped[name] = "a call did not return" if stalled else f"after a finding of {blocked[0]}"
            continue
        try:
            await check(context)
        except StallTimeout as error:
            context.add_finding(name, str(error), "set a time-out on the operation that it waits for")
            stalled = True
        except TurnwiseError as error:
            context.add_finding(name, str(error))
        report.checks.append(name)
    if not stalled:
        try:
            await context.run(close_env(context.first), "close")
        except TurnwiseError as error:
            context.add_finding("close", str(error))
