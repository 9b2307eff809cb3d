"""How long a step waits for the last groups of its batch."""

from __future__ import annotations

import asyncio
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.property_tests import examples
from turnwise.rollout.core import GroupFacts, RolloutRequest
from turnwise.rollout.replay.buffer import LocalReplayBuffer
from turnwise.rollout.replay.strategies import Bounded, Choice, Fifo, InFlight, StragglerCutoff, StragglerDeadline
from turnwise.tasks import Task
from turnwise.trajectory import Trajectory, TrajectoryGroup


def first(ready: int):
    return lambda size: Choice(tuple(str(n) for n in range(size)) if ready >= size else None)


@settings(max_examples=examples(60), deadline=None)
@given(
    times=st.lists(st.floats(0, 50), min_size=1, max_size=12),
    seconds=st.floats(0, 20),
    share=st.floats(0.1, 1),
    looks=st.lists(st.floats(0, 80), max_size=20),
)
def test_a_batch_is_cut_at_its_deadline(times, seconds, share, looks) -> None:
    tail, size, arrivals = StragglerDeadline(seconds=seconds, share=share), len(times), sorted(times)
    begins = arrivals[tail.least(size) - 1]
    assert tail.least(size) >= share * size - 1e-6
    cut, moment = StragglerCutoff(), 0.0
    pending = sorted([*arrivals, *looks])
    while pending:
        moment = pending.pop(0)
        ready = sum(time <= moment for time in arrivals)
        if ready == size:
            # Complete: nobody asks how long to wait.
            assert moment <= max(arrivals[-1], begins + seconds)
            return
        cut = tail.look(first(ready), ready, size, cut.since, moment)
        assert (cut.since is not None) == (moment >= begins)
        assert (cut.due is not None) == (begins <= moment < begins + seconds)
        if cut.take is not None:
            assert math.isclose(moment, begins + seconds, abs_tol=1e-9) or moment in looks or moment in arrivals
            assert tail.least(size) <= len(cut.take) == ready
            return
        if cut.due is not None and cut.due not in pending:
            # Whoever waits looks again when it is due, if nothing comes before.
            pending = sorted([*pending, cut.due])
    raise AssertionError("it waited for ever")


def test_the_share_begins_anew_where_groups_were_dropped() -> None:
    tail = StragglerDeadline(seconds=5.0, share=0.5)
    assert tail.look(first(2), 2, 4, None, 10.0) == StragglerCutoff(10.0, due=15.0)
    assert tail.look(first(1), 1, 4, 10.0, 12.0) == StragglerCutoff()
    assert tail.look(first(3), 3, 4, None, 20.0) == StragglerCutoff(20.0, due=25.0)
    assert tail.look(first(3), 3, 4, 20.0, 25.0) == StragglerCutoff(20.0, ("0", "1", "2"))


def test_stale_groups_do_not_count_for_the_share_of_a_cut_batch() -> None:
    def facts(number: int, version: int) -> GroupFacts:
        return GroupFacts(str(number), str(number), "t", "train", number, version, (1.0,))

    strategy = Bounded(1, "wait")
    ready = [facts(0, 0), facts(1, 2), facts(2, 3)]
    in_flight = [InFlight(str(n), "t", "train", 2) for n in range(5)]
    assert strategy.choose(ready, in_flight, 4, 2).take is None, "five more have to be trained in this step"
    alone = lambda size: strategy.choose(ready, (), 4, size)  # noqa: E731
    assert StragglerDeadline(seconds=0.0, share=1.0).look(alone, 3, 3, None, 0.0) == StragglerCutoff(), (
        "the first one is three steps old"
    )
    assert StragglerDeadline(seconds=0.0, share=0.5).look(alone, 3, 3, None, 0.0).take == ("1", "2")


async def test_a_step_goes_on_without_its_last_groups() -> None:
    buffer = LocalReplayBuffer(Fifo("key"), tail=StragglerDeadline(seconds=0.0, share=0.5))
    for number in range(4):
        buffer.expect(RolloutRequest(Task(f"t{number}", "go")), 0)
    waiting = asyncio.create_task(buffer.sample(1, "train", 4))
    member = Trajectory("e", "e", "g", "t")
    await buffer.put(TrajectoryGroup("g3", "t3", [member]))
    await asyncio.sleep(0)
    assert not waiting.done()
    await buffer.put(TrajectoryGroup("g1", "t1", [member]))
    async with asyncio.timeout(10):
        ref, metrics = await waiting
    assert ref.group_ids == ("g1", "g3")
    assert metrics["straggler/cut_groups"] == 2
    assert metrics["replay/in_flight"] == 2


async def test_the_deadline_wakes_the_step_though_nothing_comes() -> None:
    buffer = LocalReplayBuffer(tail=StragglerDeadline(seconds=0.02, share=0.5))
    await buffer.put(TrajectoryGroup("g", "t", [Trajectory("e", "e", "g", "t")]))
    async with asyncio.timeout(10):
        ref, metrics = await buffer.sample(1, "train", 2)
    assert ref.group_ids == ("g",)
    assert metrics["straggler/wait_s"] >= 0.02


@pytest.mark.parametrize("size", [1, 7, 10, 16])
def test_a_share_of_all_cuts_nothing(size) -> None:
    assert StragglerDeadline(seconds=0.0, share=1.0).least(size) == size
    assert StragglerDeadline(seconds=0.0, share=0.9).least(10) == 9
