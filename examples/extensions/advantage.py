r"""An estimator of advantages with the median as baseline: one outlier of a group moves no other member.

algorithm:
  advantage: advantage.py:median
  advantage_options: {norm_by_mad: true}
"""

from __future__ import annotations

import torch
from pydantic import PositiveFloat
from torch import Tensor

from turnwise import register_advantage
from turnwise.trainer.algorithms.advantages import Advantages, Groups


@register_advantage("median")
def median(rewards: Tensor, groups: Tensor, *, norm_by_mad: bool = False, eps: PositiveFloat = 1e-4) -> Advantages:
    """Return rewards less their group's median, shape [n].

    ``A_i = r_i - median_g``, the mean of both middle rewards where their number is even; with ``norm_by_mad`` divided
    by ``1.4826 * median_g(|r_j - median_g|) + eps``, which is the standard deviation of normally distributed rewards,
    where that is above 0.
    """
    grouped = Groups.of(rewards, groups)
    values = torch.zeros_like(grouped.rewards)
    for group in range(len(grouped.size)):
        members = grouped.index == group
        off = grouped.rewards[members] - grouped.rewards[members].quantile(0.5)
        spread = 1.4826 * off.abs().quantile(0.5)
        values[members] = off / (spread + eps) if norm_by_mad and spread > 0 else off
    return grouped.result(values)
