"""Strategies that weigh groups: by what they teach, or fresh ones against stored ones.

Owns: :class:`Prioritised`, :class:`Mixed` and :func:`priority`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from turnwise.rollout.strategies.core import Choice, Flight, GroupFacts, Strategy
from turnwise.rollout.strategies.fresh import oldest_first, split_stale
from turnwise.seeding import stable_hash

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


class Prioritised(Strategy):
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
