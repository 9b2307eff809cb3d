"""Whole runs with what is left over: carried groups, dropped ones, buffers of one's own; killed, and gone on with."""

from __future__ import annotations

import json
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import turnwise
from support.envs.run_envs import GATES, Gate
from support.trainer.hooks_and_buffers import THREADS
from support.trainer.lookup_run import GROUPS, MEMBERS, held_config, lines, silent, train_config, training, wait_until
from turnwise.errors import TrainError
from turnwise.rollout.journal.state import read_journal
from turnwise.rollout.records import Batches, read_batches
from turnwise.trainer.config.train import TrainConfig
from turnwise.trainer.loops.modes import train_as_configured
from turnwise.trainer.run.audit import audit_run
from turnwise.trainer.run.checkpoint import CheckpointStore
from turnwise.trainer.run.run import open_run
from turnwise.trainer.train import run_train
from turnwise.trajectory_file import read_trajectories

MANY = 10_000
ASYNC: dict[str, dict[str, Any]] = {
    "colocate": {"mode": "colocate_async"},
    "separate": {"mode": "separate_async", "overlap": {"stream": 2}},
}


def check_run(run: Path, steps: int) -> Batches:
    """Check on disk that nothing was trained twice, and nothing but what the journal gave."""
    batches = read_batches(run / "batches.jsonl")
    assert batches.steps == steps
    assert set(Counter((row.trajectory, row.leaf, row.epoch) for row in batches.rows).values()) == {1}
    assert audit_run(run, at_most=4, console=silent()).contradictions == []
    return batches


def saved_state(run: Path) -> dict[str, Any]:
    newest = CheckpointStore(run / "checkpoints").steps()[-1]
    return json.loads((run / "checkpoints" / f"step_{newest:06d}" / "trainer_state.json").read_text())


def killed_once_saved(config: TrainConfig, step: int) -> int:
    """Start a run, kill its trainer when this step is saved, and return the newest step that is."""
    run = config.runs / config.name
    with training(config) as process:
        wait_until((run / "checkpoints" / f"step_{step:06d}").exists, f"the checkpoint of step {step}", process)
        process.kill()
        process.wait()
    return CheckpointStore(run / "checkpoints").steps()[-1]


def fates(run: Path) -> tuple[dict[str, list[int]], dict[str, str]]:
    """Return the steps that were given each group, and why others were dropped, in the run as it stands."""
    steps_by_key: dict[str, list[int]] = {}
    dropped: dict[str, tuple[int, str]] = {}
    for _, event in read_journal(run / "journal.jsonl").events:
        if event["event"] == "start":
            resumed_step = event["after_step"]
            steps_by_key = {
                key: [step for step in steps if step <= resumed_step] for key, steps in steps_by_key.items()
            }
            dropped = {key: fate for key, fate in dropped.items() if fate[0] <= resumed_step}
        elif event["event"] == "take":
            for key in event["keys"]:
                steps_by_key.setdefault(key, []).append(event["step"])
        elif event["event"] == "back":
            for key in event["keys"]:
                steps_by_key[key].remove(event["step"])
        elif event["event"] == "drop":
            dropped[event["key"]] = event["step"], event["why"]
    return {key: steps for key, steps in steps_by_key.items() if steps}, {key: why for key, (_, why) in dropped.items()}


@pytest.mark.long
@pytest.mark.parametrize("mode", ["sync", "separate_async"])
async def test_carried_group_is_finished_by_the_resumed_process(mode: str, lookup_model: Path, tmp_path: Path) -> None:
    """The first episode waits for ever: its group is carried from step to step, until the trainer is killed."""
    ahead = {} if mode == "sync" else {"ahead": 0}
    changes: dict[str, Any] = {
        "mode": mode,
        "steps": MANY,
        "batch": {"tail": {"seconds": 1, "share": 0.5}},
        "replay": {"strategy": "bounded", "max_staleness": MANY, **ahead},
        "curriculum": {"success_reward": 0.5},
        "tasks": "turnwise.envs.basic.lookup:tasks?n=5&split=train",
    }
    config = held_config(lookup_model, tmp_path, 1, **changes)
    killed_step = killed_once_saved(config, 2)
    run_dir, state = tmp_path / "run", saved_state(tmp_path / "run")
    # What was asked for first stands first.
    waiting = f"train-{state['feed'][0]['task']['id']}-e0"
    assert waiting not in fates(run_dir)[0]
    cut = [record for record in lines(run_dir / "metrics.jsonl") if record["kind"] == "train"]
    assert cut[0]["straggler/cut_groups"] == cut[0]["straggler/carried"] == 1
    async with open_run(config.model_copy(update={"steps": killed_step + 3}), run_dir, silent()) as run:
        assert run.tasks.state() == state["tasks"], "success rates, and what was taken"
        assert run.scheduler.state() == state["feed"]
        await train_as_configured(run)
    check_run(run_dir, killed_step + 3)
    steps_by_key, dropped = fates(run_dir)
    assert steps_by_key[waiting][0] > killed_step
    assert max(map(len, steps_by_key.values())) == 1
    # Its id is the one that it was given first, of four members three had finished.
    group = [
        trajectory for trajectory in read_trajectories(run_dir / "trajectories.twz") if waiting in trajectory.group_id
    ]
    assert {trajectory.group_id for trajectory in group} == {f"0-{waiting}"}
    assert Counter(trajectory.id[0] for trajectory in group if trajectory.stop_reason != "cancelled") == {
        "0": MEMBERS - 1,
        "1": 1,
    }
    # Nothing that was asked for is forgotten, and nothing was asked for beside the order of tasks.
    in_flight = {f"train-{group['task']['id']}-e{group['epoch']}" for group in saved_state(run_dir)["feed"]}
    assert len(steps_by_key.keys() | dropped.keys() | in_flight) == saved_state(run_dir)["tasks"]["position"]


