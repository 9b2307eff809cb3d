"""A replay buffer written to the signature that verl documents: ``UserCustomReplayBuffer.sample``.

What differs from there: the base class, how one waits (no sleeping between looks), and what a batch is made with.
"""

from __future__ import annotations

import asyncio
import re
import threading
from pathlib import Path

import pytest

from support.trainer.lookup_run import MODEL, build_model, lines, shared, silent, train_config
from turnwise import LocalReplayBuffer
from turnwise.config import load_config
from turnwise.errors import ConfigError, EngineDied, TrainError
from turnwise.rollout.core import BatchRef, ReplayBuffer, RolloutRequest
from turnwise.rollout.replay.config import ReplayConfig, RunFacts, make_buffer
from turnwise.tasks import Task
from turnwise.trainer.run.audit import audit_run
from turnwise.trainer.train import run_train
from turnwise.trajectory import Trajectory, TrajectoryGroup

DOCS = Path(__file__).parents[2] / "docs" / "extending.md"


class UserCustomReplayBuffer(LocalReplayBuffer):
    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[BatchRef, dict]:
        """The newest first."""
        threads.add(threading.current_thread().name)
        while len(self.ready(partition_id)) < batch_size:
            self.wait()
        newest = sorted(self.ready(partition_id), key=lambda group: -group.arrived)[:batch_size]
        ref, metrics = self.take([group.id for group in newest], global_steps)
        return ref, {**metrics, "replay/newest": newest[0].arrived}


threads: set[str] = set()


class Asynchronous(LocalReplayBuffer):
    def __init__(self, minimum: int, **inherited):
        super().__init__(**inherited)
        self.least = minimum

    async def sample(self, global_steps, partition_id, batch_size):
        while len(self.ready(partition_id)) < self.least:
            await self.changed()
        return self.take([group.id for group in self.ready(partition_id)][:batch_size], global_steps)


class Returning(LocalReplayBuffer):
    answer: object = None

    def sample(self, global_steps, partition_id, batch_size):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class Renamed(LocalReplayBuffer):
    def sample(self, step, n):
        return None


def buffer(name: str, **config: object) -> ReplayBuffer:
    section = {"buffer": {"name": f"{__name__}:{name}", "config": config}}
    return make_buffer(load_config(ReplayConfig, defaults=section), RunFacts(2, sync=True))


def group(name: str, *rewards: float) -> TrajectoryGroup:
    members = [
        Trajectory(f"{name}/{n}", f"{name}/{n}", name, name, rewards=[(None, "score", reward)])
        for n, reward in enumerate(rewards or (1.0, 0.0))
    ]
    return TrajectoryGroup(name, name, members, "train")


async def test_a_plain_sample_blocks_in_a_thread_of_its_own() -> None:
    replay = buffer("UserCustomReplayBuffer")
    waiting = asyncio.create_task(replay.next_batch(1, "train", 2))
    for name in "abc":
        await asyncio.sleep(0)
        assert not waiting.done()
        await replay.put(group(name))
        if name == "b":
            break
    ref, metrics = await waiting
    assert ref.group_ids == ("b", "a")
    assert (metrics["replay/newest"], metrics["replay/ready"]) == (1, 0)
    assert metrics["replay/wait_s"] >= 0
    assert [group.id for group in await replay.fetch(ref)] == ["b", "a"]
    assert threading.current_thread().name not in threads


async def test_blocking_sample_ends_with_the_rollouts_or_its_cancelled_waiter() -> None:
    replay = buffer("UserCustomReplayBuffer")
    waiting = asyncio.create_task(replay.next_batch(1, "train", 2))
    await asyncio.sleep(0.05)
    replay.fail(EngineDied("the server ended"))
    with pytest.raises(EngineDied, match="the server ended"):
        await waiting
    replay = buffer("UserCustomReplayBuffer")
    threads = threading.active_count()
    waiting = asyncio.create_task(replay.next_batch(1, "train", 2))
    await asyncio.sleep(0.05)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    # The thread is free again: the next call needs none besides it.
    await asyncio.to_thread(lambda: None)
    assert threading.active_count() <= threads + 1


