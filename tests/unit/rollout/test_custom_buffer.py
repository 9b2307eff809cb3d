"""A buffer of the user's: whatever its ``sample`` does, nobody waits for ever and no group is lost."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from pathlib import Path

import pytest

from turnwise.errors import TaskError, TrainError
from turnwise.rollout.core import RolloutRequest
from turnwise.rollout.journal.journal import Journal
from turnwise.rollout.replay.buffer import LocalReplayBuffer
from turnwise.tasks import Task
from turnwise.trajectory import Trajectory, TrajectoryGroup


def group(name: str, *rewards: float) -> TrajectoryGroup:
    members = [
        Trajectory(f"{name}/{n}", f"{name}/{n}", name, name, rewards=[(None, "score", reward)])
        for n, reward in enumerate(rewards or (1.0, 0.0))
    ]
    return TrajectoryGroup(name, name, members)


class Counting(LocalReplayBuffer):
    """Asks the inherited ``sample`` and adds a metric."""

    async def sample(self, global_steps, partition_id, batch_size):
        ref, metrics = await super().sample(global_steps, partition_id, batch_size)
        return ref, {**metrics, "mine": float(len(ref.group_ids))}


class Patient(LocalReplayBuffer):
    """Waits until there is a batch."""

    async def sample(self, global_steps, partition_id, batch_size):
        while len(self.ready(partition_id)) < batch_size:
            await self.changed()
        return self.take([group.id for group in self.ready(partition_id)][:batch_size], global_steps)


class Forgetful(Patient):
    """Takes a batch, and fails then."""

    async def sample(self, global_steps, partition_id, batch_size):
        await super().sample(global_steps, partition_id, batch_size)
        raise KeyError("mine")


class Slow(LocalReplayBuffer):
    """Computes for long, in a thread; afterwards it takes a group, or waits."""

    def __init__(self, act: str, **inherited):
        super().__init__(**inherited)
        self.act, self.computes, self.computed = act, threading.Event(), threading.Event()
        self.ended: concurrent.futures.Future[None] = concurrent.futures.Future()

    def sample(self, global_steps, partition_id, batch_size):
        self.computes.set()
        assert self.computed.wait(30)
        try:
            if self.act == "wait":
                self.wait()
            return self.take(["a"], global_steps)
        except concurrent.futures.CancelledError as error:
            self.ended.set_exception(error)
            raise


class Hasty(LocalReplayBuffer):
    """Waits for a batch as long as something comes at least every hundredth of a second; takes what is there then."""

    def sample(self, global_steps, partition_id, batch_size):
        waits = []
        while not self.ready(partition_id):
            waits.append(self.wait())
        while len(self.ready(partition_id)) < batch_size and all(waits):
            waits.append(self.wait(0.01))
        ref, metrics = self.take([group.id for group in self.ready(partition_id)], global_steps)
        return ref, {**metrics, "waits": float(len(waits)), "came": float(sum(waits))}


class HastyToo(LocalReplayBuffer):
    """The same on the event loop."""

    async def sample(self, global_steps, partition_id, batch_size):
        waits = []
        while not self.ready(partition_id):
            waits.append(await self.changed())
        while len(self.ready(partition_id)) < batch_size and all(waits):
            waits.append(await self.changed(0.01))
        ref, metrics = self.take([group.id for group in self.ready(partition_id)], global_steps)
        return ref, {**metrics, "waits": float(len(waits)), "came": float(sum(waits))}


@pytest.mark.parametrize("kind", [Hasty, HastyToo])
async def test_an_own_sample_may_cut_the_tail_of_its_batch(kind: type[LocalReplayBuffer]) -> None:
    inner = kind()
    waiting = asyncio.create_task(inner.next_batch(1, "train", 3))
    await asyncio.sleep(0)
    await inner.put(group("a"))
    ref, metrics = await asyncio.wait_for(waiting, 30)
    assert ref.group_ids == ("a",), "nothing else came in a hundredth of a second"
    assert metrics["waits"] == metrics["came"] + 1, "only the last wait was in vain"


@pytest.mark.parametrize("act", ["wait", "take"])
async def test_a_thread_that_nobody_waits_for_any_more_changes_nothing_and_ends(act: str) -> None:
    inner = Slow(act)
    await inner.put(group("a"))
    sampling = asyncio.create_task(inner.next_batch(1, "train", 1))
    await asyncio.to_thread(inner.computes.wait, 30)
    sampling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sampling
    inner.computed.set()
    assert isinstance(await asyncio.to_thread(inner.ended.exception, 30), concurrent.futures.CancelledError)
    assert [group.id for group in inner.ready("train")] == ["a"]


async def test_tasks_that_cannot_be_asked_for_end_the_wait() -> None:
    inner = Patient()

    def refill(missing: int) -> bool:
        raise TaskError(f"row {missing} cannot be read")

    inner.refill_by(refill)
    async with asyncio.timeout(30):
        with pytest.raises(TaskError, match="row 2 cannot be read"):
            await inner.next_batch(1, "train", 2)


async def test_the_inherited_sample_takes_a_smaller_batch_where_nothing_more_is_asked_for() -> None:
    inner = Counting(filter_metric="reward")
    inner.refill_by(lambda missing: False)
    for name in "ab":
        inner.expect(RolloutRequest(Task(name, "?")), 0)
    sampling = asyncio.create_task(inner.next_batch(1, "train", 2))
    await asyncio.sleep(0)
    await inner.put(group("a", 1.0, 1.0))
    await asyncio.sleep(0)
    await inner.put(group("b"))
    async with asyncio.timeout(30):
        ref, metrics = await sampling
    assert (ref.group_ids, metrics["mine"], metrics["replay/dropped/equal"]) == (("b",), 1, 1)


async def test_groups_that_a_failed_sample_took_count_as_handed_out(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    inner = Forgetful(journal=journal)
    for name in "abc":
        await inner.put(group(name))
    with pytest.raises(TrainError, match=r"step 1: Forgetful\.sample raised KeyError: 'mine'"):
        await inner.next_batch(1, "train", 2)
    assert len(journal.given) == 2
