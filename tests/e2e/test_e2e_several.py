"""Two roles in a training run, one played by the weights that it began with: recorded, audited, never trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.trainer.lookup_run import lines, silent, train_config
from turnwise.config import load_config
from turnwise.errors import ConfigError, InferenceError
from turnwise.evaluation.config import EvalConfig
from turnwise.evaluation.runner import run_eval
from turnwise.rollout.audit import audit_files
from turnwise.trainer.run.audit import audit_run
from turnwise.trainer.train import run_train

FROZEN = {"past": {"start": True, "temperature": 0.5, "inference": {"threads": 1}}}


def rollout(**agent) -> dict:
    return {
        "env": {"name": "support.envs.run_envs:Exchange"},
        "agent": {"name": "turns", "config": agent},
        "frozen": FROZEN,
        "max_turns": 3,
        "max_tokens_per_turn": 6,
    }


@pytest.mark.long
def test_a_role_trains_against_the_weights_that_the_run_began_with(lookup_model: Path, tmp_path: Path) -> None:
    config = train_config(lookup_model, tmp_path, rollout=rollout(policies={"right": "past"}), steps=2)
    run_train(config, console=silent())
    run = tmp_path / "run"
    rows = lines(run / "trajectories.twz")
    assert {(row["agent"], row["policy"]) for row in rows} == {("left", "main"), ("right", "past")}
    temperatures = {row["policy"]: row["metrics"]["temperature"] for row in rows}
    assert temperatures == {"main": 1.0, "past": 0.5}
    # The weights that are synced reach the trained policy's server alone.
    versions = {
        policy: {span[0] for row in rows if row["policy"] == policy for segment in row["segments"]
                 for span in segment.get("weight_versions", ())}
        for policy in ("main", "past")
    }  # fmt: skip
    assert versions == {"main": {0, 1}, "past": {0}}
    trained = {row["trajectory"] for step in lines(run / "batches.jsonl") for row in step.get("rows", ())}
    assert trained
    assert all(name.endswith("/left") for name in trained)
    step = next(record for record in lines(run / "metrics.jsonl") if record["kind"] == "train")
    assert {"reward/by_role/left", "reward/by_role/right@past", "rollout/turns_by_role/left"} <= step.keys()
    report = audit_run(run, console=silent())
    assert report.contradictions == []
    # Both policies' calls stand in the ledger.
    assert report.counts["turns equal to a call"] == report.counts["turns"] == sum(
        segment["kind"] == "sampled" for row in rows for segment in row["segments"]
    )  # fmt: skip
    assert (run / "logs" / "frozen-past").is_dir()

    # Had a frozen policy's tokens been trained, the audit would say so.
    batches = run / "batches.jsonl"
    batches.write_text(batches.read_text().replace("/left", "/right"))
    assert any(
        "although its policy 'past' is frozen" in contradiction for contradiction in audit_files(run).contradictions
    )


def test_evaluation_plays_against_the_same_frozen_policy(lookup_model: Path, tmp_path: Path) -> None:
    settings = {
        "model": str(lookup_model),
        "tasks": "turnwise.envs.basic.lookup:tasks?n=3&split=test",
        "samples": 2,
        "greedy": False,
        "out": str(tmp_path / "out"),
        "success_reward": 0.0,
        "role": "left",
        "rollout": rollout(others="past"),
    }
    result = run_eval(load_config(EvalConfig, defaults=settings), console=silent())
    assert result.sampled is not None
    assert result.sampled.success.episodes == 6
    assert set(result.sampled.by_role) <= {"left", "right", "left@past", "right@past"}
    assert {name.partition("@")[2] for name in result.sampled.by_role} == {"", "past"}
    assert audit_files(tmp_path / "out").contradictions == []
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["sampled"]["by_role"].keys() == result.sampled.by_role.keys()


@pytest.mark.parametrize(
    ("frozen", "policy", "error", "words"),
    [
        ({}, "past", ConfigError, "names the policy 'past', which does not exist: name one of main"),
        ({"past": {"model": "/nowhere"}}, "past", ConfigError, "past.model is /nowhere: there is no such"),
        ({"past": {"start": True, "url": "http://127.0.0.1:9"}}, "past", ValueError, "start alone"),
        ({"past": {"url": "http://127.0.0.1:9"}}, "past", ValueError, "model, the directory"),
        ({"main": {"start": True}}, "main", ValueError, "main"),
        ({"past": {"url": "https://api.example.com", "hosted": {}}}, "past", ValueError, "hosted.model"),
        ({"past": {"url": "https://e.example.com", "hosted": {"model": "m", "key_env": "NO_SUCH_KEY"}}}, "past",
         ConfigError, "NO_SUCH_KEY"),
    ],
)  # fmt: skip
def test_invalid_frozen_policy_is_refused_before_the_start(
    lookup_model: Path, tmp_path: Path, frozen: dict, policy: str, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        run_train(
            train_config(lookup_model, tmp_path, rollout={**rollout(policies={"right": policy}), "frozen": frozen}),
            console=silent(),
        )
    assert not (tmp_path / "run" / "logs").exists()


def test_an_endpoint_that_does_not_answer_is_named(
    lookup_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # By itself it waits for six seconds.
    monkeypatch.setattr("turnwise.inference.client.RETRIES", 1)
    # No process listens on port 9 of the loopback.
    frozen = {"past": {"model": str(lookup_model), "url": "http://127.0.0.1:9"}}
    settings = {
        "model": str(lookup_model), "tasks": "turnwise.envs.basic.lookup:tasks?n=1", "out": str(tmp_path / "out"),
        "rollout": {**rollout(others="past"), "frozen": frozen},
    }  # fmt: skip
    with pytest.raises(InferenceError, match=r"rollout.frozen.past.url is http://127.0.0.1:9: "):
        run_eval(load_config(EvalConfig, defaults=settings), console=silent())
