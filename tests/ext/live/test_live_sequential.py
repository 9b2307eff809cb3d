"""The interval of two means: its literal value, and how often it errs and decides where every batch is looked at."""

from __future__ import annotations

import random

import pytest

from turnwise.ext.live.sequential_test import ALPHA, FEWEST, ArmRewards, difference_interval

RUNS, SESSIONS = 400, 800


def arm(rewards: list[float]) -> ArmRewards:
    rewards_of_arm = ArmRewards()
    for reward in rewards:
        rewards_of_arm.add(reward)
    return rewards_of_arm


def deciding_share(first: float, second: float, share: float) -> float:
    """Return the share of runs whose interval ever excludes 0, for the success rates of two arms."""
    draw, decided = random.Random(7), 0
    for _ in range(RUNS):
        arms = ArmRewards(), ArmRewards()
        for session in range(SESSIONS):
            number = draw.random() < share
            arms[number].add(float(draw.random() < (first, second)[number]))
            interval = difference_interval(*arms) if session % 4 == 3 else None
            if interval is not None and not interval[0] <= 0 <= interval[1]:
                decided += 1
                break
    return decided / RUNS


def test_moments_are_those_of_the_rewards() -> None:
    moments = arm([3.0, -1.0, 1.0])
    assert (moments.count, moments.mean, moments.lowest, moments.highest) == (3, 1.0, -1.0, 3.0)
    # 2^2 + 2^2 + 0; with 20 at the ends of the range, 2 away: (8 + 80) / 23 / 3.
    assert moments.deviations == pytest.approx(8.0)
    assert moments.variance_of_mean(4.0) == pytest.approx(88 / 69)


def test_interval_of_ten_successes_and_ten_failures() -> None:
    # Variance 2 * (20 / 4) / 30 / 10 = 1/30, mixture 1/16: 0.10222 * log(sqrt(2.875) / 0.05) = 0.3602, its root 0.6002.
    assert difference_interval(arm([1.0] * 10), arm([0.0] * 10)) == pytest.approx((0.3998, 1.6002), abs=1e-4)


def test_few_or_equal_rewards_decide_nothing() -> None:
    assert difference_interval(arm([1.0] * 100), arm([0.0] * (FEWEST - 1))) is None
    interval = difference_interval(arm([1.0] * 100), arm([1.0] * 100))
    assert interval is not None
    assert interval[0] < 0 < interval[1]


@pytest.mark.parametrize(("rate", "share"), [(0.1, 0.25), (0.5, 0.1), (0.5, 0.25), (0.5, 0.5), (0.9, 0.25)])
def test_equal_arms_are_told_apart_in_fewer_runs_than_alpha(rate: float, share: float) -> None:
    assert deciding_share(rate, rate, share) <= ALPHA


def test_difference_of_three_tenths_is_decided() -> None:
    assert deciding_share(0.8, 0.5, 0.25) >= 0.99
