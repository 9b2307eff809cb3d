"""A model from nothing learns to read a picture that only a tool shows; what it leaves passes the audit."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from support.processes.warm import run_command
from support.trainer.lookup_run import lines
from turnwise.rollout.audit import audit_files

MAIN = Path(__file__).parents[2] / "examples" / "picture" / "main.py"
KINDS = ("sampled", "greedy")
pytestmark = pytest.mark.long


def play(runs: Path, *arguments: str) -> Path:
    command = [sys.executable, str(MAIN), "--runs", str(runs), "--name", "run", *arguments]
    done = run_command(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return runs / "run"


@pytest.mark.parametrize("family", ["qwen3_vl", "smolvlm"])
def test_other_families_run_with_next_to_no_training(family: str, tmp_path: Path) -> None:
    run = play(tmp_path, "--smoke", "--family", family)
    rows = lines(run / "trajectories.twz")
    assert {row["error"] for row in rows} == {None}
    assert audit_files(run).contradictions == []


@pytest.mark.alike("jobs", "picture")
def test_it_reads_pictures_that_it_has_not_seen(tmp_path: Path) -> None:
    run = play(tmp_path, "--seed", "0")
    summary = json.loads((run / "summary.json").read_text())
    figures = {
        f"{part} {kind}": summary[part][kind]["success"]["mean"] for part in ("before", "after") for kind in KINDS
    }
    print(f"{figures}, {summary['wall_s']:.0f} s wall, {summary['cpu_s']:.0f} CPU-s")
    # What the warm start leaves is mostly wrong, and the boards of the evaluation are none of the training's.
    assert max(figures["before sampled"], figures["before greedy"]) <= 0.5
    assert min(figures["after sampled"], figures["after greedy"]) >= 0.9
    assert audit_files(run).contradictions == []
