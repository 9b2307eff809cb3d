"""How far an evaluation is: the episodes that have ended, the time that the rest may take, and the figures so far."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn
from rich.progress import Task as ProgressTask
from rich.text import Text

from turnwise.evaluation.config import EvalPlan
from turnwise.evaluation.metrics import EpisodeRow, episode_rows
from turnwise.evaluation.result import EvalResult
from turnwise.evaluation.runner import eval_result
from turnwise.rollout.core import RolloutRequest
from turnwise.trajectory import Trajectory, TrajectoryGroup
from turnwise.types import StopReason

_LINE_EVERY_S = 30.0
"""Seconds between two lines where the output is no terminal."""


class EvalProgress:
    """Counts the episodes of an evaluation as they end, shows that, and knows the figures of what has ended.

    Attributes:
        total: Episodes of the whole evaluation.
    """

    def __init__(
        self, plan: EvalPlan, requests: Sequence[RolloutRequest], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Count nothing yet.

        Args:
            plan: What is evaluated.
            requests: What is rolled out, as :func:`~turnwise.evaluation.runner.eval_requests` returns it.
            clock: Returns seconds.
        """
        self.total = sum(request.group_size for request in requests)
        self._plan = plan
        self._requests = list(requests)
        self._by_key = {request.key: number for number, request in enumerate(requests)}
        self._groups: dict[int, TrajectoryGroup] = {}
        # What episodes of groups left that are not whole yet, by the number of their request.
        self._open: defaultdict[int, list[Trajectory]] = defaultdict(list)
        self._success: dict[str, bool] = {}
        self._failed = 0
        self._clock = clock
        self._started = clock()
        self._show: Callable[[], None] = lambda: None

    @property
    def ended(self) -> int:
        """How many episodes have ended, those included that ended in an error after their last attempt."""
        return min(self.total, len(self._success) + self._failed)

    @property
    def time_left(self) -> float | None:
        """Seconds that the other episodes take if they go on as those that ended did; None before the first."""
        if self.ended == 0:
            return None
        return (self._clock() - self._started) / self.ended * (self.total - self.ended)

    def wrote(self, trajectory: Trajectory) -> None:
        """Count an episode by one of its trajectories, each of which is given here when it is written."""
        number = self._by_key.get(trajectory.group_id.partition("-")[2])
        if number is None or number in self._groups:
            return
        self._open[number].append(trajectory)
        self._count(self._ended(number))

    def arrived(self, group: TrajectoryGroup) -> None:
        """Count a group all of whose episodes have ended."""
        number = self._by_key.get(group.id.partition("-")[2])
        if number is None:
            # A rollout manager of the user's may name its groups as it likes: it answers the samples first.
            asked = enumerate(self._requests)
            left = (n for n, request in asked if request.task.id == group.task_id and n not in self._groups)
            number = next(left, None)
        if number is None:
            return
        self._groups[number] = group
        self._open.pop(number, None)
        self._failed += group.failed
        self._count(group.trajectories)

    def partial(self) -> EvalResult:
        """Return the figures of the episodes that have ended, and how many have not."""
        groups: list[TrajectoryGroup] = []
        for number, request in enumerate(self._requests):
            group = self._groups.get(number)
            if group is None:
                ended, task = self._ended(number), request.task
                group = TrajectoryGroup(request.key, task.id, ended, request.partition, source=task.source)
            groups.append(group)
        result = eval_result(self._plan, groups, self._clock() - self._started)
        return result.left(self.total - self.ended)

    @contextlib.contextmanager
    def shown(self, console: Console) -> Iterator[None]:
        """Show a line that follows the count: one that moves on a terminal, else a new one every half minute."""
        if not console.is_terminal:
            last = self._started

            def say() -> None:
                nonlocal last
                if self._clock() - last >= _LINE_EVERY_S:
                    last = self._clock()
                    console.print(f"evaluating: {self}", highlight=False, soft_wrap=True)

            self._show = say
            yield
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:.0f} of {task.total:.0f} episodes"),
            TimeElapsedColumn(),
            _TimeLeft(self),
        )
        with Progress(*columns, console=console, transient=True) as bars:
            bar = bars.add_task("evaluating", total=self.total)
            self._show = lambda: bars.update(bar, completed=self.ended, description=f"success {self._share}")
            yield

    def __str__(self) -> str:
        elapsed = _clock_time(self._clock() - self._started)
        left = self.time_left
        rest = "" if left is None else f", about {_clock_time(left)} left"
        return f"{self.ended} of {self.total} episodes, success {self._share}, {elapsed} elapsed{rest}"

    @property
    def _share(self) -> str:
        return f"{sum(self._success.values()) / len(self._success):.2f}" if self._success else "-"

    def _ended(self, number: int) -> list[Trajectory]:
        """Return what the episodes of an open group left that have ended: not their failed attempts."""
        attempts: defaultdict[tuple[str, int], list[Trajectory]] = defaultdict(list)
        for each in self._open[number]:
            attempts[each.episode_id, each.attempt].append(each)
        return [each for members in attempts.values() if self._has_ended(members) for each in members]

    def _has_ended(self, members: Sequence[Trajectory]) -> bool:
        [row] = self._rows(members)
        return row.error is None and row.stop_reason not in (StopReason.ERROR, StopReason.CANCELLED)

    def _rows(self, trajectories: Sequence[Trajectory]) -> list[EpisodeRow]:
        return episode_rows(trajectories, success_reward=self._plan.success_reward, role=self._plan.role)

    def _count(self, ended: Sequence[Trajectory]) -> None:
        self._success |= {row.episode_id: row.success for row in self._rows(ended)}
        self._show()


class _TimeLeft(ProgressColumn):
    """The estimate of the time left, which moves between two episodes too."""

    def __init__(self, progress: EvalProgress) -> None:
        super().__init__()
        self._progress = progress

    def render(self, task: ProgressTask) -> Text:
        """Return the text of the column."""
        del task
        left = self._progress.time_left
        return Text("-:--:-- left" if left is None else f"{_clock_time(left)} left", style="progress.remaining")


def _clock_time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
