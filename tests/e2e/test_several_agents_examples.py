"""The examples of several agents run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.processes.warm import run_command
from support.trainer.lookup_run import environment, lines
from turnwise.rollout.audit import audit_files

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(example: str, folder: Path, *arguments: str, timeout: int = 110) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / example / "main.py"), "--runs", str(folder), *arguments]
    done = run_command(
        command, check=False, cwd=folder, env=environment(), capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.mark.long
@pytest.mark.parametrize(
    ("example", "roles"),
    [
        ("two_player", {"first", "second", "main"}),
        ("solver_critic", {"solver", "critic"}),
        ("proposer_solver", {"proposer", "solver/0", "solver/1", "solver/2"}),
    ],
)
def test_example_runs_with_next_to_no_training(example: str, roles: set[str], tmp_path: Path) -> None:
    assert len((EXAMPLES / example / "main.py").read_text().splitlines()) <= 150
    done = run(example, tmp_path, "--smoke", "--name", "smoke")
    assert "everything is in" in done.stdout
    rows = lines(tmp_path / "smoke" / "trajectories.twz")
    assert {row["agent"] for row in rows} == roles
    assert {row["error"] for row in rows} == {None}
    assert audit_files(tmp_path / "smoke").contradictions == []
