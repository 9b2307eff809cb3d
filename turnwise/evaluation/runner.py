"""Runs an environment's tasks against a model, with the code that training rolls out with.

Owns: :func:`evaluate`, with a producer that stands, as the trainer has one. Refuses: starting and stopping anything
(:func:`turnwise.evaluation.standalone.run_eval`). Evaluation resets environments with run seed 0 and epoch 0, so every
evaluation of a task begins from the same state.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from turnwise.errors import ConfigError
from turnwise.evaluation.config import EvalPlan
from turnwise.evaluation.metrics import Summary, summarize
from turnwise.evaluation.result import EvalResult
from turnwise.rollout.core import RolloutRequest
from turnwise.rollout.producer import RolloutProducer
from turnwise.tasks import Task, load_tasks
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
    producer: RolloutProducer,
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
        TaskError: The tasks cannot be loaded.
        ConfigError: There are none.
    """
    started = time.monotonic()
    tasks = load_eval_tasks(plan) if tasks is None else tasks
    requests = eval_requests(plan, tasks, label)
    groups = await producer.gather(requests, on_group)
    split = len(tasks) if plan.samples else 0
    return EvalResult(
        sampled=_summary(plan, groups[:split], plan.pass_k) if plan.samples else None,
        greedy=_summary(plan, groups[split:], ()) if plan.greedy else None,
        seconds=time.monotonic() - started,
    )


def load_eval_tasks(plan: EvalPlan) -> list[Task]:
    """Return the plan's tasks. Raises ConfigError where there are none."""
    tasks = load_tasks(plan.tasks, limit=plan.limit)
    if not tasks:
        raise ConfigError(f"tasks: {plan.tasks!r} holds no task: there is nothing to evaluate")
    return tasks


def _summary(plan: EvalPlan, groups: Sequence[TrajectoryGroup], pass_k: Sequence[int]) -> Summary:
    return summarize(groups, success_reward=plan.success_reward, pass_k=pass_k)
