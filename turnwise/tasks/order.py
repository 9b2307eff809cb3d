"""Task orders: shuffled, streamed and by curriculum, each with a resumable state."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from turnwise.errors import TaskError
from turnwise.seeding import stable_hash
from turnwise.tasks.config import POOL_FLOOR, CurriculumConfig, pools_of
from turnwise.tasks.core import Task
from turnwise.tasks.reader import Read, TaskReader, check_new

# How many tasks are read ahead where none are shuffled: errors in them are reported before training starts.
_AHEAD = 100
REMEDY = "resume with the same tasks, or start a new run"


class TaskOrder(ABC):
    """An endless sequence of tasks; ``position`` tasks of the pass ``epoch`` over the source were taken."""

    epoch: int
    position: int

    @abstractmethod
    def next(self) -> tuple[Task, int]:
        """Return the next task and its epoch. Raises TaskError for an unreadable row."""

    @abstractmethod
    def ahead(self) -> Iterable[Task]:
        """Return the tasks that are in memory now."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return the state to resume from, as JSON values."""

    @abstractmethod
    def dropped(self) -> dict[str, int]:
        """Return the number of rows dropped so far by reason."""

    def learn(self, task_id: str, rewards: Sequence[float]) -> None:
        """Update task statistics with the rewards of a group; used by :class:`CurriculumOrder`."""
        del task_id, rewards

    def rates(self) -> list[float]:
        """Return the running success rates of :meth:`rates_by_value`."""
        return list(self.rates_by_value().values())

    def rates_by_value(self) -> dict[str, float]:
        """Return the running success rates by task, or by value of ``curriculum.by``; empty without a curriculum."""
        return {}


class InMemoryOrder(TaskOrder):
    """Repeats tasks in memory, shuffled per epoch; TaskError if ``state`` does not match them."""

    def __init__(
        self,
        tasks: Sequence[Task],
        *,
        seed: int = 0,
        shuffle: bool = True,
        state: Mapping[str, Any] | None = None,
        name: str = "tasks",
        dropped: Mapping[str, int] | None = None,
    ) -> None:
        state = state or {}
        if not tasks:
            raise TaskError(f"{name} holds no task{left_out(dropped or {})}")
        if "buffer" in state:
            raise TaskError(
                f"the checkpoint was made while {name} was streamed, and now it is held in memory: {REMEDY}"
            )
        self.epoch = int(state.get("epoch", 0))
        self.position = int(state.get("position", 0))
        if self.position > len(tasks):
            raise TaskError(
                f"the checkpoint is at task {self.position} of its epoch, but {name} holds {len(tasks)}: {REMEDY}"
            )
        self._digest = _digest(tasks)
        _check_digest(state, self._digest, name)
        self._tasks = tasks
        self._seed = seed
        self._shuffle = shuffle
        self._dropped = dict(dropped or {})
        self._order = self._ordered()

    def next(self) -> tuple[Task, int]:
        """Return the next task and its epoch."""
        if self.position == len(self._tasks):
            self.epoch, self.position = self.epoch + 1, 0
            self._order = self._ordered()
        task = self._tasks[self._order[self.position]]
        self.position += 1
        return task, self.epoch

    def ahead(self) -> Iterable[Task]:
        """Return all tasks."""
        return self._tasks

    def state(self) -> dict[str, Any]:
        """Return the state to resume from."""
        return {"epoch": self.epoch, "position": self.position, "ids": self._digest}

    def dropped(self) -> dict[str, int]:
        """Return the number of dropped rows by reason."""
        return self._dropped

    def _ordered(self) -> Sequence[int]:
        if not self._shuffle:
            return range(len(self._tasks))
        rng = np.random.default_rng(stable_hash("order", self._seed, self.epoch))
        return [int(index) for index in rng.permutation(len(self._tasks))]


