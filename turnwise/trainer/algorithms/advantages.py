"""Advantage estimators, their registry, and the advantages of a training step.

Every estimator takes ``rewards``, float of shape [n], and ``groups``, integers of shape [n]: one entry per trajectory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from pydantic import PositiveFloat
from torch import Tensor

from turnwise.errors import TrainError, shown
from turnwise.plugins import registering
from turnwise.trainer.algorithms.credit import (
    Credit,
    CustomAdvantages,
    StateCredit,
    TrajectoryCredit,
    TreeCredit,
    Values,
)
from turnwise.trainer.algorithms.gae import CRITIC_ADVANTAGES, whitened
from turnwise.trainer.algorithms.registry import ConfiguredFunction, find
from turnwise.trainer.algorithms.rewards import StepRewards
from turnwise.trainer.algorithms.trees import TREE_CREDITS
from turnwise.trajectory import TrainSample


@dataclass(frozen=True, slots=True)
class Advantages:
    """The advantages of n trajectories.

    Attributes:
        values: float32 of shape [n].
        dead: bool of shape [n], true in groups without a gradient: all rewards equal, or a single trajectory.
        groups: Number of groups.
        dead_groups: Number of groups without a gradient.
    """

    values: Tensor
    dead: Tensor
    groups: int
    dead_groups: int


@dataclass(frozen=True, slots=True)
class Groups:
    """The groups of n trajectories, in float64 to keep small differences of large rewards.

    Attributes:
        index: int64 of shape [n], each trajectory's group, numbered from 0.
        size: int64 of shape [groups].
        dead: bool of shape [groups], true where all rewards are equal, as in a group of one.
        mean: Mean reward, shape [groups].
        rewards: Shape [n].
    """

    index: Tensor
    size: Tensor
    dead: Tensor
    mean: Tensor
    rewards: Tensor

    @classmethod
    def of(cls, rewards: Tensor, groups: Tensor) -> Self:
        """Group rewards, of shape [n], by ``groups``, integers of shape [n].

        Raises:
            TrainError: Shapes differ, or a reward is not finite.
        """
        if rewards.ndim != 1 or rewards.shape != groups.shape:
            shapes = f"rewards have shape {tuple(rewards.shape)}, groups {tuple(groups.shape)}"
            raise TrainError(f"{shapes}; both must be [n]")
        if not bool(torch.isfinite(rewards).all()):
            infinite = torch.nonzero(~torch.isfinite(rewards)).flatten().tolist()
            raise TrainError(f"rewards[{infinite[0]}] is {rewards[infinite[0]].item()}; every reward must be finite")
        r = rewards.double()
        names, index = torch.unique(groups, return_inverse=True)
        count = len(names)
        size = torch.bincount(index, minlength=count)
        low = torch.full((count,), torch.inf, dtype=r.dtype).scatter_reduce(0, index, r, "amin")
        high = torch.full((count,), -torch.inf, dtype=r.dtype).scatter_reduce(0, index, r, "amax")
        mean = torch.zeros(count, dtype=r.dtype).index_add(0, index, r) / size
        return cls(index, size, low == high, mean, r)

    @property
    def centred(self) -> Tensor:
        """Rewards minus their group's mean, shape [n]."""
        return self.rewards - self.mean[self.index]

    @property
    def std(self) -> Tensor:
        """Sample standard deviation (n - 1) of each group, shape [groups]; 0 for a group of one."""
        squares = torch.zeros_like(self.mean).index_add(0, self.index, self.centred.square())
        return (squares / (self.size - 1).clamp(min=1)).sqrt()

    def result(self, values: Tensor, dead: Tensor | None = None) -> Advantages:
        """Return advantages from ``values`` [n], exactly 0 in ``dead`` groups, by default those of equal rewards."""
        dead_groups = self.dead if dead is None else dead
        mask = dead_groups[self.index]
        return Advantages(values.masked_fill(mask, 0.0).float(), mask, len(self.size), int(dead_groups.sum()))


