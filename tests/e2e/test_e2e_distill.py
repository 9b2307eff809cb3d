"""On-policy distillation from a server of our own: what the teacher is asked, and what it says."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.trainer.lookup_run import EXAMPLE, example, lines, silent, train_config
from turnwise.config import load_config
from turnwise.evaluation.config import EvalConfig
from turnwise.evaluation.runner import run_eval
from turnwise.trainer.config.offline import SFTConfig
from turnwise.trainer.config.train import TrainConfig
from turnwise.trainer.offline.sft import run_sft
from turnwise.trainer.offline.small_model import make_model
from turnwise.trainer.run.audit import audit_run
from turnwise.trainer.train import run_train

DISTILL = EXAMPLE.parent / "objectives" / "distill.yaml"
# Of how many demonstrations the models of the long test are made, and for how many steps of 24 they are shown them.
DEMONSTRATIONS, TEACHER_STEPS, STUDENT_STEPS = 4000, 80, 100


def steps(run: Path) -> list[dict]:
    return [record for record in lines(run / "metrics.jsonl") if record["kind"] == "train"]


@pytest.mark.long
def test_distillation_from_equal_weights_starts_without_divergence(lookup_model: Path, tmp_path: Path) -> None:
    config = train_config(
        lookup_model,
        tmp_path,
        rollout={"group_size": 1, "frozen": {"first": {"start": True, "inference": {"threads": 1}}}},
        algorithm={"distill": {"teacher": "first"}},
        batch={"groups": 4},
        steps=2,
    )
    run_train(config, console=silent())
    first, second = steps(tmp_path / "run")
    # The teacher is the student: its word on each sampled token is what the student said itself, up to rounding.
    assert first["distill/gap_max"] < 1e-4
    assert first["distill/unscored_tokens"] == 0
    assert abs(first["distill/reverse_kl"]) < 1e-4
    # AdamW takes a full step of any gradient, so then they differ, and the teacher disagrees.
    assert second["distill/gap_max"] > 1e-3
    assert np.isfinite(second["train/grad_norm"])
    # What was scored was not sampled: it is in no trajectory, and the ledger holds nothing of it.
    report = audit_run(tmp_path / "run", console=silent())
    assert report.contradictions == []
    assert report.counts["turns equal to a call"] == report.counts["turns"]


@pytest.mark.long
def test_a_policy_teaches_itself_and_contexts_are_recorded(lookup_model: Path, tmp_path: Path) -> None:
    config = train_config(
        lookup_model,
        tmp_path,
        algorithm={"self_distill": {"contexts": ["error", "sibling"]}},
        batch={"groups": 8, "max_tokens_per_micro_batch": 2048},
    )
    run_train(config, console=silent())
    records = lines(tmp_path / "run" / "batches.jsonl")
    for step in steps(tmp_path / "run"):
        [batch] = [record for record in records if record.get("step") == step["step"]]
        assert len(batch["contexts"]) == step["distill/turns"] > 0
        assert np.isfinite(step["train/grad_norm"])
        trained = {row["trajectory"] for row in batch["rows"]}
        assert {trajectory for trajectory, _, _ in batch["contexts"]} <= trained
    report = audit_run(tmp_path / "run", console=silent())
    assert report.contradictions == []
    contexts = sum(len(record.get("contexts", [])) for record in records)
    assert report.counts["contexts of self-distillation recomputed"] == contexts
    forged = next(record for record in records if record.get("contexts"))
    forged["contexts"][0][2] += " Say nothing else."
    text = "".join(json.dumps(record) + "\n" for record in records)
    (tmp_path / "run" / "batches.jsonl").write_text(text)
    [contradiction] = audit_run(tmp_path / "run", console=silent()).contradictions
    assert f"the context that taught turn {forged['contexts'][0][1]} in step {forged['step']}" in contradiction


def right(messages: list[dict[str, Any]]) -> bool:
    """Whether a demonstration makes both calls and answers with what the second one told."""
    answers = [message["content"] for message in messages if message["role"] == "tool"]
    return len(answers) == 2 and messages[-1]["content"] == answers[1]


def shown(runs: Path, name: str, rows: list[dict[str, Any]], steps: int) -> Path:
    """Train the model ``runs / "base"`` on demonstrations."""
    data = runs / f"{name}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "name": name,
        "runs": runs,
        "data": data,
        "model": {"path": runs / "base", "threads": 1},
        "steps": steps,
        "conversations": 24,
        "optim": {"name": "muon", "lr": 4e-3, "muon": {"lr": 0.02}},
        "schedule": {"kind": "wsd", "warmup_steps": 8, "decay_fraction": 0.4},
    }
    return run_sft(SFTConfig.model_validate(settings), console=silent()).model


def success(figures: dict[str, Any] | None) -> float:
    assert figures is not None
    return figures["sampled"]["success"]["mean"]


@pytest.mark.long
@pytest.mark.alike("jobs", "distill")
@pytest.mark.timeout(900)
def test_a_student_of_wrong_demonstrations_becomes_nearly_as_good_as_its_teacher(tmp_path: Path) -> None:
    rows = asyncio.run(example("teacher").demonstrations(DEMONSTRATIONS, seed=0))
    make_model(tmp_path / "base", rows, seed=0)
    # The teacher has seen the right ones alone; the student all of them, of which four in five are wrong.
    correct = [row for row in rows if right(row["messages"])]
    expert = shown(tmp_path, "expert", correct, TEACHER_STEPS)
    novice = shown(tmp_path, "novice", rows, STUDENT_STEPS)
    overrides = [f"policies.main.model.path={novice}", f"rollout.frozen.expert.model={expert}", f"runs={tmp_path}"]
    config = load_config(TrainConfig, DISTILL, overrides)
    assert config.eval is not None
    changes = {
        "model": expert,
        "out": tmp_path / "played",
        "tasks": config.eval.tasks,
        "samples": config.eval.samples,
        "greedy": False,
        "rollout": {"env": {"name": "lookup"}, "max_turns": 4, "max_tokens_per_turn": 24},
        "inference": {"threads": 1},
    }
    taught = success(run_eval(EvalConfig.model_validate(changes), console=silent()).to_json())
    summary = run_train(config, console=silent())
    novice_success, trained_success = success(summary.before), success(summary.after)
    apart = [record["distill/reverse_kl"] for record in steps(summary.directory)]
    print(
        f"student {novice_success:.3f} to {trained_success:.3f}, teacher {taught:.3f}; {summary.cpu_s:.0f} CPU-s in all"
    )
    print(f"reverse KL {[round(divergence, 3) for divergence in apart]}")
    # The bar of every algorithm on this job. No reward was read: config.algorithm.distill alone says what is learned.
    assert config.algorithm.distill is not None
    assert config.algorithm.distill.reward_coef == 0
    assert novice_success <= 0.35
    assert taught >= 0.95
    assert trained_success > 0.85
    assert np.mean(apart[-5:]) < 0.2 * apart[0]
