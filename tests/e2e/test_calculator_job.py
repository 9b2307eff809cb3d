"""The calculator's job reaches its figures; what it leaves passes the audit."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from support.processes.warm import run_command
from support.trainer.job_bars import hold_to_bars, mostly_fails, success

MAIN = Path(__file__).parents[2] / "examples" / "calculator" / "main.py"
# One seed: several are the main job's to show (``test_main_job.py``).
pytestmark = [pytest.mark.long, pytest.mark.alike("jobs", "calculator"), pytest.mark.xdist_group("calculator-job")]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs, name = tmp_path_factory.mktemp("calculator-job"), "seed0"
    command = [sys.executable, str(MAIN), "--runs", str(runs), "--seed", "0", "--name", name]
    result = run_command(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    assert f"turnwise eval calculator --model {runs / name}" in result.stdout
    return runs / name


def test_policy_learns_to_calculate_with_the_tool(run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    hold_to_bars(summary, sampled=0.90, greedy=0.93)
    # What the warm start leaves is mostly wrong, and not nothing: rewards need something to begin with.
    mostly_fails(summary)
    assert success(summary["before"], "sampled") >= 0.03


def test_audit_of_the_run_passes(run: Path) -> None:
    command = [sys.executable, "-m", "turnwise", "audit", str(run), "--no-recompute"]
    result = run_command(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "no contradictions" in result.stdout
