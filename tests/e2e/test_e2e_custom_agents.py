"""Agents that users write train and are evaluated: loops over ids, functions behind an endpoint, silent ones."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from support.agents.user_agents import FILE
from support.processes.warm import run_command
from support.trainer.lookup_run import environment, lines, silent, take_warm, train_config
from turnwise.cli import app
from turnwise.config import dump_config
from turnwise.trainer.run.audit import audit_run
from turnwise.trainer.train import run_train
from turnwise.trajectory_file import read_trajectories

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_loop"
EVAL = {"tasks": "support.agents.user_agents:tasks?n=3", "samples": 1, "greedy": False, "every": None}


@pytest.mark.long
def test_rows_choose_their_agents_and_all_agents_train(lookup_model: Path, tmp_path: Path) -> None:
    names = tmp_path / "agents.yaml"
    names.write_text(FILE.format(loop=f"{EXAMPLE / 'loop.py'}:LookupLoop"))
    config = train_config(
        lookup_model, tmp_path, tasks="support.agents.user_agents:tasks?n=6", eval=EVAL, shuffle=False,
        batch={"groups": 3}, rollout={"agent_loop_config_path": names},
    )  # fmt: skip
    (tmp_path / "run.yaml").write_text(dump_config(config))
    dry = CliRunner().invoke(app, ["train", str(tmp_path / "run.yaml"), "--dry-run"])
    assert dry.exit_code == 0, dry.output
    summary = run_train(config, console=silent())
    report = audit_run(summary.directory, console=silent())
    assert report.contradictions == []
    assert report.counts["trajectories trained"] > 0
    by_agent: dict[str, list] = {}
    for trajectory in read_trajectories(summary.directory / "trajectories.twz"):
        assert trajectory.error is None
        by_agent.setdefault(("loop", "proxied", "silent")[int(trajectory.task_id[-1]) % 3], []).append(trajectory)
    assert {name: len(played) for name, played in by_agent.items()} == dict.fromkeys(by_agent, 2 * 4 + 2)
    assert all(trajectory.segments for name in ("loop", "proxied") for trajectory in by_agent[name])
    # One that never asks the model keeps its reward, and is counted.
    assert {(trajectory.reward, len(trajectory.segments)) for trajectory in by_agent["silent"]} == {(0.5, 0)}
    steps = [record for record in lines(summary.directory / "metrics.jsonl") if record["kind"] == "train"]
    assert [record["batch/trajectories"] for record in steps] == [12.0, 12.0]


@pytest.mark.long
def test_the_example_runs(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLE / "main.py"), "--smoke", "--runs", str(tmp_path)]
    done = run_command(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "success, sampled" in done.stdout


@pytest.mark.long
@pytest.mark.alike("lookup")
def test_custom_agent_loop_learns_lookup_to_the_bar_of_the_main_job(warm_lookup: Path, tmp_path: Path) -> None:
    """The bars are those of ``test_main_job.py``, said before it was run."""
    take_warm(warm_lookup, tmp_path / "loop")
    command = [sys.executable, str(EXAMPLE / "main.py"), "--runs", str(tmp_path), "--name", "loop", "eval.samples=2"]
    done = run_command(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads((tmp_path / "loop" / "summary.json").read_text())
    assert summary["after"]["sampled"]["success"]["mean"] >= 0.88
    assert summary["after"]["greedy"]["success"]["mean"] >= 0.97