class StreamingOrder(TaskOrder):
    """Streams tasks and shuffles them through a ``buffer`` of those read last; ``limit`` tasks per epoch.

    An epoch ends when source and buffer are exhausted: each task was then taken once. The state holds the row numbers
    in the buffer and the next one to read; TaskError if it does not match the source.
    """

    def __init__(
        self,
        reader: TaskReader,
        *,
        seed: int = 0,
        shuffle: bool = True,
        buffer: int = 10_000,
        limit: int | None = None,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        self._reader = reader
        self._seed = seed
        self._shuffle = shuffle
        self._size = buffer if shuffle else min(buffer, _AHEAD)
        self._limit = limit
        self._dropped: Counter[str] = Counter()
        self.epoch = 0
        if state is None:
            self._begin()
        else:
            self._restore(state)

    def next(self) -> tuple[Task, int]:
        """Return the next task and its epoch."""
        if not self._buffer:
            self.epoch += 1
            self._begin()
        count = len(self._buffer)
        index = stable_hash("draw", self._seed, self.epoch, self.position) % count if self._shuffle else 0
        follows = self._next_task()
        _, task = self._buffer[index]
        self._ids.pop(task.id)
        if not self._shuffle:
            self._buffer.pop(0)
        elif follows is None:
            self._buffer[index] = self._buffer[-1]
            self._buffer.pop()
        if follows is not None:
            self._put(follows, index if self._shuffle else None)
        self.position += 1
        return task, self.epoch

    def ahead(self) -> Iterable[Task]:
        """Return the tasks of the buffer."""
        return [task for _, task in self._buffer]

    def state(self) -> dict[str, Any]:
        """Return the state to resume from."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "read": self._read,
            "buffer": [number for number, _ in self._buffer],
            "ids": _digest(task for _, task in self._buffer),
            "dropped": dict(self._dropped),
        }

    def dropped(self) -> dict[str, int]:
        """Return the number of rows dropped so far, over all epochs, by reason."""
        return dict(self._dropped)

    def _begin(self) -> None:
        self.position = 0
        self._read = 0
        self._buffer: list[tuple[int, Task]] = []
        self._ids: dict[str, str] = {}
        self._rows: Iterator[Read] = self._reader.read()
        while len(self._buffer) < self._size and (follows := self._next_task()) is not None:
            self._put(follows)
        if not self._buffer:
            raise TaskError(f"{self._reader.name} holds no task{left_out(self._dropped)}")

    def _next_task(self) -> Read | None:
        """Return the next row that has a task, or None at the end of the epoch."""
        if self._limit is not None and self.position + len(self._buffer) >= self._limit:
            return None
        for read in self._rows:
            self._read = read.number + 1
            if read.dropped:
                self._dropped[read.dropped] += 1
            if read.task is not None:
                check_new(read.task.id, read.where, self._ids.get(read.task.id))
                return read
        return None

    def _put(self, read: Read, index: int | None = None) -> None:
        assert read.task is not None
        self._ids[read.task.id] = read.where
        if index is None:
            self._buffer.append((read.number, read.task))
        else:
            self._buffer[index] = (read.number, read.task)

    def _restore(self, state: Mapping[str, Any]) -> None:
        name = self._reader.name
        if "buffer" not in state:
            raise TaskError(
                f"the checkpoint was made while {name} was held in memory, and now it is streamed: {REMEDY}"
            )
        self.epoch, self.position, self._read = int(state["epoch"]), int(state["position"]), int(state["read"])
        self._dropped.update(state["dropped"])
        numbers = [int(number) for number in state["buffer"]]
        rows = self._reader.read(min([*numbers, self._read]))
        missing, restored = set(numbers), {}
        self._rows = rows
        for read in rows:
            if read.number >= self._read:
                self._rows = itertools.chain([read], rows)
                break
            if read.number in missing and read.task is not None:
                restored[read.number] = read
                missing.remove(read.number)
        if missing:
            raise TaskError(
                f"the checkpoint held row {min(missing)} of {name}, which no longer has such a task: {REMEDY}"
            )
        self._buffer, self._ids = [], {}
        for number in numbers:
            self._put(restored[number])
        _check_digest(state, _digest(task for _, task in self._buffer), name)


def _digest(tasks: Iterable[Task]) -> int:
    return stable_hash(*(task.id for task in tasks))


def _check_digest(state: Mapping[str, Any], digest: int, name: str) -> None:
    # A checkpoint of an earlier version has no ids.
    if state.get("ids", digest) != digest:
        raise TaskError(f"the checkpoint was made when {name} held tasks of other ids, or in another order: {REMEDY}")


def left_out(dropped: Mapping[str, int]) -> str:
    """Return the suffix of an error message that counts dropped rows."""
    reasons = ", ".join(f"{number:,} ({reason})" for reason, number in dropped.items())
    return f": all of its rows were left out: {reasons}" if reasons else ""


def shares_of(pool_sizes: Sequence[int], weights: Sequence[float]) -> list[float]:
    """Return the sampling share of each pool, of ``pool_sizes`` tasks by pool.

    An empty pool has 0. Of n others, pool i has 0.05 + (1 - 0.05 n) w_i / sum w; equal shares where all weights are
    0.
    """
    having = [number > 0 for number in pool_sizes]
    count = sum(having)
    total = sum(weight for weight, has in zip(weights, having, strict=True) if has)
    return [
        (POOL_FLOOR + (1 - count * POOL_FLOOR) * (weight / total if total else 1 / count)) if has else 0.0
        for weight, has in zip(weights, having, strict=True)
    ]


class CurriculumOrder(InMemoryOrder):
    """Takes every task once, then samples by difficulty. It has no epochs.

    Pools are drawn by :func:`shares_of`, and within a pool the least recently taken task. Draws depend on the seed, the
    number of draws and the rates. A task's epoch is how often it was taken before, so that each of its groups has other
    seeds. TaskError if the state does not match the tasks.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        config: CurriculumConfig,
        *,
        state: Mapping[str, Any] | None = None,
        name: str = "tasks",
        **options: Any,
    ) -> None:
        if state is not None and "curriculum" not in state:
            raise TaskError(f"the checkpoint was made without a curriculum for {name}: {REMEDY}")
        super().__init__(tasks, state=None if state is None else {"ids": state["ids"]}, name=name, **options)
        self._config = config
        self._index_of = {task.id: number for number, task in enumerate(tasks)}
        self.position = 0 if state is None else int(state["position"])
        count = len(tasks)
        statistics: Mapping[str, Any] = {"taken": [0] * count, "last": [-1] * count, "rates": [None] * count}
        if state is not None:
            statistics = state["curriculum"]
        self._taken = np.array(statistics["taken"], np.int64)
        self._last = np.array(statistics["last"], np.int64)
        self._rates = np.array([np.nan if rate is None else rate for rate in statistics["rates"]], np.float64)

    def next(self) -> tuple[Task, int]:
        """Return the next task, and how often it was taken before."""
        index = self._order[self.position] if self.position < len(self._tasks) else self._draw()
        times_taken = int(self._taken[index])
        self._taken[index] += 1
        self._last[index] = self.position
        self.position += 1
        return self._tasks[index], times_taken

    def learn(self, task_id: str, rewards: Sequence[float]) -> None:
        """Update a task's success rate with a group's rewards."""
        index = self._index_of.get(task_id)
        if index is not None and rewards:
            self._rates[index] = self._config.rate(float(self._rates[index]), rewards)

    def state(self) -> dict[str, Any]:
        """Return the state to resume from."""
        rates = [None if np.isnan(rate) else float(rate) for rate in self._rates]
        statistics = {"taken": self._taken.tolist(), "last": self._last.tolist(), "rates": rates}
        return {**super().state(), "curriculum": statistics}

    def rates_by_value(self) -> dict[str, float]:
        """Return the known running success rates by task."""
        rated_tasks = zip(self._tasks, self._rates, strict=True)
        return {task.id: float(rate) for task, rate in rated_tasks if not np.isnan(rate)}

    def _draw(self) -> int:
        pools = pools_of(self._rates)
        pool_sizes = np.bincount(pools, minlength=len(self._config.weights)).tolist()
        shares = np.cumsum(shares_of(pool_sizes, self._config.weights))
        draw = np.random.default_rng(stable_hash("curriculum", self._seed, self.position)).random()
        # The last share that is not 0 ends at 1, up to rounding.
        pool = min(int(np.searchsorted(shares, draw * shares[-1], side="right")), int(pools.max()))
        while not pool_sizes[pool]:
            pool -= 1
        waiting = np.where(pools == pool, self._last, np.iinfo(np.int64).max)
        return int(waiting.argmin())


