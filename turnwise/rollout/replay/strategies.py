"""Which finished groups a train step learns from."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from turnwise.seeding import stable_hash

STALE = "stale"
"""Why a group is dropped that was sampled by weights that are too old."""


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """What is known of a finished group without its tokens.

    Attributes:
        id: The group's.
        key: What was asked for (:attr:`~turnwise.rollout.core.RolloutRequest.key`); the group's id where nobody asked.
        task_id: Its task.
        partition: ``train`` or ``val``.
        arrived: Its place in the order in which groups arrived, from 0.
        oldest_version: The oldest weights that sampled a token of it. Where nothing was sampled, those of the servers
            when it was asked for; None where nobody asked, either.
        rewards: Of its members, failed ones left out.
        failed: Members that ended in an error.
        sampled_tokens: Of all its members.
        uses: How many batches it was part of.
        spread: How far what is compared with each other lies apart, by the name of a reward; ``reward`` is their sum.
    """

    id: str
    key: str
    task_id: str
    partition: str
    arrived: int
    oldest_version: int | None
    rewards: tuple[float, ...]
    failed: int = 0
    sampled_tokens: int = 0
    uses: int = 0
    spread: Mapping[str, float] = field(default_factory=dict)

    def staleness(self, step: int) -> int:
        """Return how many train steps the weights of step ``step`` are ahead of the oldest that sampled it.

        Weights of a version that a crash lost, and that the run has not reached again, count as those of the step.
        """
        return 0 if self.oldest_version is None else max(0, step - 1 - self.oldest_version)


@dataclass(frozen=True, slots=True)
class Flight:
    """A group that was asked for and is not finished.

    Attributes:
        key: What was asked for.
        task_id: Its task.
        partition: ``train`` or ``val``.
        version: The weight version of the servers when it was asked for, or what sampled a member that an earlier
            process finished: none of its tokens is older. A group that still waits for ``rollout.concurrency`` will be
            newer: a strategy that waits for flights may wait for it a step sooner than it has to, never later.
    """

    key: str
    task_id: str
    partition: str
    version: int


@dataclass(frozen=True, slots=True)
class Choice:
    """What a strategy wants.

    Attributes:
        take: Ids of the groups of the batch, in order; None waits for the next change.
        drop: (id of a finished group, why) that will never be taken. It is counted as ``replay/dropped/WHY``.
        refill: Whether what a batch lacks may be asked for while this waits.
    """

    take: tuple[str, ...] | None = None
    drop: tuple[tuple[str, str], ...] = ()
    refill: bool = True


class Strategy(ABC):
    """Chooses the groups of a batch.

    Attributes:
        keep_groups: How many groups that were trained stay, to be chosen again; the others are forgotten.
        max_uses: How many batches a group may be part of.
    """

    keep_groups: int = 0
    max_uses: int = 1

    @abstractmethod
    def choose(
        self, ready: Sequence[GroupFacts], flying: Sequence[Flight], step: int, batch_size: int, taken: int = 0
    ) -> Choice:
        """Choose, or wait. Called at every change while somebody waits for a batch.

        Args:
            ready: Finished groups of the partition, in the order of their arrival; those with ``uses`` were trained.
            flying: Groups of the partition that are not finished.
            step: The train step that asks; it learns with the weights of version ``step - 1``.
            batch_size: How many groups are asked for.
            taken: How many groups were handed out for this step before: a step may ask for parts of its batch.
        """

    def lacks(self, ready: Sequence[GroupFacts], flying: Sequence[Flight], step: int, batch_size: int) -> int:
        """Return how many groups a choice waits for that are neither here nor in flight: they are asked for then."""
        del step
        fresh = sum(each.uses == 0 for each in ready)
        return max(0, batch_size - fresh - len(flying))


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
    is dropped as long as no more is asked for than ``rollout/replay/setup.py`` allows. With ``drop`` a step waits for
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


FLOOR = 0.01
"""The priority of a group that teaches nothing: it may still be drawn."""

_EPS = 1e-4
"""As in ``algorithm.advantage: grpo``."""


def priority(rewards: Sequence[float]) -> float:
    """Return the mean magnitude of a group's advantages, and a little more.

    ``p = mean_i |A_i| + 0.01`` with ``A_i = (r_i - mean) / (std + 1e-4)``, the advantages of GRPO (arXiv:2402.03300,
    section 4.1.2; std with n - 1). A group of one, or one whose rewards are equal, has 0.01.
    """
    if len(rewards) < 2:
        return FLOOR
    mean = math.fsum(rewards) / len(rewards)
    off = [abs(each - mean) for each in rewards]
    std = math.sqrt(math.fsum(each * each for each in off) / (len(rewards) - 1))
    return math.fsum(off) / len(rewards) / (std + _EPS) + FLOOR


def drawn(groups: Sequence[GroupFacts], weights: Sequence[float], seed: tuple[int, ...]) -> list[GroupFacts]:
    """Return groups in an order drawn without replacement, each time in proportion to the weights of what is left.

    Each group has the key ``log(u) / w`` with a uniform u of its own; the largest come first (Efraimidis and Spirakis
    2006, Weighted random sampling with a reservoir). u comes from the seed and what was asked for, so that the order
    does not depend on which group arrived first.
    """

    def key(group: GroupFacts, weight: float) -> float:
        uniform = (stable_hash("replay", *seed, group.key) + 1) / (2**63 + 1)
        return math.log(uniform) / weight

    keys = [key(group, weight) for group, weight in zip(groups, weights, strict=True)]
    return [group for _, _, group in sorted(zip(keys, (g.id for g in groups), groups, strict=True), reverse=True)]


class Prioritized(Strategy):
    """Groups drawn in proportion to ``priority ** alpha``, without replacement (Schaul et al. 2016, Prioritized
    Experience Replay, arXiv:1511.05952, eq. 1; its importance weights are left out: groups that teach nothing are what
    is to be met less often).

    Args:
        alpha: 0 draws evenly; with more, groups that differ within are met more often.
        bound: Most train steps that a group's weights may be old, beyond which it is dropped; None sets no bound, and
            what is never drawn stays.
        seed: Of the run.
    """

    def __init__(self, alpha: float = 0.6, bound: int | None = None, *, seed: int = 0) -> None:
        self._alpha = alpha
        self._bound = bound
        self._seed = seed

    def choose(
        self, ready: Sequence[GroupFacts], flying: Sequence[Flight], step: int, batch_size: int, taken: int = 0
    ) -> Choice:
        """Draw a batch of what is here."""
        del flying
        fit, choice = split_stale(ready, step, self._bound)
        if len(fit) < batch_size:
            return choice
        weights = [priority(each.rewards) ** self._alpha for each in fit]
        return Choice(
            tuple(each.id for each in drawn(fit, weights, (self._seed, step, taken))[:batch_size]), choice.drop
        )


class Mixed(Strategy):
    """A share of each batch from groups that were trained before, the rest fresh, the oldest first.

    Stored groups are drawn evenly among those that were used least. Where there are too few of them, fresh ones take
    their place.

    Args:
        stored_share: Share of a batch that may be stored groups; rounded down.
        max_uses: How many batches a group may be part of, its first included.
        keep_groups: How many trained groups stay.
        bound: Most train steps that a group's weights may be old; None sets no bound.
        seed: Of the run.
    """

    def __init__(
        self, stored_share: float, max_uses: int, keep_groups: int, bound: int | None = None, *, seed: int = 0
    ) -> None:
        self.keep_groups = keep_groups
        self.max_uses = max_uses
        self._share = stored_share
        self._bound = bound
        self._seed = seed

    def choose(
        self, ready: Sequence[GroupFacts], flying: Sequence[Flight], step: int, batch_size: int, taken: int = 0
    ) -> Choice:
        """Take what is fresh, and draw the rest."""
        del flying
        fit, choice = split_stale(ready, step, self._bound)
        fresh = oldest_first([each for each in fit if each.uses == 0])
        stored = self._stored(fit, batch_size, (self._seed, step, taken))
        wanted = batch_size - len(stored)
        if len(fresh) < wanted:
            return choice
        return Choice(tuple(each.id for each in (*fresh[:wanted], *stored)), choice.drop)

    def lacks(self, ready: Sequence[GroupFacts], flying: Sequence[Flight], step: int, batch_size: int) -> int:
        """Return how many fresh groups are missing."""
        fit, _ = split_stale(ready, step, self._bound)
        fresh = sum(each.uses == 0 for each in fit)
        stored = self._stored(fit, batch_size, (self._seed, step, 0))
        return max(0, batch_size - len(stored) - fresh - len(flying))

    def _stored(self, fit: Sequence[GroupFacts], batch_size: int, seed: tuple[int, ...]) -> list[GroupFacts]:
        usable = [each for each in fit if 0 < each.uses < self.max_uses]
        shuffled = drawn(usable, [1.0] * len(usable), seed)
        return sorted(shuffled, key=lambda each: each.uses)[: stored_groups(self._share, batch_size)]


def stored_groups(share: float, groups: int) -> int:
    """Return how many groups of a batch may be stored ones."""
    return int(share * groups + 1e-9)


__all__ = ["Arrival", "Bounded", "Choice", "Flight", "GroupFacts", "Mixed", "OnPolicy", "Prioritized", "Strategy"]


EQUAL = "equal"
"""Why a group is dropped whose members all earned the same."""


def why_filtered(facts: GroupFacts, metric: str) -> str | None:
    """Return why a group is left out, or None where it may be trained.

    ``equal``: all that are compared with each other have the same value. ``no_METRIC``: none of them has such a reward.
    A group of which fewer than two members finished is nothing that could be told by comparing, and stays; so does one
    that was trained before.

    Args:
        facts: What is known of the group.
        metric: The name of a reward; ``reward`` is the sum of all.
    """
    if facts.uses or len(facts.rewards) < 2:
        return None
    if metric not in facts.spread:
        return f"no_{metric.replace('/', '_')}"
    return EQUAL if facts.spread[metric] == 0 else None


class Filtered(Strategy):
    """Another strategy, which does not see what :func:`why_filtered` leaves out.

    Args:
        strategy: Who chooses.
        metric: By which reward groups are told apart.
    """

    def __init__(self, strategy: Strategy, metric: str) -> None:
        self._strategy = strategy
        self._metric = metric
        self.keep_groups, self.max_uses = strategy.keep_groups, strategy.max_uses

    def choose(
        self, ready: Sequence[GroupFacts], flying: Sequence[Flight], step: int, batch_size: int, taken: int = 0
    ) -> Choice:
        """Drop the groups that teach nothing, and have the strategy choose among the others."""
        whys = {each.id: why for each in ready if (why := why_filtered(each, self._metric)) is not None}
        left = [each for each in ready if each.id not in whys]
        choice = self._strategy.choose(left, flying, step, batch_size, taken)
        return replace(choice, drop=(*whys.items(), *choice.drop))

    def lacks(self, ready: Sequence[GroupFacts], flying: Sequence[Flight], step: int, batch_size: int) -> int:
        """Return what the strategy lacks."""
        return self._strategy.lacks(ready, flying, step, batch_size)


@dataclass(frozen=True, slots=True)
class StragglerCutoff:
    """Where waiting for a batch stands.

    Attributes:
        since: When there was enough to begin with; None where there is not.
        take: Ids of the groups to train without the others; None waits on.
        due: When to look again if nothing comes before.
    """

    since: float | None = None
    take: tuple[str, ...] | None = None
    due: float | None = None

    def metrics(self, missing: int, now: float) -> dict[str, float]:
        """Return what is told of a batch that is taken now and lacks so many groups."""
        waited = 0.0 if self.since is None else now - self.since
        return {"straggler/cut_groups": float(missing), "straggler/wait_s": waited}


@dataclass(frozen=True, slots=True)
class StragglerDeadline:
    """Once ``share`` of a batch is there, the rest has ``seconds``.

    Groups stay whole: what is taken is fewer groups, never part of one.

    Attributes:
        seconds: How long the rest has.
        share: Of the groups of a batch: at least so many are taken.
    """

    seconds: float
    share: float

    def least(self, batch_size: int) -> int:
        """Return the fewest groups that a batch has."""
        return max(1, math.ceil(round(batch_size * self.share, 6)))

    def look(
        self, choose: Callable[[int], Choice], ready: int, batch_size: int, since: float | None, now: float
    ) -> StragglerCutoff:
        """Say whether a batch that is not complete is taken as it is.

        Args:
            choose: What the strategy chooses for a batch of so many groups if no further one is to come.
            ready: Groups that have finished.
            batch_size: How many are asked for.
            since: What the last look said.
            now: The time, in seconds from anywhere.
        """
        least = self.least(batch_size)
        if ready < least or choose(least).take is None:
            return StragglerCutoff()
        since = now if since is None else since
        due = since + self.seconds
        if now < due:
            return StragglerCutoff(since, due=due)
        sizes = range(min(ready, batch_size), least - 1, -1)
        return StragglerCutoff(since, next(take for size in sizes if (take := choose(size).take) is not None))
