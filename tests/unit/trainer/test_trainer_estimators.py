"""Advantage estimators against numbers worked out by hand: ragged groups, singletons, what takes no part."""

from __future__ import annotations

import inspect
import math
import re

import pytest
import torch
from pydantic import ValidationError

from turnwise.errors import TrainError
from turnwise.trainer.algorithms.advantages import (
    ADVANTAGES,
    WITHOUT_GROUPS,
    dr_grpo,
    gdpo,
    gigpo,
    gpg,
    opo,
    passk,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax,
    rloo,
)
from turnwise.trainer.algorithms.config import AlgorithmConfig
from turnwise.trainer.algorithms.gae import gae, whitened

# Group 0: 1, 3, 5 (mean 3); group 1: 0, 1 (mean 1/2); group 2: 7 alone; group 3: 2, 2.
REWARDS = torch.tensor([1.0, 0.0, 3.0, 7.0, 2.0, 5.0, 1.0, 2.0], dtype=torch.float64)
GROUPS = torch.tensor([0, 1, 0, 2, 3, 0, 1, 3])
DEAD = [False, False, False, True, True, False, False, True]


def test_dr_grpo_subtracts_the_mean() -> None:
    advantages = dr_grpo(REWARDS, GROUPS)
    assert advantages.values.tolist() == [-2.0, -0.5, 0.0, 0.0, 0.0, 2.0, 0.5, 0.0]
    assert (advantages.dead.tolist(), advantages.groups, advantages.dead_groups) == (DEAD, 4, 2)


def test_rloo_compares_with_the_others() -> None:
    # 1 - (3+5)/2 = -3; 3 - (1+5)/2 = 0; 5 - (1+3)/2 = 3; 0 - 1 = -1; 1 - 0 = 1.
    advantages = rloo(REWARDS, GROUPS)
    assert advantages.values.tolist() == [-3.0, -1.0, 0.0, 0.0, 0.0, 3.0, 1.0, 0.0]
    assert advantages.dead.tolist() == DEAD


def test_opo_weighs_the_baseline_by_length() -> None:
    # Group 0, lengths 1, 2, 5: (1 + 6 + 25) / 8 = 4. Group 1, lengths 3, 1: 1/4.
    advantages = opo(REWARDS, GROUPS, lengths=torch.tensor([1, 3, 2, 9, 1, 5, 1, 2]))
    assert advantages.values.tolist() == [-3.0, -0.25, -1.0, 0.0, 0.0, 1.0, 0.75, 0.0]
    # Equal lengths: the plain mean.
    assert torch.equal(opo(REWARDS, GROUPS, lengths=torch.full((8,), 3)).values, dr_grpo(REWARDS, GROUPS).values)


def test_passk_rewards_the_best_alone() -> None:
    # Group 0: 5 - 3 = 2; group 1: 1 - 0 = 1.
    advantages = passk(REWARDS, GROUPS)
    assert advantages.values.tolist() == [0.0, 0.0, 0.0, 0.0, 0.0, 2.0, 1.0, 0.0]
    # Standard deviations: sqrt((4 + 0 + 4) / 2) = 2 and sqrt(1/2).
    scaled = passk(REWARDS, GROUPS, by_std=True, eps=1e-12)
    assert scaled.values.tolist() == pytest.approx([0, 0, 0, 0, 0, 1.0, math.sqrt(2), 0])
    # Two that are best: the maximum does not depend on either.
    tie = passk(torch.tensor([1.0, 1.0, 0.0]), torch.tensor([4, 4, 4]))
    assert (tie.values.tolist(), tie.dead_groups) == ([0.0, 0.0, 0.0], 1)


def test_reinforce_plus_plus_normalises_over_the_batch() -> None:
    # 1, 2, 3, 6: mean 3, squares 4 + 1 + 0 + 9 = 14, unbiased variance 14/3.
    spread = math.sqrt(14 / 3)
    advantages = reinforce_plus_plus(torch.tensor([1.0, 2.0, 3.0, 6.0]), torch.tensor([0, 0, 1, 2]))
    assert advantages.values.tolist() == pytest.approx([-2 / spread, -1 / spread, 0.0, 3 / spread], rel=1e-6)
    assert not advantages.dead.any()
    equal = reinforce_plus_plus(torch.tensor([2.0, 2.0]), torch.tensor([0, 1]))
    assert (equal.values.tolist(), equal.dead_groups) == ([0.0, 0.0], 2)


