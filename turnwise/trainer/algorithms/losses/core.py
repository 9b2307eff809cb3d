"""What losses share: sums over tokens, the clamped log-ratio, and means over spans of tokens.

Losses are summed and divided only by the normaliser of the whole step (``aggregation.py``), so that gradients do not
depend on how rows are split over micro-batches and ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal, TypeAlias

import torch
from pydantic import Field
from torch import Tensor

from turnwise.trainer.core import TrainRow

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this magnitude before they are exponentiated: exp(20) is 4.9e8, finite in float32."""

ClipLow: TypeAlias = Annotated[float, Field(ge=0, lt=1)]
"""How far a ratio may fall below 1."""


@dataclass(slots=True)
class LossSums:
    """The loss of one micro-batch.

    Attributes:
        loss: Scalar to differentiate: a weighted sum over tokens.
        sums: Detached scalars, unweighted sums over tokens; reported as means.
        maxima: Detached scalars, reported as the maximum over micro-batches.
    """

    loss: Tensor
    sums: dict[str, Tensor] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)


def bounded_log_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Return ``clamp(logprobs - old_logprobs, -20, 20)``; no gradient beyond the bounds."""
    return (logprobs - old_logprobs.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def ratio_sums(log_ratio: Tensor, ratio: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the sums ``ratio`` and ``approx_kl`` and the maximum ``ratio_max``, reported by every loss.

    ``approx_kl`` is the estimator k3 of KL(old || trained), ``exp(log_ratio) - 1 - log_ratio``: Schulman,
    "Approximating KL divergence", 2020. ``ratio`` is the weight of a token: in a sequence loss the sequence's ratio.
    """
    with torch.no_grad():
        sums = {"ratio": ratio.sum(), "approx_kl": (log_ratio.exp() - 1.0 - log_ratio).sum()}
        return sums, {"ratio_max": ratio.max() if ratio.numel() else ratio.new_tensor(0.0)}


def span_mean(values: Tensor, spans: Tensor) -> Tensor:
    """Return for each element the mean over its span, shape [N]; ``spans`` is int64 of shape [N], numbered from 0."""
    if not values.numel():
        return values
    count = int(spans.max()) + 1
    totals = values.new_zeros(count).index_add(0, spans, values)
    return (totals / torch.bincount(spans, minlength=count).clamp(min=1))[spans]


def cross_entropy_loss(logprobs: Tensor, weights: Tensor) -> LossSums:
    """Negative log-likelihood of the trained tokens: ``sum(weights * -logprobs)``, with its unweighted sum ``nll``."""
    return LossSums(-(weights * logprobs).sum(), {"nll": -logprobs.detach().sum()})


def entropy_bonus(entropy: Tensor, weights: Tensor, coef: float) -> Tensor:
    """Return ``-coef * sum(weights * entropy)``, to be added to a loss (Mnih et al. 2016, arXiv:1602.01783, sec. 4)."""
    return -coef * (weights * entropy).sum()


def value_loss(
    values: Tensor, returns: Tensor, weights: Tensor, *, old_values: Tensor | None = None, clip: float | None = None
) -> LossSums:
    """Half the squared error of a critic, with clipped value updates.

    ``L = sum_t w_t 1/2 max((V_t - R_t)^2, (C_t - R_t)^2)`` with ``C = V_old + clamp(V - V_old, -clip, clip)``; without
    ``clip`` the first square alone. The square is that of Schulman et al. 2017, PPO (arXiv:1707.06347), eq. 9;
    the clipped form is in that paper's published code, and as equation in Engstrom et al. 2020, Implementation Matters
    (arXiv:2005.12729), section 3.

    Args:
        values: Shape [N]; gradients flow through it.
        returns: Shape [N].
        weights: Shape [N].
        old_values: The critic's values before the first update of the step, shape [N]. Needed with ``clip``.
        clip: Clip range of a value, in units of reward.

    Returns:
        The weighted sum, and the sums ``critic/loss`` (unweighted) and ``critic/clip_fraction`` (tokens whose gradient
        the clip range cut off).
    """
    returns = returns.detach()
    squares = (values - returns).square()
    cut = torch.zeros_like(squares)
    if clip is not None and old_values is not None:
        old = old_values.detach()
        clipped = (old + (values - old).clamp(-clip, clip) - returns).square()
        cut = (clipped > squares).to(squares.dtype)
        squares = torch.maximum(squares, clipped)
    losses = 0.5 * squares
    sums = {"critic/loss": losses.detach().sum(), "critic/clip_fraction": cut.sum()}
    return LossSums((weights * losses).sum(), sums)


def logprob_gap(trainer: Tensor, rollout: Tensor) -> LossSums:
    """Return the difference between the trainer's and the server's log-probabilities on equal weights and ids.

    Returns:
        No loss (0); the sums ``gap_abs`` (``|trainer - rollout|``) and ``gap_kl`` (k3 estimate of
        KL(rollout || trainer) on the sampled tokens); the maximum ``gap_max``.
    """
    with torch.no_grad():
        difference = (trainer - rollout).float()
        magnitude = difference.abs()
        log_ratio = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        sums = {"gap_abs": magnitude.sum(), "gap_kl": (torch.expm1(log_ratio) - log_ratio).sum()}
        maxima = {"gap_max": magnitude.max() if magnitude.numel() else difference.new_tensor(0.0)}
        return LossSums(difference.new_tensor(0.0), sums, maxima)


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
    """Return the rows of one optimizer step with their loss weights, and the step's normaliser."""
    weights, normalizer = loss_weights(
        [row.sample.trained_tokens for row in rows], [row.sample.trajectory_id for row in rows], mode, scale=scale
    )
    return [replace(row, weight=weight) for row, weight in zip(rows, weights, strict=True)], normalizer


def loss_weights(
    trained_tokens: Sequence[int], trajectory_ids: Sequence[str], mode: LossAggregation, *, scale: float | None = None
) -> tuple[list[float], float]:
    """Return the token weight of each row and the normaliser of the step.

    The loss of a step is ``sum over tokens of weight * token loss / normaliser``. Rows without a trained token do not
    count. A sequence is one row, so the sequence modes weigh a trajectory by its number of branches; the trajectory
    modes count it once.

    ``token_mean``: weight 1, divided by the number of trained tokens (Yu et al. 2025, DAPO, arXiv:2503.14476).
    ``seq_mean_token_mean``: the mean over a row's tokens, averaged over rows (DeepSeekMath, arXiv:2402.03300, eq. 3,
    where every trajectory is one row).
    ``seq_mean_token_sum``: the sum over a row's tokens, averaged over rows.
    ``seq_mean_token_sum_norm``: that, divided by ``scale``, a constant such as the longest completion (Liu et al.
    2025, Dr. GRPO, arXiv:2503.20783, section 3.2).
    ``trajectory_mean``: the mean over a trajectory's tokens, averaged over trajectories (DeepSeekMath, eq. 3).
    ``trajectory_sum``: the sum over a trajectory's tokens, averaged over trajectories.

    Args:
        trained_tokens: Trained tokens per row.
        trajectory_ids: Trajectory of each row.
        mode: The aggregation.
        scale: The divisor of ``seq_mean_token_sum_norm``; None of others.

    Returns:
        Weights, one per row, and the normaliser, at least 1.
    """
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
    return ones, max(1, rows) * (scale or 1.0)