def grpo(rewards: Tensor, groups: Tensor, *, norm_by_std: bool = True, eps: PositiveFloat = 1e-4) -> Advantages:
    """Group-relative advantages.

    For member i of group g: ``A_i = (r_i - mean_g) / (std_g + eps)``: Shao et al. 2024, DeepSeekMath
    (arXiv:2402.03300), section 4.1.2. The paper leaves the kind of std open; here it is the sample one (n - 1). Without
    ``norm_by_std``: ``A_i = r_i - mean_g``, as in Liu et al. 2025, Understanding R1-Zero-Like Training
    (arXiv:2503.20783), section 3.2.

    Raises:
        TrainError: Shapes differ, or a reward is not finite.
    """
    grouped = Groups.of(rewards, groups)
    return grouped.result(_scaled(grouped, norm_by_std, eps))


def dr_grpo(rewards: Tensor, groups: Tensor) -> Advantages:
    """Group-relative advantages without the standard deviation: ``A_i = r_i - mean_g``.

    Liu et al. 2025, Dr. GRPO, Understanding R1-Zero-Like Training (arXiv:2503.20783), section 3.2. The paper's constant
    length normaliser is the aggregation ``seq_mean_token_sum_norm``.
    """
    return grpo(rewards, groups, norm_by_std=False)


def rloo(rewards: Tensor, groups: Tensor) -> Advantages:
    """Leave-one-out baseline: the mean reward of the group's other trajectories.

    ``A_i = r_i - 1/(n-1) sum_(j != i) r_j = n/(n-1) (r_i - mean_g)``: Ahmadian et al. 2024, Back to Basics
    (arXiv:2402.14740), after Kool et al. 2019.
    """
    grouped = Groups.of(rewards, groups)
    factor = grouped.size / (grouped.size - 1).clamp(min=1)
    return grouped.result(grouped.centred * factor[grouped.index])


def opo(rewards: Tensor, groups: Tensor, *, lengths: Tensor) -> Advantages:
    """The length-weighted baseline of minimal variance.

    ``A_i = r_i - sum_g l_j r_j / sum_g l_j`` with l the ``lengths`` (sampled tokens, shape [n]): Hao et al. 2025,
    On-Policy RL with Optimal Reward Baseline (arXiv:2505.23585), the simplified b*, which assumes that a trajectory's
    squared gradient norm grows with its length.

    Raises:
        TrainError: Shapes differ, or a reward is not finite.
    """
    grouped = Groups.of(rewards, groups)
    weight = lengths.double()
    total = torch.zeros_like(grouped.mean).index_add(0, grouped.index, weight)
    baseline = torch.zeros_like(grouped.mean).index_add(0, grouped.index, weight * grouped.rewards) / total
    return grouped.result(grouped.rewards - baseline[grouped.index])


def passk(rewards: Tensor, groups: Tensor, *, by_std: bool = False, eps: PositiveFloat = 1e-4) -> Advantages:
    """Leave-one-out estimator of the group's maximum (pass@k): only the best trajectory has an advantage.

    ``A_best = (r_best - r_second) / (std_g + eps)``, all others 0: Tang et al. 2025, Optimizing Language Models for
    Inference Time Objectives using RL (arXiv:2503.19595); without ``by_std`` the divisor is 1. A tie of the best two
    leaves the group dead.
    """
    grouped = Groups.of(rewards, groups)
    values = torch.zeros_like(grouped.rewards)
    dead = grouped.dead.clone()
    for group in range(len(grouped.size)):
        numbers = torch.nonzero(grouped.index == group).flatten()
        if len(numbers) > 1:
            best = grouped.rewards[numbers].topk(2)
            lead = best.values[0] - best.values[1]
            values[numbers[best.indices[0]]] = lead / (grouped.std[group] + eps) if by_std else lead
            dead[group] = lead == 0
    return grouped.result(values, dead)


