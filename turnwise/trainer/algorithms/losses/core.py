"""What losses share: the sums that they return, the bounded log-ratio, and means over spans of tokens.

Sums are not divided here but by the normaliser of the whole step (``aggregation.py``): gradients do not depend on how
rows are split over micro-batches and ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, TypeAlias

import torch
from pydantic import Field
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this magnitude before they are exponentiated: exp(20) is 4.9e8, finite in float32."""

ClipLow: TypeAlias = Annotated[float, Field(ge=0, lt=1)]
"""How far a ratio may fall below 1."""

NotNegative: TypeAlias = Annotated[float, Field(ge=0)]
Positive: TypeAlias = Annotated[float, Field(gt=0)]


@dataclass(slots=True)
class LossSums:
    """What a loss returns for one micro-batch.

    Attributes:
        loss: Scalar to differentiate: a weighted sum over tokens.
        sums: Scalars summed over tokens (unweighted, detached); divided by the number of tokens they are means.
        maxima: Scalars of which the largest over micro-batches counts (detached).
    """

    loss: Tensor
    sums: dict[str, Tensor] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)


def bounded_log_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Return ``clamp(logprobs - old_logprobs, -20, 20)``; beyond the bounds it has no gradient."""
    return (logprobs - old_logprobs.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def ratio_sums(log_ratio: Tensor, ratio: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the sums ``ratio`` and ``approx_kl`` and the maximum ``ratio_max``, as every loss reports them.

    ``approx_kl`` is the estimator k3 of KL(old || trained), ``exp(log_ratio) - 1 - log_ratio``: Schulman,
    "Approximating KL divergence", 2020.

    Args:
        log_ratio: Shape [N], of the tokens.
        ratio: Shape [N], what the loss weighs tokens by (that of the sequence in a loss of sequences).
    """
    with torch.no_grad():
        sums = {"ratio": ratio.sum(), "approx_kl": (log_ratio.exp() - 1.0 - log_ratio).sum()}
        return sums, {"ratio_max": ratio.max() if ratio.numel() else ratio.new_tensor(0.0)}


def span_mean(values: Tensor, spans: Tensor) -> Tensor:
    """Return for each element the mean over all elements of its span, shape [N].

    Args:
        values: Shape [N]; gradients flow through it.
        spans: int64 of shape [N], the number (from 0) of the span that each element belongs to.
    """
    if not values.numel():
        return values
    count = int(spans.max()) + 1
    totals = values.new_zeros(count).index_add(0, spans, values)
    return (totals / torch.bincount(spans, minlength=count).clamp(min=1))[spans]
