"""How much better than expected a trajectory was.

Owns: advantage estimators, pure functions of rewards and groups, and their registry. Refuses: configuration objects
and trajectories; callers hand in numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from turnwise.errors import RegistryError, TrainError


@dataclass(frozen=True, slots=True)
class Advantages:
    """What an estimator returns for n trajectories.

    Attributes:
        values: float32 of shape [n].
        dead: bool of shape [n], true for members of groups that teach nothing: all rewards equal, or a single member.
        groups: How many groups there were.
        dead_groups: How many of them teach nothing.
    """

    values: Tensor
    dead: Tensor
    groups: int
    dead_groups: int


class AdvantageFn(Protocol):
    """An estimator: rewards of shape [n], group numbers of shape [n] (any integers), and its options."""

    def __call__(self, rewards: Tensor, groups: Tensor, *, norm_by_std: bool, eps: float) -> Advantages:
        """Return one advantage per trajectory."""


def grpo(rewards: Tensor, groups: Tensor, *, norm_by_std: bool = True, eps: float = 1e-4) -> Advantages:
    """Group-relative advantages.

    For member i of group g: ``A_i = (r_i - mean_g) / (std_g + eps)``, std with Bessel's correction (n - 1), as in
    Shao et al. 2024, DeepSeekMath (arXiv:2402.03300), eq. 4. Without ``norm_by_std``: ``A_i = r_i - mean_g``, as in
    Liu et al. 2025, Understanding R1-Zero-Like Training (arXiv:2503.20783), section 3.2.

    Groups may differ in size. A group of one, and a group whose rewards are all equal, has advantage exactly 0.

    Args:
        rewards: Shape [n].
        groups: Shape [n], integers; members of a group carry the same number.
        norm_by_std: Whether to divide by the group's standard deviation.
        eps: Added to the standard deviation.

    Raises:
        TrainError: Shapes differ, or a reward is not finite.
    """
    if rewards.ndim != 1 or rewards.shape != groups.shape:
        raise TrainError(f"rewards have shape {tuple(rewards.shape)}, groups {tuple(groups.shape)}; both must be [n]")
    if not bool(torch.isfinite(rewards).all()):
        bad = torch.nonzero(~torch.isfinite(rewards)).flatten().tolist()
        raise TrainError(f"rewards[{bad[0]}] is {rewards[bad[0]].item()}; every reward must be finite")
    if rewards.numel() == 0:
        return Advantages(rewards.float(), torch.zeros(0, dtype=torch.bool), 0, 0)
    # In double precision: large rewards with small differences keep their differences.
    r = rewards.double()
    names, member = torch.unique(groups, return_inverse=True)
    count = len(names)
    size = torch.bincount(member, minlength=count)
    low = torch.full((count,), torch.inf, dtype=r.dtype).scatter_reduce(0, member, r, "amin")
    high = torch.full((count,), -torch.inf, dtype=r.dtype).scatter_reduce(0, member, r, "amax")
    mean = torch.zeros(count, dtype=r.dtype).index_add(0, member, r) / size
    centred = r - mean[member]
    values = centred
    if norm_by_std:
        squares = torch.zeros(count, dtype=r.dtype).index_add(0, member, centred.square())
        std = (squares / (size - 1).clamp(min=1)).sqrt()
        values = centred / (std[member] + eps)
    dead_group = low == high
    dead = dead_group[member]
    return Advantages(values.masked_fill(dead, 0.0).float(), dead, count, int(dead_group.sum()))


ADVANTAGES: dict[str, AdvantageFn] = {"grpo": grpo}
"""Estimators by the name that a configuration uses."""


def advantage_fn(name: str) -> AdvantageFn:
    """Return an estimator by name.

    Raises:
        RegistryError: No such estimator.
    """
    if name not in ADVANTAGES:
        raise RegistryError(f"algorithm.advantage is {name!r}; known: {', '.join(sorted(ADVANTAGES))}")
    return ADVANTAGES[name]
