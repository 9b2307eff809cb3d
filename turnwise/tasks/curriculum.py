"""Which task comes next by how often the tasks succeed: a curriculum.

Owns: :class:`CurriculumConfig`, the pools of difficulty and their shares (:func:`pools_of`, :func:`shares_of`), and
:class:`CurriculumOrder`. Refuses: what a success is worth in training, and streamed sources: who is drawn has to be
there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

from turnwise.errors import TaskError
from turnwise.seeding import stable_hash
from turnwise.tasks.core import Task
from turnwise.tasks.order import REMEDY, HeldOrder, TaskOrder

Share = Annotated[float, Field(ge=0, le=1)]

# Of a task that was taken, and of which nothing is known yet: neither easy nor hard.
_UNKNOWN = 0.5
_TOLERANCE = 1e-9


class CurriculumConfig(BaseModel):
    """Tasks are drawn from pools of difficulty. How hard a task is says its running success rate.

    Attributes:
        buckets: The bounds of the pools, from 0 to 1; a rate that is a bound belongs to the pool above it.
        weights: How often each pool is drawn from, relative to the others.
        floor: The least share of every pool that holds a task.
        decay: How much of a task's rate the next group leaves: rate = decay * rate + (1 - decay) * its successes.
        success_reward: The least reward of a success.
    """

    model_config = ConfigDict(extra="forbid")

    buckets: tuple[Share, ...] = (0.0, 0.2, 0.8, 1.0)
    weights: tuple[Annotated[float, Field(ge=0, allow_inf_nan=False)], ...] = (1.0, 4.0, 1.0)
    floor: Share = 0.05
    decay: Annotated[float, Field(ge=0, lt=1)] = 0.5
    success_reward: float = 1.0

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        bounds = self.buckets
        if len(bounds) < 2 or (bounds[0], bounds[-1]) != (0.0, 1.0) or list(bounds) != sorted(set(bounds)):
            raise ValueError(f"buckets is {list(bounds)}; bounds rise from 0.0 to 1.0, such as [0.0, 0.2, 0.8, 1.0]")
        if len(self.weights) != len(bounds) - 1 or not any(self.weights):
            raise ValueError(
                f"weights is {list(self.weights)}; there are {len(bounds) - 1} pools: one number for each, not all 0"
            )
        if self.floor * len(self.weights) > 1:
            raise ValueError(f"floor is {self.floor:g}, and {len(self.weights)} pools have more than 1 then: lower it")
        return self

    @property
    def pools(self) -> list[str]:
        """What the pools are called in metrics."""
        return [f"{low:g}-{high:g}" for low, high in zip(self.buckets, self.buckets[1:], strict=False)]

    def rate(self, before: float, rewards: Sequence[float]) -> float:
        """Return the running success rate of a task after a group of it.

        Args:
            before: The rate before; nan where there was none.
            rewards: What the members of the group earned.
        """
        found = sum(each >= self.success_reward - _TOLERANCE for each in rewards) / len(rewards)
        return found if np.isnan(before) else self.decay * before + (1 - self.decay) * found

    def figures(self, rates: Iterable[float]) -> dict[str, float]:
        """Return the mean of running success rates, and the share of the tasks in each pool."""
        known = np.array(list(rates), np.float64)
        if not len(known):
            return {}
        held = np.bincount(pools_of(known, self.buckets), minlength=len(self.weights)) / len(known)
        shares = {f"curriculum/share_{name}": float(share) for name, share in zip(self.pools, held, strict=True)}
        return {"curriculum/rate": float(known.mean()), "curriculum/tasks": float(len(known)), **shares}


def pools_of(rates: NDArray[np.float64], buckets: Sequence[float]) -> NDArray[np.intp]:
    """Return the number of each rate's pool; of one that is not known (nan), that of a half."""
    return np.searchsorted(buckets[1:-1], np.where(np.isnan(rates), _UNKNOWN, rates), side="right")


def shares_of(held: Sequence[int], weights: Sequence[float], floor: float) -> list[float]:
    """Return how often each pool is drawn from.

    A pool without a task has 0. Of n others, pool i has floor + (1 - n floor) w_i / sum w; where all their weights are
    0, they are equal.

    Args:
        held: How many tasks each pool holds; one of them holds some.
        weights: By pool.
        floor: The least share of a pool that holds a task.
    """
    having = [number > 0 for number in held]
    count = sum(having)
    total = sum(weight for weight, has in zip(weights, having, strict=True) if has)
    return [
        (floor + (1 - count * floor) * (weight / total if total else 1 / count)) if has else 0.0
        for weight, has in zip(weights, having, strict=True)
    ]


