"""What all estimators share: what they return, and what a group is.

Owns: :class:`Advantages`, :class:`Groups` (who is compared with whom, its means and spreads) and :func:`whitened`.
Refuses: formulas of estimators.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Self, TypeAlias

import torch
from pydantic import Field
from torch import Tensor

from turnwise.errors import TrainError

Positive: TypeAlias = Annotated[float, Field(gt=0)]


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


@dataclass(frozen=True, slots=True)
class Groups:
    """The groups of n trajectories. Everything is float64: large rewards with small differences keep them.

    Attributes:
        member: int64 of shape [n], the number (from 0) of each trajectory's group.
        size: int64 of shape [groups].
        dead: bool of shape [groups], whether all rewards are equal, as they are in a group of one.
        mean: Shape [groups], of the rewards.
        rewards: Shape [n].
    """

    member: Tensor
    size: Tensor
    dead: Tensor
    mean: Tensor
    rewards: Tensor

    @classmethod
    def of(cls, rewards: Tensor, groups: Tensor) -> Self:
        """Find the groups.

        Args:
            rewards: Shape [n].
            groups: Shape [n], integers; members of a group carry the same number.

        Raises:
            TrainError: Shapes differ, or a reward is not finite.
        """
        if rewards.ndim != 1 or rewards.shape != groups.shape:
            shapes = f"rewards have shape {tuple(rewards.shape)}, groups {tuple(groups.shape)}"
            raise TrainError(f"{shapes}; both must be [n]")
        if not bool(torch.isfinite(rewards).all()):
            bad = torch.nonzero(~torch.isfinite(rewards)).flatten().tolist()
            raise TrainError(f"rewards[{bad[0]}] is {rewards[bad[0]].item()}; every reward must be finite")
        r = rewards.double()
        names, member = torch.unique(groups, return_inverse=True)
        count = len(names)
        size = torch.bincount(member, minlength=count)
        low = torch.full((count,), torch.inf, dtype=r.dtype).scatter_reduce(0, member, r, "amin")
        high = torch.full((count,), -torch.inf, dtype=r.dtype).scatter_reduce(0, member, r, "amax")
        mean = torch.zeros(count, dtype=r.dtype).index_add(0, member, r) / size
        return cls(member, size, low == high, mean, r)

    @property
    def centred(self) -> Tensor:
        """Rewards less the mean of their group, shape [n]."""
        return self.rewards - self.mean[self.member]

    @property
    def std(self) -> Tensor:
        """Standard deviation of each group with Bessel's correction (n - 1), shape [groups]; 0 for a group of one."""
        squares = torch.zeros_like(self.mean).index_add(0, self.member, self.centred.square())
        return (squares / (self.size - 1).clamp(min=1)).sqrt()

    def result(self, values: Tensor, dead: Tensor | None = None) -> Advantages:
        """Return advantages in which groups that teach nothing have exactly 0.

        Args:
            values: Shape [n].
            dead: bool of shape [groups]; by default those whose rewards are all equal.
        """
        gone = self.dead if dead is None else dead
        mine = gone[self.member]
        return Advantages(values.masked_fill(mine, 0.0).float(), mine, len(self.size), int(gone.sum()))


def whitened(values: Tensor, mask: Tensor | None = None, *, shift: bool = True, eps: float = 1e-8) -> Tensor:
    """Return ``(x - mean) / sqrt(var + eps)`` with the unbiased variance, ``sum (x - mean)^2 / (n - 1)``.

    Statistics are those of the elements where ``mask`` is true; elsewhere the result is 0. A single element, and equal
    ones, become 0 (with ``shift``): Bessel's correction is 1 there.

    Args:
        values: Any shape.
        mask: bool of the same shape; None takes every element.
        shift: Whether the mean is subtracted; without it it is only divided, the spread still taken around the mean.
        eps: Added to the variance.
    """
    kept = torch.ones_like(values, dtype=torch.bool) if mask is None else mask
    count = kept.sum()
    if not bool(count):
        return torch.zeros_like(values)
    mean = values[kept].mean()
    variance = (values[kept] - mean).square().sum() / (count - 1).clamp(min=1)
    moved = values - mean if shift else values
    return (moved * (variance + eps).rsqrt()).masked_fill(~kept, 0.0)
