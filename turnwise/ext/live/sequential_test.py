"""Comparison of two means by an interval that is valid however often it is looked at."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

ALPHA: Final = 0.05
"""Probability with which an interval ever excludes the true difference."""
FEWEST: Final = 10
"""Rewards of an arm before which there is no interval: of fewer a variance says little."""
_PSEUDO_REWARDS: Final = 20
"""Imagined rewards in the variance of an arm, half at each end of the range: equal rewards prove no variance of 0."""
_MIXTURE: Final = 0.25
"""Standard deviation of the differences that are expected, as a share of the rewards' range."""


@dataclass(slots=True)
class ArmRewards:
    """The rewards of an arm's sessions, as running moments (Welford 1962).

    Attributes:
        deviations: Sum of squared deviations from the mean.
        lowest: The lowest reward; 0 before the first, as the highest.
    """

    count: int = 0
    mean: float = 0.0
    deviations: float = 0.0
    lowest: float = 0.0
    highest: float = 0.0

    def add(self, reward: float) -> None:
        """Add the reward of a session."""
        if not self.count:
            self.lowest = self.highest = reward
        self.count += 1
        difference = reward - self.mean
        self.mean += difference / self.count
        self.deviations += difference * (reward - self.mean)
        self.lowest, self.highest = min(self.lowest, reward), max(self.highest, reward)

    def variance_of_mean(self, spread: float) -> float:
        """Return the variance of the mean, for rewards whose range is ``spread``."""
        imagined = _PSEUDO_REWARDS * (spread / 2) ** 2
        return (self.deviations + imagined) / (self.count + _PSEUDO_REWARDS) / self.count


def difference_interval(first: ArmRewards, second: ArmRewards, *, alpha: float = ALPHA) -> tuple[float, float] | None:
    """Return the interval of ``mean(first) - mean(second)``; None while an arm has too few rewards.

    The inversion of the mixture sequential probability ratio test, which holds at all times together (Johari, Koomen,
    Pekelis and Walsh 2017, Peeking at A/B Tests). With variance ``V`` of the difference and mixture ``N(0, t^2)``::

        d +- sqrt(2 V (V + t^2) / t^2 * log(sqrt((V + t^2) / V) / alpha))
    """
    if min(first.count, second.count) < FEWEST:
        return None
    spread = max(first.highest, second.highest) - min(first.lowest, second.lowest) or 1.0
    variance = first.variance_of_mean(spread) + second.variance_of_mean(spread)
    mixture = (_MIXTURE * spread) ** 2
    ratio = (variance + mixture) / variance
    half = math.sqrt(2 * variance * (variance + mixture) / mixture * math.log(math.sqrt(ratio) / alpha))
    difference = first.mean - second.mean
    return difference - half, difference + half
