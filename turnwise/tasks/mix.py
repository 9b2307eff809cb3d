"""Mixes of task sources: loaded as a whole, or drawn by weight in a training order."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from turnwise.errors import TaskError
from turnwise.seeding import stable_hash
from turnwise.tasks.config import CurriculumConfig, SourceConfig, Sources, sources_of
from turnwise.tasks.core import Task
from turnwise.tasks.order import CurriculumOrder, InMemoryOrder, LevelOrder, StreamingOrder, TaskOrder, left_out
from turnwise.tasks.reader import Collected, Keep, SourceReport, TaskReader

# Sources with more tasks than this are streamed, unless they say otherwise.
HELD_AT_MOST = 100_000
# Tasks in memory of a streamed source, from which the next one is drawn.
SHUFFLE_BUFFER = 10_000
# More tasks than this are not loaded to take each once, unless a limit asks for it: a source may have no end.
EVALUATED_AT_MOST = 1_000_000


class Shares:
    """Schedule of a mix: at any time each source was taken in proportion to its share, to within one task.

    With k sources, of which i has the share p_i and was taken x_i times before turn n, those with n p_i - x_i >= 1 /
    (2k - 2) are eligible, and the one whose share is used up first is taken: the least (1 - 1 / (2k - 2) - (n p_i -
    x_i)) / p_i. Then |n p_i - x_i| <= 1 - 1 / (2k - 2) always holds (Tijdeman 1980, "The chairman assignment problem").

    Args:
        weights: By source; shares are weights over their sum.
        seed: Breaks ties.
    """

    def __init__(self, weights: Mapping[str, float], *, seed: int = 0) -> None:
        # As they are written: one tenth is 1/10, not the number that a float has for it.
        exact = {name: Fraction(repr(weight)) for name, weight in weights.items()}
        total = sum(exact.values())
        self._shares = {name: weight / total for name, weight in exact.items()}
        self._ties = {name: stable_hash("mix", seed, name) for name in weights}
        self._least = Fraction(1, max(2 * len(weights) - 2, 1))

    def next(self, counts: Mapping[str, int]) -> str:
        """Return the source of the next draw, given how often each was taken before."""
        if len(self._shares) == 1:
            return next(iter(self._shares))
        turn = sum(counts.values()) + 1
        owed = {name: turn * share - counts[name] for name, share in self._shares.items()}
        able = [name for name in owed if owed[name] >= self._least]
        return min(able, key=lambda name: ((1 - self._least - owed[name]) / self._shares[name], self._ties[name]))


class MixedOrder(TaskOrder):
    """Draws from several orders by their shares (:class:`Shares`). Epochs are counted per source."""

    epoch = 0

    def __init__(
        self,
        members: Mapping[str, TaskOrder],
        weights: Mapping[str, float],
        *,
        seed: int = 0,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        self._members = members
        self._shares = Shares(weights, seed=seed)
        members_state = {} if state is None else state["sources"]
        self._taken = {name: int(members_state[name]["taken"]) if members_state else 0 for name in members}
        self.position = sum(self._taken.values())

    def next(self) -> tuple[Task, int]:
        """Return the next task and its source's epoch."""
        name = self._shares.next(self._taken)
        task_and_epoch = self._members[name].next()
        self._taken[name] += 1
        self.position += 1
        return task_and_epoch

    def ahead(self) -> Iterable[Task]:
        """Return the tasks of all sources that are in memory now."""
        return itertools.chain.from_iterable(order.ahead() for order in self._members.values())

    def state(self) -> dict[str, Any]:
        """Return the state of the mix and its members."""
        sources = {name: {"taken": self._taken[name], **order.state()} for name, order in self._members.items()}
        return {"epoch": self.epoch, "position": self.position, "sources": sources}

    def dropped(self) -> dict[str, int]:
        """Return the number of dropped rows of all sources by reason."""
        total: Counter[str] = Counter()
        for order in self._members.values():
            total.update(order.dropped())
        return dict(total)

    def learn(self, task_id: str, rewards: Sequence[float]) -> None:
        """Pass a group's rewards to the order of its task."""
        for order in self._members.values():
            order.learn(task_id, rewards)

    def rates_by_value(self) -> dict[str, float]:
        """Return the running success rates by name of the source and value of ``curriculum.by``."""
        return {
            f"{name}_{value}": rate
            for name, order in self._members.items()
            for value, rate in order.rates_by_value().items()
        }


