"""Loss aggregation: the weights of rows and the normaliser of a step, over tokens, sequences or trajectories."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, TypeAlias, get_args

from turnwise.errors import TrainError
from turnwise.trainer.batch.packing import TrainRow

LossAggregation: TypeAlias = Literal[
    "token_mean",
    "seq_mean_token_mean",
    "seq_mean_token_sum",
    "seq_mean_token_sum_norm",
    "trajectory_mean",
    "trajectory_sum",
]


def weigh(
    rows: Sequence[TrainRow], mode: LossAggregation, *, scale: float | None = None
) -> tuple[list[TrainRow], float]:
    """Return the rows of one optimizer step with their loss weights, and the normaliser of that step."""
    weights, normalizer = loss_weights(
        [row.sample.trained_tokens for row in rows], [row.sample.trajectory_id for row in rows], mode, scale=scale
    )
    return [replace(row, weight=weight) for row, weight in zip(rows, weights, strict=True)], normalizer


def loss_weights(
    trained_tokens: Sequence[int], trajectory_ids: Sequence[str], mode: LossAggregation, *, scale: float | None = None
) -> tuple[list[float], float]:
    """Return the weight of each row's tokens and the normaliser of the step.

    The loss of a step is ``sum over tokens of weight * token loss / normaliser``. Rows without a trained token count
    in nothing; a trajectory counts once, however many rows (branches) it has. A sequence is one row, so in the modes
    of sequences a trajectory with more branches weighs more.

    ``token_mean``: weight 1, divided by the number of trained tokens (Yu et al. 2025, DAPO, arXiv:2503.14476).
    ``seq_mean_token_mean``: the mean over a row's tokens, averaged over rows (DeepSeekMath, arXiv:2402.03300, eq. 3,
    where every trajectory is one row).
    ``seq_mean_token_sum``: the sum over a row's tokens, averaged over rows.
    ``seq_mean_token_sum_norm``: that, divided by ``scale``, a constant such as the longest completion (Liu et al.
    2025, Dr. GRPO, arXiv:2503.20783, section 3.2).
    ``trajectory_mean``: the mean over a trajectory's tokens, averaged over trajectories (DeepSeekMath, eq. 3).
    ``trajectory_sum``: the sum over a trajectory's tokens, averaged over trajectories.

    Args:
        trained_tokens: Per row, how many tokens it trains.
        trajectory_ids: Per row, its trajectory.
        mode: How tokens are aggregated.
        scale: Read by ``seq_mean_token_sum_norm``, which needs it.

    Returns:
        Weights, one per row, and the normaliser, at least 1.

    Raises:
        TrainError: An unknown mode, a scale that is missing or not above 0, or lists of different lengths.
    """
    if len(trained_tokens) != len(trajectory_ids):
        raise TrainError(f"{len(trained_tokens)} token counts for {len(trajectory_ids)} trajectory ids")
    totals: Counter[str] = Counter()
    for tokens, name in zip(trained_tokens, trajectory_ids, strict=True):
        totals[name] += tokens
    trajectories = sum(1 for total in totals.values() if total)
    rows = sum(1 for tokens in trained_tokens if tokens)
    ones = [1.0] * len(trained_tokens)
    if mode == "token_mean":
        return ones, float(max(1, totals.total()))
    if mode == "trajectory_sum":
        return ones, float(max(1, trajectories))
    if mode == "trajectory_mean":
        return [1.0 / totals[name] if totals[name] else 0.0 for name in trajectory_ids], float(max(1, trajectories))
    if mode == "seq_mean_token_mean":
        return [1.0 / tokens if tokens else 0.0 for tokens in trained_tokens], float(max(1, rows))
    if mode == "seq_mean_token_sum":
        return ones, float(max(1, rows))
    if mode == "seq_mean_token_sum_norm":
        if scale is None or not scale > 0:
            raise TrainError(f"algorithm.loss_scale is {scale}; {mode} divides by it, so give a number above 0")
        return ones, max(1, rows) * scale
    raise TrainError(f"algorithm.loss_aggregation is {mode!r}; allowed: {', '.join(get_args(LossAggregation))}")
