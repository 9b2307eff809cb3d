"""What the loss of a step is averaged over: tokens or trajectories.

Owns: :func:`loss_weights` and :func:`weigh`. Refuses: the losses themselves (``losses.py``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, TypeAlias

from turnwise.errors import TrainError
from turnwise.trainer.packing import TrainRow

LossAggregation: TypeAlias = Literal["token_mean", "trajectory_mean", "trajectory_sum"]


def weigh(rows: Sequence[TrainRow], mode: LossAggregation) -> tuple[list[TrainRow], float]:
    """Return the rows of one optimizer step with their loss weights, and the normaliser of that step."""
    weights, normalizer = loss_weights(
        [row.sample.trained_tokens for row in rows], [row.sample.trajectory_id for row in rows], mode
    )
    return [replace(row, weight=weight) for row, weight in zip(rows, weights, strict=True)], normalizer


def loss_weights(
    trained_tokens: Sequence[int], trajectory_ids: Sequence[str], mode: LossAggregation
) -> tuple[list[float], float]:
    """Return the weight of each row's tokens and the normaliser of the step.

    The loss of a step is ``sum over tokens of weight * token loss / normaliser``. Rows without a trained token count
    in nothing; a trajectory counts once, however many rows (branches) it has.

    ``token_mean``: weight 1, divided by the number of trained tokens (Yu et al. 2025, DAPO, arXiv:2503.14476, eq. 8).
    ``trajectory_mean``: the mean over a trajectory's tokens, averaged over trajectories (DeepSeekMath, eq. 3).
    ``trajectory_sum``: the sum over a trajectory's tokens, averaged over trajectories.

    Args:
        trained_tokens: Per row, how many tokens it trains.
        trajectory_ids: Per row, its trajectory.
        mode: How tokens are aggregated.

    Returns:
        Weights, one per row, and the normaliser, at least 1.

    Raises:
        TrainError: An unknown mode, or lists of different lengths.
    """
    if len(trained_tokens) != len(trajectory_ids):
        raise TrainError(f"{len(trained_tokens)} token counts for {len(trajectory_ids)} trajectory ids")
    totals: Counter[str] = Counter()
    for tokens, name in zip(trained_tokens, trajectory_ids, strict=True):
        totals[name] += tokens
    trajectories = sum(1 for total in totals.values() if total)
    if mode == "token_mean":
        return [1.0] * len(trained_tokens), float(max(1, totals.total()))
    if mode == "trajectory_sum":
        return [1.0] * len(trained_tokens), float(max(1, trajectories))
    if mode == "trajectory_mean":
        return [1.0 / totals[name] if totals[name] else 0.0 for name in trajectory_ids], float(max(1, trajectories))
    raise TrainError(f"algorithm.loss_aggregation is {mode!r}; allowed: token_mean, trajectory_mean, trajectory_sum")
