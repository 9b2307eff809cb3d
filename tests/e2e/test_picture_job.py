"""A model from nothing learns to read a picture that only a tool shows; what it leaves passes the audit."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from support.processes.warm import run_command
from support.trainer.job_bars import hold_to_bars, success
from support.trainer.lookup_run import lines
from turnwise.rollout.audit import audit_files
from turnwise.trajectory_file import read_trajectories

MAIN = Path(__file__).parents[2] / "examples" / "picture" / "main.py"
# One seed: others are in docs/vision.md. A busy machine takes minutes for it.
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1200),
    pytest.mark.alike("jobs", "picture"),
    pytest.mark.xdist_group("picture-job"),
]


def play(runs: Path, *arguments: str) -> Path:
    command = [sys.executable, str(MAIN), "--runs", str(runs), "--name", "run", *arguments]
    done = run_command(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "picture_env.py:PictureEnv --model" in done.stdout
    return runs / "run"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return play(tmp_path_factory.mktemp("picture-job"), "--seed", "0")


def test_policy_learns_to_read_unseen_pictures(run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    hold_to_bars(summary, sampled=0.9, greedy=0.93, episodes=(400, 100))
    # What the warm start leaves is mostly wrong, and not nothing: rewards need something to begin with.
    assert 0.03 <= success(summary["before"], "sampled") <= 0.5


def test_no_picture_of_the_evaluation_was_trained_on(run: Path) -> None:
    seen: dict[str, set[str]] = {"train": set(), "val": set()}
    for trajectory in read_trajectories(run / "trajectories.twz"):
        seen[trajectory.partition] |= {media.digest for segment in trajectory.segments for media in segment.media}
    assert len(seen["train"]) > 100
    assert len(seen["val"]) > 50
    assert not seen["train"] & seen["val"]


def test_audit_of_the_run_passes(run: Path) -> None:
    assert audit_files(run).contradictions == []


def test_another_family_runs_with_next_to_no_training(tmp_path: Path) -> None:
    output = play(tmp_path, "--smoke", "--family", "smolvlm")
    assert {row["error"] for row in lines(output / "trajectories.twz")} == {None}
    assert audit_files(output).contradictions == []
