"""The published results of examples/published: their runner, their credit, and the shortest of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from support.processes.warm import run_command
from support.trainer.lookup_run import environment

HOME = Path(__file__).parents[2] / "examples" / "published"


def success(run: Path, kind: str) -> float:
    mean: float = json.loads((run / "summary.json").read_text())["after"][kind]["success"]["mean"]
    return mean


def play(runs: Path, script: str, *arguments: str) -> str:
    command = [sys.executable, str(HOME / script), "--runs", str(runs), *arguments]
    done = run_command(command, check=False, cwd=runs, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout


@pytest.mark.long
@pytest.mark.alike("finished runs")
@pytest.mark.parametrize(("name", "runs"), [("search", 2), ("compaction", 2), ("frozen_lake", 2), ("wordle", 1)])
def test_finished_runs_are_not_repeated(tmp_path: Path, name: str, runs: int) -> None:
    first = play(tmp_path, "run.py", name, "--seed", "0", "--smoke")
    assert first.count(f"== {name}-") == runs
    assert len(list(tmp_path.glob("*/summary.json"))) == runs
    assert "==" not in play(tmp_path, "run.py", name, "--seed", "0", "--smoke")


@pytest.mark.long
@pytest.mark.alike("jobs", "published")
@pytest.mark.timeout(1200)
@pytest.mark.xdist_group("published")
def test_trained_summaries_cross_trails_that_masked_ones_do_not(tmp_path: Path) -> None:
    play(tmp_path, "compaction/main.py", "--name", "trained")
    also = ("--also", "masked.yaml", "--warm", str(tmp_path / "trained"))
    play(tmp_path, "compaction/main.py", "--name", "masked", *also)
    reached = {name: success(tmp_path / name, "greedy") for name in ("trained", "masked")}
    print(reached)
    assert reached["trained"] >= 0.6
    assert reached["masked"] <= 0.2
