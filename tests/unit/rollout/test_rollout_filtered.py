"""Dynamic sampling: groups whose members are all equal are dropped before a strategy chooses."""

from __future__ import annotations

import numpy as np
import pytest

from turnwise.rollout.replay.buffer import LocalReplayBuffer
from turnwise.rollout.replay.group_store import group_facts
from turnwise.rollout.replay.strategies import why_filtered
from turnwise.trajectory import Segment, Trajectory, TrajectoryGroup

Rewards = list[tuple[str, float]]


def group(name: str, *members: Rewards, compared: tuple[str, ...] = (), policy: str = "main") -> TrajectoryGroup:
    segments = [Segment(0, -1, "sampled", np.arange(3, dtype=np.int32), np.zeros(3, np.float32), [(0, 0, 3)])]
    trajectories = [
        Trajectory(
            f"{name}/{number}",
            f"{name}/{number}",
            compared[number] if compared else name,
            f"task-{name}",
            policy=policy,
            segments=segments,
            rewards=[(None, which, value) for which, value in rewards],
        )
        for number, rewards in enumerate(members)
    ]
    return TrajectoryGroup(name, f"task-{name}", trajectories)


def why(metric: str, *members: Rewards, **fields: tuple[str, ...]) -> str | None:
    return why_filtered(group_facts(group("g", *members, **fields), "g", 0), metric)


def test_why_filtered_of_equal_and_missing_rewards() -> None:
    right, wrong = [("correct", 1.0), ("format", 0.5)], [("correct", 0.0), ("format", 0.5)]
    assert why("reward", right, wrong) is None
    assert why("correct", right, wrong) is None
    assert why("format", right, wrong) == "equal"
    assert why("reward", right, right) == "equal"
    # Sums are compared, not events.
    assert why("reward", [("a", 0.25), ("a", 0.25)], [("a", 0.5)]) == "equal"
    # Who has no such event has 0 of it.
    assert why("bonus", [("bonus", 1.0)], []) is None
    assert why("bonos", right, wrong) == "no_bonos"
    # One alone cannot be compared; it is for others to say what becomes of it.
    assert why("reward", right) is None
    # Roles are not compared with each other: within each all earned the same.
    assert why("reward", right, wrong, right, wrong, compared=("x", "y", "x", "y")) == "equal"
    assert why("reward", right, wrong, right, right, compared=("x", "y", "x", "y")) is None
    failed = group("g", right, wrong, right)
    failed.trajectories[1].error = "gone"
    assert why_filtered(group_facts(failed, "g", 0), "reward") == "equal"


@pytest.mark.parametrize("equal_first", [True, False])
async def test_a_buffer_asks_for_others_and_counts(equal_first: bool) -> None:
    buffer, refills, drops = LocalReplayBuffer(filter_metric="reward"), list[int](), list[str]()
    buffer.refill_by(lambda missing: refills.append(missing) or True)
    buffer.drops_to(lambda facts, why: drops.append(f"{facts.id} {why}"))
    differ, equal = group("a", [("r", 0.0)], [("r", 1.0)]), group("b", [("r", 1.0)], [("r", 1.0)])
    for finished in (equal, differ) if equal_first else (differ, equal):
        await buffer.put(finished)
    ref, metrics = await buffer.sample(1, "train", 1)
    assert (ref.group_ids, drops) == (("a",), ["b equal"])
    assert metrics["replay/dropped/equal"] == 1
    assert refills == []