class CurriculumOrder(TaskOrder):
    """Takes every task once, and then those whose difficulty is wanted. It has no epochs of its own.

    A pool is drawn by the shares of :func:`shares_of`; in it the task is next that was taken the longest ago. What is
    drawn depends on the seed, on how many were taken, and on the rates. The number beside a task, its epoch, is how
    often it was taken before, so each of its groups begins otherwise.

    Args:
        tasks: The tasks.
        config: What is wanted.
        seed: Decides the first round, and what is drawn.
        shuffle: Whether the first round is shuffled.
        state: Where to go on; the beginning where it is None.
        name: What the source is called in messages.
        dropped: How many rows were left out when they were read, by reason.

    Raises:
        TaskError: There is no task, or the state does not fit them.
    """

    epoch = 0

    def __init__(
        self,
        tasks: Sequence[Task],
        config: CurriculumConfig,
        *,
        seed: int = 0,
        shuffle: bool = True,
        state: Mapping[str, Any] | None = None,
        name: str = "tasks",
        dropped: Mapping[str, int] | None = None,
    ) -> None:
        if state is not None and "curriculum" not in state:
            raise TaskError(f"the checkpoint was made without a curriculum for {name}: {REMEDY}")
        first = None if state is None else {"ids": state["ids"]}
        self._first = HeldOrder(tasks, seed=seed, shuffle=shuffle, state=first, name=name, dropped=dropped)
        self._tasks, self._config, self._seed = tasks, config, seed
        self._places = {task.id: number for number, task in enumerate(tasks)}
        self.position = 0 if state is None else int(state["position"])
        known: Mapping[str, Any] = {"taken": [0] * len(tasks), "last": [-1] * len(tasks), "rates": [None] * len(tasks)}
        if state is not None:
            known = state["curriculum"]
            for _ in range(min(self.position, len(tasks))):
                self._first.next()
        self._taken = np.array(known["taken"], np.int64)
        self._last = np.array(known["last"], np.int64)
        self._rates = np.array([np.nan if rate is None else rate for rate in known["rates"]], np.float64)

    def next(self) -> tuple[Task, int]:
        """Return the next task, and how often it was taken before."""
        new = self.position < len(self._tasks)
        place = self._places[self._first.next()[0].id] if new else self._drawn()
        before = int(self._taken[place])
        self._taken[place] += 1
        self._last[place] = self.position
        self.position += 1
        return self._tasks[place], before

    def learn(self, task_id: str, rewards: Sequence[float]) -> None:
        """Take into account what the members of a group of a task earned."""
        place = self._places.get(task_id)
        if place is None or not rewards:
            return
        self._rates[place] = self._config.rate(float(self._rates[place]), rewards)

    def ahead(self) -> Iterable[Task]:
        """Return all tasks."""
        return self._tasks

    def state(self) -> dict[str, Any]:
        """Return where this stands."""
        rates = [None if np.isnan(rate) else float(rate) for rate in self._rates]
        known = {"taken": self._taken.tolist(), "last": self._last.tolist(), "rates": rates}
        return {**self._first.state(), "epoch": self.epoch, "position": self.position, "curriculum": known}

    def dropped(self) -> dict[str, int]:
        """Return how many rows were left out, by reason."""
        return self._first.dropped()

    def rates(self) -> list[float]:
        """Return the running success rates of the tasks that have one."""
        return [float(rate) for rate in self._rates if not np.isnan(rate)]

    def _drawn(self) -> int:
        pools = pools_of(self._rates, self._config.buckets)
        held = np.bincount(pools, minlength=len(self._config.weights)).tolist()
        shares = np.cumsum(shares_of(held, self._config.weights, self._config.floor))
        draw = np.random.default_rng(stable_hash("curriculum", self._seed, self.position)).random()
        # The last share that is not 0 ends at 1, up to rounding.
        pool = min(int(np.searchsorted(shares, draw * shares[-1], side="right")), int(pools.max()))
        while not held[pool]:
            pool -= 1
        waiting = np.where(pools == pool, self._last, np.iinfo(np.int64).max)
        return int(waiting.argmin())
