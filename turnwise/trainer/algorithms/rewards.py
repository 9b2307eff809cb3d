"""The rewards of a step's trajectories as numbers: in total, by turn, by name, and of greedy rollouts."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from turnwise.errors import TrainError
from turnwise.trajectory import TrainSample, Trajectory, TrajectoryGroup

RowKey = tuple[str, int]
"""What tells a row from the others of a step: trajectory and leaf."""


@dataclass(frozen=True, slots=True)
class StepRewards:
    """The rewards of n trajectories.

    Attributes:
        totals: float64 of shape [n], the sum of each trajectory's rewards.
        groups: For each trajectory the number (from 0) of the group that it is compared within.
        turn_rewards: For each trajectory the reward of each turn, in commit order.
        turn_lengths: For each trajectory the sampled tokens of each turn.
        components: For each reward name float64 of shape [n].
        baselines: float64 of shape [n], the reward of the greedy rollout of each group; NaN where there is none.
    """

    totals: Tensor
    groups: list[int]
    turn_rewards: list[list[float]]
    turn_lengths: list[list[int]]
    components: dict[str, Tensor]
    baselines: Tensor

    @property
    def lengths(self) -> Tensor:
        """The sampled tokens of each trajectory, int64 of shape [n]."""
        return torch.tensor([sum(lengths) for lengths in self.turn_lengths], dtype=torch.int64)


def step_rewards(trajectories: Sequence[Trajectory], baselines: Mapping[str, float]) -> StepRewards:
    """Return the rewards of trajectories.

    Args:
        trajectories: Trajectories in which something was sampled.
        baselines: The reward of the greedy rollout, by group id.
    """
    numbers: dict[str, int] = {}
    names = sorted({name for each in trajectories for _, name, _ in each.rewards})
    components = {
        name: [sum(value for _, other, value in each.rewards if other == name) for each in trajectories]
        for name in names
    }
    return StepRewards(
        totals=torch.tensor([each.reward for each in trajectories], dtype=torch.float64),
        groups=[numbers.setdefault(each.group_id, len(numbers)) for each in trajectories],
        turn_rewards=[turn_rewards(each) for each in trajectories],
        turn_lengths=[[len(segment.ids) for segment in each.segments if segment.sampled] for each in trajectories],
        components={name: torch.tensor(sums, dtype=torch.float64) for name, sums in components.items()},
        baselines=torch.tensor([baselines.get(each.group_id, math.nan) for each in trajectories], dtype=torch.float64),
    )


def turn_rewards(trajectory: Trajectory) -> list[float]:
    """Return the reward of each turn; those of the episode, and of turns that are not here, come with the last one."""
    numbers = {segment.turn_id: number for number, segment in enumerate(s for s in trajectory.segments if s.sampled)}
    last = len(numbers) - 1
    rewards = [0.0] * len(numbers)
    for turn_id, _, value in trajectory.rewards:
        rewards[last if turn_id is None else numbers.get(turn_id, last)] += value
    return rewards


def with_penalties(
    trajectories: Sequence[Trajectory],
    samples: Sequence[Sequence[TrainSample]],
    penalties: Mapping[RowKey, Tensor],
) -> list[Trajectory]:
    """Return trajectories with the KL penalties of their turns among their rewards, as events named ``kl``.

    The reward of a trajectory is then ``r - sum_t penalty_t`` over its sampled tokens, and that of a turn its own
    rewards less the penalties of its own tokens. What no row holds (cut off, left out by an agent) has no penalty.

    Args:
        trajectories: They are not changed.
        samples: For each its rows.
        penalties: For each row the penalty of each of its trained tokens, shape [N]; empty where there are none.
    """
    if not penalties:
        return list(trajectories)
    return [_with_penalty(each, rows, penalties) for each, rows in zip(trajectories, samples, strict=True)]


def _with_penalty(
    trajectory: Trajectory, samples: Sequence[TrainSample], penalties: Mapping[RowKey, Tensor]
) -> Trajectory:
    paid: dict[int, float] = {}
    for sample in samples:
        turns = sample.turn_ids[sample.loss_mask].tolist()
        for turn, value in zip(turns, penalties[sample.key].tolist(), strict=True):
            paid[turn] = paid.get(turn, 0.0) + value
    turn_ids = [segment.turn_id for segment in trajectory.segments if segment.sampled]
    events = [(turn_ids[turn], "kl", -value) for turn, value in sorted(paid.items())]
    return replace(trajectory, rewards=[*trajectory.rewards, *events])


def greedy_rewards(groups: Sequence[TrajectoryGroup], policy: str) -> dict[str, float]:
    """Return the reward of the greedy rollout, by the group (``Trajectory.group_id``) that it is a baseline for.

    Where a role has several sessions in an episode it is the mean over them.

    Args:
        groups: Finished groups.
        policy: Only trajectories of this policy count.
    """
    rewards: defaultdict[str, list[float]] = defaultdict(list)
    for trajectory in (each for group in groups for each in group.baselines):
        if trajectory.policy == policy and trajectory.error is None:
            rewards[trajectory.group_id].append(trajectory.reward)
    return {name: sum(each) / len(each) for name, each in rewards.items()}


def without_baseline(trajectories: Sequence[Trajectory], baselines: Mapping[str, float]) -> set[int]:
    """Return the numbers of trajectories whose group has no baseline: its greedy rollout failed, or had not their role.

    Raises:
        TrainError: No trajectory has one.
    """
    missing = {number for number, each in enumerate(trajectories) if each.group_id not in baselines}
    if trajectories and len(missing) == len(trajectories):
        raise TrainError(
            f"algorithm.advantage reads the reward of a greedy rollout, but none of {len(trajectories)} trajectories "
            "has one: every greedy rollout failed (trajectories.jsonl holds them, with baseline true), or the rollout "
            "manager does not make what RolloutRequest.greedy_baseline asks for"
        )
    return missing
