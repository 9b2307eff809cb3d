"""Credit: which turn is given how much, how that meets the comparison of a group, and what it leaves alone."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.trainer.credited import build, trajectory, turn_advantages
from turnwise.config import load_config
from turnwise.errors import ConfigError, TrainError
from turnwise.trainer.algorithms.advantages import compare_returns, grpo
from turnwise.trainer.algorithms.config import AlgorithmConfig
from turnwise.trainer.algorithms.credit import CreditConfig, load_credit, turn_returns, turn_shares
from turnwise.trainer.algorithms.losses.core import weigh
from turnwise.trainer.algorithms.rewards import branch_rewards
from turnwise.trainer.batch.packing import pack
from turnwise.trainer.observe.metrics import meaning
from turnwise.trajectory import Trajectory

PAIR = [trajectory("a", 3, [(None, 1.0)]), trajectory("b", 2, [(None, 0.0)])]
PAID = [trajectory("a", 3, [(0, 1.0), (None, 2.0)]), trajectory("b", 2, [(1, 1.0)])]


@pytest.mark.parametrize(
    ("credit", "expected"),
    [
        # Mean 0.5: the advantages of the trajectories are 0.5 and -0.5.
        ("same", {"a": [0.5, 0.5, 0.5], "b": [-0.5, -0.5]}),
        ("last", {"a": [0, 0, 0.5], "b": [0, -0.5]}),
        ({"name": "discounted", "gamma": 0.5}, {"a": [0.125, 0.25, 0.5], "b": [-0.25, -0.5]}),
        # Nothing was noted on a turn: what follows from each is the whole reward, so this is "same".
        ("turns", {"a": [0.5, 0.5, 0.5], "b": [-0.5, -0.5]}),
    ],
)
def test_a_reward_at_the_end(credit: object, expected: dict[str, list[float]]) -> None:
    assert turn_advantages(build(PAIR, credit)) == expected


def test_turn_rewards_count_for_the_same_and_earlier_turns() -> None:
    # a: rewards 1, 0, 2, so 3, 2, 2 follow: mean 7/3. b: 0, 1, so 1, 1 follow: mean 1. The group's mean is 5/3.
    by_name = turn_advantages(build(PAID, "turns"))
    assert by_name["a"] == pytest.approx([4 / 3, 1 / 3, 1 / 3])
    assert by_name["b"] == pytest.approx([-2 / 3, -2 / 3])
    # Discounted by a half: 1.5, 1, 2 and 0.5, 1. Means 1.5 and 0.75, together 1.125.
    by_name = turn_advantages(build(PAID, {"name": "turns", "gamma": 0.5}))
    assert by_name["a"] == pytest.approx([0.375, -0.125, 0.875])
    assert by_name["b"] == pytest.approx([-0.625, -0.125])


def test_the_spread_counts_each_trajectory_once() -> None:
    by_name = turn_advantages(build(PAID, "turns", advantage_options={"eps": 1e-9}))
    # Around 5/3: a has 16/9, 1/9, 1/9 (mean 2/3), b has 4/9 (mean 4/9); their sum over n - 1 = 1 is 10/9.
    scale = math.sqrt(10 / 9)
    assert by_name["a"] == pytest.approx([4 / 3 / scale, 1 / 3 / scale, 1 / 3 / scale])


@pytest.mark.parametrize("credit", ["turns", "tokens", "gigpo"])
def test_options_of_the_estimator_scale_the_comparison_of_turns(credit: str) -> None:
    centred = build(PAID, credit, advantage_options={"norm_by_std": False})
    scaled = build(PAID, credit, advantage_options={"eps": 10.0})
    assert not np.array_equal(centred.rows[0].advantage, scaled.rows[0].advantage)


def test_equal_totals_earned_in_different_turns_still_teach() -> None:
    early = trajectory("a", 2, [(0, 1.0)])
    late = trajectory("b", 2, [(1, 1.0)])
    assert turn_advantages(build([early, late], "same")) == {}, "as wholes they are equal"
    result = build([early, late], "turns")
    # 1, 0 and 1, 1 follow: the mean of their means is 3/4.
    assert turn_advantages(result) == {"a": [0.25, -0.75], "b": [0.25, 0.25]}
    assert result.metrics["batch/dead_groups"] == 0
    assert result.metrics["reward/informative"] == 1.0


def test_equal_returns_and_groups_of_one_have_no_gradient() -> None:
    for members in ([trajectory("a", 2, [(1, 1.0)]), trajectory("b", 3, [(2, 1.0)])], [trajectory("a", 2, [(0, 5.0)])]):
        for drop in (True, False):
            result = build(members, "turns", drop_zero_variance=drop)
            assert result.metrics["batch/dead_groups"] == 1
            assert {value for advantages in turn_advantages(result).values() for value in advantages} <= {0.0}


def test_the_turns_of_a_fork_are_counted_in_the_order_in_which_they_were_committed() -> None:
    forked = trajectory("a", 3, [(1, 2.0), (None, 1.0)], fork=True)
    result = build([forked, trajectory("b", 1, [])], "turns", norm_by_std=False)
    assert len([row for row in result.rows if row.sample.trajectory_id == "a"]) == 2
    # 3, 3, 1 follow, mean 7/3; b is 0: the group's mean is 7/6.
    assert turn_advantages(result)["a"] == pytest.approx([3 - 7 / 6, 3 - 7 / 6, 1 - 7 / 6])


def test_rewards_of_the_episode_and_of_unknown_turns_come_with_the_last_turn() -> None:
    member = trajectory("a", 2, [(None, 1.0), (0, 0.5)])
    member.rewards.append(("a turn of another session", "r", 4.0))
    [branch] = branch_rewards(member)
    assert branch.rewards == [0.5, 5.0]
    assert sum(branch.rewards) == member.reward


def by_length(trajectory: Trajectory) -> list[float]:
    return [float(number) for number, _ in enumerate(trajectory.turns())]


def broken(trajectory: Trajectory) -> list[float]:
    raise KeyError("critic")


ANSWERS: dict[str, object] = {}


def answering(trajectory: Trajectory) -> object:
    return ANSWERS["now"]


async def later(trajectory: Trajectory) -> list[float]:
    raise AssertionError


def of_two(trajectory: Trajectory, other: object) -> list[float]:
    raise AssertionError


def test_a_custom_function_returns_the_returns_of_turns() -> None:
    # 0, 1, 2 and 0, 1: means 1 and 0.5, together 0.75.
    assert turn_advantages(build(PAIR, f"{__name__}:by_length")) == {"a": [-0.75, 0.25, 1.25], "b": [-0.75, 0.25]}


def test_a_function_may_stand_in_a_file_and_is_loaded_once_with_the_run(tmp_path: Path) -> None:
    file = tmp_path / "credit.py"
    file.write_text("def halves(trajectory):\n    return [0.5] * sum(1 for _ in trajectory.turns())\n")
    credit = CreditConfig(name=f"{file}:halves")
    function = load_credit(credit)
    assert function is not None
    assert function.call(PAIR[0], "it") == [0.5] * 3


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (f"{__name__}:nobody", "has no 'nobody'"),
        ("no_such_package.f", "no module named 'no_such_package'"),
        (f"{__name__}:later", "is async"),
        (f"{__name__}:of_two", "cannot be called as f(trajectory)"),
    ],
)
def test_an_unusable_credit_function_raises_config_error(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.credit") as error:
        load_credit(CreditConfig(name=name))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([1.0], "for trajectory a: it must be a list of 3 numbers"),
        (None, "returned None for trajectory a"),
        ([0.0, math.nan, 1.0], "returned nan for a turn of trajectory a: not a finite number"),
        ([0.0, True, 1.0], "returned True"),
        ([0.0, "1", 1.0], "returned '1'"),
    ],
)
def test_invalid_returns_of_a_credit_function_raise_train_error(answer: object, message: str) -> None:
    ANSWERS["now"] = answer
    with pytest.raises(TrainError, match=r"algorithm\.credit") as error:
        build(PAIR, f"{__name__}:answering")
    assert message in str(error.value)


def test_an_error_of_a_credit_function_raises_train_error() -> None:
    with pytest.raises(TrainError, match=r"broken' raised KeyError for trajectory a: 'critic'"):
        build(PAIR, f"{__name__}:broken")


@pytest.mark.parametrize(
    ("credit", "message"),
    [
        (
            "lasts",
            "name is 'lasts'; allowed: same, last, discounted, turns, tokens, gigpo, tree_grpo, tree_value, or "
            "pkg.module:function",
        ),
        ("discounted", "gamma, in (0, 1]"),
        ({"name": "last", "gamma": 0.9}, "no gamma: 'last' does not discount"),
        ({"name": "discounted", "gamma": 1.5}, "allowed: at most 1.0"),
        ({"name": "turns", "gama": 0.5}, "did you mean credit.gamma?"),
    ],
)
def test_invalid_credit_raises_config_error(credit: object, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(AlgorithmConfig, defaults={"credit": credit})
    assert message in str(error.value)


def test_turns_are_compared_as_grpo_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules["turnwise.trainer.algorithms.advantages"].ADVANTAGES, "mine", grpo)
    assert turn_advantages(build(PAIR, "last", advantage="mine")) == turn_advantages(build(PAIR, "last"))
    with pytest.raises(ConfigError, match="compares turns as the estimator"):
        build(PAIR, "turns", advantage="mine")


def test_an_infinite_reward_is_refused() -> None:
    infinite = replace(PAIR[0], rewards=[(None, "r", math.inf)])
    for credit in ("same", "last", "turns"):
        with pytest.raises(TrainError, match="finite"):
            build([infinite, PAIR[1]], credit)


def test_credit_metrics_are_documented_and_logged_for_credit_per_turn() -> None:
    metrics = build(PAIR, "last").metrics
    assert metrics["credit/spread"] == 0.5
    assert metrics["credit/silent_turns"] == pytest.approx(3 / 5)
    assert (metrics["credit/first"], metrics["credit/last"]) == (0.0, 0.5)
    assert [name for name in metrics if meaning(name) is None] == []
    assert [name for name in build(PAIR, "same").metrics if name.startswith("credit/")] == []


# Properties.

REWARD = st.floats(-10, 10).map(lambda value: round(value, 3))
GROUP = st.lists(st.lists(REWARD, min_size=1, max_size=5), min_size=1, max_size=5)
CREDITS = st.sampled_from(
    [
        "same",
        "last",
        {"name": "discounted", "gamma": 0.7},
        "turns",
        {"name": "tokens", "gamma": 0.7},
        "gigpo",
        f"{__name__}:by_length",
    ]
)


def members_of(groups: list[list[list[float]]], forks: bool) -> list[Trajectory]:
    return [
        trajectory(f"m{g}-{m}-", len(turns), list(enumerate(turns)), group=f"g{g}", fork=forks)
        for g, group in enumerate(groups)
        for m, turns in enumerate(group)
    ]


@given(st.lists(GROUP, min_size=1, max_size=3), CREDITS, st.booleans(), st.booleans())
def test_every_sampled_token_is_trained_once_with_its_weight_whatever_the_credit(
    groups: list[list[list[float]]], credit: object, forks: bool, norm: bool
) -> None:
    members = members_of(groups, forks)
    plain = build(members, "same", drop_zero_variance=False, norm_by_std=norm)
    result = build(members, credit, drop_zero_variance=False, norm_by_std=norm)
    # 3: each sampled token once. 10: the weights of a trajectory are those that they would be without credit.
    assert result.metrics["batch/trained_tokens"] == sum(member.sampled_tokens for member in members)
    for mode in ("token_mean", "trajectory_mean", "trajectory_sum"):
        weights = [[row.weight for row in weigh(experience.rows, mode)[0]] for experience in (result, plain)]  # type: ignore[arg-type]
        assert weights[0] == weights[1]
    # 11: a group of one has advantage 0; all advantages are finite, and reach the batch as they are.
    for row in result.rows:
        assert np.isfinite(row.advantage).all()
        if sum(member.group_id == row.sample.group_id for member in members) == 1:
            assert not np.any(row.advantage)
    for micro in pack(result.rows, 64):
        for number, index in enumerate(micro.rows):
            row = result.rows[index]
            expected = np.broadcast_to(np.float32(row.advantage), row.sample.loss_mask.shape)[row.sample.loss_mask]
            assert micro.advantages[micro.sequences == number].tolist() == expected.tolist()


@given(st.lists(st.lists(REWARD, min_size=1, max_size=6), min_size=2, max_size=6), st.booleans())
def test_credited_turns_of_a_group_balance_each_other(group: list[list[float]], norm: bool) -> None:
    returns = [turn_returns(rewards, 1.0) for rewards in group]
    advantages, dead = compare_returns(returns, [0] * len(group), norm_by_std=norm, eps=1e-4)
    assert sum(float(turns.mean()) for turns in advantages) == pytest.approx(0, abs=1e-6)
    assert len(set(dead)) == 1
    assert dead[0] == (len({float(value) for turns in returns for value in turns}) == 1)


@given(st.lists(st.tuples(REWARD, st.integers(1, 5)), min_size=1, max_size=6), st.booleans())
def test_equal_returns_within_trajectories_make_turn_credit_equal_grpo(
    group: list[tuple[float, int]], norm: bool
) -> None:
    returns = [np.full(turns, reward) for reward, turns in group]
    advantages, dead = compare_returns(returns, [0] * len(group), norm_by_std=norm, eps=1e-4)
    rewards = torch.tensor([reward for reward, _ in group], dtype=torch.float64)
    expected = grpo(rewards, torch.zeros(len(group), dtype=torch.int64), norm_by_std=norm, eps=1e-4)
    assert [turns[0] for turns in advantages] == pytest.approx(expected.values.tolist(), rel=1e-5, abs=1e-6)
    assert dead == expected.dead.tolist()


@given(st.integers(1, 8), st.floats(0.01, 1.0))
def test_shares_give_the_last_turn_all(turns: int, gamma: float) -> None:
    for name in ("same", "last", "discounted"):
        shares = turn_shares(name, turns, gamma)
        assert (len(shares), shares[-1]) == (turns, 1.0)
        assert ((shares >= 0) & (shares <= 1)).all()


def test_default_credit_equals_the_estimator_bit_by_bit() -> None:
    members = [trajectory(f"m{n}", 1 + n % 3, [(None, value)]) for n, value in enumerate([0.1, 0.7, 0.35, 0.7])]
    result = build(members, norm_by_std=True)
    rewards = torch.tensor([member.reward for member in members], dtype=torch.float64)
    expected = grpo(rewards, torch.zeros(4, dtype=torch.int64))
    assert [row.advantage for row in result.rows] == [float(value) for value in expected.values]
