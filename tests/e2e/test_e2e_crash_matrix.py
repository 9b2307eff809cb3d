"""A run that is killed wherever it touches a file goes on, and ends with the weights of one that was not."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from support.lookup_run import GROUPS, MEMBERS, lines, shared, silent, train_config, training
from turnwise.rollout.batches import read_batches
from turnwise.rollout.writer import read_trajectories
from turnwise.trainer.audit import audit_run
from turnwise.trainer.config import TrainConfig
from turnwise.trainer.train import run_train

pytestmark = pytest.mark.long
STEPS = 3
# Places, as parts of all the times that the run touches a file: the beginning, the end, and nine between them.
PLACES = 11


def config(model: Path, runs: Path, at: int) -> TrainConfig:
    env = {"name": "support.lookup_envs:Crashing", "config": {"at": at, "done": str(runs / "done")}}
    # One episode at a time, none finding in the cache what another left, and a bounded number of checkpoints: they are
    # removed too.
    return train_config(
        model,
        runs,
        steps=STEPS,
        rollout={"env": env, "concurrency": 1},
        inference={"prefix_cache": False},
        checkpoint={"every": 1, "keep": 1},
    )


@pytest.fixture(scope="module")
def straight(lookup_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody kills; the file ``done`` beside it lists where it touched files."""

    def build(runs: Path) -> None:
        with training(config(lookup_model, runs, 0)) as process:
            assert process.wait() == 0, process.output()

    return shared(tmp_path_factory, "straight", build)


def final(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / f"step_{STEPS:06d}" / "model.safetensors")


@pytest.mark.parametrize("place", range(PLACES))
def test_a_kill_anywhere_costs_at_most_the_steps_since_the_last_checkpoint(
    straight: Path, lookup_model: Path, tmp_path: Path, place: int
) -> None:
    events = (straight / "done").read_text().splitlines()
    assert len(events) > 3 * PLACES
    at = 1 + place * (len(events) - 1) // (PLACES - 1)
    settings = config(lookup_model, tmp_path, at)
    with training(settings) as process:
        assert process.wait() == -signal.SIGKILL, process.output()
    [event] = (tmp_path / "done").read_text().splitlines()
    run = tmp_path / "run"
    left = [trajectory.id for trajectory in read_trajectories(run / "trajectories.jsonl")]
    assert audit_run(run, recompute=False, console=silent()).contradictions == [], event

    assert run_train(settings, console=silent()).steps == STEPS
    wanted, found = final(straight / "run"), final(run)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted), event
    assert [path.name for path in (run / "checkpoints").iterdir()] == [f"step_{STEPS:06d}"], event
    logged = [record["step"] for record in lines(run / "metrics.jsonl") if record["kind"] == "train"]
    assert sorted(set(logged)) == [1, 2, 3], event
    batches = read_batches(run / "batches.jsonl")
    assert batches.steps == STEPS
    assert len({row.trajectory for row in batches.rows}) <= STEPS * GROUPS * MEMBERS
    ids = [trajectory.id for trajectory in read_trajectories(run / "trajectories.jsonl")]
    assert ids[: len(left)] == left
    assert len(set(ids)) == len(ids)
    assert audit_run(run, at_most=4, console=silent()).contradictions == [], event
