"""What the audit reads of a run (trajectories and trained rows), and an assertion on its verdict."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from turnwise.rollout.audit import AuditReport, audit_files
from turnwise.rollout.records import BatchWriter
from turnwise.trajectory import Trajectory, to_samples
from turnwise.trajectory_file import TrajectoryWriter, read_trajectories


def write_trajectories(folder: Path, trajectories: Sequence[Trajectory]) -> None:
    """Append trajectories to those of a run."""
    writer = TrajectoryWriter(folder / "trajectories.twz")
    for trajectory in trajectories:
        writer.write(trajectory)
    writer.close()


def train_once(folder: Path) -> None:
    """Write down that all rows of a run were trained, one trajectory a step."""
    batches = BatchWriter(folder / "batches.jsonl")
    for step, trajectory in enumerate(read_trajectories(folder / "trajectories.twz"), 1):
        rows = to_samples(trajectory, reported=True).rows
        if rows and trajectory.error is None:
            batches.write(step, rows)
    batches.close()


def assert_sound(folder: Path, *trajectories: Trajectory) -> AuditReport:
    """Train what a run left once, and hold all that is on disk against its ledger."""
    write_trajectories(folder, trajectories)
    train_once(folder)
    report = audit_files(folder)
    assert report.contradictions == [], report.contradictions
    return report