def test_reinforce_plus_plus_baseline_scales_by_the_batch() -> None:
    # Centred: -2, -.5, 0, 0, 0, 2, .5, 0: squares 4 + .25 + 4 + .25 = 8.5, by 7.
    spread = math.sqrt(8.5 / 7)
    advantages = reinforce_plus_plus_baseline(REWARDS, GROUPS)
    expected = [-2 / spread, -0.5 / spread, 0, 0, 0, 2 / spread, 0.5 / spread, 0]
    assert advantages.values.tolist() == pytest.approx(expected, rel=1e-6)
    assert advantages.dead.tolist() == DEAD


def test_gpg_makes_up_for_dead_groups() -> None:
    # Five of eight teach: alpha 8/5.
    advantages = gpg(REWARDS, GROUPS)
    assert advantages.values.tolist() == pytest.approx([-3.2, -0.8, 0, 0, 0, 3.2, 0.8, 0])
    assert gpg(torch.ones(2), torch.tensor([0, 0])).values.tolist() == [0.0, 0.0]


def test_gdpo_compares_each_reward_apart() -> None:
    # One group of two and one of two: "a" 0, 1 | 5, 5 and "b" 10, 30 | 1, 0. Standardised with std of two, each pair is
    # -+ 1/sqrt(2) = -+h. Sums: -2h, 2h | h, -h (a teaches nothing there). Squares: (4 + 4 + 1 + 1) h^2 = 5, by 3.
    components = {"a": torch.tensor([0.0, 1.0, 5.0, 5.0]), "b": torch.tensor([10.0, 30.0, 1.0, 0.0])}
    groups = torch.tensor([0, 0, 1, 1])
    advantages = gdpo(torch.zeros(4), groups, components=components, eps=1e-12)
    h, spread = 1 / math.sqrt(2), math.sqrt(5 / 3)
    assert advantages.values.tolist() == pytest.approx(
        [-2 * h / spread, 2 * h / spread, h / spread, -h / spread], rel=1e-5
    )
    # With a alone: -h, h | 0, 0; squares 1, by 3; the second group teaches nothing.
    only = gdpo(torch.zeros(4), groups, components=components, reward_weights={"a": 2.0}, eps=1e-12)
    assert only.values.tolist() == pytest.approx([-h * math.sqrt(3), h * math.sqrt(3), 0, 0], rel=1e-5)
    assert only.dead.tolist() == [False, False, True, True]
    with pytest.raises(TrainError, match="reward_weights names 'c', but the rewards of this batch are a, b"):
        gdpo(torch.zeros(4), groups, components=components, reward_weights={"c": 1.0})
    # Nobody earned anything, or nobody was there: no name is wrong for that.
    for size in (4, 0):
        none = gdpo(torch.zeros(size), groups[:size], components={}, reward_weights={"a": 1.0})
        assert none.values.tolist() == [0.0] * size
        assert none.dead.all()


def test_remax_subtracts_the_greedy_reward() -> None:
    advantages = remax(
        torch.tensor([1.0, 0.0, 1.0, 0.5]), torch.tensor([0, 0, 1, 2]), baselines=torch.tensor([0.5, 0.5, 1.0, 0.0])
    )
    assert advantages.values.tolist() == [0.5, -0.5, 0.0, 0.5]
    assert advantages.dead.tolist() == [False, False, True, False]


@pytest.mark.parametrize("name", sorted(set(ADVANTAGES) - WITHOUT_GROUPS))
def test_dead_groups_have_advantage_zero(name: str) -> None:
    data = {"lengths": torch.arange(1, 9), "components": {"score": REWARDS}}
    reads = inspect.signature(ADVANTAGES[name]).parameters
    advantages = ADVANTAGES[name](REWARDS, GROUPS, **{key: value for key, value in data.items() if key in reads})
    assert advantages.values[torch.tensor(DEAD)].tolist() == [0.0, 0.0, 0.0]
    assert advantages.values.dtype == torch.float32
    # Neither do the numbers of groups matter, nor the order of trajectories.
    order = torch.tensor([7, 0, 3, 5, 1, 6, 2, 4])
    moved = {"lengths": data["lengths"][order], "components": {"score": REWARDS[order]}}
    reordered = ADVANTAGES[name](
        REWARDS[order], 9 - GROUPS[order], **{key: moved[key] for key in moved if key in reads}
    )
    torch.testing.assert_close(reordered.values, advantages.values[order])
    empty = torch.zeros(0)
    none = {"lengths": empty, "components": {"score": empty}}
    nothing = ADVANTAGES[name](empty, empty.long(), **{key: none[key] for key in none if key in reads})
    assert nothing.values.shape == (0,)


