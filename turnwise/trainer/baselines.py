"""What greedy rollouts earned, for estimators that hold a trajectory against that (``remax``).

Owns: :func:`greedy_rewards` and :func:`without_baseline`. Refuses: rolling anything out (``rollout/producer.py``), and
the estimator.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from turnwise.errors import TrainError
from turnwise.trajectory import Trajectory, TrajectoryGroup


def greedy_rewards(groups: Sequence[TrajectoryGroup], policy: str) -> dict[str, float]:
    """Return what the greedy rollout earned, by the group (``Trajectory.group_id``) that it is a baseline for.

    Where a role has several sessions in an episode it is the mean over them.

    Args:
        groups: Finished groups.
        policy: Only trajectories of this policy count.
    """
    found: defaultdict[str, list[float]] = defaultdict(list)
    for trajectory in (each for group in groups for each in group.baselines):
        if trajectory.policy == policy and trajectory.error is None:
            found[trajectory.group_id].append(trajectory.reward)
    return {name: sum(rewards) / len(rewards) for name, rewards in found.items()}


def without_baseline(members: Sequence[Trajectory], baselines: Mapping[str, float]) -> set[int]:
    """Return the numbers of members whose group has no baseline: its greedy rollout failed, or had not their role.

    Raises:
        TrainError: No member has one.
    """
    missing = {number for number, each in enumerate(members) if each.group_id not in baselines}
    if members and len(missing) == len(members):
        raise TrainError(
            f"algorithm.advantage reads what a greedy rollout earned, but none of {len(members)} trajectories has one: "
            "every greedy rollout failed (trajectories.jsonl holds them, with baseline true), or the rollout manager "
            "does not make what RolloutRequest.greedy_baseline asks for"
        )
    return missing
