r"""A replay strategy by which a batch has as many different tasks as possible, none of them too old.

    replay:
      strategy: {name: replay_strategy.py:DistinctTasks, config: {max_staleness: 2}}

In an asynchronous run over few tasks, groups of one task from two passes over the data may be ready together.
"""

from __future__ import annotations

from collections.abc import Sequence

from turnwise.rollout.core import GroupFacts
from turnwise.rollout.replay.config import register_strategy
from turnwise.rollout.replay.strategies import Choice, InFlight, Strategy, oldest_first, split_stale


@register_strategy("distinct_tasks")
class DistinctTasks(Strategy):
    """Takes the oldest group of each task, and a second one of a task only where no other is on its way.

    Args:
        max_staleness: Train steps between the weights that sampled a group and those that it trains, beyond which it
            is dropped; None is unbounded.
    """

    def __init__(self, max_staleness: int | None = None) -> None:
        if max_staleness is not None and max_staleness < 0:
            raise ValueError(f"max_staleness is {max_staleness}: it must be at least 0, or null")
        self._bound = max_staleness

    def choose(
        self, ready: Sequence[GroupFacts], in_flight: Sequence[InFlight], step: int, batch_size: int, taken: int = 0
    ) -> Choice:
        """Take a batch of distinct tasks, or wait for one."""
        fit, choice = split_stale(ready, step, self._bound)
        first: dict[str, GroupFacts] = {}
        repeated = [group for group in oldest_first(fit) if first.setdefault(group.task_id, group) is not group]
        # Those on their way will not make the batch more various.
        done = all(each.task_id in first for each in in_flight)
        chosen = [*first.values(), *(repeated if done else ())][:batch_size]
        if len(chosen) < batch_size:
            return choice
        return Choice(tuple(group.id for group in chosen), choice.drop)
