"""An update that fails before it changed any weights costs the run nothing that was trained before."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from support.trainer import failing_updates
from support.trainer.lookup_run import GROUPS, MEMBERS, silent, train_config
from turnwise.rollout.journal.state import read_journal
from turnwise.rollout.records import read_batches
from turnwise.trainer.config.train import TrainConfig
from turnwise.trainer.observe.metrics import read_metrics
from turnwise.trainer.run.audit import audit_run
from turnwise.trainer.run.checkpoint import CheckpointStore
from turnwise.trainer.run.directory import CHECKPOINTS
from turnwise.trainer.train import train
from turnwise.trajectory_file import read_trajectories

STEPS = 3


def failing(model: Path, runs: Path, **changes: Any) -> TrainConfig:
    """Return a run whose only checkpoints are those of its ends, and each of whose rows is a micro-batch."""
    support = "support.trainer.failing_updates"
    return train_config(
        model,
        runs,
        steps=STEPS,
        checkpoint={"every": 100},
        hooks=[f"{support}:Fresh"],
        algorithm={"loss": f"{support}:second_call"},
        policies={"main": {"engine": f"{support}:Watched"}},
        rollout={"env": {"name": f"{support}:Ranked"}},
        batch={"max_tokens_per_micro_batch": 32, "share_prefixes": False},
        **changes,
    )


def saved(run: Path) -> list[int]:
    return CheckpointStore(run / CHECKPOINTS).steps()


def groups_by_step(run: Path) -> dict[int, set[str]]:
    group_of = {trajectory.id: trajectory.group_id for trajectory in read_trajectories(run / "trajectories.twz")}
    groups: defaultdict[int, set[str]] = defaultdict(set)
    for row in read_batches(run / "batches.jsonl").rows:
        groups[row.step].add(group_of[row.trajectory])
    return dict(groups)


async def fail_in(update: int, config: TrainConfig) -> Path:
    failing_updates.FAILS[:] = [update]
    with pytest.raises(ValueError, match=f"the loss of update {update}"):
        await train(config, console=silent())
    failing_updates.FAILS.clear()
    run = config.runs / config.name
    [last_checkpoint] = saved(run)
    weights = load_file(run / CHECKPOINTS / f"step_{last_checkpoint:06d}" / "model.safetensors")
    assert all(torch.equal(weights[name], weight) for name, weight in failing_updates.BEFORE.items())
    assert audit_run(run, recompute=False, console=silent()).contradictions == []
    return run


@pytest.mark.long
@pytest.mark.parametrize("mode", ["sync", "colocate_async"])
async def test_step_before_a_failed_update_is_saved_and_resumed(mode: str, lookup_model: Path, tmp_path: Path) -> None:
    config = failing(lookup_model, tmp_path, mode=mode)
    run = await fail_in(3, config)
    assert saved(run) == [2]
    sampled = {trajectory.id for trajectory in read_trajectories(run / "trajectories.twz")}
    taken_keys = [event["keys"] for _, event in read_journal(run / "journal.jsonl").events if event["event"] == "take"]
    summary = await train(config, console=silent())
    assert summary.steps == STEPS
    assert audit_run(run, at_most=8, console=silent()).contradictions == []
    # What the failed update was to learn from is learned from, as it was sampled, and is counted once.
    trained = groups_by_step(run)
    assert {name.partition("-")[2] for name in trained[3]} == set(taken_keys[2])
    everything = [
        trajectory for trajectory in read_trajectories(run / "trajectories.twz") if trajectory.partition == "train"
    ]
    of_step_3 = [trajectory for trajectory in everything if trajectory.group_id in trained[3]]
    assert {trajectory.id for trajectory in of_step_3} <= sampled
    assert [len(trained[step]) for step in (1, 2, 3)] == [GROUPS] * 3
    counted = sum(
        trajectory.sampled_tokens for trajectory in everything if trajectory.group_id in set.union(*trained.values())
    )
    assert summary.spent["sampled_tokens"] == counted
    assert [record["step"] for record in read_metrics(run / "metrics.jsonl") if record["kind"] == "train"] == [1, 2, 3]


@pytest.mark.long
async def test_streamed_step_ends_with_the_parts_before_the_failed_update(lookup_model: Path, tmp_path: Path) -> None:
    replay = {"max_staleness": 3, "ahead": 1}
    config = failing(lookup_model, tmp_path, mode="separate_async", overlap={"stream": 2}, replay=replay)
    # The second half of step 2.
    run = await fail_in(4, config)
    assert saved(run) == [2]
    assert [len(groups) for groups in groups_by_step(run).values()] == [GROUPS, 1]
    events = [event for _, event in read_journal(run / "journal.jsonl").events]
    [[key]] = [event["keys"] for event in events if event["event"] == "back"]
    state = json.loads((run / CHECKPOINTS / "step_000002" / "trainer_state.json").read_text())
    assert state["feed"][0]["task"]["id"] in key
    assert state["spent"]["sampled_tokens"] > 0

    summary = await train(config, console=silent())
    assert summary.steps == STEPS
    assert audit_run(run, at_most=8, console=silent()).contradictions == []
    trained = groups_by_step(run)
    assert [len(trained[step]) for step in (1, 2, 3)] == [GROUPS, 1, GROUPS]
    assert sum(map(len, trained.values())) == len(set.union(*trained.values()))
    [name] = [group for group in trained[3] if group.endswith(f"-{key}")]
    assert name.startswith("0-"), "trained from disk, not sampled again"
    members = [trajectory for trajectory in read_trajectories(run / "trajectories.twz") if trajectory.group_id == name]
    assert len(members) == MEMBERS
    everything = [
        trajectory for trajectory in read_trajectories(run / "trajectories.twz") if trajectory.partition == "train"
    ]
    counted = sum(
        trajectory.sampled_tokens for trajectory in everything if trajectory.group_id in set.union(*trained.values())
    )
    assert summary.spent["sampled_tokens"] == counted
    assert [record["step"] for record in read_metrics(run / "metrics.jsonl") if record["kind"] == "train"] == [1, 2, 3]
