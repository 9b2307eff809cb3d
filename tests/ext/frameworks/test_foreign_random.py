"""Random states of episodes of other frameworks: each draws as if no other one ran beside it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from turnwise.ext.frameworks.foreign.inside.core import RandomState

DRAWS: dict[str, Callable[[], Any]] = {
    "python": random.random,
    "gauss": lambda: random.gauss(0, 1),
    "uniform": np.random.random_sample,
    # One of a pair: the second one is kept by the generator.
    "normal": np.random.standard_normal,
    "integers": lambda: np.random.randint(0, 1000, 3).tolist(),
    "many": lambda: np.random.random_sample(700).tolist(),
}


def drawn(plan: list[str], seed: int) -> list[Any]:
    random.seed(seed)
    np.random.seed(seed)
    return [DRAWS[name]() for name in plan]


@given(
    plans=st.lists(st.lists(st.sampled_from(sorted(DRAWS)), max_size=6), min_size=1, max_size=4),
    order=st.randoms(use_true_random=False),
)
def test_interleaved_episodes_draw_as_alone(plans: list[list[str]], order: random.Random) -> None:
    states = [RandomState() for _ in plans]
    draws: list[list[Any]] = [[] for _ in plans]
    # The process has its own numbers, one of a pair of normal ones among them.
    outside = drawn(["normal", "gauss", "normal", "uniform", "normal", "python"], 99)
    random.seed(99)
    np.random.seed(99)
    seen = [DRAWS["normal"](), DRAWS["gauss"]()]
    for number, state in enumerate(states):
        with state.used(number):
            pass
    turns = [number for number, plan in enumerate(plans) for _ in plan]
    order.shuffle(turns)
    for number in turns:
        with states[number].used():
            draws[number].append(DRAWS[plans[number][len(draws[number])]]())
    seen += [DRAWS[name]() for name in ("normal", "uniform", "normal", "python")]
    assert draws == [drawn(plan, number) for number, plan in enumerate(plans)]
    assert seen == outside
