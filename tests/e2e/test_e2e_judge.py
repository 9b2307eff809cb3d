"""Runs that host their judge: a frozen policy grades the answers, and what it read and wrote is recorded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.trainer.judged_run import COLOURS, build_judge, judge, judged_config, rollout, tasks
from support.trainer.judged_run import MODEL as JUDGE
from support.trainer.lookup_run import lines, shared, silent
from turnwise.config import load_config
from turnwise.errors import ConfigError
from turnwise.evaluation.config import EvalConfig
from turnwise.evaluation.runner import run_eval
from turnwise.trainer.run.audit import audit_run
from turnwise.trainer.train import run_train


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that names colours and grades them."""
    return shared(tmp_path_factory, "judge-model", build_judge) / JUDGE


def said(row: dict) -> str:
    """Return what a trajectory's last segment says."""
    return row["segments"][-1]["messages"][-1]["content"]


def test_a_policy_learns_what_its_hosted_judge_prefers(model: Path, tmp_path: Path) -> None:
    # Rule and judge: a weighted sum.
    scorer = {
        "short": {"function": "regex", "arguments": {"pattern": "^[A-Za-z]+$"}, "weight": 0.5},
        "liked": {**judge(), "weight": 2.0},
    }
    config = judged_config(model, tmp_path, scorer, steps=6)
    run_train(config, console=silent())
    run = tmp_path / "run"
    rows = lines(run / "trajectories.twz")
    answers = {row["episode_id"]: row for row in rows if row["agent"] == "main"}
    grades = [row for row in rows if row["agent"].startswith("reward/grader.")]
    assert len(grades) == len(answers) == 6 * 16
    assert {row["policy"] for row in grades} == {"grader"}
    assert all(row["frozen"] for row in grades)
    for grade in grades:
        answer = answers[grade["episode_id"]]
        score = json.loads(said(grade))["score"]
        if said(answer) in COLOURS:  # Nothing else was shown to the judge, and nothing says how it grades that.
            assert score == (10 if said(answer) == "red" else 0)
        rewards = {name: value for _, name, value in answer["rewards"]}
        assert rewards == {"short": 0.5 * said(answer).isalpha(), "liked": 2.0 * score / 10}
    steps = [record for record in lines(run / "metrics.jsonl") if record["kind"] == "train"]
    assert steps[-1]["reward/mean"] > steps[0]["reward/mean"]
    assert not any("by_role" in name for name in steps[0])
    report = audit_run(run, console=silent())
    assert report.contradictions == []
    assert report.counts["turns equal to a call"] == report.counts["turns"] == 2 * 6 * 16


def test_an_evaluation_asks_the_same_judge(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    settings = {
        "model": str(model), "tasks": "support.trainer.judged_run:tasks", "samples": 2, "greedy": False,
        "out": str(out), "rollout": rollout(model, {"liked": judge()}),
    }  # fmt: skip
    result = run_eval(load_config(EvalConfig, defaults=settings), console=silent())
    assert result.sampled is not None
    assert result.sampled.success.episodes == 2 * len(tasks())
    assert result.sampled.by_role == {}
    rows = lines(out / "trajectories.twz")
    scores = [json.loads(said(row))["score"] for row in rows if row["agent"].startswith("reward/grader.")]
    assert result.sampled.success.mean == pytest.approx(sum(scores) / 10 / (2 * len(tasks())))
    assert audit_run(out, console=silent()).contradictions == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"policy": "grade"}, r"scorer.liked.arguments.policy is 'grade', which is not in rollout.frozen.*grader"),
        ({"policy": "main"}, r"arguments.policy is 'main'.*a trained policy cannot judge"),
    ],
)
def test_a_judge_that_is_no_frozen_policy_is_refused_before_a_server_starts(
    model: Path, tmp_path: Path, arguments: dict, words: str
) -> None:
    config = judged_config(model, tmp_path, {"liked": judge(**arguments)})
    with pytest.raises(ConfigError, match=words):
        run_train(config, console=silent())
    assert not (tmp_path / "run" / "logs").exists()
