"""Runs an environment's tasks against a model, with the code that training rolls out with.

Owns: :func:`evaluate`, with a producer that stands, as the trainer has one. Refuses: starting and stopping anything
(:func:`turnwise.evaluation.standalone.run_eval`). Evaluation resets environments with run seed 0 and epoch 0, so every
evaluation of a task begins from the same state.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from turnwise.agents.roles import role_of
from turnwise.errors import ConfigError
from turnwise.evaluation.config import EvalPlan
from turnwise.evaluation.metrics import Summary, summarize
from turnwise.evaluation.result import EvalResult
from turnwise.inference.core import Renderer
from turnwise.rollout.config import RolloutConfig
from turnwise.rollout.core import RolloutRequest
from turnwise.rollout.managers import Rollouts
from turnwise.rollout.task_checks import (
    PromptLimit,
    check_own,
    check_specs,
    check_tools_shown,
    task_source,
)
from turnwise.tasks import LoadedTasks, Task, load_mix
from turnwise.trajectory import TrajectoryGroup

OnGroup = Callable[[TrajectoryGroup], None]


def eval_requests(plan: EvalPlan, tasks: Sequence[Task], label: str = "") -> list[RolloutRequest]:
    """Return what is to be rolled out: each task sampled, then each task greedily.

    Args:
        plan: How many samples, and whether greedily too.
        tasks: The tasks.
        label: Part of the ids of these episodes: different for each evaluation of one run (``step-20``).
    """
    prefix = f"{label}-" if label else ""
    requests = []
    if plan.samples:
        requests += [RolloutRequest(task, 0, plan.samples, "val", None, f"{prefix}sampled") for task in tasks]
    if plan.greedy:
        requests += [RolloutRequest(task, 0, 1, "val", 0.0, f"{prefix}greedy") for task in tasks]
    return requests


async def evaluate(
    producer: Rollouts,
    plan: EvalPlan,
    *,
    tasks: Sequence[Task] | None = None,
    label: str = "",
    on_group: OnGroup | None = None,
) -> EvalResult:
    """Roll out tasks and return the figures.

    Args:
        producer: Rolls out; its configuration names environment, agent, temperature and limits.
        plan: What is evaluated.
        tasks: The tasks, where they are loaded already.
        label: Part of the episodes' ids: different for each evaluation that one run makes.
        on_group: Called with each group when it ends.

    Raises:
        ConfigError: Nobody names any tasks, or ``plan.role`` is no role of the episodes.
        TaskError: They cannot be loaded, or there are none.
    """
    started = time.monotonic()
    if tasks is None:
        tasks = (await load_eval_tasks(plan, producer.config, producer.renderer)).tasks
    requests = eval_requests(plan, tasks, label)
    groups = await producer.gather(requests, on_group)
    return eval_result(plan, groups, time.monotonic() - started)


def eval_result(plan: EvalPlan, groups: Sequence[TrajectoryGroup], seconds: float) -> EvalResult:
    """Return the figures of groups, which stand in the order of :func:`eval_requests`."""
    split = len(groups) // (1 + plan.greedy) if plan.samples else 0
    return EvalResult(
        sampled=_summary(plan, groups[:split], plan.pass_k) if plan.samples else None,
        greedy=_summary(plan, groups[split:], ()) if plan.greedy else None,
        seconds=seconds,
    )


async def load_eval_tasks(plan: EvalPlan, rollout: RolloutConfig, renderer: Renderer) -> LoadedTasks:
    """Return the plan's tasks, and what became of the rows of their sources.

    Args:
        plan: Names them, else the environment does.
        rollout: Environment and agent.
        renderer: Counts the tokens of their prompts, where the plan has a limit.

    Raises:
        ConfigError: Nobody names any, or the chat template does not show the tools of their environment.
        RegistryError: There is no such environment or agent.
        TaskError: They cannot be loaded, there are none, or they name an environment or agent that cannot be made.
    """
    check_own(rollout)
    source = task_source(plan.tasks, rollout, "tasks")
    keep = await PromptLimit.create(plan.max_prompt_tokens, renderer, rollout)
    loaded = load_mix(source, limit=plan.limit, keep=keep)
    await check_specs(loaded.tasks, rollout)
    await check_tools_shown(loaded.tasks, renderer, rollout)
    return loaded


def _summary(plan: EvalPlan, groups: Sequence[TrajectoryGroup], pass_k: Sequence[int]) -> Summary:
    if plan.role is not None:
        roles = {role_of(each.agent) for group in groups for each in group.trajectories}
        if roles and plan.role not in roles:
            raise ConfigError(
                f"role is {plan.role!r}, which no episode had: their roles are {', '.join(sorted(roles))}"
            )
    return summarize(groups, success_reward=plan.success_reward, pass_k=pass_k, role=plan.role)