@dataclass(frozen=True, slots=True)
class LoadedTasks:
    """Tasks in memory, with a report of each source."""

    tasks: list[Task]
    reports: list[SourceReport]


def open_order(
    tasks: Sources,
    *,
    seed: int = 0,
    shuffle: bool = True,
    keep: Keep | None = None,
    state: Mapping[str, Any] | None = None,
    held_at_most: int = HELD_AT_MOST,
    curriculum: CurriculumConfig | None = None,
) -> tuple[TaskOrder, list[SourceReport]]:
    """Open the order in which tasks are trained, with a report of each source.

    Args:
        tasks: One source, or several that are mixed by their weights; TaskError if one is unreadable or empty.
        seed: Seed of the shuffle.
        shuffle: Whether tasks are shuffled within their source.
        keep: Filter of tasks.
        state: State to resume from (:meth:`TaskOrder.state`); None for a new order.
        held_at_most: Sources with more tasks are streamed, unless configured otherwise.
        curriculum: Difficulty curriculum within each source; None takes all tasks equally often.
    """
    sources = _open_sources(tasks, keep)
    if len(sources) == 1:
        [source] = sources
        if state is not None and "sources" in state:
            _check_state(sources, state)
        return _order(source, seed, shuffle, source.config.limit, state, held_at_most, {}, curriculum)
    _check_state(sources, state)
    orders: dict[str, TaskOrder] = {}
    reports: list[SourceReport] = []
    first_uses: dict[str, str] = {}
    for source in sources:
        source_state = None if state is None else state["sources"][source.name]
        # One seed for each source: sources of equal length would else be shuffled alike.
        source_seed = stable_hash("source", seed, source.name)
        order, report = _order(
            source, source_seed, shuffle, source.config.limit, source_state, held_at_most, first_uses, curriculum
        )
        orders[source.name] = order
        reports += report
    weights = {source.name: source.config.weight for source in sources}
    return MixedOrder(orders, weights, seed=seed, state=state), reports


def load_mix(tasks: Sources, *, limit: int | None = None, keep: Keep | None = None) -> LoadedTasks:
    """Load the tasks of one or several sources, each once. Raises TaskError.

    Args:
        tasks: The sources.
        limit: Maximum number of tasks, divided by weight; exhausted sources pass their share on.
        keep: Filter of tasks.
    """
    sources = _open_sources(tasks, keep)
    tasks_by_source: dict[str, list[Task]] = {}
    reports: list[SourceReport] = []
    first_uses: dict[str, str] = {}
    for source in sources:
        collected = Collected()
        source_limit = _least(limit, source.config.limit)
        collected.take(source.reader.read(), EVALUATED_AT_MOST + 1 if source_limit is None else source_limit)
        if source_limit is None and len(collected.tasks) > EVALUATED_AT_MOST:
            raise TaskError(
                f"{source.label} holds more than {EVALUATED_AT_MOST:,} tasks, or has no end, and each would be taken "
                "once: set limit to the number of tasks to evaluate"
            )
        if not collected.tasks:
            raise TaskError(f"{source.label} holds no task{left_out(collected.dropped)}")
        _check_distinct(collected.first_uses, first_uses)
        tasks_by_source[source.name] = collected.tasks
        reports.append(SourceReport(source.name, len(collected.tasks), collected.dropped))
    if limit is not None and len(sources) > 1:
        counts = _divide_limit(
            limit, {name: len(source_tasks) for name, source_tasks in tasks_by_source.items()}, sources
        )
        tasks_by_source = {name: source_tasks[: counts[name]] for name, source_tasks in tasks_by_source.items()}
        for report in reports:
            report.tasks = counts[report.name]
    return LoadedTasks([task for source_tasks in tasks_by_source.values() for task in source_tasks], reports)


