"""What every replay buffer keeps, wherever its groups wait: in memory, or behind a journal."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pytest

from support.rollout.finished_groups import lively, same
from turnwise.errors import EngineDied, TrainError
from turnwise.rollout.core import RolloutRequest
from turnwise.rollout.journal.journal import Journal
from turnwise.rollout.replay.buffer import LocalReplayBuffer
from turnwise.rollout.replay.strategies import Bounded, Fifo, Strategy
from turnwise.tasks import Task
from turnwise.trajectory import Segment, Trajectory, TrajectoryGroup

Make: TypeAlias = Callable[..., LocalReplayBuffer]


@pytest.fixture(params=["memory", "journal"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    """Makes buffers, each of a run of its own."""
    journals: list[Journal] = []

    def made(strategy: Strategy | None = None) -> LocalReplayBuffer:
        if request.param == "memory":
            return LocalReplayBuffer(strategy)
        journals.append(Journal.open(tmp_path / str(len(journals))))
        return LocalReplayBuffer(strategy, journals[-1])

    yield made
    for journal in journals:
        journal.close()


@pytest.fixture
def process(tmp_path: Path) -> Make:
    """Makes the buffers of one run's processes: each begins after a step, where the one before was killed."""
    parts: list[int] = []

    def begun(strategy: Strategy | None = None, *, resumed_step: int = 0) -> LocalReplayBuffer:
        parts.append(resumed_step)
        journal = Journal.open(tmp_path, part=len(parts) - 1, after_step=resumed_step)
        return LocalReplayBuffer(strategy, journal)

    return begun


def group(name: str, partition: str = "train", failed: int = 0) -> TrajectoryGroup:
    ids = np.arange(3, dtype=np.int32)
    segment = Segment(0, -1, "context", ids, messages=({"role": "user", "content": "hi"},), tools=({"name": "t"},))
    trajectory = Trajectory(f"{name}/0", f"{name}/0", name, "task", segments=[segment], rewards=[(None, "score", 1.0)])
    trajectory.metrics["turns"] = 2.0
    return TrajectoryGroup(name, "task", [trajectory], partition, failed)


def sampled_by(version: int, name: str) -> TrajectoryGroup:
    ids, logprobs = np.arange(3, dtype=np.int32), np.zeros(3, np.float32)
    sampled = group(name)
    segment = Segment(1, 0, "sampled", ids, logprobs=logprobs, weight_versions=((version, 0, 3),))
    trajectory = sampled.trajectories[0]
    return replace(sampled, trajectories=[replace(trajectory, segments=[*trajectory.segments, segment])])


async def test_sample_waits_for_enough_groups_of_its_partition(make: Make) -> None:
    buffer = make()
    waiting = asyncio.create_task(buffer.sample(1, "train", 2))
    await buffer.put(group("b", failed=2))
    await buffer.put(group("v", "val"))
    await asyncio.sleep(0)
    assert not waiting.done()
    await buffer.put(group("a", failed=1))
    await buffer.put(group("c"))
    ref, metrics = await waiting
    assert ref.group_ids == ("b", "a")
    assert metrics["replay/failed"] == 3
    assert metrics["replay/wait_s"] >= 0
    await buffer.put(group("d"))
    assert (await buffer.sample(2, "train", 1))[1]["replay/ready"] == 1
    assert [g.id for g in await buffer.fetch(ref)] == ["b", "a"]
    other, _ = await buffer.sample(1, "val", 1)
    assert other.group_ids == ("v",)
    assert other.id != ref.id


async def test_order_by_id_does_not_depend_on_arrival(make: Make) -> None:
    for names in (["g2", "g1", "g3"], ["g3", "g2", "g1"]):
        buffer = make(Fifo("key"))
        for name in names:
            await buffer.put(group(name))
        ref, _ = await buffer.sample(1, "train", 3)
        assert ref.group_ids == ("g1", "g2", "g3")


async def test_two_waiters_get_different_groups(make: Make) -> None:
    buffer = make()
    tasks = [asyncio.create_task(buffer.sample(1, "train", 2)) for _ in range(2)]
    for number in range(4):
        await asyncio.sleep(0)
        await buffer.put(group(str(number)))
    sampled_ids = [(await task)[0].group_ids for task in tasks]
    assert sorted(name for names in sampled_ids for name in names) == ["0", "1", "2", "3"]


async def test_a_cancelled_waiter_takes_nothing(make: Make) -> None:
    buffer = make()
    waiting = asyncio.create_task(buffer.sample(1, "train", 1))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await buffer.put(group("a"))
    assert (await buffer.sample(1, "train", 1))[0].group_ids == ("a",)