async def test_an_async_sample_with_arguments_of_its_own() -> None:
    replay = buffer("Asynchronous", minimum=3)
    waiting = asyncio.create_task(replay.next_batch(1, "train", 1))
    for name in "abc":
        await replay.put(group(name))
        await asyncio.sleep(0)
    assert (await waiting)[0].group_ids == ("a",)


async def test_the_example_of_the_page_discards_and_is_refilled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    page = DOCS.read_text(encoding="utf-8")
    [code] = [
        block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "UserCustomReplayBuffer" in block
    ]
    assert len([line for line in code.splitlines() if line.strip()]) <= 20
    (tmp_path / "mine.py").write_text(code)
    section = {"buffer": f"{tmp_path}/mine.py:UserCustomReplayBuffer"}
    replay = make_buffer(load_config(ReplayConfig, defaults=section), RunFacts(2, sync=True))
    refills: list[int] = []
    refilled = asyncio.Event()

    def refill(missing: int) -> bool:
        refills.append(missing)
        refilled.set()
        for number in range(missing):
            replay.expect(RolloutRequest(Task(f"new{len(refills)}-{number}", "?")), 0)
        return True

    replay.refill_by(refill)
    for name in "ab":
        replay.expect(RolloutRequest(Task(name, "?")), 0)
    waiting = asyncio.create_task(replay.next_batch(1, "train", 2))
    await replay.put(group("a", 1.0, 1.0))
    await replay.put(group("b"))
    await refilled.wait()
    await replay.put(group("new1-0"))
    ref, metrics = await waiting
    assert set(ref.group_ids) == {"b", "new1-0"}
    assert metrics["replay/dropped/even"] == 1
    assert refills == [1]


async def test_invalid_returns_of_sample_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    replay = buffer("Returning")
    ref = BatchRef(0, (), ())
    for answer, message in [
        (None, r"Returning\.sample returned None: return self\.take\(ids, global_steps\)"),
        (ref, r"Returning\.sample returned BatchRef"),
        ((ref, {"mine": "x"}), r"Returning\.sample returned the metric 'mine': 'x'; metrics are numbers"),
        (KeyError("b"), r"step 1: Returning\.sample raised KeyError: 'b'"),
    ]:
        monkeypatch.setattr(Returning, "answer", answer)
        with pytest.raises(TrainError, match=message):
            await replay.next_batch(1, "train", 1)
    with pytest.raises(ConfigError, match=r"sample takes \(step, n\); it is called with \(global_steps, partition_id"):
        buffer("Renamed")
    with pytest.raises(ConfigError, match="is not a replay buffer: subclass"):
        make_buffer(ReplayConfig.model_validate({"buffer": "turnwise.tasks:Task"}), RunFacts(2, sync=True))
    with pytest.raises(ConfigError, match=r"cannot be made: .*missing 1 required positional argument: 'minimum'"):
        buffer("Asynchronous")


@pytest.fixture(scope="module")
def lookup_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared(tmp_path_factory, "lookup-model", build_model) / MODEL


@pytest.mark.long
def test_custom_buffer_trains(lookup_model: Path, tmp_path: Path) -> None:
    changes = {"replay": {"buffer": f"{__name__}:UserCustomReplayBuffer"}, "steps": 2}
    summary = run_train(train_config(lookup_model, tmp_path, **changes), console=silent())
    steps = [record for record in lines(summary.directory / "metrics.jsonl") if record["kind"] == "train"]
    assert [record["replay/newest"] for record in steps] == [1, 3]
    assert [record["replay/staleness_max"] for record in steps] == [0, 0]
    assert audit_run(summary.directory, console=silent()).contradictions == []
