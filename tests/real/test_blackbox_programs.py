"""Claude Code, Codex, mini-swe-agent and opencode as black-box agents, four at a time, where there is only loopback.

Their recipes are used as they ship. Rewards come from the environment: from the file that a program repaired, and from
tools that it called over MCP, or from a shell where it speaks no MCP.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from support.agents import run_blackbox
from support.agents.isolated_programs import ROOT, program
from support.rollout.audited import train_once
from turnwise.rollout.audit import audit_files
from turnwise.trajectory import to_samples
from turnwise.trajectory_file import read_trajectories

pytestmark = [pytest.mark.real, pytest.mark.timeout(400)]

NPM = ".cache/npm/node_modules/.bin"
PROGRAMS: dict[str, tuple[tuple[str, str], dict[str, Any]]] = {
    "claude_code": (("claude", NPM), {"name": "Bash", "argument": "command"}),
    "codex": (("codex", NPM), {"name": "exec_command", "argument": "cmd"}),
    "mini_swe_agent": (("mini", ".venv-agents/bin"), {"name": "bash", "argument": "command", "submit": True}),
    "opencode": (
        ("opencode", ".cache/opencode"),
        {"name": "bash", "argument": "command", "more": {"description": "x"}},
    ),
}
SLOW = ("opencode", "repair")


async def play(recipe: str, env: str, run_dir: Path) -> list[dict[str, Any]]:
    """Play the dataset in a process, in a namespace of its own; return what became of each episode."""
    (name, location), tool = PROGRAMS[recipe]
    config = {"agent": {"recipe": recipe, "program": program(name, location)}, "env": env, "tool": tool}
    mapping = [] if os.geteuid() == 0 else ["--map-root-user"]
    process = await asyncio.create_subprocess_exec(
        *("unshare", "--net", *mapping, sys.executable, str(run_blackbox.__file__), str(run_dir), json.dumps(config)),
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests")},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, err = await process.communicate()
    finally:
        if process.returncode is None:
            # What it started ends with it.
            process.kill()
    assert process.returncode == 0, err.decode()[-4000:]
    episodes: list[dict[str, Any]] = json.loads(out)
    return episodes


# opencode, which takes long to start, is held to the harder half.
@pytest.mark.alike("rows by programs")
@pytest.mark.parametrize(
    ("recipe", "env"), [(name, env) for name in PROGRAMS for env in ("repair", "lookup") if (name, env) != SLOW]
)
async def test_a_program_plays_a_dataset_and_yields_rows(recipe: str, env: str, tmp_path: Path) -> None:
    episodes = await play(recipe, env, tmp_path)
    assert [(episode["error"], episode["stop_reason"]) for episode in episodes] == [(None, "completed")] * 6
    # Every third one was played wrong: the environment saw it.
    right = [0.0 if member % 3 == 2 else 1.0 for member in range(6)]
    expected = [{"fixed": value, "said": 0.5} if env == "repair" else {"score": value} for value in right]
    assert [episode["rewards"] for episode in episodes] == expected
    for episode in episodes:
        metrics = episode["metrics"]
        # opencode asks for a title, which is a branch of its own.
        extra = recipe == "opencode"
        assert (metrics["turns"], episode["leaves"]) == (3 + extra, 1 + extra)
        assert metrics["blackbox/nonzero_exits"] == 0
        assert metrics.get("tool_calls", 0) == (2 if env == "lookup" else 0)
        assert metrics.get("tool_errors", 0) == 0
    train_once(tmp_path)
    report = audit_files(tmp_path)
    assert report.contradictions == []
    assert report.counts["turns equal to a call"] == sum(episode["metrics"]["turns"] for episode in episodes)
    for trajectory in read_trajectories(tmp_path / "trajectories.twz"):
        assert sum(row.trained_tokens for row in to_samples(trajectory).rows) == trajectory.sampled_tokens > 0
        if env == "lookup":
            # Each call was counted on the turn that made it.
            assert sum(metrics.get("tool_calls", 0) for metrics in trajectory.turn_metrics.values()) == 2
