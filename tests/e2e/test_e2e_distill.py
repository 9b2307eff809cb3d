"""On-policy distillation from a server of our own: what the teacher is asked, and what it says."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from support.lookup_run import example, lines, silent, train_config
from turnwise.trainer.audit import audit_run
from turnwise.trainer.config import TrainConfig
from turnwise.trainer.offline.config import SFTConfig
from turnwise.trainer.offline.sft import run_sft
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


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_student_of_few_demonstrations_becomes_nearly_as_good_as_its_teacher(tmp_path: Path) -> None:
    make_model, teacher = example("make_model"), example("teacher")
    rows = [row for row in asyncio.run(teacher.demonstrations(3000, seed=0)) if right(row["messages"])]
    base, data = tmp_path / "base", tmp_path / "demonstrations.jsonl"
    make_model.make_model(base, rows, seed=0)
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, count in (("teacher", TEACHER_STEPS), ("student", STUDENT_STEPS)):
        given = {
            "name": name,
            "runs": tmp_path,
            "data": data,
            "model": {"path": base, "threads": 1},
            "steps": count,
            "conversations": 24,
            "optim": {"name": "muon", "lr": 4e-3, "muon": {"lr": 0.02}},
            "schedule": {"kind": "wsd", "warmup_steps": 8, "decay_fraction": 0.4},
        }
        run_sft(SFTConfig.model_validate(given), console=silent())
    config = TrainConfig.model_validate({
        "name": "distilled",
        "runs": tmp_path,
        "steps": 15,
        "tasks": "turnwise.envs.lookup:tasks?n=2000&split=train",
        "policies": {
            "main": {
                "model": {"path": tmp_path / "student" / "model", "threads": 1},
                "optim": {"lr": 1e-3, "eps": 1e-5, "max_grad_norm": 0.5},
                "schedule": {"kind": "linear", "warmup_steps": 2, "min_ratio": 0.1},
            }
        },
        "rollout": {
            "env": {"name": "lookup"},
            "group_size": 1,
            "max_turns": 4,
            "max_tokens_per_turn": 24,
            "concurrency": 128,
            "frozen": {"expert": {"model": tmp_path / "teacher" / "model", "inference": {"threads": 1}}},
        },
        "algorithm": {"distill": {"teacher": "expert"}},
        "batch": {"groups": 96, "max_tokens_per_micro_batch": 2048},
        "eval": {"tasks": "turnwise.envs.lookup:tasks?n=100&split=test", "samples": 2, "greedy": False, "every": None},
        "checkpoint": {"every": 100},
    })  # fmt: skip
    summary = run_train(config, console=silent())
    first, last = (figures["sampled"]["success"]["mean"] for figures in (summary.first_eval, summary.last_eval))
    found = steps(tmp_path / "distilled")
    print(first, last, [round(each["distill/reverse_kl"], 3) for each in found])
    assert first < 0.6
    assert last > 0.85
    # The divergence falls, though no reward was read.
    assert found[-1]["distill/reverse_kl"] < 0.3 * found[0]["distill/reverse_kl"]


# The teacher learns from all demonstrations that it can read in this time, the student from a fraction.
TEACHER_STEPS, STUDENT_STEPS = 100, 45


def right(messages: list[dict]) -> bool:
    """Whether a demonstration makes both calls and answers with what the second one told."""
    answers = [message["content"] for message in messages if message["role"] == "tool"]
    return len(answers) == 2 and messages[-1]["content"] == answers[1]