def reinforce_plus_plus(rewards: Tensor, groups: Tensor) -> Advantages:
    """REINFORCE with the batch as its baseline.

    ``A_i = (r_i - mean) / sqrt(var + 1e-8)`` over all trajectories of the batch, var unbiased: Hu et al. 2025,
    REINFORCE++ (arXiv:2501.03262), global batch normalisation. A group of one, or of equal rewards, still has a
    gradient; only a batch of equal rewards has none.
    """
    grouped = Groups.of(rewards, groups)
    equal = len(grouped.rewards) == 0 or bool(grouped.rewards.min() == grouped.rewards.max())
    return grouped.result(whitened(grouped.rewards), torch.full_like(grouped.dead, equal))


def reinforce_plus_plus_baseline(rewards: Tensor, groups: Tensor) -> Advantages:
    """REINFORCE++ with the group's mean as baseline and the batch's standard deviation as scale.

    ``A_i = (r_i - mean_g) / sqrt(var + 1e-8)``, var that of all ``r - mean_g`` of the batch, unbiased: Hu et al. 2025
    (arXiv:2501.03262), REINFORCE++-baseline. The batch mean of ``r - mean_g`` is 0 and need not be subtracted.
    """
    grouped = Groups.of(rewards, groups)
    return grouped.result(whitened(grouped.centred, shift=False))


def gpg(rewards: Tensor, groups: Tensor) -> Advantages:
    """Group policy gradient: advantages scaled up for the groups that have none.

    ``A_i = alpha (r_i - mean_g)`` with ``alpha = n / m``, m of the n trajectories being in groups whose rewards
    differ: Chu et al. 2025, GPG (arXiv:2504.02546), the accurate gradient estimation, with normaliser 1. (Some
    implementations count non-zero rewards in place of m.) Dead groups must stay in the denominator of the loss:
    ``drop_zero_variance: false``.
    """
    grouped = Groups.of(rewards, groups)
    telling = int((~grouped.dead[grouped.index]).sum())
    return grouped.result(grouped.centred * (len(rewards) / max(1, telling)))


