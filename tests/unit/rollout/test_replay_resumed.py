"""The buffer of a process that goes on where another one was killed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from turnwise.rollout.core import RolloutRequest
from turnwise.rollout.journal.journal import Journal
from turnwise.rollout.replay.buffer import LocalReplayBuffer
from turnwise.tasks import Task
from turnwise.trajectory import Segment, Trajectory, TrajectoryGroup

REQUEST = RolloutRequest(Task("a", "go"), group_size=3)


def finish(journal: Journal, number: int, *versions: int) -> None:
    """Note a member whose tokens were sampled by these weights."""
    name = f"0-{REQUEST.key}/{number}.0"
    ids = np.arange(len(versions), dtype=np.int32)
    spans = tuple((version, at, at + 1) for at, version in enumerate(versions))
    segments = [
        Segment(0, -1, "context", np.arange(2, dtype=np.int32)),
        Segment(1, 0, "sampled", ids, logprobs=np.zeros(len(ids), np.float32), weight_versions=spans),
    ]
    trajectory = Trajectory(name, name, f"0-{REQUEST.key}", "a", segments=segments)
    journal.write(trajectory)
    journal.member(REQUEST.key, f"0-{REQUEST.key}", number, [trajectory])


@pytest.mark.parametrize(("version", "expected"), [(4, 2), (1, 1)])
async def test_a_group_is_as_old_as_the_members_that_were_found(tmp_path: Path, version: int, expected: int) -> None:
    journal = Journal.open(tmp_path)
    finish(journal, 0, 3, 4)
    finish(journal, 2, 2, 3)
    buffer = LocalReplayBuffer(journal=Journal.open(tmp_path, part=1))
    assert not buffer.expect(REQUEST, version)
    other = RolloutRequest(Task("b", "go"), group_size=3)
    assert not buffer.expect(other, version)
    assert [flight.version for flight in buffer.in_flight("train")] == [expected, version]


@pytest.mark.parametrize("resumed_step", [0, 3])
async def test_a_drop_before_the_first_sample_is_undone_with_the_step_after_the_checkpoint(
    tmp_path: Path, resumed_step: int
) -> None:
    finish(Journal.open(tmp_path), 0, 0)
    buffer = LocalReplayBuffer(journal=Journal.open(tmp_path, part=1, after_step=resumed_step))
    buffer.expect(REQUEST, resumed_step)
    buffer.discard([REQUEST.key], "surplus")
    # Killed before the next step was saved: what it dropped is there again; after that it is gone for ever.
    assert Journal.open(tmp_path, part=2, after_step=resumed_step).restore(REQUEST.key) is not None
    buffer = LocalReplayBuffer(journal=Journal.open(tmp_path, part=3, after_step=resumed_step))
    buffer.expect(REQUEST, resumed_step)
    buffer.discard([REQUEST.key], "surplus")
    assert Journal.open(tmp_path, part=4, after_step=resumed_step + 1).restore(REQUEST.key) is None


async def test_a_group_that_lost_its_members_is_refused_again_where_its_step_is_undone(tmp_path: Path) -> None:
    for part in range(2):
        dropped: list[str] = []
        buffer = LocalReplayBuffer(journal=Journal.open(tmp_path, part=part), min_members=2)
        buffer.drops_to(lambda facts, why, drops=dropped: drops.append(f"{facts.key} {why}"))
        if not buffer.expect(REQUEST, 0):
            name = f"0-{REQUEST.key}"
            member = Trajectory(f"{name}/0.0", f"{name}/0.0", name, "a")
            await buffer.put(TrajectoryGroup(name, "a", [member], failed=2))
        assert dropped == [f"{REQUEST.key} failed"]
        assert buffer.ready("train") == buffer.in_flight("train") == []
