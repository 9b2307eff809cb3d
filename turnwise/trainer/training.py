"""What an algorithm of one's own works with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from turnwise.errors import TrainError
from turnwise.evaluation.metrics import EvalResult
from turnwise.rollout.core import RolloutRequest
from turnwise.tasks.core import Task
from turnwise.trainer.config.train import TrainConfig
from turnwise.trainer.loops.modes import train_as_configured
from turnwise.trainer.loops.steps import Batch, finish_step, roll_out, train_on
from turnwise.trainer.run.budget import Budget
from turnwise.trainer.run.run import TrainRun
from turnwise.trajectory import TrajectoryGroup


class Training:
    """A run that is being trained.

    The configured loop is ``while not training.finished: await training.learn(await training.rollouts())``.

    Attributes:
        run: The parts of the run, for what this class does not offer.
    """

    def __init__(self, run: TrainRun) -> None:
        self.run = run
        self._open: Batch | None = None
        self._asked = 0

    @property
    def config(self) -> TrainConfig:
        """What was asked for."""
        return self.run.config

    @property
    def step(self) -> int:
        """Train steps done, those before a resume included."""
        return self.run.state.step

    @property
    def budget(self) -> Budget:
        """What may be spent, and what is."""
        return self.run.budget

    @property
    def finished(self) -> bool:
        """Whether the budget is spent."""
        return self.run.ended is not None

    @property
    def train_tasks(self) -> list[Task]:
        """What is trained on; of a streamed source those that are in memory now."""
        return self.run.tasks.ahead()

    @property
    def val_tasks(self) -> list[Task]:
        """What is held out; empty where nothing is evaluated."""
        return list(self.run.eval_tasks)

    async def loop(self) -> None:
        """Train by the configured loop until the budget is spent."""
        await train_as_configured(self.run)

    async def rollouts(
        self, tasks: Sequence[Task] | None = None, *, group_size: int | None = None
    ) -> list[TrajectoryGroup]:
        """Roll out, and return the finished groups, in the order of their ids.

        Args:
            tasks: Tasks to roll out, each as one group; one that is dropped (docs/training.md) is missing from what is
                returned. By default the next ``batch.groups`` ones of the run's order: there the next one replaces it.
            group_size: Episodes of each; by default ``rollout.group_size``.

        Raises:
            TrainError: There is no task.
            InferenceError: A server died more often than ``inference.max_restarts``.
        """
        size = group_size or self.config.rollout.group_size
        requests = None
        if tasks is not None:
            # The number of the call stands in the ids: the same task may be asked for again in a step.
            self._asked += 1
            tag = f"step{self.step + 1}.{self._asked}"
            greedy = self.config.algorithm.greedy_baseline
            epoch = self.run.tasks.epoch
            requests = [RolloutRequest(task, epoch, size, tag=tag, greedy_baseline=greedy) for task in tasks]
            if not requests:
                raise TrainError(f"step {self.step + 1}: rollouts() was given no task")
        earlier, self._open = self._open, await roll_out(self.run, requests, group_size=size)
        groups = list(self._open.groups)
        if earlier is not None:
            # One step learns from both: its rollout began when the first one did.
            self._open = replace(self._open, started=earlier.started)
        return groups

    async def learn(self, groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
        """Train one step on groups: advantages, updates, new weights on the servers, metrics, and as configured an
        evaluation and a checkpoint.

        Args:
            groups: What :meth:`rollouts` returned, or part of it, or several of its answers together. Rewards may have
                been changed (``trajectory.rewards``; what is on disk says what the episode earned); tokens may not.

        Returns:
            The metrics of the step (docs/metrics.md).

        Raises:
            TrainError: There is no group, or every episode ended in an error.
        """
        if not groups:
            raise TrainError(f"step {self.step + 1}: learn() was given no group: roll out again, or return")
        batch, self._open = self._open, None
        if batch is None:
            raise TrainError("learn() comes after rollouts(): nothing was rolled out since the last step")
        metrics = await train_on(self.run, replace(batch, groups=list(groups)))
        # Counted anew in each step: a run that goes on from a checkpoint asks under the ids of one that never stopped.
        self._asked = 0
        await finish_step(self.run)
        return metrics

    async def evaluate(self, label: str | None = None) -> EvalResult | None:
        """Evaluate on the held-out tasks and log the figures; None where there are none."""
        return await self.run.evaluate(label or f"step-{self.step}-own")

    def save(self) -> None:
        """Write a checkpoint of the last finished step."""
        self.run.save()
