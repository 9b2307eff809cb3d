"""The whole line, with every part real: environment, agent, recorder, server in its own process, trainer, files."""

from __future__ import annotations

import math
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from support.trainer.lookup_run import GROUPS, MEMBERS, lines, shared, silent, train_config
from turnwise.agents.core import Agent
from turnwise.agents.registry import register_agent
from turnwise.cli import main
from turnwise.errors import CheckpointError, ConfigError, TrainError
from turnwise.recorder.ledger import read_ledger
from turnwise.rollout.audit import audit_files
from turnwise.rollout.records import read_batches
from turnwise.trainer.observe.metrics import meaning
from turnwise.trainer.run.audit import audit_run
from turnwise.trainer.train import run_train
from turnwise.trajectory import Trajectory
from turnwise.trajectory_file import read_trajectories

EVAL = {"tasks": "turnwise.envs.basic.lookup:tasks?n=3&split=test", "samples": 2, "greedy": True, "every": None}


def cli(*arguments: object) -> int:
    with pytest.raises(SystemExit) as exit_:
        main([str(argument) for argument in arguments])
    return int(exit_.value.code or 0)


def trained(model: Path, runs: Path, **changes: Any) -> Path:
    return run_train(train_config(model, runs, **changes), console=silent()).directory


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    return load_file(checkpoint / "model.safetensors")


def steps_of(run: Path) -> list[dict[str, Any]]:
    return [record for record in lines(run / "metrics.jsonl") if record["kind"] == "train"]


PEAKS = {"trainer": "trainer_peak", "server/0": "server_peak/0"}


