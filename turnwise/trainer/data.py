"""Which tasks a train step takes, and where a run stands in them.

Owns: :class:`TaskStream` and :func:`open_tasks`. Refuses: reading tasks, and their order (``turnwise/tasks``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from turnwise.inference.core import Renderer
from turnwise.rollout.core import RolloutRequest
from turnwise.rollout.task_checks import (
    PromptLimit,
    check_own,
    check_specs,
    check_tools_shown,
    task_source,
)
from turnwise.tasks import SourceReport, Task, TaskOrder, open_order
from turnwise.tasks.curriculum import CurriculumConfig
from turnwise.trainer.checkpoint import TrainerState
from turnwise.trainer.config import TrainConfig


class TaskStream:
    """Takes tasks in an order, as requests of a train step.

    What :meth:`state` returns is all that decides what follows: a resumed run takes the tasks that the killed one would
    have taken.

    Args:
        order: The tasks, one after the other.
        curriculum: What the order depends on, where it has a curriculum.
    """

    def __init__(self, order: TaskOrder, curriculum: CurriculumConfig | None = None) -> None:
        self._order = order
        self._curriculum = curriculum

    @property
    def epoch(self) -> int:
        """How often all tasks were taken; 0 for several sources, each of which has epochs of its own."""
        return self._order.epoch

    @property
    def position(self) -> int:
        """How many tasks of the current epoch were taken; of several sources, how many in all."""
        return self._order.position

    def ahead(self) -> list[Task]:
        """Return the tasks that are in memory now: all of them, unless a source is streamed."""
        return list(self._order.ahead())

    def take(self, groups: int, group_size: int, *, greedy_baseline: bool = False) -> list[RolloutRequest]:
        """Return the requests of one train step and move on.

        Raises:
            TaskError: A row that was reached cannot be read.
        """
        taken = [self._order.next() for _ in range(groups)]
        return [RolloutRequest(task, epoch, group_size, greedy_baseline=greedy_baseline) for task, epoch in taken]

    def state(self) -> dict[str, Any]:
        """Return where this stands, as JSON values."""
        return self._order.state()

    def metrics(self) -> dict[str, float]:
        """Return how many rows were left out so far, where some were, and where a curriculum stands."""
        left_out = sum(self._order.dropped().values())
        figures = {} if self._curriculum is None else self._curriculum.figures(self._order.rates())
        return {"tasks/left_out": float(left_out), **figures} if left_out else figures

    def learn(self, task_id: str, rewards: Sequence[float]) -> None:
        """Hear what the members of a group earned: what follows may depend on it."""
        self._order.learn(task_id, rewards)


async def open_tasks(
    config: TrainConfig, renderer: Renderer, state: TrainerState
) -> tuple[TaskStream, list[SourceReport]]:
    """Return the tasks of a run from where it stands, and what became of the rows of their sources.

    Args:
        config: Names the tasks, else the environment does.
        renderer: Counts the tokens of their prompts, where the run has a limit.
        state: Where the run stands.

    Raises:
        ConfigError: Nobody names any tasks, or the chat template does not show the tools of their environment.
        RegistryError: There is no such environment or agent.
        TaskError: They cannot be loaded, there are none, the state does not fit them, or they name an environment or
            agent that cannot be made.
    """
    check_own(config.rollout)
    order, reports = open_order(
        task_source(config.tasks, config.rollout, "tasks"),
        seed=config.seed,
        shuffle=config.shuffle,
        limit=config.task_limit,
        keep=await PromptLimit.create(config.max_prompt_tokens, renderer, config.rollout),
        state=(state.tasks or {"epoch": state.epoch, "position": state.position}) if state.step else None,
        curriculum=config.curriculum,
    )
    await check_specs(order.ahead(), config.rollout)
    await check_tools_shown(order.ahead(), renderer, config.rollout)
    return TaskStream(order, config.curriculum), reports
