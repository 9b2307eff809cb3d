"""Replay strategies: which finished groups a train step learns from."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from turnwise.config import Section
from turnwise.rollout.core import GroupFacts
from turnwise.trajectory import TrajectoryGroup

STALE = "stale"
"""Why a group is dropped that was sampled by weights that are too old."""


@dataclass(frozen=True, slots=True)
class InFlight:
    """A group in flight: requested and not finished.

    Attributes:
        key: Request key.
        task_id: Its task.
        partition: ``train`` or ``val``.
        version: Weight version of the servers at the request, or of a member that an earlier process finished: a lower
            bound for its tokens. A group queued for ``rollout.concurrency`` will be newer, so a strategy may wait for
            it a step early, never late.
    """

    key: str
    task_id: str
    partition: str
    version: int


@dataclass(frozen=True, slots=True)
class Choice:
    """Decision of a strategy.

    Attributes:
        take: Group ids of the batch, in order; None waits for the next change.
        drop: (id of a finished group, reason), counted as ``replay/dropped/REASON``.
    """

    take: tuple[str, ...] | None = None
    drop: tuple[tuple[str, str], ...] = ()


class Strategy(ABC):
    """Chooses the groups of a batch. Each group is trained once."""

    @abstractmethod
    def choose(
        self, ready: Sequence[GroupFacts], in_flight: Sequence[InFlight], step: int, batch_size: int, taken: int = 0
    ) -> Choice:
        """Choose or wait. Called at every change while a batch is requested.

        Args:
            ready: Finished groups of the partition, in the order of arrival.
            in_flight: Groups in flight of the partition.
            step: The train step; it learns with the weights of version ``step - 1``.
            batch_size: Number of groups requested.
            taken: Groups handed out for this step before: a step may request its batch in parts.
        """

    def lacks(self, ready: Sequence[GroupFacts], in_flight: Sequence[InFlight], step: int, batch_size: int) -> int:
        """Return how many needed groups are neither finished nor in flight, to be requested."""
        del step
        return max(0, batch_size - len(ready) - len(in_flight))


Order: TypeAlias = Literal["arrival", "key"]
"""How the groups of one batch are ordered. By ``key`` the order does not depend on which episode ended first."""


def split_stale(ready: Sequence[GroupFacts], step: int, bound: int | None) -> tuple[list[GroupFacts], Choice]:
    """Return the groups that a step may train, and the choice that drops the others."""
    if bound is None:
        return list(ready), Choice()
    usable = [group for group in ready if group.staleness(step) <= bound]
    return usable, Choice(drop=tuple((group.id, STALE) for group in ready if group.staleness(step) > bound))


def oldest_first(groups: Sequence[GroupFacts]) -> list[GroupFacts]:
    """Sort groups by sampling weights, oldest first, then by arrival; those without a version last."""
    never = math.inf
    return sorted(
        groups, key=lambda group: (never if group.oldest_version is None else group.oldest_version, group.arrived)
    )


def ordered(groups: Sequence[GroupFacts], order: Order) -> tuple[str, ...]:
    """Return the group ids of a batch in its order."""
    if order == "key":
        groups = sorted(groups, key=lambda group: (group.key, group.arrived))
    return tuple(group.id for group in groups)


class Fifo(Strategy):
    """First in, first out, whatever the weights."""

    def __init__(self, order: Order = "arrival") -> None:
        self._order: Order = order

    def choose(
        self, ready: Sequence[GroupFacts], in_flight: Sequence[InFlight], step: int, batch_size: int, taken: int = 0
    ) -> Choice:
        """Take the first ``batch_size`` groups."""
        del in_flight, step, taken
        if len(ready) < batch_size:
            return Choice()
        return Choice(ordered(ready[:batch_size], self._order))


class Bounded(Strategy):
    """Groups at most ``bound`` train steps stale, the oldest first.

    With ``wait`` a step takes a batch only if the rest can be trained within the bound, ``step_groups`` in each step
    (earliest deadline first), and otherwise waits for groups in flight: nothing is dropped within the admission of
    ``rollout/replay/config.py``. With ``drop`` it never waits; late groups are dropped and replaced by other tasks.

    Args:
        bound: Most train steps between the sampling weights and those that a group trains.
        when_stale: Treatment of groups that would be older.
        step_groups: Groups of a train step, where it requests them in parts; None is the requested number.
        order: Order of the groups of a batch.
    """

    def __init__(
        self,
        bound: int,
        when_stale: Literal["drop", "wait"] = "wait",
        *,
        step_groups: int | None = None,
        order: Order = "arrival",
    ) -> None:
        self._bound = bound
        self._waits = when_stale == "wait"
        self._step_groups = step_groups
        self._order: Order = order

    def choose(
        self, ready: Sequence[GroupFacts], in_flight: Sequence[InFlight], step: int, batch_size: int, taken: int = 0
    ) -> Choice:
        """Take the oldest groups within the bound."""
        usable, choice = split_stale(ready, step, self._bound)
        queue = oldest_first(usable)
        if len(queue) < batch_size:
            return choice
        of_step = max(self._step_groups or batch_size, taken + batch_size)
        if self._waits and self._must_wait(queue, in_flight, step, batch_size, (of_step, of_step - taken - batch_size)):
            return choice
        return Choice(ordered(queue[:batch_size], self._order), choice.drop)

    def _must_wait(
        self, queue: list[GroupFacts], in_flight: Sequence[InFlight], step: int, batch_size: int, room: tuple[int, int]
    ) -> bool:
        """Whether taking the head of the queue leaves more groups than can be trained in time, and one in flight could
        replace a group with more time.
        """
        of_step, remaining = room
        versions = (math.inf if group.oldest_version is None else group.oldest_version for group in queue)
        deadlines = [version + 1 + self._bound for version in versions]
        # A group in flight that is past the bound is dropped when it arrives: do not wait for it.
        flights = [due for flight in in_flight if (due := flight.version + 1 + self._bound) >= step]
        for due in set(flights):
            remain = sum(deadline <= due for deadline in (*deadlines[batch_size:], *flights))
            if remain > remaining + (due - step) * of_step and any(
                deadline > due for deadline in deadlines[:batch_size]
            ):
                return True
        return False


EQUAL = "equal"
"""Why a group is dropped whose members all earned the same."""


def why_filtered(facts: GroupFacts, metric: str) -> str | None:
    """Return why a group is dropped, or None.

    ``equal``: all compared members have the same value. ``no_METRIC``: none has such a reward. Groups with fewer than
    two finished members stay.

    Args:
        facts: The group.
        metric: The name of a reward; ``reward`` is the sum of all.
    """
    if len(facts.rewards) < 2:
        return None
    if metric not in facts.spread:
        return f"no_{metric.replace('/', '_')}"
    return EQUAL if facts.spread[metric] == 0 else None


@dataclass(frozen=True, slots=True)
class StragglerCutoff:
    """State of waiting for stragglers.

    Attributes:
        since: When the least share was there; None before.
        take: Ids of the groups to train without the rest; None waits on.
        due: Time of the next look without a change.
    """

    since: float | None = None
    take: tuple[str, ...] | None = None
    due: float | None = None

    def metrics(self, missing: int, now: float) -> dict[str, float]:
        """Return the metrics of a batch cut now with ``missing`` groups."""
        waited = 0.0 if self.since is None else now - self.since
        return {"straggler/cut_groups": float(missing), "straggler/wait_s": waited}


class StragglerDeadline(Section):
    """How long a step waits for the last groups of its batch; only whole groups are cut.

    Attributes:
        seconds: Wait after ``share`` of the groups have finished; then the step takes the finished ones.
        share: Minimal share of the batch's groups.
    """

    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    share: Annotated[float, Field(gt=0, le=1)] = 0.9

    def least(self, batch_size: int) -> int:
        """Return the fewest groups of a batch."""
        return max(1, math.ceil(round(batch_size * self.share, 6)))

    def look(
        self, choose: Callable[[int], Choice], ready: int, batch_size: int, since: float | None, now: float
    ) -> StragglerCutoff:
        """Decide whether an incomplete batch is taken.

        Args:
            choose: The strategy's choice for a batch of that size, with nothing in flight.
            ready: Finished groups.
            batch_size: Number of groups requested.
            since: ``since`` of the last look.
            now: Monotonic time in seconds.
        """
        fewest = self.least(batch_size)
        if ready < fewest or choose(fewest).take is None:
            return StragglerCutoff()
        since = now if since is None else since
        due = since + self.seconds
        if now < due:
            return StragglerCutoff(since, due=due)
        sizes = range(min(ready, batch_size), fewest - 1, -1)
        return StragglerCutoff(since, next(take for size in sizes if (take := choose(size).take) is not None))


FAILED = "failed"
"""Why a group is dropped that lost too many members, as it is counted."""


def lacks_members(group: TrajectoryGroup, least: int = 1) -> bool:
    """Whether fewer than ``least`` members of a group (at least 1) ended without an error."""
    failed = {trajectory.episode_id for trajectory in group.trajectories if trajectory.error is not None}
    members = {trajectory.episode_id for trajectory in group.trajectories} - failed
    return len(members) < max(1, least)
