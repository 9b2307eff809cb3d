"""The rewards of a step's trajectories: totals, by turn, by name, and of greedy rollouts."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from turnwise.errors import TrainError
from turnwise.trainer.core import RowKey
from turnwise.trajectory import TrainSample, Trajectory, TrajectoryGroup, branch_paths
from turnwise.types import RewardEvent


@dataclass(frozen=True, slots=True)
class WayRewards:
    """The rewards of one way through an episode.

    Attributes:
        turns: Its turns, as their numbers in the trajectory's commit order.
        rewards: The reward of each of these turns.
    """

    turns: tuple[int, ...]
    rewards: list[float]


@dataclass(frozen=True, slots=True)
class StepRewards:
    """The rewards of n trajectories.

    Attributes:
        totals: Sum of each trajectory's rewards, float64 of shape [n].
        groups: Group of each trajectory, numbered from 0.
        ways: Per trajectory the rewards of its turns, way by way; one that was not forked has one way.
        turn_lengths: Per trajectory the sampled tokens of each turn.
        components: float64 of shape [n] by reward name.
        baselines: Reward of the group's greedy rollout, float64 of shape [n]; NaN where there is none.
    """

    totals: Tensor
    groups: list[int]
    ways: list[list[WayRewards]]
    turn_lengths: list[list[int]]
    components: dict[str, Tensor]
    baselines: Tensor

    @property
    def lengths(self) -> Tensor:
        """Sampled tokens of each trajectory, int64 of shape [n]."""
        return torch.tensor([sum(lengths) for lengths in self.turn_lengths], dtype=torch.int64)


def step_rewards(trajectories: Sequence[Trajectory], baselines: Mapping[str, float]) -> StepRewards:
    """Return the rewards of trajectories with sampled tokens; ``baselines`` are greedy rewards by group id."""
    numbers: dict[str, int] = {}
    named = [each.named_rewards() for each in trajectories]
    components = {
        name: [each.get(name, 0.0) for each in named] for name in sorted({key for each in named for key in each})
    }
    return StepRewards(
        totals=torch.tensor([each.reward for each in trajectories], dtype=torch.float64),
        groups=[numbers.setdefault(each.group_id, len(numbers)) for each in trajectories],
        ways=[ways_of(each) for each in trajectories],
        turn_lengths=[
            [len(segment.token_ids) for segment in each.segments if segment.sampled] for each in trajectories
        ],
        components={name: torch.tensor(sums, dtype=torch.float64) for name, sums in components.items()},
        baselines=torch.tensor([baselines.get(each.group_id, math.nan) for each in trajectories], dtype=torch.float64),
    )


def ways_of(trajectory: Trajectory) -> list[WayRewards]:
    """Return the rewards of a trajectory's turns, for each way through its episode.

    Rewards of a way as a whole, and of turns that it does not have, go to its last turn.
    """
    numbers = {segment.turn_id: number for number, segment in enumerate(s for s in trajectory.segments if s.sampled)}
    if not trajectory.branches:
        return [_way(list(numbers.values()), trajectory.rewards, numbers)]
    found: list[WayRewards] = []
    for branch, path in zip(trajectory.branches, branch_paths(trajectory.branches), strict=True):
        shared = [event for event in trajectory.rewards if event[0] is None or event[0] in path]
        found.append(_way([numbers[turn] for turn in path], [*shared, *branch.rewards], numbers))
    return found


def _way(turns: list[int], events: Sequence[RewardEvent], numbers: Mapping[str | None, int]) -> WayRewards:
    places = {turn: place for place, turn in enumerate(turns)}
    rewards = [0.0] * len(turns)
    for turn_id, _, value in events if turns else ():
        rewards[places.get(numbers.get(turn_id, -1), -1)] += value
    return WayRewards(tuple(turns), rewards)


def with_penalties(
    trajectories: Sequence[Trajectory], samples: Sequence[Sequence[TrainSample]], penalties: Mapping[RowKey, Tensor]
) -> list[Trajectory]:
    """Return copies of trajectories with the KL penalties of their turns added as reward events named ``kl``.

    The reward of a trajectory becomes ``r - sum_t penalty_t`` over its sampled tokens, and that of a turn its own
    rewards less the penalties of its own tokens. Tokens in no row (cut off, dropped by an agent) have no penalty.
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
    """Return the greedy rollout's reward of a policy by group id, averaged over a role's sessions."""
    rewards: defaultdict[str, list[float]] = defaultdict(list)
    for trajectory in (each for group in groups for each in group.baselines):
        if trajectory.policy == policy and trajectory.error is None:
            rewards[trajectory.group_id].append(trajectory.reward)
    return {name: sum(each) / len(each) for name, each in rewards.items()}


def without_baseline(trajectories: Sequence[Trajectory], baselines: Mapping[str, float]) -> set[int]:
    """Return the indices of trajectories without a baseline: the greedy rollout failed or lacked their role.

    Raises:
        TrainError: No trajectory has one.
    """
    missing = {number for number, each in enumerate(trajectories) if each.group_id not in baselines}
    if trajectories and len(missing) == len(trajectories):
        raise TrainError(
            f"algorithm.advantage reads the reward of a greedy rollout, but none of {len(trajectories)} trajectories "
            "has one: every greedy rollout failed (trajectories.twz holds them, with baseline true), or the rollout "
            "manager does not make what RolloutRequest.greedy_baseline asks for"
        )
    return missing
