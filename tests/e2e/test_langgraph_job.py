"""The example's graph, whose parallel sub-graphs are loops, plays, and learns lookup as well as the ReAct loop does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.processes.warm import run_command
from support.trainer.job_bars import hold_to_bars, mostly_fails
from support.trainer.lookup_run import take_warm

EXAMPLE = Path(__file__).parents[2] / "examples" / "langgraph_agent"


def example(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLE / "main.py"), *arguments]
    return run_command(command, capture_output=True, text=True, check=False)


@pytest.mark.long
def test_the_example_plays_its_graph_with_a_scripted_model() -> None:
    done = example("--smoke")
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    # Both scouts begin with the same prompt: what the second says of it is another sample of it.
    assert "completed, reward 1, forks {'resample': 1}" in lines
    assert {"node/left/ask/turns 3", "node/right/ask/turns 3", "node/left/ask/reward 1"} <= set(lines)


@pytest.mark.long
@pytest.mark.alike("lookup")
@pytest.mark.xdist_group("langgraph-job")
def test_a_graph_learns_to_use_the_tools_as_the_react_loop_does(warm_lookup: Path, tmp_path: Path) -> None:
    """The bars are those that the ReAct loop is held to (``test_main_job.py``)."""
    take_warm(warm_lookup, tmp_path / "graph")
    done = example("--runs", str(tmp_path), "--seed", "0", "--name", "graph")
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads((tmp_path / "graph" / "summary.json").read_text())
    mostly_fails(summary)
    hold_to_bars(summary, sampled=0.88, greedy=0.97)
    audit = [sys.executable, "-m", "turnwise", "audit", str(tmp_path / "graph")]
    result = run_command(audit, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "no contradictions" in result.stdout
