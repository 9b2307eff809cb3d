from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from turnwise.errors import EngineDied, TrainError
from turnwise.rollout.replay.buffer import LocalReplayBuffer
from turnwise.rollout.replay.strategies import Bounded, Fifo
from turnwise.trajectory import Segment, Trajectory, TrajectoryGroup


def group(name: str, partition: str = "train", failed: int = 0) -> TrajectoryGroup:
    ids = np.arange(3, dtype=np.int32)
    segment = Segment(0, -1, "context", ids, messages=({"role": "user", "content": "hi"},), tools=({"name": "t"},))
    trajectory = Trajectory(f"{name}/0", f"{name}/0", name, "task", segments=[segment], rewards=[(None, "score", 1.0)])
    trajectory.metrics["turns"] = 2.0
    return TrajectoryGroup(name, "task", [trajectory], partition, failed)


def sampled_by(version: int, name: str) -> TrajectoryGroup:
    ids, logprobs = np.arange(3, dtype=np.int32), np.zeros(3, np.float32)
    whole = group(name)
    segment = Segment(1, 0, "sampled", ids, logprobs=logprobs, weight_versions=((version, 0, 3),))
    trajectory = whole.trajectories[0]
    return replace(whole, trajectories=[replace(trajectory, segments=[*trajectory.segments, segment])])


async def test_sample_waits_for_enough_groups_of_its_partition() -> None:
    buffer = LocalReplayBuffer()
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
    assert metrics["replay/ready"] == 1
    assert metrics["replay/wait_s"] >= 0
    assert [g.id for g in await buffer.fetch(ref)] == ["b", "a"]
    other, _ = await buffer.sample(1, "val", 1)
    assert other.group_ids == ("v",)
    assert other.id != ref.id


async def test_order_by_id_does_not_depend_on_arrival() -> None:
    for names in (["g2", "g1", "g3"], ["g3", "g2", "g1"]):
        buffer = LocalReplayBuffer(Fifo("key"))
        for name in names:
            await buffer.put(group(name))
        ref, _ = await buffer.sample(1, "train", 3)
        assert ref.group_ids == ("g1", "g2", "g3")


async def test_two_waiters_get_different_groups() -> None:
    buffer = LocalReplayBuffer()
    tasks = [asyncio.create_task(buffer.sample(1, "train", 2)) for _ in range(2)]
    for number in range(4):
        await asyncio.sleep(0)
        await buffer.put(group(str(number)))
    found = [(await task)[0].group_ids for task in tasks]
    assert sorted(name for names in found for name in names) == ["0", "1", "2", "3"]


async def test_a_cancelled_waiter_takes_nothing() -> None:
    buffer = LocalReplayBuffer()
    waiting = asyncio.create_task(buffer.sample(1, "train", 1))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await buffer.put(group("a"))
    assert (await buffer.sample(1, "train", 1))[0].group_ids == ("a",)


async def test_failure_reaches_waiters_and_later_callers() -> None:
    buffer = LocalReplayBuffer()
    waiting = [asyncio.create_task(buffer.sample(1, name, 1)) for name in ("train", "val")]
    await asyncio.sleep(0)
    buffer.fail(EngineDied("the server ended"))
    buffer.fail(ValueError("later"))
    for task in waiting:
        with pytest.raises(EngineDied, match="the server ended"):
            await task
    with pytest.raises(EngineDied):
        await buffer.sample(2, "train", 1)
    other = LocalReplayBuffer()
    other.fail(ValueError("boom"))
    with pytest.raises(TrainError, match="rollouts ended: ValueError: boom"):
        await other.sample(3, "train", 1)


async def test_fields_leave_out_what_is_not_read() -> None:
    buffer = LocalReplayBuffer()
    original = group("a")
    await buffer.put(original)
    ref, _ = await buffer.sample(1, "train", 1)
    (kept,) = await buffer.fetch(ref, ["tokens", "rewards"])
    (member,) = kept.trajectories
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


async def test_release_forgets() -> None:
    buffer = LocalReplayBuffer()
    await buffer.put(group("a"))
    ref, _ = await buffer.sample(1, "train", 1)
    await buffer.release(ref)
    await buffer.release(ref)
    with pytest.raises(TrainError, match="was released or never handed out"):
        await buffer.fetch(ref)


async def test_bad_arguments_are_named() -> None:
    buffer = LocalReplayBuffer()
    with pytest.raises(TrainError, match="partition is 'test'"):
        await buffer.put(group("a", "test"))
    with pytest.raises(TrainError, match="partition is 'test'"):
        await buffer.sample(1, "test", 1)
    with pytest.raises(TrainError, match="asks for 0 groups"):
        await buffer.sample(1, "train", 0)


async def test_a_server_that_never_gets_the_new_weights_ends_the_run_instead_of_sampling_for_ever() -> None:
    buffer = LocalReplayBuffer(Bounded(0, "drop"))
    asked = []

    def refill(missing: int) -> bool:
        for _ in range(missing):
            asked.append(asyncio.ensure_future(buffer.put(sampled_by(0, f"g{len(asked)}"))))
        return True

    buffer.refill_by(refill)
    with pytest.raises(TrainError, match=r"requested groups came back too stale .* the new weights"):
        await buffer.sample(2, "train", 1)
    assert len(asked) == 17


async def test_what_a_frozen_policy_sampled_makes_no_group_old() -> None:
    buffer = LocalReplayBuffer(Bounded(0, "drop"))
    whole = sampled_by(1, "g")
    frozen = replace(sampled_by(0, "f").trajectories[0], policy="rival")
    await buffer.put(replace(whole, trajectories=[*whole.trajectories, frozen]))
    ref, _ = await buffer.sample(2, "train", 1)
    assert ref.group_ids == ("g",)
