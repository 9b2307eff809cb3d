"""Advantages from a critic, against numbers worked out by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from support.property_tests import examples
from turnwise.trainer.algorithms.gae import critic_gae
from turnwise.trainer.batch.value_targets import token_rewards


def f(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def i(*numbers: int) -> Tensor:
    return torch.tensor(numbers)


def assert_is(actual: Tensor, *numbers: float) -> None:
    torch.testing.assert_close(actual.double(), f(*numbers), atol=1e-6, rtol=0)


def test_tokens_of_two_turns() -> None:
    # gamma = lam = 1/2, so gamma lam = 1/4; what stands between the turns is not here: the third token follows the
    # second. Rewards 0 1 0 4, values 1 2 3 2, the end.
    #   A_4 = 4 + 0 - 2                    =  2       R_4 = 4
    #   A_3 = 0 + 1/2 2 - 3 + 1/4 2        = -1.5     R_3 = 1.5
    #   A_2 = 1 + 1/2 3 - 2 + 1/4 (-1.5)   =  0.125   R_2 = 2.125
    #   A_1 = 0 + 1/2 2 - 1 + 1/4 0.125    =  0.03125 R_1 = 1.03125
    [targets] = critic_gae(
        [f(0, 1, 0, 4)], [f(1, 2, 3, 2)], [i(0, 0, 1, 1)], [0.0], gamma=0.5, lam=0.5, whiten=False
    )  # fmt: skip
    assert_is(targets.advantages, 0.03125, 0.125, -1.5, 2)
    assert_is(targets.returns, 1.03125, 2.125, 1.5, 4)
    assert targets.valued.all()
    assert targets.advantages.dtype == torch.float32


def test_truncated_episodes_bootstrap_from_the_last_value() -> None:
    # As above with V = 8 after the end: A_4 = 4 + 1/2 8 - 2 = 6, R_4 = 8; A_3 = 0 + 1 - 3 + 1/4 6 = -0.5, R_3 = 2.5;
    # A_2 = 1 + 1.5 - 2 - 0.125 = 0.375, R_2 = 2.375; A_1 = 0 + 1 - 1 + 0.09375, R_1 = 1.09375.
    [targets] = critic_gae(
        [f(0, 1, 0, 4)], [f(1, 2, 3, 2)], [i(0, 0, 1, 1)], [8.0], gamma=0.5, lam=0.5, whiten=False
    )  # fmt: skip
    assert_is(targets.advantages, 0.09375, 0.375, -0.5, 6)
    assert_is(targets.returns, 1.09375, 2.375, 2.5, 8)


def test_level_turn_makes_turns_the_time_steps() -> None:
    # Turns of 2, 1 and 3 tokens; rewards within a turn are summed: 1, 0, 2 + 2 = 4. Their first tokens' values are 1, 3
    # and 2; the others' (9) are not read. gamma = lam = 1/2.
    #   A_3 = 4 - 2 = 2, R_3 = 4;  A_2 = 0 + 1 - 3 + 1/4 2 = -1.5, R_2 = 1.5;
    #   A_1 = 1 + 1.5 - 1 + 1/4 (-1.5) = 1.125, R_1 = 2.125.
    [targets] = critic_gae(
        [f(0, 1, 0, 2, 0, 2)], [f(1, 9, 3, 2, 9, 9)], [i(0, 0, 1, 4, 4, 4)], [0.0],
        gamma=0.5, lam=0.5, level="turn", whiten=False,
    )  # fmt: skip
    assert_is(targets.advantages, 1.125, 1.125, -1.5, 2, 2, 2)
    assert_is(targets.returns, 2.125, 0, 1.5, 4, 0, 0)
    assert targets.valued.tolist() == [True, False, True, True, False, False]


def test_targets_may_reach_further_than_advantages() -> None:
    # gamma = 1. Advantages at lam 0: r + V' - V = 0 + 3 - 1 = 2 and 5 - 3 = 2. Targets at lam 1: the sum of what
    # follows, 5 and 5 (at lam 0 they would be r + V' = 3 and 5).
    [targets] = critic_gae([f(0, 5)], [f(1, 3)], [i(0, 0)], [0.0], lam=0.0, value_lam=1.0, whiten=False)
    assert_is(targets.advantages, 2, 2)
    assert_is(targets.returns, 5, 5)
    # Where the episode was cut, the value after its end belongs to the targets too: 5 + 8 for both tokens.
    [cut] = critic_gae([f(0, 5)], [f(1, 3)], [i(0, 0)], [8.0], lam=0.0, value_lam=1.0, whiten=False)
    assert_is(cut.returns, 13, 13)
    [same] = critic_gae([f(0, 5)], [f(1, 3)], [i(0, 0)], [0.0], lam=0.0, whiten=False)
    assert_is(same.returns, 3, 5)


def test_whitening_is_over_all_tokens_of_the_batch_and_unbiased() -> None:
    # Values 0 and lam = 1: advantages are what follows, (2, 2, 2) and (-1, -1). Their mean is (6 - 2)/5 = 0.8, the
    # variance (3 1.2^2 + 2 1.8^2)/4 = (4.32 + 6.48)/4 = 2.7. The critic's targets stay what they are.
    targets = critic_gae([f(0, 0, 2), f(0, -1)], [f(0, 0, 0), f(0, 0)], [i(0, 0, 1), i(0, 0)], [0.0, 0.0])
    assert_is(targets[0].advantages, *[1.2 / 2.7**0.5] * 3)
    assert_is(targets[1].advantages, *[-1.8 / 2.7**0.5] * 2)
    assert_is(targets[0].returns, 2, 2, 2)
    # All equal, or a single token: nothing is better than anything else.
    [one] = critic_gae([f(3)], [f(0)], [i(0)], [0.0])
    assert_is(one.advantages, 0)
    assert critic_gae([], [], [], []) == []


@settings(max_examples=examples(15), deadline=None)
@given(st.lists(st.floats(-3, 3), min_size=1, max_size=12), st.floats(0, 1), st.data())
def test_returns_at_lam_1_are_discounted_sums_for_any_values(
    rewards: list[float], gamma: float, data: st.DataObject
) -> None:
    n = len(rewards)
    values = data.draw(st.lists(st.floats(-3, 3), min_size=n, max_size=n))
    bootstrap = data.draw(st.floats(-3, 3))
    [targets] = critic_gae([f(*rewards)], [f(*values)], [torch.zeros(n).long()], [bootstrap], gamma=gamma, whiten=False)
    for t in range(n):
        total = sum(gamma ** (k - t) * rewards[k] for k in range(t, n)) + gamma ** (n - t) * bootstrap
        assert float(targets.returns[t]) == pytest.approx(total, abs=1e-5)


def test_the_reward_of_a_turn_stands_on_its_last_token() -> None:
    # Turn 1 has no token (its row was cut): its reward comes to the last token before it, of turn 0.
    assert_is(token_rewards(f(1, 2, 4), i(0, 0, 2, 2, 2)), 0, 3, 0, 0, 4)
    # Nothing before turn 1 is trained: what turn 0 earned is nobody's here.
    assert_is(token_rewards(f(1, 2), i(1, 1)), 0, 2)
    assert_is(token_rewards(f(1, 2, 3), i(0)), 6)
    assert_is(token_rewards(f(1), torch.zeros(0).long()))
