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

    def next(self, taken: Mapping[str, int]) -> str:
        """Return the source of the next draw, given how often each was taken before."""
        if len(self._shares) == 1:
            return next(iter(self._shares))
        turn = sum(taken.values()) + 1
        owed = {name: turn * share - taken[name] for name, share in self._shares.items()}
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
        before = {} if state is None else state["sources"]
        self._taken = {name: int(before[name]["taken"]) if before else 0 for name in members}
        self.position = sum(self._taken.values())

    def next(self) -> tuple[Task, int]:
        """Return the next task and its source's epoch."""
        name = self._shares.next(self._taken)
        found = self._members[name].next()
        self._taken[name] += 1
        self.position += 1
        return found

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

    def rates(self) -> list[float]:
        """Return the running success rates of all sources' tasks."""
        return [rate for order in self._members.values() for rate in order.rates()]

    def rates_by_value(self) -> dict[str, float]:
        """Return them by name of the source and value of ``curriculum.by``."""
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
    limit: int | None = None,
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
        limit: Maximum number of tasks of a single source.
        keep: Filter of tasks.
        state: State to resume from (:meth:`TaskOrder.state`); None for a new order.
        held_at_most: Sources with more tasks are streamed, unless configured otherwise.
        curriculum: Difficulty curriculum within each source; None takes all tasks equally often.
    """
    sources = _opened(tasks, keep)
    if limit is not None and len(sources) > 1:
        raise TaskError(f"task_limit is {limit}, but there are {len(sources)} sources: set a limit for each source")
    if len(sources) == 1:
        [source] = sources
        if state is not None and "sources" in state:
            _check_state(sources, state)
        return _order(source, seed, shuffle, _least(limit, source.config.limit), state, held_at_most, {}, curriculum)
    _check_state(sources, state)
    orders: dict[str, TaskOrder] = {}
    reports: list[SourceReport] = []
    places: dict[str, str] = {}
    for source in sources:
        own = None if state is None else state["sources"][source.name]
        # One seed for each source: sources of equal length would else be shuffled alike.
        own_seed = stable_hash("source", seed, source.name)
        order, report = _order(source, own_seed, shuffle, source.config.limit, own, held_at_most, places, curriculum)
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
    sources = _opened(tasks, keep)
    held: dict[str, list[Task]] = {}
    reports: list[SourceReport] = []
    places: dict[str, str] = {}
    for source in sources:
        collected = Collected()
        most = _least(limit, source.config.limit)
        collected.take(source.reader.read(), EVALUATED_AT_MOST + 1 if most is None else most)
        if most is None and len(collected.tasks) > EVALUATED_AT_MOST:
            raise TaskError(
                f"{source.label} holds more than {EVALUATED_AT_MOST:,} tasks, or has no end, and each would be taken "
                "once: set limit to the number of tasks to evaluate"
            )
        if not collected.tasks:
            raise TaskError(f"{source.label} holds no task{left_out(collected.dropped)}")
        _check_apart(collected.places, places)
        held[source.name] = collected.tasks
        reports.append(SourceReport(source.name, len(collected.tasks), collected.dropped))
    if limit is not None and len(sources) > 1:
        counts = _divided(limit, {name: len(found) for name, found in held.items()}, sources)
        held = {name: found[: counts[name]] for name, found in held.items()}
        for report in reports:
            report.tasks = counts[report.name]
    return LoadedTasks([task for found in held.values() for task in found], reports)


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


def _opened(tasks: Sources, keep: Keep | None) -> list[_Source]:
    configs = sources_of(tasks)
    sources = [_Source(each, TaskReader(each, keep=keep, named=len(configs) > 1)) for each in configs]
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
    places: dict[str, str],
    curriculum: CurriculumConfig | None,
) -> tuple[TaskOrder, list[SourceReport]]:
    config, reader = source.config, source.reader
    most = None if config.stream is False else held_at_most
    if not config.stream:
        collected = Collected()
        # One more than may be held shows that there are more.
        collected.take(reader.read(), _least(limit, None if most is None else most + 1))
        if most is None or len(collected.tasks) <= most:
            _check_apart(collected.places, places)
            tasks, left = collected.tasks, collected.dropped
            report = [SourceReport(source.name, len(tasks), left)]
            if curriculum is None:
                named = source.label
                return InMemoryOrder(tasks, seed=seed, shuffle=shuffle, state=state, name=named, dropped=left), report
            kind = CurriculumOrder if curriculum.by is None else LevelOrder
            drawn = kind(tasks, curriculum, seed=seed, shuffle=shuffle, state=state, name=source.label, dropped=left)
            return drawn, report
    if curriculum is not None:
        raise TaskError(
            f"{source.label} is streamed, and a curriculum draws among all of its tasks: set stream: false with a "
            "limit, or remove curriculum"
        )
    lazy = StreamingOrder(reader, seed=seed, shuffle=shuffle, buffer=config.shuffle_buffer, limit=limit, state=state)
    return lazy, [SourceReport(source.name, None, Counter(lazy.dropped()))]


def _check_apart(own: Mapping[str, str], places: dict[str, str]) -> None:
    both = next((task_id for task_id in own if task_id in places), None)
    if both is not None:
        raise TaskError(
            f"{own[both]}: the id {both!r} is also the id of a task of another source ({places[both]}): set id_prefix "
            "of one of the sources"
        )
    places.update(own)


def _check_state(sources: Sequence[_Source], state: Mapping[str, Any] | None) -> None:
    if state is None:
        return
    known, names = sorted(state.get("sources", {})), sorted(source.name for source in sources)
    if known != names:
        raise TaskError(
            f"the checkpoint was made with the task sources {', '.join(known) or '(one)'}, and now they are "
            f"{', '.join(names)}: resume with the same ones, or start a new run"
        )


def _divided(limit: int, sizes: Mapping[str, int], sources: Sequence[_Source]) -> dict[str, int]:
    counts = dict.fromkeys(sizes, 0)
    for name in _turns({source.name: source.config.weight for source in sources}, sizes):
        if sum(counts.values()) == limit:
            break
        counts[name] += 1
    return counts


def _turns(weights: Mapping[str, float], sizes: Mapping[str, int]) -> Iterator[str]:
    left = dict(sizes)
    while left:
        shares, taken = Shares({name: weights[name] for name in left}), dict.fromkeys(left, 0)
        while all(left.values()):
            name = shares.next(taken)
            taken[name] += 1
            left[name] -= 1
            yield name
        left = {name: count for name, count in left.items() if count}


def _least(*limits: int | None) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)
