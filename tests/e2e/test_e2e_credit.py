"""Training with credit for turns: what a custom function may read, and what reaches the trainer."""

from __future__ import annotations

from pathlib import Path

from support.trainer.lookup_run import lines, silent, train_config
from turnwise.trainer.run.audit import audit_run
from turnwise.trainer.train import run_train
from turnwise.trajectory import Trajectory


def by_what_was_said(trajectory: Trajectory) -> list[float]:
    """A turn is worth what it says, in characters: only who has the messages knows."""
    return [float(len(str(turn.sampled.messages[0]))) + trajectory.reward for turn in trajectory.turns()]


def test_custom_credit_reads_messages_and_its_turns_are_trained(lookup_model: Path, tmp_path: Path) -> None:
    changes = {"algorithm": {"credit": f"{__name__}:by_what_was_said"}}
    run = run_train(train_config(lookup_model, tmp_path, **changes), console=silent()).directory
    steps = [record for record in lines(run / "metrics.jsonl") if record["kind"] == "train"]
    assert len(steps) == 2
    for record in steps:
        assert record["train/updates"] == 1
        assert record["credit/spread"] > 0
        assert record["gap/max"] < 1e-4
    assert audit_run(run, console=silent()).contradictions == []
