"""How long a train step waits for the last groups of its batch.

Owns: :class:`Tail`. Pure: when something came and what time it is are arguments. Refuses: waiting (``replay.py``), and
what becomes of the groups that nobody waits for any more (``trainer/feed.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from turnwise.rollout.strategies import Choice


@dataclass(frozen=True, slots=True)
class Cut:
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
class Tail:
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
    ) -> Cut:
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
            return Cut()
        since = now if since is None else since
        due = since + self.seconds
        if now < due:
            return Cut(since, due=due)
        sizes = range(min(ready, batch_size), least - 1, -1)
        return Cut(since, next(take for size in sizes if (take := choose(size).take) is not None))