async def test_failure_reaches_waiters_and_later_callers(make: Make) -> None:
    buffer = make()
    waiting = [asyncio.create_task(buffer.sample(1, name, 1)) for name in ("train", "val")]
    await asyncio.sleep(0)
    buffer.fail(EngineDied("the server ended"))
    buffer.fail(ValueError("later"))
    for task in waiting:
        with pytest.raises(EngineDied, match="the server ended"):
            await task
    with pytest.raises(EngineDied):
        await buffer.sample(2, "train", 1)
    other = make()
    other.fail(ValueError("boom"))
    with pytest.raises(TrainError, match="rollouts ended: ValueError: boom"):
        await other.sample(3, "train", 1)


async def test_fetch_returns_only_the_named_fields(make: Make) -> None:
    buffer = make()
    original = group("a")
    await buffer.put(original)
    ref, _ = await buffer.sample(1, "train", 1)
    (reduced,) = await buffer.fetch(ref, ["tokens", "rewards"])
    (member,) = reduced.trajectories
    assert member.segments[0].messages == ()
    assert member.segments[0].tools is None
    assert member.segments[0].token_ids.tolist() == [0, 1, 2]
    assert member.reward == 1.0
    assert member.metrics == {}
    (bare,) = await buffer.fetch(ref, ["messages", "metrics"])
    assert bare.trajectories[0].segments == []
    assert bare.trajectories[0].rewards == []
    assert bare.trajectories[0].metrics == {"turns": 2.0}
    # The buffer's own groups stay whole.
    assert (await buffer.fetch(ref))[0].trajectories[0].segments[0].messages
    with pytest.raises(TrainError, match="fields holds 'ids'"):
        await buffer.fetch(ref, ["ids"])


async def test_released_groups_cannot_be_fetched(make: Make) -> None:
    buffer = make()
    await buffer.put(group("a"))
    ref, _ = await buffer.sample(1, "train", 1)
    await buffer.release(ref)
    await buffer.release(ref)
    with pytest.raises(TrainError, match="was released or never handed out"):
        await buffer.fetch(ref)


async def test_bad_arguments_are_named(make: Make) -> None:
    buffer = make()
    with pytest.raises(TrainError, match="partition is 'test'"):
        await buffer.put(group("a", "test"))
    with pytest.raises(TrainError, match="partition is 'test'"):
        await buffer.sample(1, "test", 1)
    with pytest.raises(TrainError, match="asks for 0 groups"):
        await buffer.sample(1, "train", 0)


async def test_a_server_that_never_gets_the_new_weights_ends_the_run_instead_of_sampling_for_ever(make: Make) -> None:
    buffer = make(Bounded(0, "drop"))
    puts = []

    def refill(missing: int) -> bool:
        for _ in range(missing):
            puts.append(asyncio.ensure_future(buffer.put(sampled_by(0, f"g{len(puts)}"))))
        return True

    buffer.refill_by(refill)
    with pytest.raises(TrainError, match=r"requested groups came back too stale .* the new weights"):
        await buffer.sample(2, "train", 1)
    assert len(puts) == 17


async def test_samples_of_a_frozen_policy_do_not_count_as_staleness(make: Make) -> None:
    buffer = make(Bounded(0, "drop"))
    sampled = sampled_by(1, "g")
    frozen = replace(sampled_by(0, "f").trajectories[0], policy="rival", frozen=True)
    await buffer.put(replace(sampled, trajectories=[*sampled.trajectories, frozen]))
    ref, _ = await buffer.sample(2, "train", 1)
    assert ref.group_ids == ("g",)


def asked(number: int) -> RolloutRequest:
    return RolloutRequest(Task(f"t{number}", "go"))


def finished(number: int) -> TrajectoryGroup:
    return replace(lively(f"0-{number}-train-t{number}-e0", members=2, baselines=1), task_id=f"t{number}")


async def test_after_a_kill_nothing_is_lost_and_nothing_is_trained_twice(process: Make) -> None:
    first = process()
    for number in range(5):
        assert not first.expect(asked(number), 0)
        await first.put(finished(number))
    for step in (1, 2):
        ref, _ = await first.sample(step, "train", 2)
        assert all(map(same, await first.fetch(ref), [finished(2 * step - 2), finished(2 * step - 1)]))
        await first.release(ref)
    # It is killed before step 2 is in a checkpoint: what that step took is there again, and nothing of step 1.
    second = process(resumed_step=1)
    assert [second.expect(asked(number), 0) for number in range(6)] == [False, False, True, True, True, False]
    await second.put(finished(5))
    ref, metrics = await second.sample(2, "train", 4)
    assert all(map(same, await second.fetch(ref), [finished(number) for number in (2, 3, 4, 5)]))
    assert metrics["replay/in_flight"] == 2
    third = process(resumed_step=2)
    assert not any(third.expect(asked(number), 0) for number in range(6))
