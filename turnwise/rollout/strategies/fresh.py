"""Strategies that train each group once, in the order of its age.

Owns: :class:`Arrival`, :class:`OnPolicy` and :class:`Bounded`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, TypeAlias

from turnwise.rollout.strategies.core import STALE, Choice, Flight, GroupFacts, Strategy

Order: TypeAlias = Literal["arrival", "key"]
"""How the groups of one batch are ordered. By ``key`` the order does not depend on which episode ended first."""


def split_stale(ready: Sequence[GroupFacts], step: int, bound: int | None) -> tuple[list[GroupFacts], Choice]:
    """Return the groups that a step may train, and the choice that drops the others."""
    if bound is None:
        return list(ready), Choice()
    fit = [each for each in ready if each.staleness(step) <= bound]
    return fit, Choice(drop=tuple((each.id, STALE) for each in ready if each.staleness(step) > bound))


def oldest_first(groups: Sequence[GroupFacts]) -> list[GroupFacts]:
    """Return groups by the age of what sampled them, then by arrival; last those that never grow old."""
    never = math.inf
    return sorted(
        groups, key=lambda each: (never if each.oldest_version is None else each.oldest_version, each.arrived)
    )


def ordered(groups: Sequence[GroupFacts], order: Order) -> tuple[str, ...]:
    """Return the ids of the groups of a batch in its order."""
    if order == "key":
        groups = sorted(groups, key=lambda each: (each.key, each.arrived))
    return tuple(each.id for each in groups)


class Arrival(Strategy):
    """The groups that arrived first, whatever weights sampled them.

    Args:
        order: How the groups of one batch are ordered.
    """

    def __init__(self, order: Order = "arrival") -> None:
        self._order: Order = order

    def choose(
        self, ready: Sequence[GroupFacts], flying: Sequence[Flight], step: int, batch_size: int, taken: int = 0
    ) -> Choice:
        """Take the first ``batch_size`` groups."""
        del flying, step, taken
        if len(ready) < batch_size:
            return Choice()
        return Choice(ordered(ready[:batch_size], self._order))


class Bounded(Strategy):
    """Groups whose weights are at most ``bound`` train steps old, the oldest first.

    With ``wait`` a step waits for groups in flight that no later step could train in time: it takes a batch only if
    what remains can be trained within the bound, ``step_groups`` in each step (earliest deadline first). So nothing
    is dropped as long as no more is asked for than ``rollout/admission.py`` allows. With ``drop`` a step waits for
    nobody; what comes too late is dropped, and asked for anew as another task.

    Args:
        bound: Most train steps between the weights that sampled a group and those that it trains.
        when_stale: What becomes of a group that would be older.
        step_groups: Groups of a train step, where it asks for parts of them; None is what it asks for.
        order: How the groups of one batch are ordered.
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
        self, ready: Sequence[GroupFacts], flying: Sequence[Flight], step: int, batch_size: int, taken: int = 0
    ) -> Choice:
        """Take the oldest groups that are young enough."""
        fit, choice = split_stale(ready, step, self._bound)
        queue = oldest_first(fit)
        if len(queue) < batch_size:
            return choice
        of_step = max(self._step_groups or batch_size, taken + batch_size)
        if self._waits and self._must_wait(queue, flying, step, batch_size, (of_step, of_step - taken - batch_size)):
            return choice
        return Choice(ordered(queue[:batch_size], self._order), choice.drop)

    def _must_wait(
        self, queue: list[GroupFacts], flying: Sequence[Flight], step: int, batch_size: int, room: tuple[int, int]
    ) -> bool:
        """Whether taking the head of the queue leaves more to be trained than there is room for before it is too old,
        and a group that flies could stand in that batch instead of one that has more time.
        """
        of_step, left = room
        versions = (math.inf if each.oldest_version is None else each.oldest_version for each in queue)
        last = [version + 1 + self._bound for version in versions]
        # What flies past the bound already is dropped when it comes: nobody waits for it.
        flights = [due for each in flying if (due := each.version + 1 + self._bound) >= step]
        for due in set(flights):
            remain = sum(each <= due for each in (*last[batch_size:], *flights))
            if remain > left + (due - step) * of_step and any(each > due for each in last[:batch_size]):
                return True
        return False


class OnPolicy(Bounded):
    """Groups that the weights of this step sampled, and no others.

    Args:
        order: How the groups of one batch are ordered.
    """

    def __init__(self, order: Order = "key") -> None:
        super().__init__(0, "drop", order=order)