@pytest.mark.long
@pytest.mark.parametrize("mode", ASYNC)
def test_custom_buffer_trains_in_each_mode(mode: str, lookup_model: Path, tmp_path: Path) -> None:
    THREADS.clear()
    buffer = {"name": "support.trainer.hooks_and_buffers:Newest", "config": {"bound": 2}}
    replay = {"buffer": buffer, "max_staleness": 2, "ahead": 2}
    run_train(train_config(lookup_model, tmp_path, steps=4, replay=replay, **ASYNC[mode]), console=silent())
    steps = [record for record in lines(tmp_path / "run" / "metrics.jsonl") if record["kind"] == "train"]
    assert [record["batch/trajectories"] for record in steps] == [GROUPS * MEMBERS] * 4
    assert max(record["replay/staleness_max"] for record in steps) <= 2
    assert all("replay/newest" in record for record in steps), "the metric of the custom buffer"
    assert threading.current_thread().name not in THREADS
    # A resumed run has the same buffer.
    config = train_config(lookup_model, tmp_path, steps=5, replay=replay, **ASYNC[mode])
    assert run_train(config, console=silent()).steps == 5
    check_run(tmp_path / "run", 5)


@pytest.mark.long
def test_groups_taken_by_a_failed_custom_buffer_are_requested_again(lookup_model: Path, tmp_path: Path) -> None:
    """In the second part of step 2: the step ends with its first part, and requeues what it did not train."""
    done = tmp_path / "done"
    named = {"name": "support.trainer.hooks_and_buffers:Stumbling", "config": {"at": 4, "done": str(done)}}
    replay = {"buffer": named, "max_staleness": 3}
    config = train_config(lookup_model, tmp_path, steps=3, replay=replay, **ASYNC["separate"])
    with pytest.raises(TrainError, match=r"step 2: Stumbling\.sample raised RuntimeError: not this time"):
        run_train(config, console=silent())
    assert CheckpointStore(tmp_path / "run" / "checkpoints").steps() == [1, 2]
    assert run_train(config, console=silent()).steps == 3
    check_run(tmp_path / "run", 3)
    assert fates(tmp_path / "run")[0][done.read_text()] == [3]


@pytest.mark.long
def test_filtering_and_over_sampling_survive_a_kill(lookup_model: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "steps": MANY,
        "hooks": ["support.trainer.hooks_and_buffers:OverSampling"],
        "replay": {"filter_groups": {"metric": "reward"}, "max_staleness": 2},
        **ASYNC["separate"],
    }
    config = train_config(lookup_model, tmp_path, **changes)
    killed_step = killed_once_saved(config, 3)
    run_train(config.model_copy(update={"steps": killed_step + 2}), console=silent())
    run = tmp_path / "run"
    check_run(run, killed_step + 2)
    steps_by_key, dropped = fates(run)
    groups = [event for _, event in read_journal(run / "journal.jsonl").events if event["event"] == "group"]
    spread = {event["key"]: event["facts"]["spread"]["reward"] for event in groups}
    assert min(spread[key] for key in steps_by_key) > 0
    assert not steps_by_key.keys() & dropped.keys()
    assert {key for key, why in dropped.items() if why == "equal"} <= {key for key, far in spread.items() if far == 0}
    in_flight = {f"train-{group['task']['id']}-e{group['epoch']}" for group in saved_state(run)["feed"]}
    # Of the steps that count more was asked for than they took: what is left over is known.
    assert in_flight
    assert not in_flight & (steps_by_key.keys() | dropped.keys())


class Opens(turnwise.Hooks):
    """Opens the gate of a run when the first part of its second step is there."""

    def on_sample_end(self):
        if self.global_steps == 2:
            for gate in GATES.values():
                gate.opened.set()


@pytest.mark.long
async def test_a_tail_leaves_a_streamed_step_the_groups_that_its_later_parts_may_train(
    lookup_model: Path, tmp_path: Path
) -> None:
    """Eight groups of the first weights are on their way for two steps; the last of them waits for step 2 to begin."""
    gate = tmp_path / "gate"
    GATES[str(gate)] = Gate()
    config = held_config(
        lookup_model,
        tmp_path,
        16,
        steps=2,
        batch={"groups": 4, "tail": {"seconds": 600, "share": 1.0}},
        rollout={"group_size": 2},
        hooks=[f"{__name__}:Opens"],
        **ASYNC["separate"],
    )
    async with open_run(config, tmp_path / "run", silent()) as run:
        await train_as_configured(run)
    del GATES[str(gate)]
    steps = [record for record in lines(tmp_path / "run" / "metrics.jsonl") if record["kind"] == "train"]
    assert [record["batch/trajectories"] for record in steps] == [8, 8]
    assert [record["replay/staleness_max"] for record in steps] == [0, 1]
    assert not any("straggler/cancelled" in record or "rollout/cancelled_episodes" in record for record in steps)
    check_run(tmp_path / "run", 2)
