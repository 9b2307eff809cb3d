"""What a run reached on held-out tasks, by the tokens that it had sampled."""

from __future__ import annotations

import json
from pathlib import Path


def curve(run: Path, metric: str) -> list[tuple[float, float]]:
    """Return what a run reached on held-out tasks, and the tokens that it had sampled by then."""
    points: list[tuple[float, float]] = []
    tokens = 0.0
    for line in (run / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["kind"] == "train":
            tokens += record["rollout/sampled_tokens"] * record["batch/trajectories"]
        elif record["kind"] == "eval":
            points.append((record["sampled"][metric]["mean"], tokens))
    return points


def first_at_least(points: list[tuple[float, float]], level: float) -> float | None:
    """Return the tokens at which a curve first reaches a level."""
    return next((tokens for reached, tokens in points if reached >= level), None)