@dataclass(frozen=True, slots=True)
class _Source:
    config: SourceConfig
    reader: TaskReader

    @property
    def name(self) -> str:
        return self.reader.name

    @property
    def label(self) -> str:
        return f"the task source {self.config.source}"


def _open_sources(tasks: Sources, keep: Keep | None) -> list[_Source]:
    configs = sources_of(tasks)
    sources = [_Source(config, TaskReader(config, keep=keep, named=len(configs) > 1)) for config in configs]
    for name, count in Counter(source.name for source in sources).items():
        if count > 1:
            raise TaskError(f"{count} sources are called {name!r}: give each a unique 'name'")
    return sources


def _order(
    source: _Source,
    seed: int,
    shuffle: bool,
    limit: int | None,
    state: Mapping[str, Any] | None,
    held_at_most: int,
    first_uses: dict[str, str],
    curriculum: CurriculumConfig | None,
) -> tuple[TaskOrder, list[SourceReport]]:
    config, reader = source.config, source.reader
    memory_limit = None if config.stream is False else held_at_most
    if not config.stream:
        collected = Collected()
        # One more than may be held shows that there are more.
        collected.take(reader.read(), _least(limit, None if memory_limit is None else memory_limit + 1))
        if memory_limit is None or len(collected.tasks) <= memory_limit:
            _check_distinct(collected.first_uses, first_uses)
            tasks, dropped = collected.tasks, collected.dropped
            report = [SourceReport(source.name, len(tasks), dropped)]
            if curriculum is None:
                label = source.label
                return InMemoryOrder(
                    tasks, seed=seed, shuffle=shuffle, state=state, name=label, dropped=dropped
                ), report
            kind = CurriculumOrder if curriculum.by is None else LevelOrder
            order = kind(tasks, curriculum, seed=seed, shuffle=shuffle, state=state, name=source.label, dropped=dropped)
            return order, report
    if curriculum is not None:
        raise TaskError(
            f"{source.label} is streamed, and a curriculum draws among all of its tasks: set stream: false with a "
            "limit, or remove curriculum"
        )
    lazy = StreamingOrder(reader, seed=seed, shuffle=shuffle, buffer=SHUFFLE_BUFFER, limit=limit, state=state)
    return lazy, [SourceReport(source.name, None, Counter(lazy.dropped()))]


def _check_distinct(new_uses: Mapping[str, str], first_uses: dict[str, str]) -> None:
    shared_id = next((task_id for task_id in new_uses if task_id in first_uses), None)
    if shared_id is not None:
        raise TaskError(
            f"{new_uses[shared_id]}: the id {shared_id!r} is also the id of a task of another source "
            f"({first_uses[shared_id]}): set id_prefix of one of the sources"
        )
    first_uses.update(new_uses)


def _check_state(sources: Sequence[_Source], state: Mapping[str, Any] | None) -> None:
    if state is None:
        return
    checkpointed, names = sorted(state.get("sources", {})), sorted(source.name for source in sources)
    if checkpointed != names:
        raise TaskError(
            f"the checkpoint was made with the task sources {', '.join(checkpointed) or '(one)'}, and now they are "
            f"{', '.join(names)}: resume with the same ones, or start a new run"
        )


def _divide_limit(limit: int, sizes: Mapping[str, int], sources: Sequence[_Source]) -> dict[str, int]:
    counts = dict.fromkeys(sizes, 0)
    for name in _sources_in_turn({source.name: source.config.weight for source in sources}, sizes):
        if sum(counts.values()) == limit:
            break
        counts[name] += 1
    return counts


def _sources_in_turn(weights: Mapping[str, float], sizes: Mapping[str, int]) -> Iterator[str]:
    remaining = dict(sizes)
    while remaining:
        shares, counts = Shares({name: weights[name] for name in remaining}), dict.fromkeys(remaining, 0)
        while all(remaining.values()):
            name = shares.next(counts)
            counts[name] += 1
            remaining[name] -= 1
            yield name
        remaining = {name: count for name, count in remaining.items() if count}


def _least(*limits: int | None) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)
