"""The asynchronous modes as whole runs: how old what they train may be, interrupts, and what dies meanwhile."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from support.trainer.failing_updates import HOLDS, UpdateHold
from support.trainer.hooks_and_buffers import FAILURES, GIVEN
from support.trainer.lookup_run import GROUPS, MEMBERS, lines, silent, train_config
from turnwise.config import load_config
from turnwise.errors import ConfigError, TrainError
from turnwise.rollout.records import Batches, read_batches
from turnwise.trainer.config.train import TrainConfig
from turnwise.trainer.loops.modes import train_as_configured
from turnwise.trainer.run.audit import audit_run
from turnwise.trainer.run.checkpoint import CheckpointStore
from turnwise.trainer.run.directory import CHECKPOINTS
from turnwise.trainer.run.run import open_run
from turnwise.trainer.train import train
from turnwise.trajectory_file import read_trajectories

STEPS = 5
ASYNC = {
    "colocate": {"mode": "colocate_async"},
    "colocate, pausing": {"mode": "colocate_async", "overlap": {"sampling": "pause"}},
    "separate": {"mode": "separate_async", "replay": {"max_staleness": 2, "ahead": 2}},
    "separate, streaming": {"mode": "separate_async", "overlap": {"stream": 2}},
}


@contextmanager
def held(update: int, fails: Exception | None = None) -> Iterator[UpdateHold]:
    """Hold one update of the runs of this block."""
    hold = UpdateHold(update, fails=fails)
    HOLDS.append(hold)
    try:
        yield hold
    finally:
        hold.opened.set()
        HOLDS.remove(hold)


def held_run(model: Path, runs: Path, mode: str, **changes: Any) -> TrainConfig:
    policies = {"main": {"engine": "support.trainer.failing_updates:HeldLearner"}}
    return train_config(model, runs, policies=policies, steps=STEPS, **ASYNC[mode], **changes)


async def reached(hold: UpdateHold, training: asyncio.Task[Any]) -> None:
    """Wait until the update begins; the event loop runs meanwhile."""
    waiting = asyncio.create_task(asyncio.to_thread(hold.reached.wait, 60))
    await asyncio.wait([waiting, training], return_when=asyncio.FIRST_COMPLETED)
    if training.done():
        training.result()
    assert hold.reached.is_set()


def check_run(run_dir: Path, bound: int) -> Batches:
    """Check on disk that nothing older than the bound was trained, nothing twice, and all of it as it was sampled."""
    trajectories = {trajectory.id: trajectory for trajectory in read_trajectories(run_dir / "trajectories.twz")}
    batches = read_batches(run_dir / "batches.jsonl")
    for row in batches.rows:
        spans = [span for part in trajectories[row.trajectory].segments for span in part.weight_versions]
        assert all(0 <= row.step - 1 - version <= bound for version, _, _ in spans), (row, spans)
    trained = Counter((row.trajectory, row.leaf, row.epoch) for row in batches.rows)
    assert set(trained.values()) == {1}
    assert audit_run(run_dir, at_most=8, console=silent()).contradictions == []
    return batches


class Span(NamedTuple):
    """A span of ``timeline.jsonl``."""

    what: str
    name: str
    begin: float
    end: float | None


def update_and_groups(run_dir: Path) -> tuple[list[Span], list[Span]]:
    records = map(json.loads, (run_dir / "timeline.jsonl").read_text().splitlines())
    spans = [Span(*record) for record in records if isinstance(record, list)]
    return [span for span in spans if span.what == "update"], [span for span in spans if span.what == "group"]


@pytest.mark.parametrize("mode", [pytest.param("colocate, pausing", marks=pytest.mark.long), "separate, streaming"])
async def test_rollouts_overlap_updates_within_the_staleness_bound(
    mode: str, lookup_model: Path, tmp_path: Path
) -> None:
    config = train_config(lookup_model, tmp_path, steps=STEPS, **ASYNC[mode])
    async with open_run(config, tmp_path / "run", silent()) as run:
        await train_as_configured(run)
        assert run.state.weight_version == STEPS
        assert (await run.policy.fleet.client.model_info()).weight_version == STEPS
    assert check_run(tmp_path / "run", bound=1).steps == STEPS
    records = [record for record in lines(tmp_path / "run" / "metrics.jsonl") if record["kind"] == "train"]
    assert max(record["lag/max"] for record in records) == 1
    assert {record["batch/trajectories"] for record in records} == {GROUPS * MEMBERS}
    streams = config.overlap.stream
    assert {record["train/updates"] for record in records} <= set(map(float, range(1, streams + 1)))
    updates, groups = update_and_groups(tmp_path / "run")
    assert len(updates) == STEPS * streams
    assert any(group.begin < update.begin < (group.end or 0.0) for update in updates for group in groups)
    assert sum(record["time/overlap_s"] for record in records) > 0


@pytest.mark.long
@pytest.mark.parametrize("mode", ["colocate", "separate, streaming"])
async def test_interrupt_waits_for_the_update_and_the_run_resumes(
    mode: str, lookup_model: Path, tmp_path: Path
) -> None:
    config = held_run(lookup_model, tmp_path, mode, checkpoint={"every": 100})
    # In a streamed step the second update is the last one of step 1, the third the first of step 2.
    with held(3) as hold:
        training = asyncio.create_task(train(config, console=silent()))
        await reached(hold, training)
        training.cancel()
        done, _ = await asyncio.wait([training], timeout=0.2)
        assert not done
        hold.opened.set()
        with pytest.raises(asyncio.CancelledError):
            await training
        assert len(hold.threads) == 1
        assert threading.get_ident() not in hold.threads
    killed_step = 2 if config.overlap.stream == 2 else 3
    assert CheckpointStore(tmp_path / "run" / CHECKPOINTS).steps() == [killed_step]
    with held(0):
        assert (await train(config, console=silent())).steps == STEPS
    assert check_run(tmp_path / "run", bound=1).steps == STEPS
    records = [record for record in lines(tmp_path / "run" / "metrics.jsonl") if record["kind"] == "train"]
    assert [record["step"] for record in records] == list(range(1, STEPS + 1)), "also of the step that was interrupted"


@pytest.mark.long
async def test_a_server_that_dies_during_an_update_comes_back_with_its_weights(
    lookup_model: Path, tmp_path: Path
) -> None:
    config = held_run(lookup_model, tmp_path, "colocate")
    with held(2) as hold:
        async with open_run(config, tmp_path / "run", silent()) as run:
            training = asyncio.create_task(train_as_configured(run))
            await reached(hold, training)
            [replica] = run.policy.fleet.replicas
            assert replica.pid is not None
            os.kill(replica.pid, signal.SIGKILL)
            hold.opened.set()
            await training
            assert run.policy.fleet.restarts == 1
            assert (await run.policy.fleet.client.model_info()).weight_version == STEPS
    assert check_run(tmp_path / "run", bound=1).steps == STEPS


@pytest.mark.long
async def test_update_that_fails_while_changing_weights_is_not_saved(lookup_model: Path, tmp_path: Path) -> None:
    config = held_run(lookup_model, tmp_path, "separate", checkpoint={"every": 100})
    with held(3, fails=TrainError("the third update")) as hold:
        hold.opened.set()
        with pytest.raises(TrainError, match="the third update"):
            await train(config, console=silent())
    assert CheckpointStore(tmp_path / "run" / CHECKPOINTS).steps() == []


@pytest.mark.long
async def test_untrained_groups_of_a_streamed_step_are_taken_again(lookup_model: Path, tmp_path: Path) -> None:
    hooks = ["support.trainer.hooks_and_buffers:FailsOnce"]
    replay = {"max_staleness": 3, "ahead": 1}
    config = train_config(lookup_model, tmp_path, steps=3, hooks=hooks, replay=replay, **ASYNC["separate, streaming"])
    GIVEN.clear()
    # The fourth part: the other half of step 2.
    FAILURES[:] = [4]
    with pytest.raises(TrainError, match=r"FailsOnce\.on_sample_end raised RuntimeError"):
        await train(config, console=silent())
    assert CheckpointStore(tmp_path / "run" / CHECKPOINTS).steps() == [1, 2]
    step, lost = GIVEN[-1]
    assert step == 2
    GIVEN.clear()
    FAILURES.clear()
    assert (await train(config, console=silent())).steps == 3
    assert set(lost) <= {group for _, groups in GIVEN for group in groups}
    assert check_run(tmp_path / "run", bound=3).steps == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["overlap.stream=2"], "overlap is given, but mode is sync"),
        (["layout=colocated", "mode=separate_async"], "layout is colocated, .* mode is separate_async .*mode to sync"),
        (["layout=colocated", "mode=colocate_async"], "layout is colocated, .* set overlap.sampling to pause, or"),
        (["mode=separate_async", "overlap.sampling=pause"], "whose servers are never paused"),
        (["mode=colocate_async", "overlap.stream=2"], "only separate_async streams"),
        (["mode=separate_async", "overlap.stream=3"], "a batch has 2 groups"),
        (["mode=separate_async", "overlap.stream=2", "algorithm.epochs=2"], "set algorithm.epochs and"),
    ],
)
def test_keys_that_a_mode_does_not_read_are_refused(changes: list[str], message: str, tmp_path: Path) -> None:
    config = train_config(tmp_path, tmp_path).model_dump(mode="json", exclude={"overlap", "mode"})
    with pytest.raises(ConfigError, match=message):
        load_config(TrainConfig, None, changes, config)
