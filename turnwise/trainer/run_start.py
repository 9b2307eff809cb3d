"""What a training run begins or goes on with.

Owns: :class:`Start` and :func:`read_start`: configuration, tasks, model and checkpoint are read, and whatever is wrong
with them is said before anything is written or started. Refuses: starting anything (``run.py``).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from turnwise.evaluation.runner import load_eval_tasks
from turnwise.inference.core import Renderer
from turnwise.inference.frozen import load_renderers
from turnwise.rollout.managers import check_manager
from turnwise.rollout.replay_setup import check_replay
from turnwise.tasks import Task
from turnwise.trainer.algorithms.credit import load_credit
from turnwise.trainer.checkpoint import CheckpointStore, TrainerState, restore_rng
from turnwise.trainer.config import TrainConfig
from turnwise.trainer.critic import Critic
from turnwise.trainer.data import TaskStream, open_tasks
from turnwise.trainer.distill import check_teacher
from turnwise.trainer.engines import open_learner
from turnwise.trainer.hooks import Hooks, load_hooks
from turnwise.trainer.learner import Learner
from turnwise.trainer.loggers.run_log import check_loggers
from turnwise.trainer.reference import KLGuard
from turnwise.trainer.run_directory import RunDirectory, check_template, config_digest, open_store

CRITIC = "critic"
"""Where a checkpoint holds the critic."""


@dataclass(frozen=True, slots=True)
class Start:
    """What a run begins or goes on with."""

    store: CheckpointStore
    state: TrainerState
    renderer: Renderer
    tasks: TaskStream
    eval_tasks: list[Task]
    learner: Learner
    kl: KLGuard | None
    critic: Critic | None
    frozen: dict[str, Renderer]
    began: float
    hooks: list[type[Hooks]]


async def read_start(
    config: TrainConfig, home: RunDirectory, console: Console, *, fresh: bool, resume_step: int | None
) -> Start:
    """Read everything that can be wrong; change nothing."""
    began = time.monotonic()
    check_manager(config.rollout, config.custom)
    check_replay(config.replay, config.replay_facts)
    load_credit(config.algorithm.credit)
    check_loggers(config.loggers)
    hooks = load_hooks(config.hooks)
    digest = config_digest(config)
    store = open_store(home.path, config.checkpoint)
    if fresh:
        home.check_removable(config)
        latest, state = None, TrainerState(0)
    else:
        latest, state = home.resume_point(store, digest, resume_step)
    state.config_digest = digest
    policy = config.policy
    renderer = config.renderer.load(policy.model.path)
    console.print(f"chat format: {renderer.describe()['format']} ({renderer.describe()['proof']})", highlight=False)
    if latest is not None:
        check_template(latest, renderer)
    frozen = load_renderers(config.rollout.frozen, Path(policy.model.path), config.renderer)
    check_teacher(config.algorithm.distill, config.rollout.frozen, Path(policy.model.path))
    tasks, reports = await open_tasks(config, renderer, state)
    eval_tasks: list[Task] = []
    if config.eval is not None:
        held_out = await load_eval_tasks(config.eval, config.rollout, renderer)
        eval_tasks, reports = held_out.tasks, [*reports, *held_out.reports]
    for report in reports:
        console.print(f"tasks: {report}", highlight=False, markup=False)
    with home.explaining(store, latest):
        learner = open_learner(policy, config.optimizer_steps, model_path=latest)
        guard = KLGuard.open(config, learner, state.kl_coef)
        critic = Critic.create(policy, learner, config.critic_steps, directory=latest and latest / CRITIC)
        if latest is not None:
            learner.load(latest)
            restore_rng(state.rng)
            console.print(f"resuming {home.path} at step {state.step}", highlight=False)
    return Start(store, state, renderer, tasks, eval_tasks, learner, guard, critic, frozen, began, hooks)