def test_whitening_uses_the_unbiased_variance() -> None:
    # Mean 2, variance (1 + 1) / 1 = 2.
    assert whitened(torch.tensor([1.0, 3.0]), eps=0.0).tolist() == pytest.approx([-1 / math.sqrt(2), 1 / math.sqrt(2)])
    unshifted = whitened(torch.tensor([1.0, 3.0]), shift=False, eps=0.0)
    assert unshifted.tolist() == pytest.approx([1 / math.sqrt(2), 3 / math.sqrt(2)])
    assert whitened(torch.tensor([5.0])).tolist() == [0.0]
    assert whitened(torch.zeros(0)).shape == (0,)


def test_gae_by_hand() -> None:
    # Values 1, 2, 3; reward 10 at the end; gamma 0.5, lambda 0.5.
    # t=2: 10 - 3 = 7. t=1: 0.5 * 3 - 2 + 0.25 * 7 = 1.25. t=0: 0.5 * 2 - 1 + 0.25 * 1.25 = 0.3125.
    values = torch.tensor([1.0, 2.0, 3.0])
    rewards = torch.tensor([0.0, 0.0, 10.0])
    advantages, returns = gae(rewards, values, gamma=0.5, lam=0.5)
    assert advantages.tolist() == [0.3125, 1.25, 7.0]
    assert returns.tolist() == [1.3125, 3.25, 10.0]
    # An episode that was cut off goes on with the critic's value: 10 + 0.5 * 4 - 3 = 9.
    assert gae(rewards, values, gamma=0.5, lam=0.0, last_value=4.0)[0].tolist() == [0.0, -0.5, 9.0]
    # Lambda 1: the return less the value.
    assert gae(torch.tensor([1.0, 2.0]), torch.tensor([0.5, 0.25]))[0].tolist() == [2.5, 1.75]


def test_gigpo_compares_turns_from_the_same_state() -> None:
    # Two episodes of one group: centred -1, 1. State s: returns 0 and 4: -2, 2. State t of the first is alone: 0. State
    # s of the other group is another one. no division.
    advantages = gigpo(
        torch.tensor([0.0, 2.0, 9.0]),
        torch.tensor([0, 0, 1]),
        [torch.tensor([0.0, 5.0]), torch.tensor([4.0]), torch.tensor([100.0])],
        [["s", "t"], ["s"], ["s"]],
        norm_by_std=False,
    )
    assert [turns.tolist() for turns in advantages] == [[-3.0, -1.0], [3.0], [0.0]]
    # Divided: both pairs by their own spread, -+1/sqrt(2) each.
    h = 1 / math.sqrt(2)
    scaled = gigpo(
        torch.tensor([0.0, 2.0]),
        torch.tensor([0, 0]),
        [torch.tensor([0.0]), torch.tensor([4.0])],
        [["s"], ["s"]],
        eps=1e-12,
    )
    assert [turns.tolist() for turns in scaled] == [pytest.approx([-2 * h]), pytest.approx([2 * h])]


def test_every_estimator_names_its_paper_and_is_a_page() -> None:
    for function in (*ADVANTAGES.values(), gae, gigpo):
        text = inspect.getdoc(function) or ""
        assert re.search(r"arXiv:\d{4}\.\d{4,5}", text), function
        assert "``" in text, function
        assert len(inspect.getsource(function).splitlines()) <= 60, function
        assert not {"self", "config"} & set(inspect.signature(function).parameters), function


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"advantage": "rlo"}, "algorithm.advantage is 'rlo'; did you mean 'rloo'"),
        (
            {"advantage": "rloo", "advantage_options": {"norm_by_std": False}},
            "algorithm.advantage_options.norm_by_std: unknown key",
        ),
        ({"advantage": "gpg"}, "set algorithm.drop_zero_variance to false"),
        (
            {"advantage": "gdpo", "advantage_options": {"reward_weight": {}}},
            "algorithm.advantage_options.reward_weight: unknown key, value {}; did you mean "
            "algorithm.advantage_options.reward_weights",
        ),
        (
            {"advantage": "gdpo", "advantage_options": {"reward_weights": {"a": "x"}}},
            "algorithm.advantage_options.reward_weights.a: 'x' is not allowed; allowed: a number",
        ),
        ({"advantage": "math:cos"}, "which takes (x); it is called with (rewards, groups)"),
    ],
)
def test_invalid_estimator_options_raise_validation_error(section: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(message)):
        AlgorithmConfig.model_validate(section)


def test_options_reach_the_estimator() -> None:
    config = AlgorithmConfig.model_validate({"advantage_options": {"norm_by_std": False, "eps": 0.5}})
    assert config.chosen_advantage().options == {"norm_by_std": False, "eps": 0.5}
    assert AlgorithmConfig.model_validate({"advantage": "rloo"}).chosen_advantage().options == {}
    config_of_passk = AlgorithmConfig.model_validate({"advantage": "passk", "advantage_options": {"by_std": True}})
    assert config_of_passk.chosen_advantage().options == {"by_std": True}
