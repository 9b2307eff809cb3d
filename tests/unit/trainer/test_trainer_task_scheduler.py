"""The task scheduler: requests in flight, leftover groups, and what a resumed run requests first."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from turnwise.errors import CheckpointError, TrainError
from turnwise.rollout.config import RolloutConfig, SpecConfig
from turnwise.rollout.core import RolloutRequest
from turnwise.rollout.replay.buffer import LocalReplayBuffer
from turnwise.rollout.replay.strategies import Choice, Strategy
from turnwise.tasks import Task
from turnwise.tasks.order import InMemoryOrder
from turnwise.trainer.config.train import BatchConfig, TrainConfig
from turnwise.trainer.run.task_scheduler import TaskScheduler
from turnwise.trajectory import Segment, Trajectory, TrajectoryGroup
from turnwise.types import StopReason, ToolCall


class Asked:
    """A rollout manager that only notes what it is asked for."""

    def __init__(self) -> None:
        self.requests: list[RolloutRequest] = []
        self.finished: set[str] = set()
        self.cancelled: set[str] = set()

    def generate_sequences(self, requests) -> None:
        self.requests += requests

    async def cancel(self, keys) -> frozenset[str]:
        unfinished = {request.key for request in self.requests} - self.finished
        self.cancelled |= unfinished & set(keys)
        return frozenset(unfinished & set(keys))

    def group(self, number: int) -> TrajectoryGroup:
        request = self.requests[number]
        self.finished.add(request.key)
        name = f"0-{request.key}"
        member = Trajectory(f"{name}/0.0", f"{name}/0.0", name, request.task.id)
        return TrajectoryGroup(name, request.task.id, [member], request.partition)


class Told(InMemoryOrder):
    """Records the tasks whose rewards it learns from."""

    def __init__(self, state) -> None:
        super().__init__(TASKS, shuffle=False, state=state)
        self.told: list[str] = []

    def learn(self, task_id, rewards) -> None:
        self.told.append(task_id)
        super().learn(task_id, rewards)


class Picky(Strategy):
    """Drops the groups of some tasks."""

    def __init__(self, *tasks: str) -> None:
        self.tasks = tasks

    def choose(self, ready, in_flight, step, batch_size, taken=0):
        rejected = tuple((facts.id, "picky") for facts in ready if facts.task_id in self.tasks)
        accepted = [facts.id for facts in ready if facts.task_id not in self.tasks]
        return Choice(tuple(accepted[:batch_size]) if len(accepted) >= batch_size else None, rejected)


CALL = ToolCall("c", "look", {"at": 3}, '{"at": 3}')
PROMPT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
TASKS = [
    Task("t0", "zero", {"x": 1}, env="other", env_config={"depth": 2}, source="first"),
    Task("t1", PROMPT),
    *(Task(f"t{n}", str(n)) for n in range(2, 6)),
]


def make_scheduler(
    strategy: Strategy | None = None, state=None, filter_metric: str | None = None, **changes
) -> tuple[TaskScheduler, Asked, LocalReplayBuffer, Told]:
    rollout = RolloutConfig(env=SpecConfig(name="lookup"), group_size=4)
    config = TrainConfig.model_validate({
        "name": "x", "steps": 1, "policies": {"main": {"model": {"path": Path("m")}}}, "rollout": rollout, **changes,
    })  # fmt: skip
    manager, buffer = Asked(), LocalReplayBuffer(strategy, filter_metric=filter_metric)
    stream = Told(state)
    return TaskScheduler(config, stream, manager, buffer, lambda: 0), manager, buffer, stream


async def test_groups_in_flight_survive_as_json_and_are_requested_first() -> None:
    first, manager, buffer, stream = make_scheduler(algorithm={"advantage": "remax"})
    first.top_up(3)
    await buffer.put(manager.group(1))
    ref, _ = await buffer.sample(1, "train", 1)
    first.hand_out(ref, await buffer.fetch(ref))
    assert [group.request.task.id for group in first.outstanding.values()] == ["t0", "t2"]
    state, order = json.loads(json.dumps([first.state(), stream.state()]))

    second, later, *_ = make_scheduler(state=order, algorithm={"advantage": "remax"})
    second.restore(state)
    assert second.state() == state, "what has not been asked for yet is on its way, too"
    second.top_up(4)
    assert later.requests[:2] == [manager.requests[0], manager.requests[2]]
    assert later.requests[0].task.source == "first"
    assert later.requests[0].greedy_baseline
    assert [request.task.id for request in later.requests] == ["t0", "t2", "t3", "t4"]
    second.top_up(4)
    assert len(later.requests) == 4


async def test_end_cancels_rollouts_and_a_resumed_run_requests_them_again() -> None:
    scheduler, manager, buffer, _ = make_scheduler()
    scheduler.top_up(3)
    await buffer.put(manager.group(1))
    ref, _ = await buffer.sample(1, "train", 1)
    scheduler.hand_out(ref, await buffer.fetch(ref))
    state = scheduler.state()
    await manager.cancel(set(scheduler.outstanding))
    assert manager.cancelled == {manager.requests[0].key, manager.requests[2].key}
    assert scheduler.state() == state


async def test_untrained_groups_of_a_step_are_requested_first() -> None:
    scheduler, manager, buffer, _ = make_scheduler()
    scheduler.top_up(4)
    received = []
    for number in (2, 3, 0):
        await buffer.put(manager.group(number))
        ref, _ = await buffer.sample(1, "train", 1)
        scheduler.hand_out(ref, await buffer.fetch(ref))
        received += ref.keys
        if number == 2:
            scheduler.mark_trained()
    assert [record["task"]["id"] for record in scheduler.state()] == ["t1"]
    scheduler.requeue(set(received[1:]))
    assert [record["task"]["id"] for record in scheduler.state()] == ["t3", "t0", "t1"]
    scheduler.requeue({received[0]})
    assert len(scheduler.outstanding) == 3, "that one is trained"


async def take(scheduler: TaskScheduler, buffer: LocalReplayBuffer) -> str:
    """Give a step one group; return its key."""
    ref, _ = await buffer.sample(1, "train", 1)
    scheduler.hand_out(ref, await buffer.fetch(ref))
    return ref.keys[0]


async def test_curriculum_learns_once_from_a_requeued_group() -> None:
    scheduler, manager, buffer, stream = make_scheduler()
    scheduler.top_up(3)
    received = set()
    for number in (0, 1):
        await buffer.put(manager.group(number))
        received.add(await take(scheduler, buffer))
    scheduler.requeue(received)
    assert stream.told == ["t0", "t1"]
    state, order = json.loads(json.dumps([scheduler.state(), stream.state()]))
    learned = [(record["task"]["id"], record["learned"]) for record in state]
    assert learned == [("t0", True), ("t1", True), ("t2", False)]

    later, manager, buffer, stream = make_scheduler(Picky("t1"), state=order)
    later.restore(state)
    assert later.state() == state, "what has not been asked for yet was learned from all the same"
    later.top_up(3)
    for number in (0, 1, 2):
        await buffer.put(manager.group(number))
    first = await take(later, buffer)
    assert stream.told == [], "t0 is known, and t1, which is dropped"
    assert later._learned == set(), "of what was given out or dropped nothing is kept"
    later.requeue({first})
    assert [(record["task"]["id"], record["learned"]) for record in later.state()] == [("t0", True), ("t2", False)]
    await take(later, buffer)
    assert stream.told == ["t2"]


async def test_a_step_starts_no_more_fresh_groups_than_it_takes() -> None:
    first, manager, *_ = make_scheduler(batch={"groups": 4})
    first.request_step()
    first.request_step()
    assert len(manager.requests) == 4, "the buffer asks for more"
    more, manager, *_ = make_scheduler(batch={"groups": 4, "over_sample": 1.5})
    more.request_step()
    assert len(manager.requests) == 6


async def test_prompt_messages_with_tool_calls_survive_in_the_state() -> None:
    first, manager, *_ = make_scheduler()
    first.top_up(2)
    state = json.loads(json.dumps(first.state()))
    second, later, *_ = make_scheduler()
    second.restore(state)
    second.top_up(2)
    assert later.requests == manager.requests
    assert later.requests[1].task.prompt == PROMPT


async def test_the_callers_tasks_are_in_no_checkpoint_and_are_not_replaced() -> None:
    scheduler, manager, buffer, _ = make_scheduler(Picky("t2"))
    requests = [RolloutRequest(task, 0, 4, tag="step1.1") for task in TASKS[:3]]
    scheduler.issue(requests, by_caller=True)
    assert scheduler.state() == []
    for number in range(3):
        await buffer.put(manager.group(number))
    ref, metrics = await buffer.sample(1, "train", 3)
    assert len(ref.group_ids) == 2
    assert metrics["replay/dropped/picky"] == 1
    scheduler.hand_out(ref, await buffer.fetch(ref))
    assert scheduler.outstanding == {}
    assert len(manager.requests) == 3


async def test_dropped_groups_are_replaced_and_forgotten() -> None:
    scheduler, manager, buffer, _ = make_scheduler(Picky("t0"))
    scheduler.issue(scheduler.next(2, group_size=3))
    await buffer.put(manager.group(0))
    await buffer.put(manager.group(1))
    waiting = asyncio.create_task(buffer.sample(1, "train", 2))
    await asyncio.sleep(0)
    assert [request.task.id for request in manager.requests] == ["t0", "t1", "t2"]
    assert manager.requests[2].group_size == 3, "as large as the one that it replaces"
    await buffer.put(manager.group(2))
    ref, _ = await waiting
    assert ref.keys == ("train-t1-e0", "train-t2-e0")
    assert "train-t0-e0" not in scheduler.outstanding
    scheduler.hand_out(ref, await buffer.fetch(ref))
    assert scheduler.outstanding == {}


def episode(request: RolloutRequest, tokens: int, reason: StopReason = StopReason.COMPLETED) -> Trajectory:
    name = f"0-{request.key}/1.0"
    segment = Segment(0, -1, "sampled", np.zeros(tokens, np.int32))
    return Trajectory(name, name, name.partition("/")[0], request.task.id, segments=[segment], stop_reason=reason)


BOUNDED = {"strategy": "bounded", "max_staleness": 1}
TAIL = {"tail": {"seconds": 1}}


@pytest.mark.parametrize(
    ("changes", "at", "carried", "cancelled"),
    [
        ({"batch": {"groups": 4, "over_sample": 1.25}}, 1, [], ["t2", "t3", "t4"]),
        ({"batch": {"groups": 4, "over_sample": 1.25}, "replay": BOUNDED}, 1, ["t1", "t2", "t3", "t4"], []),
        ({"batch": {"groups": 4, "over_sample": 1.25}, "replay": BOUNDED}, 2, [], ["t2", "t3", "t4"]),
        ({"batch": {"groups": 5}, "mode": "separate_async"}, 2, ["t1", "t2", "t3", "t4"], []),
        ({"batch": {"groups": 5, **TAIL}, "mode": "separate_async"}, 2, ["t1"], ["t2", "t3", "t4"]),
    ],
)
async def test_leftover_groups_are_carried_if_replay_allows_it(changes, at, carried, cancelled) -> None:
    scheduler, manager, buffer, _ = make_scheduler(**changes)
    scheduler.request_step()
    assert len(manager.requests) == 5
    for number in (0, 1):
        await buffer.put(manager.group(number))
    scheduler.count_episode(episode(manager.requests[2], 7))
    ref, _ = await buffer.sample(1, "train", 1)
    scheduler.hand_out(ref, await buffer.fetch(ref))
    metrics = await scheduler.settle_leftovers(at)
    assert [group.request.task.id for group in scheduler.outstanding.values()] == carried
    assert sorted(key.split("-")[1] for key in manager.cancelled) == cancelled
    assert metrics.get("straggler/carried", 0) == (0 if metrics == {} else len(carried))
    assert metrics.get("straggler/cancelled", 0) == len(cancelled)
    assert metrics.get("rollout/wasted_tokens", 0) == (7 if cancelled else 0)
    scheduler.request_step()
    assert len(scheduler.outstanding) == 5, "what is carried counts for the next step"


async def test_cancelled_episodes_are_counted_in_the_step_in_which_they_end() -> None:
    scheduler, manager, *_ = make_scheduler(batch={"groups": 2})
    scheduler.request_step()
    await scheduler.settle_leftovers(1)
    scheduler.count_episode(episode(manager.requests[0], 5, StopReason.CANCELLED))
    scheduler.count_episode(episode(manager.requests[1], 4, StopReason.CANCELLED))
    assert await scheduler.settle_leftovers(2) == {"rollout/cancelled_episodes": 2, "rollout/wasted_tokens": 9}
    assert await scheduler.settle_leftovers(3) == {}


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"batch": {"over_sample": 2}, "mode": "colocate_async"}, "over_sample is 2, but an asynchronous mode"),
        ({"batch": {"over_sample": 0.5}}, "over_sample"),
        ({"batch": {"tail": {"seconds": 1, "share": 0}}}, "share"),
    ],
)
def test_invalid_batch_section_is_refused(changes, match) -> None:
    with pytest.raises(ValidationError, match=match):
        make_scheduler(**changes)


@pytest.mark.parametrize(("groups", "factor", "started"), [(10, 1.1, 11), (16, 1.25, 20), (3, 1.25, 4), (7, 1.0, 7)])
def test_over_sample_rounds_the_number_of_started_groups_up(groups, factor, started) -> None:
    assert BatchConfig(groups=groups, over_sample=factor).started == started


@pytest.mark.parametrize("record", [{}, {"task": {"id": "t"}, "source": None}, {"task": 3, "source": None}, []])
def test_a_malformed_state_is_one_error(record) -> None:
    with pytest.raises(CheckpointError, match="in flight"):
        make_scheduler()[0].restore([record])


@pytest.mark.parametrize(("differ", "expected"), [(1, 1), (0, None)])
async def test_filtered_groups_are_replaced_up_to_max_refills(differ: int, expected: int | None) -> None:
    def ended(number: int) -> TrajectoryGroup:
        members = [
            Trajectory(f"{number}/{n}", f"{number}/{n}", "g", "t", rewards=[(None, "r", float(n and number < differ))])
            for n in range(2)
        ]
        return replace(manager.group(number), trajectories=members)

    filtering = {"filter_groups": {"metric": "reward", "max_refills": 2}}
    run, manager, buffer, _ = make_scheduler(filter_metric="reward", batch={"groups": 2}, replay=filtering)
    run.issue(run.next(2))
    waiting = asyncio.create_task(buffer.sample(1, "train", 2))
    for number in range(100):
        await asyncio.sleep(0)
        if number == len(manager.requests):
            break
        await buffer.put(ended(number))
    # Two for the batch; each dropped one is replaced, but no more than two batches' worth of them.
    assert len(manager.requests) == 6
    if expected is None:
        with pytest.raises(TrainError, match=r"all requested groups were dropped \(equal\)"):
            await waiting
    else:
        ref, metrics = await waiting
        assert (len(ref.group_ids), metrics["replay/dropped/equal"]) == (1, 5)
