"""Advantages of the turns of forked episodes: what a turn was worth, from the branches that continue after it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from turnwise.errors import TrainError
from turnwise.trainer.algorithms.rewards import branch_rewards
from turnwise.trajectory import Trajectory

Values: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Tree:
    """The branches of a trajectory.

    Attributes:
        returns: Reward of each branch.
        paths: The turns of each branch in order, shared ones included, as their numbers in commit order.
        turns: Number of turns of the trajectory.
    """

    returns: tuple[float, ...]
    paths: tuple[tuple[int, ...], ...]
    turns: int

    @classmethod
    def of(cls, trajectory: Trajectory) -> Tree:
        """Return the tree of a trajectory; one that was not forked has one branch with all its turns."""
        paths = tuple(branch.turns for branch in branch_rewards(trajectory))
        return cls(tuple(trajectory.returns()), paths, sum(segment.sampled for segment in trajectory.segments))

    @property
    def leaves(self) -> list[list[int]]:
        """The branches that hold each turn; none for turns of branches that failed."""
        branches_of: list[list[int]] = [[] for _ in range(self.turns)]
        for branch, path in enumerate(self.paths):
            for turn in path:
                branches_of[turn].append(branch)
        return branches_of

    @property
    def mean(self) -> float:
        """Mean reward of the branches."""
        return math.fsum(self.returns) / len(self.returns)


def tree_grpo(trees: Sequence[Tree], *, norm_by_std: bool = True, eps: float = 1e-4) -> list[Values]:
    """Advantages within and between the trees of a group.

    For branch l of tree i: ``A_l = (R_l - mean_g) / (std_g + eps) + (R_l - mean_i) / (std_i + eps)`` with mean and
    sample standard deviation over all branches of the group (g) and over those of the tree (i): Ji et al. 2025,
    Tree-GRPO (arXiv:2509.21240), section 3.3. There a turn that branches share is trained once for each of them; here
    it is trained once, with the mean of their advantages. Without ``norm_by_std`` the divisors are 1. Where no tree
    branches this is GRPO.

    Args:
        trees: The trees of one group.
        norm_by_std: Whether to divide by standard deviations.
        eps: Added to them.

    Returns:
        Per tree the advantages of its turns, shape [turns].

    Raises:
        TrainError: A reward is not finite.
    """
    _check(trees)
    between = _standardised([value for tree in trees for value in tree.returns], norm_by_std, eps)
    advantages: list[Values] = []
    start = 0
    for tree in trees:
        end = start + len(tree.returns)
        combined = between[start:end] + _standardised(tree.returns, norm_by_std, eps)
        advantages.append(np.array([float(combined[leaves].mean()) if leaves else 0.0 for leaves in tree.leaves]))
        start = end
    return advantages


def tree_value(trees: Sequence[Tree], *, norm_by_std: bool = True, eps: float = 1e-4) -> list[Values]:
    """Advantages of turns over the state before them, from the values of a tree.

    The value of a turn is the mean reward of the branches that hold it, ``V(t) = mean_{l through t} R_l``. Turns
    between two forks cannot be told apart, so they are one stretch with one advantage, the difference to the stretch
    before it: ``A(t) = (V(t) - V(parent of t's stretch)) / (std_g + eps)``. All trees of a group begin in one state,
    whose value is the mean over trees of their means. ``std_g`` is the sample standard deviation of all branches of
    the group. The differences are the local advantages of Hou et al. 2025, TreeRL (arXiv:2506.11902), section 3.3,
    without the global ones. Without ``norm_by_std`` the divisor is 1. Where no tree branches this is GRPO.

    Args:
        trees: The trees of one group.
        norm_by_std: Whether to divide by the standard deviation.
        eps: Added to it.

    Returns:
        Per tree the advantages of its turns, shape [turns].

    Raises:
        TrainError: A reward is not finite.
    """
    _check(trees)
    root = math.fsum(tree.mean for tree in trees) / len(trees)
    every = np.array([value for tree in trees for value in tree.returns])
    equal = bool((every == every[0]).all())
    scale = float(every.std(ddof=1)) + eps if norm_by_std and not equal else 1.0
    by_tree: list[Values] = []
    for tree in trees:
        leaves = tree.leaves
        values = [math.fsum(tree.returns[leaf] for leaf in holders) / max(1, len(holders)) for holders in leaves]
        advantages = np.zeros(tree.turns)
        for path in tree.paths:
            value_before, stretch = root, leaves[path[0]] if path else []
            for number, turn in enumerate(path):
                if leaves[turn] != stretch:
                    value_before = values[path[number - 1]]
                stretch = leaves[turn]
                advantages[turn] = 0.0 if equal else (values[turn] - value_before) / scale
        by_tree.append(advantages)
    return by_tree


TreeAdvantages: TypeAlias = Callable[..., list[Values]]
TREE_CREDITS: Final[dict[str, TreeAdvantages]] = {"tree_grpo": tree_grpo, "tree_value": tree_value}
"""The credits of trees by name."""


def _standardised(values: Sequence[float], norm_by_std: bool, eps: float) -> Values:
    """Return values less their mean, divided by their standard deviation; 0 where all are equal."""
    array = np.array(values, np.float64)
    if (array == array[0]).all():
        return np.zeros(len(array))
    centred: Values = array - array.mean()
    return centred / (float(array.std(ddof=1)) + eps) if norm_by_std else centred


def _check(trees: Sequence[Tree]) -> None:
    for tree in trees:
        if not np.isfinite(tree.returns).all():
            raise TrainError(f"the rewards of a tree's branches are {list(tree.returns)}: every number must be finite")
