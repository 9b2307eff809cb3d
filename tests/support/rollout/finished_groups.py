"""Finished groups with everything that a trajectory may hold."""

from __future__ import annotations

from typing import Any

import numpy as np

from turnwise.trajectory import Segment, Trajectory, TrajectoryGroup
from turnwise.types import StopReason


def lively(name: str, *, members: int = 1, baselines: int = 0, tokens: int = 3) -> TrajectoryGroup:
    """Return a group whose members have two branches, rewards, notes and words that are not ASCII."""
    trajectories = [_trajectory(name, number, tokens) for number in range(members + baselines)]
    for trajectory in trajectories[members:]:
        trajectory.baseline = True
    return TrajectoryGroup(
        name, "task", trajectories[:members], failed=1, source="rows", baselines=trajectories[members:]
    )


def _trajectory(name: str, number: int, tokens: int) -> Trajectory:
    draw = np.random.default_rng(number)
    ids = draw.integers(0, 150_000, 2 * tokens + 1, dtype=np.int32)
    logprobs = -draw.random(tokens, dtype=np.float32)
    prompt, answer = (
        ({"role": "user", "content": "héllo\n"},),
        ({"role": "assistant", "content": "✓", "turn_id": "t1"},),
    )
    return Trajectory(
        f"{name}/{number}", f"{name}/{number}", name, "task",
        segments=[
            Segment(0, -1, "context", ids[:tokens], prompt, tools=({"name": "look"},), template_args={"think": False}),
            Segment(1, 0, "sampled", ids[tokens:-1], answer, "t1", logprobs, ((0, 0, 1), (2, 1, tokens)), "stop"),
            Segment(2, 0, "sampled", ids[-1:], answer, "t2", logprobs[:1], ((2, 0, 1),), "length", "resample",
                    left_out=((0, 1),)),
            Segment(3, 2, "context", ids[:0]),
        ],
        rewards=[("t1", "tool", 0.1), (None, "score", 1.0)],
        stop_reason=StopReason.MAX_TURNS, metrics={"turns": 2.0}, turn_metrics={"t1": {"calls": 1.0}},
        turn_notes={"": {"why": "none"}}, states={"": "begin"}, seed=7,
    )  # fmt: skip


def same(one: TrajectoryGroup, other: TrajectoryGroup) -> bool:
    """Whether two groups hold the same."""

    def record(group: TrajectoryGroup) -> tuple[Any, ...]:
        members = [trajectory.to_bytes() for trajectory in (*group.trajectories, *group.baselines)]
        return group.id, group.task_id, group.partition, group.failed, group.source, members

    return record(one) == record(other)
