"""Estimators that look beyond a group: at the batch, at several rewards, at a baseline from elsewhere.

Owns: :func:`reinforce_plus_plus`, :func:`reinforce_plus_plus_baseline`, :func:`gpg`, :func:`gdpo` and :func:`remax`.
Statistics of a batch count each trajectory once, however many tokens it has (other implementations take them over
tokens): a long trajectory weighs no more, and a group of one keeps advantage 0 wherever groups are compared.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from turnwise.errors import TrainError
from turnwise.trainer.advantages.core import Advantages, Groups, Positive, whitened


def reinforce_plus_plus(rewards: Tensor, groups: Tensor) -> Advantages:
    """REINFORCE with the batch as its baseline.

    ``A_i = (r_i - mean) / sqrt(var + 1e-8)`` over all trajectories of the batch, var unbiased: Hu et al. 2025,
    REINFORCE++ (arXiv:2501.03262), the global batch normalisation. Groups are not compared: one whose rewards are all
    equal, or a group of one, still learns from being better or worse than the batch. Only a batch of equal rewards
    teaches nothing.

    Args:
        rewards: Shape [n].
        groups: Shape [n], integers.
    """
    found = Groups.of(rewards, groups)
    equal = len(found.rewards) == 0 or bool(found.rewards.min() == found.rewards.max())
    return found.result(whitened(found.rewards), torch.full_like(found.dead, equal))


def reinforce_plus_plus_baseline(rewards: Tensor, groups: Tensor) -> Advantages:
    """REINFORCE++ with the group's mean as baseline and the batch's spread as scale.

    ``A_i = (r_i - mean_g) / sqrt(var + 1e-8)``, var that of all ``r - mean_g`` of the batch, unbiased: Hu et al. 2025
    (arXiv:2501.03262), REINFORCE++-baseline. (Their mean over the batch is 0, so nothing more is subtracted.)

    Args:
        rewards: Shape [n].
        groups: Shape [n], integers.
    """
    found = Groups.of(rewards, groups)
    return found.result(whitened(found.centred, shift=False))


def gpg(rewards: Tensor, groups: Tensor) -> Advantages:
    """Group policy gradient: what teaches makes up for what does not.

    ``A_i = alpha (r_i - mean_g)`` with ``alpha = n / m``, m of the n trajectories being in groups whose rewards
    differ: Chu et al. 2025, GPG (arXiv:2504.02546), the accurate gradient estimation, with normaliser 1. (Some
    implementations count non-zero rewards in place of m.) Groups that teach nothing have to stay in the denominator
    of the loss: ``drop_zero_variance: false``.

    Args:
        rewards: Shape [n].
        groups: Shape [n], integers.
    """
    found = Groups.of(rewards, groups)
    telling = int((~found.dead[found.member]).sum())
    return found.result(found.centred * (len(rewards) / max(1, telling)))


def gdpo(
    rewards: Tensor,
    groups: Tensor,
    *,
    components: Mapping[str, Tensor],
    reward_weights: dict[str, float] | None = None,
    eps: Positive = 1e-4,
) -> Advantages:
    """Rewards of several names, each compared apart, so that none drowns the others.

    ``a_ik = (r_ik - mean_gk) / (std_gk + eps)`` for each name k, ``s_i = sum_k w_k a_ik``, ``A_i = s_i / sqrt(var(s) +
    1e-8)`` over the batch: Liu et al. 2026, GDPO (arXiv:2601.05242), group reward-decoupled normalisation. (The mean
    of s over the batch is 0.)

    Args:
        rewards: Shape [n], the sums; they decide nothing here.
        groups: Shape [n], integers.
        components: For each name the rewards of that name, shape [n].
        reward_weights: Weight of each name; None weighs all by 1, a name left out has weight 0.
        eps: Added to each standard deviation.

    Raises:
        TrainError: A weight has a name that no reward has, though there are rewards.
    """
    total = Groups.of(rewards, groups)
    if not components:
        # Nothing was earned: in no episode was it the policy's turn, for instance.
        return total.result(torch.zeros_like(total.rewards), torch.ones_like(total.dead))
    weights = dict.fromkeys(components, 1.0) if reward_weights is None else reward_weights
    if unknown := weights.keys() - components.keys():
        raise TrainError(
            f"algorithm.advantage_options.reward_weights names {min(unknown)!r}, but the rewards of this batch are "
            f"{', '.join(sorted(components))}"
        )
    summed = torch.zeros_like(total.rewards)
    dead = torch.ones_like(total.dead)
    for name, weight in weights.items():
        each = Groups.of(components[name], groups)
        scaled = each.centred / (each.std[each.member] + eps)
        summed += weight * scaled.masked_fill(each.dead[each.member], 0.0)
        dead &= each.dead if weight else torch.ones_like(each.dead)
    return total.result(whitened(summed, shift=False), dead)


def remax(rewards: Tensor, groups: Tensor, *, baselines: Tensor) -> Advantages:
    """REINFORCE with the reward of the greedy completion as baseline.

    ``A_i = r_i - b_i``: Li et al. 2023, ReMax (arXiv:2310.10505). Nothing is compared within a group, so a group
    of one teaches as well as any; a trajectory that earned what the greedy one did has 0.

    Args:
        rewards: Shape [n].
        groups: Shape [n], integers.
        baselines: Shape [n], the reward of a greedy rollout of each trajectory's task.

    Raises:
        TrainError: Shapes differ, or a number is not finite.
    """
    found = Groups.of(rewards, groups)
    values = found.rewards - Groups.of(baselines, groups).rewards
    moving = torch.zeros(len(found.size), dtype=torch.int64).index_add(0, found.member, (values != 0).long())
    return found.result(values, moving == 0)
