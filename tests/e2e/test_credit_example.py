"""Credit per turn learns sooner than one outcome for all turns, from as many episodes (see docs/algorithms.md)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from support.processes.warm import run_command
from support.trainer.lookup_run import environment, lines
from turnwise.rollout.audit import audit_files

MAIN = Path(__file__).parents[2] / "examples" / "credit" / "main.py"


def play(runs: Path, *arguments: str) -> str:
    command = [sys.executable, str(MAIN), "--runs", str(runs), *arguments]
    done = run_command(command, check=False, cwd=runs, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout


@pytest.mark.long
def test_the_example_runs_in_seconds(tmp_path: Path) -> None:
    assert "held-out piles" in play(tmp_path, "--smoke", "--name", "smoke", "algorithm.credit=gigpo", "eval=null")
    rows = lines(tmp_path / "smoke" / "trajectories.twz")
    assert all(row["states"][""] for row in rows)
    assert audit_files(tmp_path / "smoke").contradictions == []


@pytest.mark.long
@pytest.mark.alike("jobs", "credit")
@pytest.mark.timeout(900)
@pytest.mark.xdist_group("credit")
def test_credit_per_turn_beats_outcome_credit(tmp_path: Path) -> None:
    filed = {}
    for name, credit in (("turns", []), ("outcome", ["algorithm.credit=same"])):
        play(tmp_path, "--name", name, "--warm", str(tmp_path / "warm"), "eval=null", *credit)
        steps = [record for record in lines(tmp_path / name / "metrics.jsonl") if record["kind"] == "train"]
        filed[name] = sum(record["reward/mean"] for record in steps[10:]) / 10
    print(filed)
    assert filed["turns"] >= 0.85
    assert filed["outcome"] <= filed["turns"] - 0.1
