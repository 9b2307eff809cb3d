"""Groups that ``mixed`` stores are there again for the process that goes on: it chooses as if nobody was killed."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.property_tests import examples
from support.rollout.record_files import spoil
from turnwise.errors import FormatError
from turnwise.rollout.core import RolloutRequest
from turnwise.rollout.journal.journal import Journal
from turnwise.rollout.journal.state import read_journal
from turnwise.rollout.replay.buffer import LocalReplayBuffer
from turnwise.rollout.replay.strategies import Mixed, stored_groups
from turnwise.tasks import Task
from turnwise.trajectory import Segment, Trajectory, TrajectoryGroup


@dataclass(frozen=True)
class Plan:
    """A run in which rollouts take no time, and where it is killed."""

    groups: int
    share: float
    uses: int
    keep: int
    bound: int | None
    extra: int
    failed: frozenset[int]
    seed: int
    save_every: int
    kills: tuple[tuple[int, bool], ...]
    steps: int = 8


@dataclass
class Saved:
    """A checkpoint."""

    step: int = 0
    position: int = 0
    outstanding: tuple[int, ...] = ()


@dataclass
class Run:
    """What a run has chosen, by step; :meth:`go` is one process of it."""

    home: Path
    plan: Plan
    saved: Saved = field(default_factory=Saved)
    chosen: list[tuple[int, tuple[str, ...]]] = field(default_factory=list)
    part: int = 0

    def through(self) -> list[tuple[int, tuple[str, ...]]]:
        """Go on to the end, killed as planned."""
        for kill in (*self.plan.kills, (self.plan.steps + 1, False)):
            asyncio.run(self.go(*kill))
            self.part += 1
        return self.chosen

    async def go(self, dies: int, before_release: bool) -> None:
        plan, saved = self.plan, self.saved
        journal = Journal.open(self.home, part=self.part, after_step=saved.step, max_uses=plan.uses)
        strategy = Mixed(plan.share, plan.uses, plan.keep, plan.bound, seed=plan.seed)
        buffer = LocalReplayBuffer(strategy, journal)
        outstanding: dict[str, int] = {}
        putting: list[asyncio.Task[None]] = []
        self.position, step = saved.position, saved.step

        def ask(numbers) -> None:
            for number in numbers:
                request = RolloutRequest(Task(f"t{number}", "?"))
                outstanding[request.key] = number
                if not buffer.expect(request, step):
                    putting.append(asyncio.create_task(buffer.put(self.group(request, number, step))))

        def more(missing: int) -> bool:
            first, self.position = self.position, self.position + missing
            ask(range(first, self.position))
            return True

        buffer.refill_by(more)
        buffer.drops_to(lambda facts, why: outstanding.pop(facts.key))
        ask(saved.outstanding)
        while step < plan.steps:
            more(max(0, plan.groups - stored_groups(plan.share, plan.groups) + plan.extra - len(outstanding)))
            await asyncio.gather(*putting)
            ref, _ = await buffer.sample(step + 1, "train", plan.groups)
            self.chosen.append((step + 1, ref.keys))
            if step + 1 == dies and before_release:
                return
            assert [group.id for group in await buffer.fetch(ref)] == list(ref.group_ids)
            await buffer.release(ref)
            for key in ref.keys:
                outstanding.pop(key, None)
            step += 1
            if step % plan.save_every == 0:
                self.saved = Saved(step, self.position, tuple(outstanding.values()))
            if step == dies:
                return

    def group(self, request: RolloutRequest, number: int, version: int) -> TrajectoryGroup:
        name = f"{self.part}-{request.key}"
        members = [] if number in self.plan.failed else [member(name, request.task.id, version)]
        return TrajectoryGroup(name, request.task.id, members, failed=1 - len(members))


def member(group: str, task: str, version: int) -> Trajectory:
    segments = [
        Segment(0, -1, "context", np.arange(2, dtype=np.int32)),
        Segment(
            1,
            0,
            "sampled",
            np.arange(2, dtype=np.int32),
            turn_id="t0",
            logprobs=np.zeros(2, np.float32),
            weight_versions=((version, 0, 2),),
            finish_reason="stop",
        ),
    ]
    return Trajectory(f"{group}/0.0", f"{group}/0.0", group, task, segments=segments, rewards=[(None, "score", 1.0)])


PLANS = st.builds(
    Plan,
    groups=st.sampled_from([2, 3, 4]),
    share=st.sampled_from([0.34, 0.5, 0.75]),
    uses=st.sampled_from([2, 3, 5]),
    keep=st.sampled_from([1, 2, 4, 100]),
    bound=st.sampled_from([None, 2, 4]),
    extra=st.sampled_from([0, 1]),
    failed=st.frozensets(st.integers(0, 20), max_size=4),
    seed=st.integers(0, 99),
    save_every=st.sampled_from([1, 2, 3]),
    kills=st.lists(st.tuples(st.integers(1, 8), st.booleans()), max_size=3).map(tuple),
)


@settings(max_examples=examples(30), deadline=None)
@given(plan=PLANS)
def test_killed_run_chooses_the_groups_of_an_uninterrupted_run(
    tmp_path_factory: pytest.TempPathFactory, plan: Plan
) -> None:
    home = tmp_path_factory.mktemp("reused")
    straight = dict(Run(home / "straight", replace(plan, kills=())).through())
    assert list(straight) == list(range(1, plan.steps + 1))
    batches = Run(home / "killed", plan).through()
    assert [straight[step] for step, _ in batches] == [keys for _, keys in batches]
    assert {step for step, _ in batches} == straight.keys()


async def trained(home: Path, *steps: tuple[str, ...], keep: int = 9, uses: int = 3) -> LocalReplayBuffer:
    """Return the buffer of a process that trained these tasks, one step after the other."""
    buffer = LocalReplayBuffer(Mixed(0.5, uses, keep), Journal.open(home, max_uses=uses))
    task_by_group: dict[str, str] = {}
    for number, tasks in enumerate(steps, 1):
        for task in tasks:
            if task not in task_by_group:
                task_by_group[task] = name = f"0-train-{task}-e0"
                buffer.expect(RolloutRequest(Task(task, "?")), 0)
                await buffer.put(TrajectoryGroup(name, task, [member(name, task, 0)]))
        ref, _ = buffer.take([task_by_group[task] for task in tasks], number)
        await buffer.release(ref)
    return buffer


def stored(buffer: LocalReplayBuffer) -> list[tuple[str, int]]:
    return [(group.task_id, group.uses) for group in buffer.ready("train") if group.uses]


async def test_a_resumed_run_restores_uses_order_and_drops(tmp_path: Path) -> None:
    first_process = await trained(tmp_path, ("a", "b"), ("c", "a"), ("b", "d"), ("a",), keep=3)
    # The room is for three: when d came c had been trained longer ago than b; a is used up.
    assert stored(first_process) == [("b", 2), ("d", 1)]

    def after(step: int, part: int) -> LocalReplayBuffer:
        journal = Journal.open(tmp_path, part=part, after_step=step, max_uses=3)
        return LocalReplayBuffer(Mixed(0.5, 3, 3), journal)

    resumed = after(4, 1)
    assert stored(resumed) == [("b", 2), ("d", 1)]
    [b, _] = resumed.ready("train")
    assert (b.key, b.id, b.oldest_version, b.rewards) == ("train-b-e0", "0-train-b-e0", 0, (1.0,))
    # What arrives is later than all of them.
    await resumed.put(TrajectoryGroup("1-train-e-e0", "e", [member("1-train-e-e0", "e", 4)]))
    assert resumed.ready("train")[-1].arrived > max(group.arrived for group in resumed.ready("train")[:-1])
    # The step that gave c up is undone: it is stored again.
    assert stored(after(2, 2)) == [("b", 1), ("c", 1), ("a", 2)]
    # A step that counts trained it: it is no group that waits for its first one.
    assert not after(2, 3).expect(RolloutRequest(Task("c", "?")), 2)
    assert stored(after(0, 4)) == []
    assert stored(LocalReplayBuffer(journal=Journal.open(tmp_path, part=5, after_step=4))) == []


async def test_a_discarded_group_is_not_stored_again(tmp_path: Path) -> None:
    first_process = await trained(tmp_path, ("a", "b"))
    first_process.discard(["train-a-e0"], "mine")
    resumed = LocalReplayBuffer(Mixed(0.5, 3, 9), Journal.open(tmp_path, part=1, after_step=1, max_uses=3))
    assert stored(resumed) == [("b", 1)]


async def test_a_stored_group_that_is_spoilt_on_disk_is_named(tmp_path: Path) -> None:
    await trained(tmp_path, ("a", "b"))
    file = tmp_path / "trajectories.twz"
    spoil(file, 0)
    with pytest.raises(FormatError, match=r"trajectory 0-train-a-e0/0\.0 at byte 0 is corrupt"):
        Journal.open(tmp_path, part=1, after_step=1, max_uses=3)
    # Nobody needs it where nothing is trained twice.
    Journal.open(tmp_path, part=1, after_step=1).close()


async def test_groups_lost_in_a_power_cut_are_rolled_out_again(tmp_path: Path) -> None:
    await trained(tmp_path, ("a",), ("b",))
    file = tmp_path / "trajectories.twz"
    file.write_bytes(file.read_bytes()[:-9] + b"\0" * 9)
    notices: list[str] = []
    buffer = LocalReplayBuffer(journal=Journal.open(tmp_path, part=1, after_step=1, say=notices.append))
    assert any("1 finished trajectories are incomplete on disk" in text for text in notices)
    assert not buffer.expect(RolloutRequest(Task("b", "?")), 1)


async def test_a_resumed_process_holds_no_consumed_groups(tmp_path: Path) -> None:
    await trained(tmp_path, ("a", "b"), ("c",))
    journal = Journal.open(tmp_path, part=1, after_step=2)
    assert journal._state.entries == {}
    journal.close()
    # It is known all the same, by the file: nothing of it is trained a second time.
    later = Journal.open(tmp_path, part=2, after_step=1)
    assert list(later._state.entries) == ["train-c-e0"]
    takes = [event["keys"] for _, event in read_journal(tmp_path / "journal.jsonl").events if event["event"] == "take"]
    assert takes == [["train-a-e0", "train-b-e0"], ["train-c-e0"]]
