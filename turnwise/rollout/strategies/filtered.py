"""Leaving out groups that teach nothing, before a strategy chooses (dynamic sampling, DAPO, arXiv:2503.14476).

Owns: :func:`why_filtered` and :class:`Filtered`. Refuses: how often what was dropped is replaced (``trainer/feed.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from turnwise.rollout.strategies.core import Choice, Flight, GroupFacts, Strategy

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