def gdpo(
    rewards: Tensor,
    groups: Tensor,
    *,
    components: Mapping[str, Tensor],
    reward_weights: dict[str, float] | None = None,
    eps: PositiveFloat = 1e-4,
) -> Advantages:
    """Normalise each named reward within its group, then sum them.

    ``a_ik = (r_ik - mean_gk) / (std_gk + eps)`` for each name k, ``s_i = sum_k w_k a_ik``, ``A_i = s_i / sqrt(var(s) +
    1e-8)`` over the batch: Liu et al. 2026, GDPO (arXiv:2601.05242), group reward-decoupled normalisation. The batch
    mean of s is 0.

    Args:
        rewards: Summed rewards, shape [n]; not read.
        groups: Shape [n], integers.
        components: Rewards of shape [n] by name.
        reward_weights: Weight by name; None weighs all by 1, an omitted name has weight 0.
        eps: Added to each standard deviation.

    Raises:
        TrainError: A weight's name is not among the rewards of the batch.
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
        component_groups = Groups.of(components[name], groups)
        summed += weight * _scaled(component_groups, True, eps)
        dead &= component_groups.dead if weight else torch.ones_like(component_groups.dead)
    return total.result(whitened(summed, shift=False), dead)


def remax(rewards: Tensor, groups: Tensor, *, baselines: Tensor) -> Advantages:
    """REINFORCE with the greedy rollout's reward as baseline.

    ``A_i = r_i - b_i`` with b the ``baselines``, shape [n]: Li et al. 2023, ReMax (arXiv:2310.10505). Groups are not
    compared, so a group of one has a gradient; a trajectory whose reward equals its baseline has advantage 0.

    Raises:
        TrainError: Shapes differ, or a number is not finite.
    """
    grouped = Groups.of(rewards, groups)
    values = grouped.rewards - Groups.of(baselines, groups).rewards
    moving = torch.zeros(len(grouped.size), dtype=torch.int64).index_add(0, grouped.index, (values != 0).long())
    return grouped.result(values, moving == 0)


def gigpo(
    rewards: Tensor,
    groups: Tensor,
    step_returns: Sequence[Tensor],
    anchors: Sequence[Sequence[Hashable]],
    *,
    norm_by_std: bool = True,
    eps: float = 1e-4,
) -> list[Tensor]:
    """Group-in-group advantages: of the episode within its group, plus of each turn among turns from the same state.

    ``A_it = A^E_i + A^S_it``; ``A^E`` as GRPO; ``A^S_it = (G_it - mean) / (std + eps)`` over the turns of the
    group that began in the same state, ``G_it`` their discounted returns: Feng et al. 2025, GiGPO (arXiv:2505.10978),
    section 4. A state met once, and a group of one, give 0. Without ``norm_by_std`` both divisors are 1.

    Args:
        rewards: Of the episodes, shape [n].
        groups: Shape [n], integers.
        step_returns: Per trajectory the returns of its turns, shape [turns].
        anchors: Per trajectory the state before each turn.
        norm_by_std: Whether to divide by standard deviations.
        eps: Added to the standard deviations.

    Returns:
        Per trajectory the advantages of its turns, float32 of shape [turns].

    Raises:
        TrainError: Shapes differ, or a number is not finite.
    """
    episodes = Groups.of(rewards, groups)
    of_episodes = _scaled(episodes, norm_by_std, eps)
    if not any(len(turns) for turns in anchors):
        return [torch.zeros(0) for _ in anchors]
    names: dict[Hashable, int] = {}
    states = [
        names.setdefault((int(group), anchor), len(names))
        for group, turns in zip(groups, anchors, strict=True)
        for anchor in turns
    ]
    steps = Groups.of(torch.cat([turns.double() for turns in step_returns]), torch.tensor(states))
    by_trajectory = torch.split(_scaled(steps, norm_by_std, eps), [len(turns) for turns in anchors])
    compared = episodes.size[episodes.index] > 1
    return [
        (of_episode + of_turns).float() * is_compared
        for of_episode, of_turns, is_compared in zip(of_episodes, by_trajectory, compared, strict=True)
    ]


def _scaled(grouped: Groups, norm_by_std: bool, eps: float) -> Tensor:
    values = grouped.centred / (grouped.std[grouped.index] + eps) if norm_by_std else grouped.centred
    return values.masked_fill(grouped.dead[grouped.index], 0.0)


ADVANTAGE_ARGUMENTS = ("rewards", "groups")
ADVANTAGE_DATA = ("lengths", "components", "baselines")
"""What an estimator may ask for by name: sampled tokens of each trajectory, shape [n]; rewards by their name, each of
shape [n]; the reward of the greedy rollout of its group, shape [n], which is rolled out for such an estimator."""

AdvantageFn: TypeAlias = Callable[..., Advantages]

ADVANTAGES: dict[str, AdvantageFn] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "opo": opo,
    "gpg": gpg,
    "passk": passk,
    "gdpo": gdpo,
    "remax": remax,
}
"""Estimators by the name that a configuration uses."""

WITHOUT_GROUPS = frozenset({"gae", "reinforce_plus_plus", "remax"})
"""Estimators whose baseline is not the group: a group of one has a gradient, too."""
WITH_GROUPS = frozenset(ADVANTAGES) - WITHOUT_GROUPS
"""Estimators by which a group of one has advantage 0. Of a custom estimator it is not known."""


F = TypeVar("F", bound=Callable[..., Any])


def register_advantage(name: str) -> Callable[[F], F]:
    """Return a decorator that registers an estimator for ``algorithm.advantage``.

    It is called with :data:`ADVANTAGE_ARGUMENTS` and the part of :data:`ADVANTAGE_DATA` that it names. The decorator
    raises RegistryError where the name is taken by another estimator.
    """
    return registering(name, ADVANTAGES, "estimator")


def advantage_fn(name: str) -> Callable[..., Any]:
    """Return an estimator by its name or by reference (``pkg.mod:function``).

    Raises:
        RegistryError: No such estimator.
    """
    function: Callable[..., Any] = find(name, {**ADVANTAGES, **CRITIC_ADVANTAGES}, "algorithm.advantage")
    return function


def compare_returns(
    returns: Sequence[Values], groups: Sequence[int], *, norm_by_std: bool, eps: float
) -> tuple[list[Values], list[bool]]:
    """Compare turns with all turns of their group, each trajectory weighing the same whatever its number of turns.

    For turn t of trajectory i of a group of n: ``A_it = (G_it - m) / (s + eps)`` with the mean of the trajectories'
    means, ``m = 1/n sum_i 1/T_i sum_t G_it``, and the spread around it, ``s^2 = 1/(n-1) sum_i 1/T_i sum_t (G_it -
    m)^2``. Without ``norm_by_std``: ``A_it = G_it - m``. Equals GRPO where all turns of a trajectory have the same
    return. A group of one, and one of equal returns, has advantage exactly 0.

    Returns:
        Per trajectory the advantages of its turns (or tokens), and whether its group is dead.

    Raises:
        TrainError: A return is not finite.
    """
    numbers_of: dict[int, list[int]] = {}
    for number, group in enumerate(groups):
        numbers_of.setdefault(group, []).append(number)
    advantages: list[Values] = [np.zeros(len(turns)) for turns in returns]
    dead = [False] * len(returns)
    for numbers in numbers_of.values():
        every = np.concatenate([returns[number] for number in numbers])
        if not np.isfinite(every).all():
            raise TrainError(f"the returns of a group's turns are {every.tolist()}: every number must be finite")
        if len(numbers) == 1 or every.min() == every.max():
            for number in numbers:
                dead[number] = True
            continue
        mean = math.fsum(float(returns[number].mean()) for number in numbers) / len(numbers)
        scale = 1.0
        if norm_by_std:
            squares = math.fsum(float(np.square(returns[number] - mean).mean()) for number in numbers)
            scale = math.sqrt(squares / (len(numbers) - 1)) + eps
        for number in numbers:
            advantages[number] = (returns[number] - mean) / scale
    return advantages, dead


TURN_COMPARISONS: dict[str, tuple[bool, bool | None]] = {
    "grpo": (True, None),
    "dr_grpo": (True, False),
    "reinforce_plus_plus": (False, True),
}
"""Estimators whose comparison of trajectories is also one of turns: whether within the group (else the batch), and
whether the spread divides (None: the estimator's option ``norm_by_std``)."""


@dataclass(frozen=True, slots=True)
class StepAdvantages:
    """The advantages of a step's trajectories.

    Attributes:
        advantages: Per trajectory a scalar, or an array of shape [turns] or [sampled tokens].
        dead: Per trajectory whether its group has no gradient.
        groups: Number of groups.
        dead_groups: Number of groups without a gradient.
        token_starts: Per trajectory the index of each turn's first token; None unless advantages are per token.
    """

    advantages: list[float | Values]
    dead: list[bool]
    groups: int
    dead_groups: int
    token_starts: list[npt.NDArray[np.int64]] | None = None

    def of_row(self, number: int, sample: TrainSample) -> float | npt.NDArray[np.float32]:
        """Return the advantages of a row's tokens, 0 on tokens that were not sampled; ``number`` is its trajectory."""
        advantages = self.advantages[number]
        if isinstance(advantages, float):
            return advantages
        if self.token_starts is None:
            # One more at the end, for what no turn sampled: its number is -1.
            return np.append(advantages, 0.0).astype(np.float32)[sample.turn_ids]
        row = np.zeros(len(sample.turn_ids), np.float32)
        sampled = sample.turn_ids >= 0
        turns = sample.turn_ids[sampled]
        _, first, inverse = np.unique(turns, return_index=True, return_inverse=True)
        # A turn stands in a row in one piece, from its first token on.
        row[sampled] = advantages[self.token_starts[number][turns] + np.arange(len(turns)) - first[inverse]]
        return row

    def group_metrics(self) -> dict[str, float]:
        """Return counts of groups with and without a gradient, and the spread over turns where credit is per turn."""
        metrics = {
            "reward/informative": (len(self.dead) - sum(self.dead)) / max(1, len(self.dead)),
            "batch/groups": float(self.groups),
            "batch/dead_groups": float(self.dead_groups),
        }
        per_turn = [row_advantages for row_advantages in self.advantages if not isinstance(row_advantages, float)]
        if not per_turn:
            return metrics
        return metrics | {
            "credit/spread": float(np.mean([np.ptp(row_advantages) for row_advantages in per_turn])),
            "credit/silent_turns": float(np.mean(np.concatenate(per_turn) == 0)),
            "credit/first": float(np.mean([abs(row_advantages[0]) for row_advantages in per_turn])),
            "credit/last": float(np.mean([abs(row_advantages[-1]) for row_advantages in per_turn])),
        }


def estimate_advantages(rewards: StepRewards, credit: Credit, estimator: ConfiguredFunction) -> StepAdvantages:
    """Compute advantages from rewards and the output of credit assignment.

    Raises:
        TrainError: A reward or a return is not finite, or a custom estimator returned no :class:`Advantages`.
    """
    groups = rewards.groups
    if isinstance(credit, CustomAdvantages):
        return _of_turns(credit.advantages, groups)
    if isinstance(credit, TrajectoryCredit):
        return _of_trajectories(rewards, credit, estimator)
    within_groups, fixed = TURN_COMPARISONS[estimator.name]
    norm_by_std = estimator.options.get("norm_by_std", True) if fixed is None else fixed
    eps = estimator.options.get("eps", 1e-4)
    if isinstance(credit, TreeCredit):
        return _of_turns(_of_trees(credit, groups, norm_by_std=norm_by_std, eps=eps), groups)
    if isinstance(credit, StateCredit):
        advantages = gigpo(
            rewards.totals,
            torch.tensor(groups, dtype=torch.int64),
            [torch.from_numpy(returns) for returns in credit.returns],
            credit.states,
            norm_by_std=norm_by_std,
            eps=eps,
        )
        return _of_turns([of_turns.double().numpy() for of_turns in advantages], groups)
    scope = groups if within_groups else [0] * len(groups)
    compared, dead = compare_returns(credit.returns, scope, norm_by_std=norm_by_std, eps=eps)
    dead_groups = {group for group, is_dead in zip(groups, dead, strict=True) if is_dead}
    return StepAdvantages([*compared], dead, len(set(groups)), len(dead_groups), credit.token_starts)


def _of_trajectories(rewards: StepRewards, credit: TrajectoryCredit, estimator: ConfiguredFunction) -> StepAdvantages:
    estimate = estimator.with_data(lengths=rewards.lengths, components=rewards.components, baselines=rewards.baselines)
    result = estimate(rewards.totals, torch.tensor(rewards.groups, dtype=torch.int64))
    if not isinstance(result, Advantages) or result.values.shape != rewards.totals.shape:
        raise TrainError(
            f"algorithm.advantage {estimator.name!r} returned {shown(result)}; it must return "
            "turnwise.trainer.algorithms.advantages.Advantages with one value for each reward"
        )
    advantages: list[float | Values] = [float(value) for value in result.values]
    if credit.shares is not None:
        advantages = [advantage * shares for advantage, shares in zip(advantages, credit.shares, strict=True)]
    return StepAdvantages(advantages, [bool(flag) for flag in result.dead], result.groups, result.dead_groups)


def _of_trees(credit: TreeCredit, groups: Sequence[int], *, norm_by_std: bool, eps: float) -> list[Values]:
    advantages: dict[int, Values] = {}
    for group in sorted(set(groups)):
        numbers = [number for number, other in enumerate(groups) if other == group]
        trees = [credit.trees[number] for number in numbers]
        of_group = TREE_CREDITS[credit.name](trees, norm_by_std=norm_by_std, eps=eps)
        advantages |= zip(numbers, of_group, strict=True)
    return [advantages[number] for number in range(len(groups))]


def _of_turns(advantages: Sequence[Values], groups: Sequence[int]) -> StepAdvantages:
    alive = {group for group, of_turns in zip(groups, advantages, strict=True) if of_turns.any()}
    every = set(groups)
    return StepAdvantages([*advantages], [group not in alive for group in groups], len(every), len(every - alive))
