"""The rewards of a step's trajectories: totals, by turn, by name, and of greedy rollouts."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from turnwise.trainer.core import RowKey
from turnwise.trajectory import TrainSample, Trajectory, branch_paths


@dataclass(frozen=True, slots=True)
class BranchRewards:
    """The rewards of one branch of an episode: of its turns from the first one on.

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
        branches: Per trajectory the rewards of its turns, branch by branch; one that was not forked has one branch.
        turn_lengths: Per trajectory the sampled tokens of each turn.
        components: float64 of shape [n] by reward name.
        baselines: Reward of the group's greedy rollout, float64 of shape [n]; NaN if none.
    """

    totals: Tensor
    groups: list[int]
    branches: list[list[BranchRewards]]
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
    parts = [trajectory.named_rewards() for trajectory in trajectories]
    names = sorted({name for rewards in parts for name in rewards})
    greedy = [baselines.get(trajectory.group_id, math.nan) for trajectory in trajectories]
    return StepRewards(
        totals=torch.tensor([trajectory.reward for trajectory in trajectories], dtype=torch.float64),
        groups=[numbers.setdefault(trajectory.group_id, len(numbers)) for trajectory in trajectories],
        branches=[branch_rewards(trajectory) for trajectory in trajectories],
        turn_lengths=[
            [len(segment.token_ids) for segment in trajectory.segments if segment.sampled]
            for trajectory in trajectories
        ],
        components={
            name: torch.tensor([rewards.get(name, 0.0) for rewards in parts], dtype=torch.float64) for name in names
        },
        baselines=torch.tensor(greedy, dtype=torch.float64),
    )


def branch_rewards(trajectory: Trajectory) -> list[BranchRewards]:
    """Return the rewards of a trajectory's turns, for each branch of its episode.

    Rewards of a branch as a whole, and of turns that it does not have, go to its last turn.
    """
    turn_ids = [segment.turn_id for segment in trajectory.segments if segment.sampled]
    numbers = {turn_id: number for number, turn_id in enumerate(turn_ids)}
    paths: list[list[int]] = [list(range(len(turn_ids)))]
    events = [trajectory.rewards]
    if trajectory.branches:
        turns = branch_paths(trajectory.branches)
        paths = [[numbers[turn_id] for turn_id in path] for path in turns]
        shared = [[event for event in trajectory.rewards if event[0] is None or event[0] in path] for path in turns]
        events = [[*common, *branch.rewards] for common, branch in zip(shared, trajectory.branches, strict=True)]
    branches: list[BranchRewards] = []
    for path, of_branch in zip(paths, events, strict=True):
        position_of = {number: position for position, number in enumerate(path)}
        rewards = [0.0] * len(path)
        for turn_id, _, reward in of_branch if path else ():
            rewards[position_of.get(numbers.get(turn_id, -1), -1)] += reward
        branches.append(BranchRewards(tuple(path), rewards))
    return branches


def with_penalties(
    trajectories: Sequence[Trajectory], samples: Sequence[Sequence[TrainSample]], penalties: Mapping[RowKey, Tensor]
) -> list[Trajectory]:
    """Return copies of trajectories with the KL penalties of their turns added as reward events named ``kl``.

    The reward of a trajectory becomes ``r - sum_t penalty_t`` over its sampled tokens, and that of a turn its own
    rewards less the penalties of its tokens. Tokens in no row (cut off, dropped by an agent) have no penalty.
    """
    if not penalties:
        return list(trajectories)
    penalised = []
    for trajectory, samples_of in zip(trajectories, samples, strict=True):
        paid: defaultdict[int, float] = defaultdict(float)
        for sample in samples_of:
            turns = sample.turn_ids[sample.loss_mask].tolist()
            for turn, value in zip(turns, penalties[sample.key].tolist(), strict=True):
                paid[turn] += value
        turn_ids = [segment.turn_id for segment in trajectory.segments if segment.sampled]
        events = [(turn_ids[turn], "kl", -value) for turn, value in sorted(paid.items())]
        penalised.append(replace(trajectory, rewards=[*trajectory.rewards, *events]))
    return penalised
