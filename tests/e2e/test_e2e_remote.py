"""Training whose episodes are played by runners in separate processes, also when some of these are killed."""

from __future__ import annotations

import re
import signal
from collections import Counter
from pathlib import Path

import pytest

from support.rollout.remote_runs import make_key, remote_rollout, runner
from support.trainer.lookup_run import GROUPS, MEMBERS, lines, silent, train_config, training, wait_until
from turnwise.trainer.config.train import TrainConfig
from turnwise.trainer.run.audit import audit_run
from turnwise.trajectory_file import read_trajectories


def remote_config(model: Path, runs: Path, **changes) -> TrainConfig:
    return train_config(model, runs, rollout=remote_rollout(runs), **changes)


def check(run: Path, steps: int) -> None:
    """Every group is whole, nothing is trained twice, and the files prove it."""
    records = {r["step"]: r for r in lines(run / "metrics.jsonl") if r["kind"] == "train"}
    assert set(records) == set(range(1, steps + 1))
    assert {record["batch/failed"] for record in records.values()} == {0}
    assert {record["batch/trajectories"] for record in records.values()} == {GROUPS * MEMBERS}
    ids = Counter(trajectory.id for trajectory in read_trajectories(run / "trajectories.twz"))
    assert max(ids.values()) == 1
    assert audit_run(run, recompute=False, console=silent()).contradictions == []


@pytest.mark.long
def test_two_runners_train_and_a_killed_runner_costs_no_episode(lookup_model: Path, tmp_path: Path) -> None:
    config = remote_config(lookup_model, tmp_path)
    with training(config) as run:
        wait_until(lambda: "runners: turnwise runner --connect" in run.output(), "the run listens", run)
        gate = tmp_path / "gate"
        dying = ("--agent", "support.agents.user_agents:DiesOnce", "-c", f"gate={gate}", "-n", "2")
        with runner(config, "dies", *dying) as dies:
            # Beside another one it might be left too few episodes to die in.
            assert dies.wait() == -signal.SIGKILL, dies.output()
        with runner(config, "stays", "--agent", "react", "-n", "2") as stays:
            assert run.wait() == 0, run.output()
            assert stays.wait() == 0, stays.output()
            assert "the run has ended" in stays.output()
    check(config.runs / "run", 2)
    lost = [
        trajectory for trajectory in read_trajectories(config.runs / "run" / "trajectories.twz") if trajectory.error
    ]
    assert lost
    assert {str(trajectory.error).partition(":")[0] for trajectory in lost} == {"RunnerDisconnected"}
    assert re.search(r"runner \S+ is gone: its connection is gone \(\d left\)", run.output())


@pytest.mark.long
def test_runner_survives_a_killed_run_and_serves_the_resumed_run(lookup_model: Path, tmp_path: Path) -> None:
    config = remote_config(lookup_model, tmp_path, steps=3)
    make_key(tmp_path)
    metrics = config.runs / "run" / "metrics.jsonl"
    with runner(config, "early", "--agent", "react", "-n", "4", "--stay") as early:
        wait_until(lambda: "no run answers" in early.output(), "the runner waits for a run", early)
        with training(config) as first:
            wait_until(lambda: metrics.exists() and len(lines(metrics)) >= 1, "a step is done", first)
            first.send_signal(signal.SIGKILL)
            first.wait()
        with training(config) as second:
            assert second.wait() == 0, second.output()
        wait_until(lambda: "waiting for another" in early.output(), "the runner heard of the end", early)
        early.send_signal(signal.SIGINT)
        assert early.wait() == 130
    check(config.runs / "run", 3)
