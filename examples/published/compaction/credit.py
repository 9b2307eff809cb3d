"""Credit of GRPO in which the turns that wrote a summary get none: only what follows a summary is trained."""

from __future__ import annotations

import numpy as np

from turnwise.trajectory import Trajectory

EPS = 1e-4
"""Added to the standard deviation, as ``algorithm.advantage: grpo`` does."""


def masked_summaries(group: list[Trajectory]) -> list[list[float]]:
    """Return each trajectory's advantage ``(r - mean) / (std + eps)`` on all its turns but those of summaries."""
    rewards = np.array([trajectory.reward for trajectory in group])
    advantages = (rewards - rewards.mean()) / (rewards.std(ddof=1) + EPS)
    return [
        [0.0 if is_summary(trajectory, turn.turn_id) else float(advantage) for turn in trajectory.turns()]
        for trajectory, advantage in zip(group, advantages, strict=True)
    ]


def is_summary(trajectory: Trajectory, turn_id: str) -> bool:
    """Return whether a turn wrote a summary, whether it was used or not."""
    metrics = trajectory.turn_metrics.get(turn_id, {})
    return "context/compactions" in metrics or "context/failed_compactions" in metrics
