"""Several trained policies in one run: each trained by its own tokens, and audited."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from support.crash.runs import kill_at_random_events
from support.trainer.lookup_run import lines, silent
from support.trainer.policies_run import MODES, ROLES, solver_and_critic
from turnwise.errors import ConfigError
from turnwise.rollout.audit import audit_files
from turnwise.rollout.records import read_batches
from turnwise.trainer.config.train import TrainConfig
from turnwise.trainer.loops.modes import train_as_configured
from turnwise.trainer.observe.metrics import meaning
from turnwise.trainer.run.audit import audit_run
from turnwise.trainer.run.export import export_model
from turnwise.trainer.run.run import open_run
from turnwise.trainer.train import run_train, train
from turnwise.trajectory import Trajectory
from turnwise.trajectory_file import read_trajectories

KILLS = int(os.environ.get("TURNWISE_TEST_KILLS", "3"))


def two_policies(model: Path, runs: Path, **changes: Any) -> TrainConfig:
    policy: dict[str, Any] = {"model": {"path": model, "threads": 1}}
    policies = {
        "solver": {**policy, "optim": {"lr": 1e-3}},
        "critic_agent": {**policy, "optim": {"lr": 3e-3}, "algorithm": {"advantage_options": {"norm_by_std": False}}},
    }
    return solver_and_critic(runs, policies, **changes)


def weights(run: Path, step: int, policy: str) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / f"step_{step:06d}" / "policies" / policy / "model.safetensors")


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def check_attribution(run: Path) -> dict[str, Trajectory]:
    """Check that each trajectory was sampled by its role's policy, and trained by that alone."""
    trajectories = {trajectory.id: trajectory for trajectory in read_trajectories(run / "trajectories.twz")}
    assert {
        (trajectory.agent, trajectory.policy) for trajectory in trajectories.values() if trajectory.error is None
    } == set(ROLES.items())
    rows = read_batches(run / "batches.jsonl").rows
    assert {row.policy for row in rows} == set(ROLES.values())
    assert all(trajectories[row.trajectory].policy == row.policy for row in rows)
    return trajectories


@pytest.mark.long
@pytest.mark.parametrize(
    "mode", ["sync", *(pytest.param(mode, marks=pytest.mark.long) for mode in ("colocate", "separate"))]
)
def test_two_policies_train_in_one_run_each_on_its_own_tokens(mode: str, lookup_model: Path, tmp_path: Path) -> None:
    run_train(two_policies(lookup_model, tmp_path, **MODES[mode]), console=silent())
    run = tmp_path / "run"
    check_attribution(run)
    report = audit_run(run, at_most=8, console=silent())
    assert report.contradictions == []
    # Two policies, each with its start and what its first step made. In the other modes the starts alone may have
    # sampled everything.
    assert report.counts["weight versions recomputed"] >= (4 if mode == "sync" else 2)
    start = load_file(lookup_model / "model.safetensors")
    for name in ROLES.values():
        assert not equal(start, weights(run, 1, name))
    assert not equal(weights(run, 1, "solver"), weights(run, 1, "critic_agent"))
    [_, last_record] = [record for record in lines(run / "metrics.jsonl") if record["kind"] == "train"]
    for name in ROLES.values():
        assert last_record[f"policy/{name}/batch/trajectories"] == 8
        # In the other modes it learns from what earlier weights sampled.
        assert mode != "sync" or last_record[f"policy/{name}/gap/max"] < 1e-3
    assert last_record["batch/trajectories"] == 16
    tokens = [last_record[f"policy/{name}/batch/trained_tokens"] for name in ROLES.values()]
    assert last_record["batch/trained_tokens"] == sum(tokens)
    assert (last_record["policy/solver/lr/adamw"], last_record["policy/critic_agent/lr/adamw"]) == (1e-3, 3e-3)
    assert "lr/adamw" not in last_record
    assert [name for name in last_record if name not in ("kind", "step") and meaning(name) is None] == []
    assert {record["policy"] for record in lines(run / "diagnostics.jsonl")} == set(ROLES.values())
    with pytest.raises(ConfigError, match="holds the policies critic_agent, solver: choose one with --policy"):
        export_model(run, tmp_path / "out")
    export_model(run, tmp_path / "out", policy="solver")
    assert equal(load_file(tmp_path / "out" / "model.safetensors"), weights(run, 2, "solver"))


@pytest.mark.long
async def test_each_policy_resumes_with_its_own_weights_optimizer_and_servers(
    lookup_model: Path, tmp_path: Path
) -> None:
    config, run_dir = two_policies(lookup_model, tmp_path, steps=1), tmp_path / "run"
    await train(config, console=silent())
    async with open_run(config.model_copy(update={"steps": 2}), run_dir, silent()) as run:
        for name, policy in run.policies.items():
            saved = run_dir / "checkpoints" / "step_000001" / "policies" / name
            assert equal(dict(policy.learner.export_weights()), weights(run_dir, 1, name))
            policy.learner.save(tmp_path / name)
            saved_state, exported = (
                torch.load(folder / "optimizer.pt", weights_only=True) for folder in (saved, tmp_path / name)
            )
            assert saved_state["steps"] == exported["steps"] == 1
            assert str(saved_state["optimizer"]) == str(exported["optimizer"])
            assert (await policy.fleet.client.model_info()).weight_version == 1
        await train_as_configured(run)
    check_attribution(run_dir)
    assert {row.step for row in read_batches(run_dir / "batches.jsonl").rows} == {1, 2}
    assert audit_files(run_dir).sound


@pytest.mark.long
def test_a_run_of_two_policies_survives_kills_at_random_events(lookup_model: Path, tmp_path: Path) -> None:
    config = two_policies(lookup_model, tmp_path, steps=6, mode="colocate_async")
    run = tmp_path / "run"
    kill_at_random_events(config, KILLS, seed=7)
    run_train(config, console=silent())
    attribution = check_attribution(run)
    assert audit_run(run, at_most=8, console=silent()).contradictions == []
    batches = read_batches(run / "batches.jsonl")
    assert {row.step for row in batches.rows} == set(range(1, 7))
    trained = [(row.policy, attribution[row.trajectory].group_id, row.step) for row in batches.rows]
    for name in ROLES.values():
        # Each step trained two groups of each policy: none was lost, none came twice.
        assert len({(group, step) for policy, group, step in trained if policy == name}) <= 2 * 6
        assert len({group for policy, group, _ in trained if policy == name}) == len(
            {(group, step) for policy, group, step in trained if policy == name}
        )
