"""A run that samples on two real vLLM servers, of which one is killed: it learns, and its records are exact."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import psutil
import pytest

from support.engine.vllm_server import LAUNCH_S, train_checkpoint, vllm_python
from support.trainer.killing_transport import VERSION
from support.trainer.lookup_run import (
    EXAMPLE,
    MODEL,
    Turnwise,
    gone,
    lines,
    shared,
    silent,
    train_config,
    training,
    wait_until,
    warm_start,
)
from turnwise.trainer.config.train import TrainConfig
from turnwise.trainer.run.audit import audit_run
from turnwise.trajectory_file import read_trajectories

pytestmark = [pytest.mark.real, pytest.mark.timeout(3000)]
STEPS = 20


def vllm_servers(process: Turnwise) -> list[psutil.Process]:
    """Return the API servers of vLLM that a command started."""
    return [
        process for process in process.children() if any("turnwise_vllm_serve" in part for part in process.cmdline())
    ]


def trained(metrics: Path) -> int:
    """Return how many steps a run has logged."""
    return sum(line["kind"] == "train" for line in lines(metrics)) if metrics.exists() else 0


def on_vllm() -> list[str]:
    """Return what the command line says besides an example's own files."""
    return ["inference.engine=vllm", f"inference.server.python={vllm_python()}"]


def check_run(run: Path, steps: int, *, evaluated: bool) -> list[dict[str, Any]]:
    """Check that what vLLM reported is the trainer's own forward, of every version; return the lines of its steps."""
    steps_trained = [line for line in lines(run / "metrics.jsonl") if line["kind"] == "train"]
    assert len(steps_trained) == steps
    assert max(step["gap/max"] for step in steps_trained) < 1e-3
    versions = {
        span[0]
        for trajectory in read_trajectories(run / "trajectories.twz")
        for segment in trajectory.segments
        for span in segment.weight_versions
    }
    assert versions == set(range(steps + evaluated))
    assert audit_run(run, console=silent()).contradictions == []
    return steps_trained


def lookup_config(start: Path, runs: Path) -> TrainConfig:
    """Return the configuration of a run on two servers."""
    return train_config(
        start,
        runs,
        steps=STEPS,
        tasks="turnwise.envs.basic.lookup:tasks?n=200&split=train",
        policies={"main": {"optim": {"lr": 2e-4, "eps": 1e-5, "max_grad_norm": 0.2}}},
        rollout={"env": {"name": "lookup"}, "group_size": 8, "max_turns": 4, "max_tokens_per_turn": 24},
        batch={"groups": 16, "max_tokens_per_micro_batch": 4096},
        eval={"tasks": "turnwise.envs.basic.lookup:tasks?n=24&split=test", "samples": 2, "every": None},
        # All else are the defaults of a run with the built-in server.
        inference={"engine": "vllm", "replicas": 2, "server": {"python": vllm_python()}},
    )


def check_learned(run: Path) -> list[dict[str, Any]]:
    """Check a run of that configuration, and that its model learned; return the lines of its steps."""
    steps = check_run(run, STEPS, evaluated=True)
    rewards = [step["reward/mean"] for step in steps]
    assert mean(rewards[-5:]) > mean(rewards[:5]) + 0.03, rewards
    return steps


@pytest.mark.alike("real jobs", "vllm adapters")
def test_adapters_of_the_example_are_trained_on_vllm_and_sent_alone(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    half_trained = shared(tmp_path_factory, "vllm-half-trained", partial(train_checkpoint, steps=38)) / MODEL
    files = [EXAMPLE / "train.yaml", EXAMPLE / "lora.yaml"]
    smaller = ["steps=3", "batch.groups=4", "eval=null"]
    paths = ["name=run", f"runs={tmp_path}", f"policies.main.model.path={half_trained}"]
    with Turnwise(tmp_path / "log", "train", *files, *paths, *smaller, *on_vllm()) as process:
        process.wait()
        assert process.returncode == 0, process.output()
    steps = check_run(tmp_path / "run", 3, evaluated=False)
    model_bytes = sum(path.stat().st_size for path in half_trained.glob("*.safetensors"))
    # Rank 32 of 128: no version is near the size of the model.
    assert all(0 < step["sync/bytes"] < 0.5 * model_bytes for step in steps), model_bytes


@pytest.mark.alike("real jobs", "vllm")
def test_a_model_learns_on_vllm_though_a_server_is_killed(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    half_trained = shared(tmp_path_factory, "vllm-half-trained", partial(train_checkpoint, steps=38)) / MODEL
    metrics = tmp_path / "run" / "metrics.jsonl"
    with training(lookup_config(half_trained, tmp_path)) as process:
        wait_until(lambda: trained(metrics) >= 1, "the first step", process, within=2 * LAUNCH_S)
        running = vllm_servers(process)
        victim = next(process for process in running if os.getpgid(process.pid) == process.pid)
        os.kill(victim.pid, signal.SIGKILL)
        process.wait()
    assert process.returncode == 0, process.output()
    wait_until(lambda: gone(running), "the end of the servers")
    steps = check_learned(tmp_path / "run")
    records = lines(metrics)
    assert sum(line["kind"] == "eval" for line in records) == 2
    [served] = [line for line in records if line["kind"] == "inference"]
    assert served["restarts"] == 1
    assert served["generated_tokens"] > 0
    # The killed server holds next to nothing while it starts again.
    peaks = [sorted(step[f"memory/server_peak/{number}"] for number in (0, 1)) for step in steps]
    assert all(other > 0.25 for _, other in peaks)
    assert min(peaks[0][0], peaks[-1][0]) > 0.25


@pytest.mark.alike("real jobs", "vllm groups")
def test_ranks_send_weights_to_a_group_though_a_server_is_killed_within_an_update(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    warm = shared(tmp_path_factory, "vllm-warm-start", warm_start) / MODEL
    metrics = tmp_path / "run" / "metrics.jsonl"
    paths = ["name=run", f"runs={tmp_path}", f"policies.main.model.path={warm}"]
    ranks = ["policies.main.engine=fsdp", "policies.main.engine_options.ranks=2", "policies.main.model.threads=2"]
    transport = "policies.main.weight_transport=support.trainer.killing_transport:KillingTransport"
    shorter = [f"steps={STEPS}", "eval.limit=25", "eval.samples=1", "inference.replicas=2"]
    command = ["train", EXAMPLE / "train.yaml", *paths, *ranks, transport, *shorter, *on_vllm()]
    with Turnwise(tmp_path / "log", *command) as process:
        wait_until(lambda: trained(metrics) >= VERSION + 2, "the update after", process, within=2 * LAUNCH_S)
        # Between two updates: it gets the last version again, or the next one.
        os.kill(vllm_servers(process)[0].pid, signal.SIGKILL)
        process.wait()
    assert process.returncode == 0, process.output()
    steps = check_run(tmp_path / "run", STEPS, evaluated=True)
    rewards = [step["reward/mean"] for step in steps]
    # From a tenth, to the bar of the example.
    assert (mean(rewards[:2]) < 0.3, mean(rewards[-5:]) > 0.95) == (True, True), rewards
    [served] = [line for line in lines(metrics) if line["kind"] == "inference"]
    # Both that were killed; the other one, which had a part of that version, was sent all of it again.
    assert served["restarts"] == 2
    assert all(0 < step["servers/paused_s"] <= step["time/sync_s"] for step in steps)
    assert all(0 < step["time/weights_s"] <= step["time/sync_s"] for step in steps)
