"""Adapters of several policies on one server: each is sampled from, trained, versioned and resumed by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from safetensors.torch import load_file

from support.trainer.lookup_run import lines, silent, training, wait_until
from support.trainer.policies_run import MODES, ROLES, solver_and_critic
from turnwise.errors import ConfigError
from turnwise.rollout.records import read_batches
from turnwise.trainer.config.train import TrainConfig
from turnwise.trainer.run.audit import audit_run
from turnwise.trainer.run.directory import RunDirectory
from turnwise.trainer.run.dry_run import dry_run
from turnwise.trainer.run.run import open_run
from turnwise.trainer.train import run_train, train
from turnwise.trajectory_file import read_trajectories


@pytest.fixture(scope="module", autouse=True)
def peft() -> Any:
    return pytest.importorskip("peft")


def two_adapters(model: Path, runs: Path, **changes: Any) -> TrainConfig:
    """Return the configuration of a run with adapters of different ranks and targets on one server."""
    solver: dict[str, Any] = {"path": model, "threads": 1, "lora": {"rank": 4}}
    critic: dict[str, Any] = {"path": model, "threads": 1, "lora": {"rank": 2, "targets": ["q_proj", "down_proj"]}}
    policies = {
        "solver": {"model": solver, "optim": {"lr": 2e-2}},
        "critic_agent": {"model": critic, "optim": {"lr": 2e-2}, "served_by": "solver"},
    }
    return solver_and_critic(runs, policies, **changes)


def check_run(run: Path, steps: int) -> None:
    """Check that each policy was trained by its own tokens alone, and that they are what its weights sample."""
    trajectories = {trajectory.id: trajectory for trajectory in read_trajectories(run / "trajectories.twz")}
    assert {
        (trajectory.agent, trajectory.policy) for trajectory in trajectories.values() if trajectory.error is None
    } == set(ROLES.items())
    rows = read_batches(run / "batches.jsonl").rows
    assert {(row.policy, row.step) for row in rows} == {
        (name, step + 1) for name in ROLES.values() for step in range(steps)
    }
    assert all(trajectories[row.trajectory].policy == row.policy for row in rows)
    report = audit_run(run, at_most=8, console=silent())
    assert report.contradictions == []
    assert report.counts["sampled tokens that cannot be recomputed"] == 0
    assert report.counts["weight versions recomputed"] >= 2
    last_record = [record for record in lines(run / "metrics.jsonl") if record["kind"] == "train"][-1]
    for name in ROLES.values():
        folder = run / "checkpoints" / f"step_{steps:06d}" / "policies" / name
        factors = load_file(folder / "adapter_model.safetensors")
        # What began at zero was trained.
        assert all(bool(tensor.any()) for key, tensor in factors.items() if "lora_B" in key)
        assert last_record[f"policy/{name}/batch/trajectories"] > 0
    servers = [record for record in lines(run / "metrics.jsonl") if record["kind"] == "inference"][-1]
    assert servers["policy"] == "solver, critic_agent"
    assert servers["requests"] > 0
    # One server, with one log.
    assert [file.relative_to(run / "logs").as_posix() for file in (run / "logs").rglob("server-*.log")] == [
        "solver/server-0.log"
    ]


@pytest.mark.long
async def test_two_adapters_train_on_one_server_and_resume(lookup_model: Path, tmp_path: Path) -> None:
    config, run_dir = two_adapters(lookup_model, tmp_path), tmp_path / "run"
    await train(config.model_copy(update={"steps": 1}), console=silent())
    async with open_run(config, run_dir, silent()) as run:
        solver, critic = run.policies.values()
        assert solver.fleet is critic.fleet
        [replica] = solver.fleet.replicas
        assert (await replica.stats())["adapters"] == {"solver": 1, "critic_agent": 1}
    # Where a policy is served may change between two parts of a run: here to a server of each.
    apart = two_adapters(lookup_model, tmp_path).model_dump(exclude_unset=True)
    del apart["policies"]["critic_agent"]["served_by"]
    async with open_run(TrainConfig.model_validate(apart), run_dir, silent()) as run:
        solver, critic = run.policies.values()
        assert solver.fleet is not critic.fleet
    (run_dir / "logs" / "critic_agent" / "server-0.log").unlink()
    await train(config, console=silent())
    check_run(run_dir, 2)
    for step in [record for record in lines(run_dir / "metrics.jsonl") if record["kind"] == "train"]:
        # What the server says of its adapters is what the trainer computes.
        assert all(step[f"policy/{name}/gap/max"] < 1e-3 for name in ROLES.values())


@pytest.mark.long
@pytest.mark.parametrize("mode", ["colocate", "separate"])
def test_two_adapters_train_on_one_server_while_it_samples(mode: str, lookup_model: Path, tmp_path: Path) -> None:
    run_train(two_adapters(lookup_model, tmp_path, steps=3, **MODES[mode]), console=silent())
    check_run(tmp_path / "run", 3)


@pytest.mark.long
def test_a_run_with_a_shared_server_survives_kills(lookup_model: Path, tmp_path: Path) -> None:
    config, run = two_adapters(lookup_model, tmp_path, steps=6, mode="colocate_async"), tmp_path / "run"
    for step in (2, 4):
        with training(config) as process:
            saved = run / "checkpoints" / f"step_{step:06d}"
            wait_until(saved.exists, f"the checkpoint of step {step}", process)
            process.kill()
            process.wait()
    run_train(config, console=silent())
    assert RunDirectory(run).read()["parts"] == 3
    check_run(run, 6)


def changed(config: TrainConfig, name: str, **changes: Any) -> dict[str, Any]:
    plain = config.model_dump(exclude_unset=True)
    plain["policies"][name] = plain["policies"][name] | changes
    return plain


@pytest.mark.parametrize(
    ("policy", "changes", "message"),
    [
        (
            "critic_agent",
            {"served_by": "judge"},
            r"served_by is 'judge', which is no other trained policy: name one of",
        ),
        ("critic_agent", {"served_by": "critic_agent"}, "which is no other trained policy: name one of solver"),
        ("solver", {"served_by": "critic_agent"}, r"which has no servers \(policies\."),
        (
            "critic_agent",
            {"model": {"path": "m"}},
            r"policies\.critic_agent trains all weights, and servers are shared",
        ),
        ("solver", {"model": {"path": "m"}}, r"policies\.solver trains all weights: give|policies\.solver trains all"),
        (
            "critic_agent",
            {"model": {"path": "other", "lora": {}}},
            r"policies\.critic_agent\.model\.path is .*other and policies\.solver\.model\.path .*name the same folder",
        ),
        ("critic_agent", {"inference": {"dtype": "bfloat16"}}, r"what serves both is policies\.solver\.inference"),
    ],
)
def test_policies_that_cannot_share_servers_are_refused(
    policy: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = two_adapters(tmp_path / "m", tmp_path)
    with pytest.raises(ValidationError, match=message):
        TrainConfig.model_validate(changed(config, policy, **changes))


@pytest.mark.ext
async def test_engine_that_serves_one_policy_is_refused_before_servers_start(
    lookup_model: Path, tmp_path: Path
) -> None:
    config = TrainConfig.model_validate(
        changed(two_adapters(lookup_model, tmp_path), "solver", inference={"engine": "sglang"})
    )
    message = (
        r"policies\.critic_agent\.served_by is 'solver', whose servers' inference\.engine is sglang, which serves one"
    )
    with pytest.raises(ConfigError, match=message):
        await train(config, console=silent())
    assert not (tmp_path / "run" / "logs").exists()
    [inference_check] = [check for check in (await dry_run(config)).checks if check.name == "inference"]
    assert (inference_check.outcome, "serves one policy" in inference_check.finding) == ("failed", True)
    [inference_check] = [
        check for check in (await dry_run(two_adapters(lookup_model, tmp_path))).checks if check.name == "inference"
    ]
    assert inference_check.finding.startswith("solver, critic_agent: builtin, 1 server")
