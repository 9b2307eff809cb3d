"""The examples of several agents: both run, and self-play learns Nim."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.lookup_run import environment, lines
from turnwise.rollout.audit import audit_files

EXAMPLES = Path(__file__).parents[2] / "examples"

# Stated before the runs: a game against the perfect player is won by playing perfectly to its end, and random allowed
# moves win fewer than one in ten of them; against a random player they win about half.
BAR_RANDOM, BAR_PERFECT = 0.75, 0.35


def run(example: str, folder: Path, *arguments: str, timeout: int = 110) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / example / "main.py"), "--runs", str(folder), *arguments]
    done = subprocess.run(
        command, check=False, cwd=folder, env=environment(), capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.mark.parametrize(
    ("example", "roles"),
    [
        ("two_player", {"first", "second", "main"}),
        ("proposer_solver", {"proposer", "solver/0", "solver/1", "solver/2"}),
    ],
)
def test_it_runs_with_next_to_no_training(example: str, roles: set[str], tmp_path: Path) -> None:
    assert len((EXAMPLES / example / "main.py").read_text().splitlines()) <= 150
    done = run(example, tmp_path, "--smoke", "--name", "smoke")
    assert "everything is in" in done.stdout
    rows = lines(tmp_path / "smoke" / "trajectories.jsonl")
    assert {row["agent"] for row in rows} == roles
    assert {row["error"] for row in rows} == {None}
    assert audit_files(tmp_path / "smoke").contradictions == []


@pytest.mark.long
@pytest.mark.timeout(900)
def test_self_play_learns_nim(tmp_path: Path) -> None:
    run("two_player", tmp_path, "--name", "nim", timeout=880)
    summary = json.loads((tmp_path / "nim" / "summary.json").read_text())
    won = {
        (when, opponent): summary[when]["sampled"]["by_source"][opponent]["success"]["mean"]
        for when in ("before", "after")
        for opponent in ("random", "perfect")
    }
    print(won, f"{summary['wall_s']:.0f} s wall", file=sys.stderr)
    assert won["before", "random"] <= 0.65
    assert won["before", "perfect"] <= 0.15
    assert won["after", "random"] >= BAR_RANDOM
    assert won["after", "perfect"] >= BAR_PERFECT
    assert audit_files(tmp_path / "nim").contradictions == []
    assert os.listdir(tmp_path / "nim" / "checkpoints")
