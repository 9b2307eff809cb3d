"""A model from nothing learns to repair code in sandboxes: the example, cut short (whole: its README.md)."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from support.processes.warm import run_command
from support.trainer.lookup_run import environment, lines
from turnwise.rollout.audit import audit_files

MAIN = Path(__file__).parents[2] / "examples" / "code_repair" / "main.py"
STEPS = 9


@pytest.mark.long
@pytest.mark.alike("jobs", "code_repair")
@pytest.mark.timeout(1200)
@pytest.mark.xdist_group("code-repair")
def test_policy_learns_to_continue_until_the_tests_pass(tmp_path: Path) -> None:
    command = [sys.executable, str(MAIN), "--runs", str(tmp_path), "--name", "run", f"steps={STEPS}"]
    # The rate of the whole example's first steps: it falls over the steps of a run.
    command += ["policies.main.schedule.kind=constant", "eval.limit=100", "eval.samples=1", "checkpoint.every=100"]
    done = run_command(command, check=False, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    run = tmp_path / "run"
    summary = json.loads((run / "summary.json").read_text())
    figures = {
        f"{part} {kind}": summary[part][kind]["success"]["mean"]
        for part in ("before", "after")
        for kind in ("sampled", "greedy")
    }
    print(f"{figures}, {summary['wall_s']:.0f} s wall, {summary['cpu_s']:.0f} CPU-s")
    assert figures["before sampled"] <= 0.4
    assert figures["after sampled"] >= figures["before sampled"] + 0.25
    trained = [record for record in lines(run / "metrics.jsonl") if record["kind"] == "train"]
    assert len(trained) == STEPS
    assert all(record["batch/failed"] == 0 for record in trained)
    # What the reward says is what the hidden tests said of the file that the model left.
    rows = [row for row in lines(run / "trajectories.twz") if row["error"] is None]
    assert {reward[1] for row in rows for reward in row["rewards"]} <= {"solved", "errors"}
    assert audit_files(run).contradictions == []
    bisects(run, rows)


def bisects(run: Path, rows: list[dict[str, Any]]) -> None:
    """An episode that failed is won from one of its turns by the trained model; where it was lost is named."""
    failed = next(
        row for row in rows if "step-0-sampled" in row["id"] and not any(value for _, _, value in row["rewards"])
    )
    [checkpoint] = (run / "checkpoints").glob("step_*")
    command = [sys.executable, "-m", "turnwise", "bisect", str(run), failed["id"], "--model", str(checkpoint), "--json"]
    done = run_command(command, check=False, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert (report["episode_id"], report["failed"]) == (failed["episode_id"], 0)
    assert all(len(turn["rewards"]) == 4 for turn in report["turns"])
    assert max(reward for turn in report["turns"] for reward in turn["rewards"]) >= 0.7
    assert f"The episode was lost at turn {report['decisive']}" in report["verdict"]
