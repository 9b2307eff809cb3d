"""Groups whose members failed for good, and groups that are cancelled before they are finished."""

from __future__ import annotations

import asyncio

import pytest
from pydantic import ValidationError

from support.chat.toy_renderer import ToyRenderer
from turnwise.envs.core import Env, StepResult
from turnwise.errors import InferenceError, TrainError
from turnwise.inference.scripted import ScriptedClient
from turnwise.rollout.config import RolloutConfig, SpecConfig
from turnwise.rollout.core import RolloutParts, RolloutRequest
from turnwise.rollout.producer import RolloutProducer
from turnwise.rollout.replay.buffer import LocalReplayBuffer
from turnwise.tasks import Task
from turnwise.trajectory import Trajectory, TrajectoryGroup
from turnwise.types import StopReason

CLOSED: list[str] = []


class Place(Env):
    """One answer ends it; says when it is closed."""

    def reset(self, task=None, *, seed=None):
        self.task = task.id
        return task.prompt, {}

    def step(self, action):
        return StepResult("", 1.0, True, False, {})

    def close(self):
        CLOSED.append(self.task)


class Bench:
    """A producer and its buffer; the script says what is sampled."""

    def __init__(self, script, *, min_members: int = 1, refill: bool = False, **config) -> None:
        self.script, self.settings = script, {"retries": 0, **config}
        self.buffer = LocalReplayBuffer(min_members=min_members)
        self.written: list[Trajectory] = []
        self.asked = 0
        if refill:
            self.buffer.refill_by(self.more)

    async def __aenter__(self) -> Bench:
        CLOSED.clear()
        renderer = ToyRenderer()
        config = RolloutConfig(
            env=SpecConfig(name=f"{__name__}:Place"), agent=SpecConfig(name="single_turn"), **self.settings
        )
        self.producer = await RolloutProducer.create(
            config,
            ScriptedClient(renderer, self.script),
            self.buffer,
            RolloutParts(renderer, write=self.written.append),
        )
        return self

    async def __aexit__(self, *exc_info) -> None:
        await self.producer.close()

    def more(self, groups: int) -> bool:
        requests = [RolloutRequest(Task(f"t{self.asked + n}", "go"), group_size=2) for n in range(groups)]
        self.asked += groups
        for request in requests:
            self.buffer.expect(request, 0)
        self.producer.generate_sequences(requests)
        return True

    async def sample(self, groups: int):
        async with asyncio.timeout(20):
            return await self.buffer.sample(1, "train", groups)


def breaking(*failing: str):
    """A script in which the server fails in these members, ``task/member`` each."""

    def script(request):
        group, _, member = request.session_id.partition("/")
        episode = f"{group.split('-')[2]}/{member[0]}"
        return InferenceError(f"no answer for {episode}") if {episode, episode.split("/")[0]} & set(failing) else "42"

    return script


async def test_a_group_that_lost_all_its_members_is_replaced() -> None:
    async with Bench(breaking("t0", "t1/1"), refill=True) as bench:
        bench.more(2)
        ref, metrics = await bench.sample(2)
        groups = {group.task_id: group for group in await bench.buffer.fetch(ref)}
    assert groups.keys() == {"t1", "t2"}
    assert groups["t1"].failed == 1
    assert metrics["replay/dropped/failed"] == 1
    assert metrics["replay/failed"] == 1


async def test_a_ragged_group_is_dropped_below_min_members() -> None:
    async with Bench(breaking("t0/1"), min_members=2, refill=True) as bench:
        bench.more(1)
        ref, metrics = await bench.sample(1)
        assert [group.task_id for group in await bench.buffer.fetch(ref)] == ["t1"]
    assert metrics["replay/dropped/failed"] == 1


async def test_too_many_lost_groups_in_a_row_end_the_run_with_the_last_error(monkeypatch) -> None:
    monkeypatch.setattr("turnwise.rollout.producer.MAX_FAILED_GROUPS", 4)
    lost = breaking(*(f"t{n}" for n in range(20) if n != 2))
    async with Bench(lost, refill=True, concurrency=2) as bench:
        with pytest.raises(TrainError, match=r"every episode of 4 groups in a row.*InferenceError: no answer for t6/"):
            await bench.sample(2)
    assert bench.asked <= 8


def test_a_rule_that_no_group_can_meet_is_refused() -> None:
    env = SpecConfig(name="lookup")
    with pytest.raises(ValidationError, match=r"min_members is 9, but a group has 8"):
        RolloutConfig(env=env, min_members=9)


async def test_cancelled_groups_are_closed_written_and_never_arrive() -> None:
    started, gate = asyncio.Event(), asyncio.Event()
    waiting = 0

    async def script(request):
        nonlocal waiting
        if "-t1-" in request.session_id and "/1." in request.session_id:
            waiting += 1
            started.set()
            await gate.wait()
        return "42"

    async with Bench(script) as bench:
        bench.more(3)
        await started.wait()
        ref, _ = await bench.sample(2)
        keys = ["train-t1-e0", "train-t0-e0", "nobody"]
        assert await bench.producer.cancel(keys) == {"train-t1-e0"}, "what is finished is left alone"
        assert waiting == 1
        assert sorted(CLOSED) == ["t0", "t0", "t1", "t1", "t2", "t2"]
        bench.buffer.discard(keys, "late")
        assert await bench.producer.cancel(keys) == frozenset()
        gate.set()
    assert {group.task_id for group in await bench.buffer.fetch(ref)} == {"t0", "t2"}
    reasons = {trajectory.id.split("-", 1)[1]: trajectory.stop_reason for trajectory in bench.written}
    assert reasons.pop("train-t1-e0/1.0") is StopReason.CANCELLED
    assert set(reasons.values()) == {StopReason.COMPLETED}


async def test_discarded_groups_are_neither_waited_for_nor_handed_out() -> None:
    buffer, refill_counts, dropped = LocalReplayBuffer(), [], []
    buffer.refill_by(lambda missing: not refill_counts.append(missing))
    buffer.drops_to(lambda facts, why: dropped.append((facts.key, why)))
    requests = [RolloutRequest(Task(f"t{number}", "go")) for number in range(3)]
    for request in requests:
        buffer.expect(request, 0)
    member = Trajectory("e", "e", "g0", "t0")
    await buffer.put(TrajectoryGroup("g0", "t0", [member]))
    waiting = asyncio.create_task(buffer.sample(1, "train", 2))
    await asyncio.sleep(0)
    assert refill_counts == []
    buffer.discard(["train-t0-e0", "train-t1-e0"], "late")
    await asyncio.sleep(0)
    assert refill_counts == [1], "one is still in flight"
    assert dropped == [("train-t0-e0", "late")]
    for name in ("t2", "t9"):
        await buffer.put(TrajectoryGroup(name, name, [member]))
    ref, metrics = await waiting
    assert ref.keys == ("train-t2-e0", "t9"), "nobody asked for the second one"
    assert metrics["replay/dropped/late"] == 1
