"""A running training run, as a custom training loop sees it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from turnwise.errors import TrainError
from turnwise.evaluation.metrics import EvalResult
from turnwise.rollout.core import RolloutRequest
from turnwise.tasks.core import Task
from turnwise.trainer.config.train import TrainConfig
from turnwise.trainer.loops.modes import train_as_configured
from turnwise.trainer.loops.steps import Batch, finish_step, roll_out, train_on
from turnwise.trainer.run.budget import Budget
from turnwise.trajectory import TrajectoryGroup

if TYPE_CHECKING:
    from turnwise.trainer.run.run import TrainRun


class Training:
    """A running training run.

    The configured loop is ``while not training.finished: await training.learn(await training.rollouts())``.

    Attributes:
        run: All parts of the run.
    """

    def __init__(self, run: TrainRun) -> None:
        self.run = run
        self._batch: Batch | None = None
        self._calls = 0

    @property
    def config(self) -> TrainConfig:
        """The run's configuration."""
        return self.run.config

    @property
    def step(self) -> int:
        """Train steps done, those before a resume included."""
        return self.run.state.step

    @property
    def budget(self) -> Budget:
        """Limits and amounts spent."""
        return self.run.budget

    @property
    def finished(self) -> bool:
        """Whether the budget is spent."""
        return self.run.ended is not None

    @property
    def train_tasks(self) -> list[Task]:
        """The training tasks; of a streamed source those in memory."""
        return list(self.run.tasks.ahead())

    @property
    def val_tasks(self) -> list[Task]:
        """The held-out tasks; empty without evaluation."""
        return list(self.run.eval_tasks)

    async def loop(self) -> None:
        """Run the configured loop until the budget is spent."""
        await train_as_configured(self.run)

    async def rollouts(
        self, tasks: Sequence[Task] | None = None, *, group_size: int | None = None
    ) -> list[TrajectoryGroup]:
        """Roll out tasks, and return the finished groups, sorted by id.

        Args:
            tasks: Tasks to roll out, one group each; dropped groups (docs/training.md) are missing from the result. By
                default the next ``batch.groups`` ones of the run, where dropped groups are replaced.
            group_size: Episodes per group; by default ``rollout.group_size``.

        Raises:
            TrainError: There is no task.
            InferenceError: A server died more often than ``inference.max_restarts``.
        """
        size = group_size or self.config.rollout.group_size
        requests = None
        if tasks is not None:
            # The ids contain the number of the call: the same task may be requested again in a step.
            self._calls += 1
            tag = f"step{self.step + 1}.{self._calls}"
            greedy = self.config.greedy_baseline
            epoch = self.run.tasks.epoch
            requests = [RolloutRequest(task, epoch, size, tag=tag, greedy_baseline=greedy) for task in tasks]
            if not requests:
                raise TrainError(f"step {self.step + 1}: rollouts() was given no task")
        earlier, self._batch = self._batch, await roll_out(self.run, requests, group_size=size)
        groups = list(self._batch.groups)
        if earlier is not None:
            # One step learns from both: its rollout began when the first one did.
            self._batch = replace(self._batch, started=earlier.started)
        return groups

    async def learn(self, groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
        """Train one step on groups: advantages, updates, weight sync, metrics, and evaluation and checkpoint where due.

        Args:
            groups: Results of :meth:`rollouts`, whole, in part or combined. Rewards may be changed
                (``trajectory.rewards``; the files keep the original ones); tokens may not.

        Returns:
            The metrics of the step (docs/metrics.md).

        Raises:
            TrainError: There is no group, or every episode ended in an error.
        """
        if not groups:
            raise TrainError(f"step {self.step + 1}: learn() was given no group: roll out again, or return")
        batch, self._batch = self._batch, None
        if batch is None:
            raise TrainError("learn() comes after rollouts(): nothing was rolled out since the last step")
        metrics = await train_on(self.run, replace(batch, groups=list(groups)))
        # Counted per step, so that a resumed run requests under the same ids as an uninterrupted one.
        self._calls = 0
        await finish_step(self.run)
        return metrics

    async def evaluate(self, label: str | None = None) -> EvalResult | None:
        """Evaluate on the held-out tasks and log the figures; None if there are none."""
        return await self.run.evaluate(label or f"step-{self.step}-own")

    async def save(self) -> None:
        """Write a checkpoint of the last finished step."""
        await self.run.save()


TrainingLoop: TypeAlias = Callable[[Training], Awaitable[None]]
"""A custom training loop: ``async def run(training)``. Final evaluation and checkpoint follow when it returns."""