class LevelOrder(InMemoryOrder):
    """Samples the values of a field of the tasks by difficulty, and takes the tasks of a value in turn.

    Values are drawn as :class:`CurriculumOrder` draws tasks: each once, then by the success rate that the tasks of a
    value have together. Tasks of one value are shuffled per epoch; a task's epoch is that of its value. TaskError if a
    task has no such field, or the state does not match the tasks.
    """

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
        if state is not None and "levels" not in state:
            raise TaskError(f"the checkpoint was made without curriculum.by for {name}: {REMEDY}")
        super().__init__(tasks, shuffle=False, name=name, dropped=dropped)
        self._values = {task.id: _value(task, str(config.by), name) for task in tasks}
        tasks_by_value: dict[str, list[Task]] = {}
        for task in tasks:
            tasks_by_value.setdefault(self._values[task.id], []).append(task)
        levels = None if state is None else state["levels"]
        values = [Task(value, "") for value in tasks_by_value]
        self._levels = CurriculumOrder(values, config, seed=seed, shuffle=False, state=levels, name=name)
        self.position = self._levels.position
        self._members = {
            value: InMemoryOrder(
                members,
                seed=stable_hash("level", seed, value),
                shuffle=shuffle,
                state=None if state is None else state["members"].get(value),
                name=name,
            )
            for value, members in tasks_by_value.items()
        }

    def next(self) -> tuple[Task, int]:
        """Return the next task of the value that is drawn, and the epoch of that value's tasks."""
        value = self._levels.next()[0].id
        self.position = self._levels.position
        return self._members[value].next()

    def learn(self, task_id: str, rewards: Sequence[float]) -> None:
        """Update the success rate of a task's value with a group's rewards."""
        if task_id in self._values:
            self._levels.learn(self._values[task_id], rewards)

    def state(self) -> dict[str, Any]:
        """Return the state to resume from."""
        members = {value: order.state() for value, order in self._members.items()}
        return {"epoch": self.epoch, "position": self.position, "levels": self._levels.state(), "members": members}

    def rates_by_value(self) -> dict[str, float]:
        """Return the known running success rates by value."""
        return self._levels.rates_by_value()


def _value(task: Task, field: str, name: str) -> str:
    value = task.data.get(field)
    if not isinstance(value, (str, int, float)):
        raise TaskError(
            f"{name}: task {task.id!r} has no number or text {field!r} in its data, by which curriculum.by draws: "
            "remove curriculum.by, or give the tasks this field"
        )
    return str(value)
