"""On-policy distillation from a server of our own: what the teacher is asked, and what it says."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from support.lookup_run import lines, silent, train_config
from turnwise.trainer.audit import audit_run
from turnwise.trainer.train import run_train


def steps(run: Path) -> list[dict]:
    return [each for each in lines(run / "metrics.jsonl") if each["kind"] == "train"]


def test_a_teacher_of_the_same_weights_has_nothing_to_say_at_first(lookup_model: Path, tmp_path: Path) -> None:
    config = train_config(
        lookup_model,
        tmp_path,
        rollout={"group_size": 1, "frozen": {"first": {"start": True, "inference": {"threads": 1}}}},
        algorithm={"distill": {"teacher": "first", "coef": 3.0}},
        batch={"groups": 4},
        steps=2,
    )
    run_train(config, console=silent())
    first, second = steps(tmp_path / "run")
    # The teacher is the student: its word on each sampled token is what the student said itself, up to rounding.
    assert first["distill/gap_max"] < 1e-4
    assert first["distill/unscored_tokens"] == 0
    assert abs(first["distill/reverse_kl"]) < 1e-4
    # AdamW takes a full step of any gradient, so then they differ, and the teacher says so.
    assert second["distill/gap_max"] > 1e-3
    assert np.isfinite(second["train/grad_norm"])
    # What was scored was not sampled: it is in no trajectory, and the ledger holds nothing of it.
    report = audit_run(tmp_path / "run", console=silent())
    assert report.contradictions == []
    assert report.counts["turns equal to a call"] == report.counts["turns"]
