"""Estimators that compare a trajectory with the others of its group.

Owns: :func:`grpo`, :func:`dr_grpo`, :func:`rloo`, :func:`opo` and :func:`passk`. Refuses: statistics of a batch.

In all of them groups may differ in size; a group of one, and a group whose rewards are all equal, has advantage exactly
0. (Some other implementations give a group of one its reward.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from turnwise.errors import TrainError
from turnwise.trainer.advantages.core import Advantages, Groups, Positive


def grpo(rewards: Tensor, groups: Tensor, *, norm_by_std: bool = True, eps: Positive = 1e-4) -> Advantages:
    """Group-relative advantages.

    For member i of group g: ``A_i = (r_i - mean_g) / (std_g + eps)``: Shao et al. 2024, DeepSeekMath
    (arXiv:2402.03300), section 4.1.2. Std is that with n - 1, of which the paper says nothing. Without ``norm_by_std``:
    ``A_i = r_i - mean_g``, as in Liu et al. 2025, Understanding R1-Zero-Like Training (arXiv:2503.20783), section 3.2.

    Args:
        rewards: Shape [n].
        groups: Shape [n], integers; members of a group carry the same number.
        norm_by_std: Whether to divide by the group's standard deviation.
        eps: Added to the standard deviation.

    Raises:
        TrainError: Shapes differ, or a reward is not finite.
    """
    found = Groups.of(rewards, groups)
    values = found.centred / (found.std[found.member] + eps) if norm_by_std else found.centred
    return found.result(values)


def dr_grpo(rewards: Tensor, groups: Tensor) -> Advantages:
    """Group-relative advantages without the standard deviation: ``A_i = r_i - mean_g``.

    Liu et al. 2025, Dr. GRPO, Understanding R1-Zero-Like Training (arXiv:2503.20783), section 3.2. The other half of
    that paper, a constant in place of the length, is the aggregation ``seq_mean_token_sum_norm``.

    Args:
        rewards: Shape [n].
        groups: Shape [n], integers.
    """
    return grpo(rewards, groups, norm_by_std=False)


def rloo(rewards: Tensor, groups: Tensor) -> Advantages:
    """Leave-one-out: a trajectory against the mean of the others of its group.

    ``A_i = r_i - 1/(n-1) sum_(j != i) r_j = n/(n-1) (r_i - mean_g)``: Ahmadian et al. 2024, Back to Basics
    (arXiv:2402.14740), after Kool et al. 2019.

    Args:
        rewards: Shape [n].
        groups: Shape [n], integers.
    """
    found = Groups.of(rewards, groups)
    factor = found.size / (found.size - 1).clamp(min=1)
    return found.result(found.centred * factor[found.member])


def opo(rewards: Tensor, groups: Tensor, *, lengths: Tensor) -> Advantages:
    """The baseline of least variance, in which a trajectory counts by its length.

    ``A_i = r_i - sum_g l_j r_j / sum_g l_j`` with l the number of sampled tokens: Hao et al. 2025, On-Policy RL with
    Optimal Reward Baseline (arXiv:2505.23585), the simplified baseline b* (the squared gradient norm of a trajectory
    is taken to grow with its length).

    Args:
        rewards: Shape [n].
        groups: Shape [n], integers.
        lengths: Shape [n], sampled tokens; above 0.

    Raises:
        TrainError: Shapes differ, a reward is not finite, or a length is not above 0.
    """
    found = Groups.of(rewards, groups)
    if lengths.shape != rewards.shape or not bool((lengths > 0).all()):
        raise TrainError(
            f"lengths are {lengths.tolist()}; there must be one above 0 for each of {len(rewards)} rewards"
        )
    weight = lengths.double()
    total = torch.zeros_like(found.mean).index_add(0, found.member, weight)
    baseline = torch.zeros_like(found.mean).index_add(0, found.member, weight * found.rewards) / total
    return found.result(found.rewards - baseline[found.member])


def passk(rewards: Tensor, groups: Tensor, *, by_std: bool = False, eps: Positive = 1e-4) -> Advantages:
    """Only the best of a group is rewarded, by how much it is better than the second: the maximum is what counts.

    ``A_best = (r_best - r_second) / (std_g + eps)``, all others 0: Tang et al. 2025, Optimizing Language Models for
    Inference Time Objectives using RL (arXiv:2503.19595), the leave-one-out estimator of pass@k; without
    ``by_std`` the divisor is 1. Where two are best the difference is 0 and the group teaches nothing.

    Args:
        rewards: Shape [n].
        groups: Shape [n], integers.
        by_std: Whether to divide by the group's standard deviation.
        eps: Added to the standard deviation.
    """
    found = Groups.of(rewards, groups)
    values = torch.zeros_like(found.rewards)
    dead = found.dead.clone()
    for group in range(len(found.size)):
        members = torch.nonzero(found.member == group).flatten()
        if len(members) > 1:
            best = found.rewards[members].topk(2)
            lead = best.values[0] - best.values[1]
            values[members[best.indices[0]]] = lead / (found.std[group] + eps) if by_std else lead
            dead[group] = lead == 0
    return found.result(values, dead)
