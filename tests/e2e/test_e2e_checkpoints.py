"""Which checkpoints a whole run leaves, and the commands that take one of them: resume and export."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from support.trainer.lookup_run import lines, shared, silent, train_config
from turnwise.cli import main
from turnwise.config import dump_config
from turnwise.rollout.records import read_batches
from turnwise.trainer.config.train import TrainConfig
from turnwise.trainer.observe.metrics import read_metrics
from turnwise.trainer.run.audit import audit_run
from turnwise.trainer.run.checkpoint import CheckpointStore
from turnwise.trainer.run.directory import CHECKPOINTS
from turnwise.trainer.train import run_train

pytestmark = pytest.mark.long
STEPS = 4
EVAL = {"tasks": "turnwise.envs.basic.lookup:tasks?n=4&split=test", "samples": 2, "greedy": False, "every": 1}
BEST = {"metric": "eval/sampled/reward"}


def evaluated(model: Path, runs: Path) -> TrainConfig:
    changes = {"eval": EVAL, "checkpoint": {"every": 2, "keep": 1, "best": BEST}, "rollout": {"concurrency": 1}}
    return train_config(model, runs, steps=STEPS, **changes)


@pytest.fixture(scope="module")
def evaluated_run(lookup_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that was evaluated after every step, and keeps the newest checkpoint and the best."""
    folder = shared(
        tmp_path_factory, "evaluated", lambda runs: run_train(evaluated(lookup_model, runs), console=silent())
    )
    return folder / "run"


def cli(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as exit_:
        main([str(argument) for argument in arguments])
    return int(exit_.value.code or 0)


def rewards(run: Path) -> dict[int, float]:
    """Return what evaluations found, by the step of the weights; of two of one step the later one counts."""
    records = read_metrics(run / "metrics.jsonl")
    return {record["step"]: record["sampled"]["reward"]["mean"] for record in records if record["kind"] == "eval"}


def the_best(run: Path) -> int:
    reward_by_step = {step: value for step, value in rewards(run).items() if step}
    return max(reward_by_step, key=lambda step: (reward_by_step[step], step))


def test_the_newest_checkpoint_and_the_best_remain(evaluated_run: Path) -> None:
    assert set(rewards(evaluated_run)) == set(range(STEPS + 1))
    best = the_best(evaluated_run)
    store = evaluated_run / CHECKPOINTS
    assert CheckpointStore(store).steps() == sorted({best, STEPS})
    assert os.readlink(store / "best") == f"step_{best:06d}"
    ratings = json.loads((store / "best.json").read_text())
    assert ratings["metric"] == "eval/sampled/reward"
    assert ratings["steps"][str(best)] == rewards(evaluated_run)[best]


def test_the_best_checkpoint_is_exported(
    evaluated_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli("export", evaluated_run, tmp_path / "model", "--best") == 0
    checkpoint = evaluated_run / CHECKPOINTS / f"step_{the_best(evaluated_run):06d}"
    assert checkpoint.name in capsys.readouterr().out
    exported, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path / "model", checkpoint))
    assert exported.keys() == theirs.keys()
    assert all(torch.equal(exported[name], theirs[name]) for name in exported)
    assert (tmp_path / "model" / "tokenizer.json").is_file()


def test_resume_step_resumes_from_that_checkpoint(
    lookup_model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = train_config(lookup_model, tmp_path, steps=3)
    run_train(config, console=silent())
    run, file = tmp_path / "run", tmp_path / "config.yaml"
    file.write_text(dump_config(config))
    first = Path(shutil.copytree(run / CHECKPOINTS / "step_000001", tmp_path / "first"))
    assert cli("train", file, "--resume-step", "7") == 1
    assert "has no checkpoint of that step; it has 1, 2, 3" in " ".join(capfd.readouterr().err.split())
    assert CheckpointStore(run / CHECKPOINTS).steps() == [1, 2, 3]
    assert cli("train", file, "steps=2", "--resume-step", "1") == 0
    assert CheckpointStore(run / CHECKPOINTS).steps() == [1, 2]
    assert (run / CHECKPOINTS / "step_000001" / "model.safetensors").read_bytes() == (
        first / "model.safetensors"
    ).read_bytes()
    batches = read_batches(run / "batches.jsonl")
    assert (batches.steps, batches.rolled_back, batches.starts) == (2, 2, ((0, 0), (1, 1)))
    # The file keeps what was undone; a reader gets what counts.
    logged = [record for record in lines(run / "metrics.jsonl") if record["kind"] == "train"]
    assert [record["step"] for record in logged] == [1, 2, 3, 2]
    effective = [record for record in read_metrics(run / "metrics.jsonl") if record["kind"] == "train"]
    assert effective == [logged[0], logged[3]]
    assert audit_run(run, at_most=8, console=silent()).contradictions == []