@pytest.fixture(scope="module")
def walk(lookup_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of three steps with evaluation before and after."""
    return shared(tmp_path_factory, "walk", lambda runs: trained(lookup_model, runs, steps=3, eval=EVAL)) / "run"


def test_files_of_a_run_hold_their_records(walk: Path, lookup_model: Path) -> None:
    files = {str(file.relative_to(walk)) for file in walk.iterdir()}
    assert files == {
        "config.yaml", "run.json", "summary.json", "metrics.jsonl", "trajectories.twz", "trajectories.index",
        "journal.jsonl", "ledger.jsonl", "batches.jsonl", "checkpoints", "logs", "diagnostics.jsonl", "timeline.jsonl",
        "manifest.json",
    }  # fmt: skip
    [summary] = [yaml.safe_load((walk / "summary.json").read_text())]
    assert set(summary) == {"steps", "before", "after", "wall_s", "cpu_s", "memory_gb", "ended_by", "spent"}
    assert summary["steps"] == 3
    assert summary["wall_s"] > 0
    assert summary["cpu_s"] > 0
    for figures in (summary["before"], summary["after"]):
        assert figures["sampled"]["success"]["episodes"] == 6
        assert figures["greedy"]["success"]["episodes"] == 3
        assert figures["sampled"]["success"]["stderr"] >= 0
    config = yaml.safe_load((walk / "config.yaml").read_text())
    assert config["policies"]["main"]["model"]["path"] == str(lookup_model)
    assert "serving" in (walk / "logs" / "server-0.log").read_text()


def test_every_step_is_logged_with_documented_metrics(walk: Path) -> None:
    records = lines(walk / "metrics.jsonl")
    assert [(r["kind"], r["step"]) for r in records if r["kind"] != "warning"] == [
        ("start", 0), ("eval", 0), ("train", 1), ("train", 2), ("train", 3), ("eval", 3), ("inference", 3),
    ]  # fmt: skip
    for record in steps_of(walk):
        assert record["batch/trajectories"] == GROUPS * MEMBERS
        assert record["batch/failed"] == 0
        assert record["train/updates"] == 1
        # Strictly on-policy: what trains is what sampled, on both sides of the wire.
        assert record["gap/max"] < 1e-4
        assert record["train/ratio"] == pytest.approx(1, abs=1e-4)
        assert [name for name in record if name not in ("kind", "step") and meaning(name) is None] == []
        memory = {part: (record[f"memory/{part}"], record[f"memory/{kind}"]) for part, kind in PEAKS.items()}
        # Each has imported torch, and neither has a hundred times as much.
        assert all(0.1 < resident <= peak < 10 for resident, peak in memory.values())
        assert record["memory/peak"] == pytest.approx(sum(peak for _, peak in memory.values()))
        # Every sampled token is trained, or its reason to be dropped is counted.
        dropped = sum(value for name, value in record.items() if name.startswith("dropped/"))
        sampled = record["rollout/sampled_tokens"] * record["batch/trajectories"]
        assert record["batch/trained_tokens"] + dropped == pytest.approx(sampled)
    peaks = [record["memory/peak"] for record in steps_of(walk)]
    assert peaks == sorted(peaks)
    assert yaml.safe_load((walk / "summary.json").read_text())["memory_gb"] == peaks[-1]
    diagnostics = lines(walk / "diagnostics.jsonl")
    assert [(record["kind"], record["step"]) for record in diagnostics] == [("gap", 1), ("gap", 2), ("gap", 3)]
    for record, step in zip(diagnostics, steps_of(walk), strict=True):
        assert sum(turn["tokens"] for turn in record["turns"]) == step["train/tokens"]
        assert max(turn["max"] for turn in record["turns"]) == pytest.approx(step["gap/max"])
        assert record["largest"][0]["gap"] == pytest.approx(step["gap/max"])
        assert record["largest"][0]["turn_id"].startswith("t")


def test_ids_on_the_wire_equal_those_recorded_and_trained(walk: Path) -> None:
    server = lines(walk / "metrics.jsonl")[-1]
    entries = read_ledger(walk / "ledger.jsonl").entries
    trajectories = list(read_trajectories(walk / "trajectories.twz"))
    turns = sum(1 for trajectory in trajectories for _ in trajectory.turns())
    # The server's own count, the ledger's and the recorder's.
    assert server["requests"] == len(entries) == turns
    assert server["generated_tokens"] == sum(trajectory.sampled_tokens for trajectory in trajectories)
    prompts = sum(len(entry.prompt_ids) for entry in entries)
    assert server["prefilled_tokens"] + server["reused_tokens"] == prompts
    # More than half of all prompt tokens were a prefix that an earlier turn or another member had read.
    assert server["reused_tokens"] > prompts / 2
    assert (server["restarts"], server["preemptions"]) == (0, 0)


def test_each_step_samples_with_the_weights_of_the_step_before(walk: Path) -> None:
    trajectories = {trajectory.id: trajectory for trajectory in read_trajectories(walk / "trajectories.twz")}
    batches = read_batches(walk / "batches.jsonl")
    assert batches.steps == 3
    assert {row.step for row in batches.rows} == {1, 2, 3}
    for row in batches.rows:
        assert versions(trajectories[row.trajectory]) == {row.step - 1}
    evaluated = [t for t in trajectories.values() if t.partition == "val"]
    assert {v for t in evaluated if "step-0-" in t.id for v in versions(t)} == {0}
    assert {v for t in evaluated if "step-3-" in t.id for v in versions(t)} == {3}


def versions(trajectory: Trajectory) -> set[int]:
    return {version for s in trajectory.segments if s.sampled for version, _, _ in s.weight_versions}


def test_every_weight_version_is_a_model_that_transformers_loads(walk: Path, lookup_model: Path) -> None:
    weights_before = weights(lookup_model)
    for step in (1, 2, 3):
        checkpoint = walk / "checkpoints" / f"step_{step:06d}"
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto")
        assert model.dtype == torch.float32
        weights_after = weights(checkpoint)
        assert weights_after.keys() == weights_before.keys()
        assert any(not torch.equal(weights_after[name], weights_before[name]) for name in weights_after)
        assert all(bool(torch.isfinite(value).all()) for value in weights_after.values())
        weights_before = weights_after
    tokenizer = AutoTokenizer.from_pretrained(walk / "checkpoints" / "step_000003")
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Who manages mia?"}], add_generation_prompt=True, return_tensors="pt"
    )["input_ids"]
    answer = model.generate(ids, max_new_tokens=24, do_sample=False)
    assert tokenizer.decode(answer[0, ids.shape[1] :]).strip()


def test_the_audit_proves_the_run_and_recomputes_its_logprobs(walk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = audit_run(walk, at_most=16, console=silent())
    assert report.contradictions == []
    assert report.counts["weight versions recomputed"] == 4
    assert report.counts["turns recomputed"] == 4 * 16
    assert report.counts["turns equal to a call"] == report.counts["model calls in the ledger"]
    dead = sum(int(record["batch/dead_groups"]) for record in steps_of(walk))
    assert report.counts["trajectories trained"] == (3 * GROUPS - dead) * MEMBERS
    assert report.figures["largest difference of a logprob"] < 1e-4
    assert cli("audit", walk, "--no-recompute") == 0
    assert "no contradictions" in capsys.readouterr().out


# Steps that teach nothing, and several updates per step


def test_step_of_dead_groups_changes_no_weights_and_counts_as_a_step(lookup_model: Path, tmp_path: Path) -> None:
    run = trained(lookup_model, tmp_path, rollout={"env": {"name": "support.envs.run_envs:Equal"}})
    first, second = steps_of(run)
    for record in (first, second):
        assert record["batch/rows"] == record["train/updates"] == record["train/tokens"] == 0
        assert record["batch/dead_groups"] == GROUPS
        assert record["reward/mean"] == 0.5
    initial, final = weights(lookup_model), weights(run / "checkpoints" / "step_000002")
    assert all(torch.equal(initial[name], final[name]) for name in initial)
    # The version is the step's all the same, and the audit knows of steps without rows.
    sampled = {v for t in read_trajectories(run / "trajectories.twz") for v in versions(t)}
    assert sampled == {0, 1}
    report = audit_run(run, console=silent())
    assert report.sound
    assert report.counts["train steps"] == 2


@pytest.mark.long
def test_rollout_logprobs_and_recomputed_old_logprobs_give_equal_steps(lookup_model: Path, tmp_path: Path) -> None:
    """Two epochs of two updates: from the second update on the weights are others than those that sampled."""
    values = {}
    for old in ("rollout", "recompute"):
        algorithm = {"epochs": 2, "minibatches": 2, "old_logprobs": old, "loss_options": {"clip_high": 10.0}}
        run = trained(lookup_model, tmp_path, name=old, algorithm=algorithm)
        for record in steps_of(run):
            assert all(math.isfinite(value) for value in record.values() if not isinstance(value, str))
            assert record["train/updates"] == 4
            assert record["train/ratio_max"] > 1.001
            # The gap is taken before the first update, while the weights are those that sampled.
            assert record["gap/max"] < 1e-4
        assert audit_files(run).sound
        epochs = {(row.step, row.epoch) for row in read_batches(run / "batches.jsonl").rows}
        assert epochs == {(1, 0), (1, 1), (2, 0), (2, 1)}
        values[old] = steps_of(run)[0]
    for name in ("train/loss", "train/ratio", "train/ratio_max", "train/approx_kl", "train/grad_norm"):
        assert values["rollout"][name] == pytest.approx(values["recompute"][name], abs=1e-4, rel=1e-4)


# Failures of environments and agents


@pytest.mark.long
def test_a_member_whose_environment_fails_leaves_its_group_ragged(lookup_model: Path, tmp_path: Path) -> None:
    env = {"name": "support.envs.run_envs:Failing", "config": {"key": str(tmp_path), "of": MEMBERS, "fails": [1]}}
    run = trained(lookup_model, tmp_path, rollout={"env": env, "concurrency": 1, "retries": 0})
    for record in steps_of(run):
        assert record["batch/failed"] == record["replay/failed"] == GROUPS
        assert record["batch/trajectories"] == GROUPS * (MEMBERS - 1)
    trajectories = list(read_trajectories(run / "trajectories.twz"))
    failed = [t for t in trajectories if t.error is not None]
    assert len(failed) == 2 * GROUPS
    for trajectory in failed:
        assert "EnvError" in trajectory.error
        assert "is gone" in trajectory.error
        assert trajectory.rewards == []
        assert trajectory.stop_reason == "error"
    # The mean is that of those who acted: no failure counts as a reward of zero.
    first = [t.reward for t in trajectories if t.error is None and versions(t) == {0}]
    assert steps_of(run)[0]["reward/mean"] == pytest.approx(np.mean(first))
    rows = {row.trajectory for row in read_batches(run / "batches.jsonl").rows}
    assert rows.isdisjoint(t.id for t in failed)
    assert audit_files(run).sound


def test_run_ends_with_the_error_if_every_episode_fails(
    lookup_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("turnwise.rollout.producer.MAX_FAILED_GROUPS", 3)
    env = {"name": "support.envs.run_envs:Failing", "config": {"key": str(tmp_path), "of": 1, "fails": [0]}}
    rollout = {"env": env, "retries": 1}
    config = train_config(lookup_model, tmp_path, rollout=rollout)
    with pytest.raises(
        TrainError, match=r"every episode of 3 groups in a row ended in .*the database of episode \d+ is"
    ):
        run_train(config, console=silent())
    run = tmp_path / "run"
    assert not (run / "checkpoints").exists()
    # Each was tried twice. Some groups that replace failed ones may be in flight.
    members = Counter(trajectory.group_id for trajectory in read_trajectories(run / "trajectories.twz"))
    assert sum(count == 2 * MEMBERS for count in members.values()) >= 3
    assert audit_files(run).sound
    # Its configuration is that of its files, also without a checkpoint.
    other = train_config(lookup_model, tmp_path, seed=99, rollout=rollout)
    times_before = {file: file.stat().st_mtime_ns for file in run.rglob("*")}
    with pytest.raises(CheckpointError, match="another configuration"):
        run_train(other, console=silent())
    assert {file: file.stat().st_mtime_ns for file in run.rglob("*")} == times_before


class WithCritic(Agent):
    """Asks a second session, of another policy, before it answers."""

    async def run(self, episode):
        opinion = await episode.session_for("critic", policy="judge").chat(episode.observation)
        episode.note("length", -0.01 * len(opinion["content"]), opinion["turn_id"], agent="critic")
        message = await episode.session.chat(episode.observation, episode.tools)
        await episode.step(message)


register_agent("test-e2e-critic")(WithCritic)


def test_only_the_trained_policy_is_trained(lookup_model: Path, tmp_path: Path) -> None:
    run = trained(
        lookup_model, tmp_path, rollout={"agent": {"name": "test-e2e-critic"}, "frozen": {"judge": {"start": True}}}
    )
    trajectories = {t.id: t for t in read_trajectories(run / "trajectories.twz")}
    assert {t.policy for t in trajectories.values()} == {"main", "judge"}
    rows = read_batches(run / "batches.jsonl").rows
    assert rows
    assert {trajectories[row.trajectory].policy for row in rows} == {"main"}
    assert steps_of(run)[0]["batch/trajectories"] == GROUPS * MEMBERS
    assert audit_files(run).sound


def test_fresh_keeps_the_initial_model(walk: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(walk, tmp_path / "run"))
    content = (run / "trajectories.twz").read_bytes()
    checkpoint = run / "checkpoints" / "step_000001"
    config_inside = train_config(checkpoint, tmp_path, steps=1)
    with pytest.raises(ConfigError, match=r"policies\.main\.model\.path is .*step_000001, inside the run"):
        run_train(config_inside, fresh=True, console=silent())
    assert (run / "trajectories.twz").read_bytes() == content
    assert checkpoint.is_dir()
