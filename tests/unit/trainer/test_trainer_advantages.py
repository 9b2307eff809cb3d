from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from turnwise.errors import RegistryError, TrainError
from turnwise.trainer.algorithms.advantages import ADVANTAGES, advantage_fn, grpo


def test_grpo_divides_by_the_unbiased_std() -> None:
    # Rewards 0, 1, 1, 2: mean 1, sum of squares 1+0+0+1 = 2, std = sqrt(2/3) = 0.81649658.
    result = grpo(torch.tensor([0.0, 1.0, 1.0, 2.0]), torch.zeros(4, dtype=torch.int64), eps=0.5)
    # -1 / 1.31649658 = -0.75959180
    assert result.values.tolist() == pytest.approx([-0.7595918, 0.0, 0.0, 0.7595918], abs=1e-6)
    assert result.values.dtype == torch.float32
    assert (result.groups, result.dead_groups) == (1, 0)


def test_without_std_only_the_mean_is_subtracted() -> None:
    result = grpo(torch.tensor([0.0, 1.0, 5.0]), torch.tensor([7, 7, 7]), norm_by_std=False)
    assert result.values.tolist() == [-2.0, -1.0, 3.0]


def test_interleaved_groups_of_different_sizes_are_compared_separately() -> None:
    # Group 3: 1, 3 -> mean 2, std sqrt(2) -> -+0.70710678. Group 9: 10, 10, 40 -> mean 20, std sqrt(300) = 17.3205.
    rewards = torch.tensor([1.0, 10.0, 3.0, 40.0, 10.0])
    result = grpo(rewards, torch.tensor([3, 9, 3, 9, 9]), eps=1e-12)
    assert result.values.tolist() == pytest.approx([-0.7071068, -0.5773503, 0.7071068, 1.1547005, -0.5773503], abs=1e-6)
    assert result.groups == 2


def test_group_of_one_has_advantage_zero() -> None:
    for norm in (True, False):
        result = grpo(torch.tensor([5.0, 1.0, 2.0]), torch.tensor([0, 1, 1]), norm_by_std=norm)
        assert result.values[0] == 0.0
        assert result.dead.tolist() == [True, False, False]
        assert result.dead_groups == 1


def test_equal_rewards_give_exact_zeros_and_are_counted() -> None:
    # 0.1 summed three times and divided by 3 is not 0.1 in floating point: without care a tiny advantage remains.
    result = grpo(
        torch.tensor([0.1, 0.1, 0.1, 0.0, 1.0], dtype=torch.float64), torch.tensor([0, 0, 0, 1, 1]), eps=1e-30
    )
    assert result.values[:3].tolist() == [0.0, 0.0, 0.0]
    assert result.dead.tolist() == [True, True, True, False, False]
    assert (result.groups, result.dead_groups) == (2, 1)


def test_small_differences_of_large_rewards_survive() -> None:
    result = grpo(torch.tensor([1e8, 1e8 + 1], dtype=torch.float64), torch.tensor([0, 0]), norm_by_std=False)
    assert result.values.tolist() == [-0.5, 0.5]


def test_no_trajectories_give_no_advantages() -> None:
    result = grpo(torch.zeros(0), torch.zeros(0, dtype=torch.int64))
    assert result.values.shape == (0,)
    assert result.groups == 0


@given(rewards=st.lists(st.floats(-100, 100), min_size=1, max_size=20), data=st.data(), shift=st.floats(-50, 50))
def test_advantages_sum_to_zero_and_ignore_order(rewards: list[float], data: st.DataObject, shift: float) -> None:
    groups = torch.tensor(data.draw(st.lists(st.integers(0, 4), min_size=len(rewards), max_size=len(rewards))))
    values = torch.tensor(rewards, dtype=torch.float64)
    result = grpo(values, groups, norm_by_std=False)
    for group in groups.unique():
        # Advantages of a group sum to zero.
        assert abs(float(result.values[groups == group].sum())) < 1e-3
    # Adding a constant to every reward changes nothing; renaming or reordering members changes nothing.
    assert torch.allclose(grpo(values + shift, groups, norm_by_std=False).values, result.values, atol=1e-4)
    order = torch.randperm(len(rewards), generator=torch.Generator().manual_seed(0))
    assert torch.allclose(
        grpo(values[order], 10 - groups[order], norm_by_std=False).values, result.values[order], atol=1e-4
    )


def test_invalid_rewards_raise_train_error() -> None:
    with pytest.raises(TrainError, match=r"rewards\[1\] is nan"):
        grpo(torch.tensor([0.0, float("nan")]), torch.tensor([0, 0]))
    with pytest.raises(TrainError, match=r"both must be \[n\]"):
        grpo(torch.zeros(2), torch.zeros(3, dtype=torch.int64))


def test_estimators_are_registered_by_name() -> None:
    assert advantage_fn("grpo") is grpo
    with pytest.raises(RegistryError, match=r"did you mean .grpo.\?; known: .*grpo"):
        advantage_fn("grpoo")
    for function in ADVANTAGES.values():
        assert "arXiv" in (function.__doc__ or "")
