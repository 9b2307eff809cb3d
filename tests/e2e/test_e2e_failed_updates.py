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
from turnwise.trainer.observe.run_log import read_metrics
from turnwise.trainer.run.audit import audit_run
from turnwise.trainer.run.checkpoint import CheckpointStore
from turnwise.trainer.run.directory import CHECKPOINTS
from turnwise.trainer.train import train
from turnwise.trajectory_file import read_trajectories

STEPS = 3


def failing(model: Path, runs: Path, **changes: Any) -> TrainConfig:
    """Return a run whose only checkpoints are those of its ends, and whose rows are micro-batches of their own."""
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
    group_of = {each.id: each.group_id for each in read_trajectories(run / "trajectories.twz")}
    found: defaultdict[int, set[str]] = defaultdict(set)
    for row in read_batches(run / "batches.jsonl").rows:
        found[row.step].add(group_of[row.trajectory])
    return dict(found)


async def fail_in(update: int, config: TrainConfig) -> Path:
    failing_updates.FAILS[:] = [update]
    with pytest.raises(ValueError, match=f"the loss of update {update}"):
        await train(config, console=silent())
    failing_updates.FAILS.clear()
    run = config.runs / config.name
    [last] = saved(run)
    weights = load_file(run / CHECKPOINTS / f"step_{last:06d}" / "model.safetensors")
    assert all(torch.equal(weights[name], weight) for name, weight in failing_updates.BEFORE.items())
    assert audit_run(run, recompute=False, console=silent()).contradictions == []
    return run


@pytest.mark.long
@pytest.mark.parametrize("mode", ["sync", "colocate_async"])
async def test_the_step_before_a_failed_update_is_saved_and_gone_on_from(
    mode: str, lookup_model: Path, tmp_path: Path
) -> None:
    config = failing(lookup_model, tmp_path, mode=mode)
    run = await fail_in(3, config)
    assert saved(run) == [2]
    sampled = {each.id for each in read_trajectories(run / "trajectories.twz")}
    given = [event["keys"] for _, event in read_journal(run / "journal.jsonl").events if event["event"] == "take"]
    summary = await train(config, console=silent())
    assert summary.steps == STEPS
    assert audit_run(run, at_most=8, console=silent()).contradictions == []
    # What the failed update was to learn from is learned from, as it was sampled, and is counted once.
    trained = groups_by_step(run)
    assert {name.partition("-")[2] for name in trained[3]} == set(given[2])
    everything = [each for each in read_trajectories(run / "trajectories.twz") if each.partition == "train"]
    of_step_3 = [each for each in everything if each.group_id in trained[3]]
    assert {each.id for each in of_step_3} <= sampled
    assert [len(trained[step]) for step in (1, 2, 3)] == [GROUPS] * 3
    counted = sum(each.sampled_tokens for each in everything if each.group_id in set.union(*trained.values()))
    assert summary.spent["sampled_tokens"] == counted
    assert [each["step"] for each in read_metrics(run / "metrics.jsonl") if each["kind"] == "train"] == [1, 2, 3]


@pytest.mark.long
async def test_a_streamed_step_ends_with_the_parts_before_the_one_that_failed(
    lookup_model: Path, tmp_path: Path
) -> None:
    replay = {"max_staleness": 3, "ahead": 1}
    config = failing(lookup_model, tmp_path, mode="separate_async", overlap={"stream": 2}, replay=replay)
    # The second half of step 2.
    run = await fail_in(4, config)
    assert saved(run) == [2]
    assert [len(each) for each in groups_by_step(run).values()] == [GROUPS, 1]
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
    [name] = [each for each in trained[3] if each.endswith(f"-{key}")]
    assert name.startswith("0-"), "trained from disk, not sampled again"
    members = [each for each in read_trajectories(run / "trajectories.twz") if each.group_id == name]
    assert len(members) == MEMBERS
    everything = [each for each in read_trajectories(run / "trajectories.twz") if each.partition == "train"]
    counted = sum(each.sampled_tokens for each in everything if each.group_id in set.union(*trained.values()))
    assert summary.spent["sampled_tokens"] == counted
    assert [each["step"] for each in read_metrics(run / "metrics.jsonl") if each["kind"] == "train"] == [1, 2, 3]
