"""A loop on OpenAI's client, in separate processes, learns lookup as the ReAct loop does: the same bar."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from support.processes.warm import run_command
from support.trainer.lookup_run import take_warm

MAIN = Path(__file__).parents[2] / "examples" / "openai_client_agent" / "main.py"
pytestmark = [pytest.mark.long, pytest.mark.alike("lookup"), pytest.mark.xdist_group("blackbox-job")]


def test_a_program_learns_as_the_react_loop_does(warm_lookup: Path, tmp_path: Path) -> None:
    take_warm(warm_lookup, tmp_path / "job")
    command = [sys.executable, str(MAIN), "--runs", str(tmp_path), "--seed", "0", "--name", "job"]
    with (tmp_path / "log").open("wb") as log:
        done = run_command(command, stdout=log, stderr=log, env={**os.environ, "COLUMNS": "160"}, check=False)
    assert done.returncode == 0, (tmp_path / "log").read_text()[-3000:]
    summary = json.loads((tmp_path / "job" / "summary.json").read_text())
    rewards = {
        f"{part} {kind}": summary[part][kind]["success"]["mean"]
        for part in ("before", "after")
        for kind in ("sampled", "greedy")
    }
    print(f"{rewards}, {summary['wall_s']:.0f} s wall, {summary['cpu_s']:.0f} CPU-s")
    assert max(rewards["before sampled"], rewards["before greedy"]) <= 0.35
    assert rewards["after sampled"] >= 0.88
    assert rewards["after greedy"] >= 0.97
    audit = [sys.executable, "-m", "turnwise", "audit", str(tmp_path / "job")]
    result = run_command(audit, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "no contradictions" in result.stdout
