"""Correction for the gap between rollout and trainer log-probabilities: importance weights and rejection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, Self, TypeAlias

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from turnwise.trainer.algorithms.losses.core import MAX_LOG_RATIO
from turnwise.trainer.core import RowKey, TrainRow

Level: TypeAlias = Literal["token", "turn", "sequence", "trajectory"]
Reduction: TypeAlias = Literal["sum", "mean", "max"]
Positive: TypeAlias = Annotated[float, Field(gt=0)]


class RejectionConfig(BaseModel):
    """Rejection of tokens whose log-probabilities differ too much.

    Attributes:
        statistic: Per token, with d = log p_trainer - log p_rollout: ``k1``, d; ``k2``, d^2 / 2; ``k3``,
            exp(d) - 1 - d.
        level: Unit of rejection: ``token``, ``turn``, ``sequence`` (a row) or ``trajectory``.
        reduction: How token statistics are reduced over a unit.
        high: Upper bound; for ``k1`` of the ratio exp(d).
        low: Lower bound of the ratio, for ``k1``; None is 1 / high.
    """

    model_config = ConfigDict(extra="forbid")

    statistic: Literal["k1", "k2", "k3"]
    level: Level = "sequence"
    reduction: Reduction = "mean"
    high: Positive
    low: Positive | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.low is not None and self.statistic != "k1":
            raise ValueError(f"low is {self.low:g}, but {self.statistic} is never negative: only k1 has a lower bound")
        if self.statistic == "k1" and not (self.low or 1 / self.high) < self.high:
            low = self.low or 1 / self.high
            raise ValueError(f"ratios from {low:g} to {self.high:g} keep nothing; high must be above low")
        if self.level == "token" and self.reduction != "mean":
            raise ValueError(f"reduction is {self.reduction!r}, but a token is not reduced: leave it out")
        return self


class CorrectionConfig(BaseModel):
    """Correction for the gap between trainer and rollout. Costs a forward pass over the step's rows.

    Attributes:
        weights: Importance weights: ``truncate`` at ``high``, ``mask`` (0 outside of low to high, IcePop), or ``none``.
        level: Unit over which ratios are multiplied into a weight: ``token``, ``turn``, ``sequence`` (a row) or
            ``trajectory``.
        high: Largest weight.
        low: Smallest weight, for ``mask``; None is 1 / high.
        normalize: Divide weights by their mean over the step's trained tokens.
        reject: Rejection rules, each applied independently.
    """

    model_config = ConfigDict(extra="forbid")

    weights: Literal["truncate", "mask", "none"] = "truncate"
    level: Level = "token"
    high: Positive = 2.0
    low: Positive | None = None
    normalize: bool = False
    reject: list[RejectionConfig] = Field(default_factory=list)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.low is not None and self.weights != "mask":
            raise ValueError(f"low is {self.low:g}, but only weights: mask has a lower bound")
        if self.weights == "mask" and not self.lower < self.high:
            raise ValueError(f"weights from {self.lower:g} to {self.high:g} keep nothing; high must be above low")
        for name, value in {"level": self.level, "high": self.high, "normalize": self.normalize}.items():
            if self.weights == "none" and value != CorrectionConfig.model_fields[name].default:
                raise ValueError(f"{name} is {value}, but weights is none, so nothing is weighted: remove it")
        if self.weights == "none" and not self.reject:
            raise ValueError("weights is none, reject empty: nothing is corrected; leave algorithm.correction out")
        return self

    @property
    def lower(self) -> float:
        """The smallest weight that ``mask`` keeps."""
        return 1.0 / self.high if self.low is None else self.low


def reduced(values: Tensor, spans: Tensor, reduction: Reduction) -> Tensor:
    """Return for each element the sum, mean or maximum over its span, shape [N]; ``spans`` as in :func:`rejected`."""
    if not values.numel():
        return values
    count = int(spans.max()) + 1
    if reduction == "max":
        return torch.full((count,), -torch.inf, dtype=values.dtype).scatter_reduce(0, spans, values, "amax")[spans]
    totals = values.new_zeros(count).index_add(0, spans, values)
    return (totals / torch.bincount(spans, minlength=count).clamp(min=1) if reduction == "mean" else totals)[spans]


def importance_weights(
    trainer: Tensor, rollout: Tensor, spans: Tensor, *, high: float, low: float | None = None
) -> Tensor:
    """Return the importance weight of each token's span.

    ``w = exp(sum_span (log p_trainer - log p_rollout))``. Without ``low`` it is ``min(w, high)``: truncated importance
    sampling, Ionides 2008, for rollouts Yao et al. 2025 ("Your efficient RL framework secretly brings you off-policy RL
    training"); sequences by Liu et al. 2025 ("When speed kills stability"). With ``low`` it is w from low to high and 0
    outside: IcePop, Ling Team 2025 (arXiv:2510.18855). All tensors have shape [N]; ``spans`` numbers each token's span
    (itself, its turn, sequence or trajectory) from 0.
    """
    weight = reduced(trainer - rollout, spans, "sum").clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    if low is None:
        return weight.clamp(max=high)
    return weight.masked_fill((weight < low) | (weight > high), 0.0)


def rejected(
    trainer: Tensor,
    rollout: Tensor,
    spans: Tensor,
    *,
    statistic: str,
    reduction: Reduction,
    high: float,
    low: float | None = None,
) -> Tensor:
    """Return the tokens of rejected spans, bool of shape [N].

    With ``d = log p_trainer - log p_rollout``: k1 keeps ``low <= exp(reduce d) <= high`` (low is 1 / high where None;
    the mean is the geometric mean of ratios), k2 keeps ``reduce d^2 / 2 <= high``, k3 keeps
    ``reduce (exp(d) - 1 - d) <= high``. Spans are int64 of shape [N], each token's span, numbered from 0.
    The estimators are those of Schulman, "Approximating KL divergence", 2020; masking whole sequences by them is Trust
    Region Masking, Li et al. 2025 (arXiv:2512.23075).
    """
    d = (trainer - rollout).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if statistic == "k1":
        ratio = reduced(d, spans, reduction).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        return (ratio > high) | (ratio < (1.0 / high if low is None else low))
    return reduced(0.5 * d.square() if statistic == "k2" else torch.expm1(d) - d, spans, reduction) > high


def gap_metrics(trainer: Tensor, rollout: Tensor, sequences: Tensor) -> dict[str, float]:
    """Return KL, effective sample size and perplexity gap of n tokens; ``sequences`` is int64 of shape [n], their rows.

    ``kl`` is the mean of ``log p_rollout - log p_trainer``, ``kl_k3`` that of ``exp(d) - 1 - d``; ``ess`` is
    ``(sum w)^2 / (n sum w^2)`` with untruncated weights of tokens, 1 where all are equal (Kong 1992); ``ppl_gap`` is
    the mean over sequences of ``log PPL_trainer - log PPL_rollout``; ``chi2`` is ``mean w^2 - 1``.
    """
    if not trainer.numel():
        return {}
    d = (trainer - rollout).double().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    weight = d.exp()
    means = torch.zeros(int(sequences.max()) + 1, dtype=d.dtype).index_add(0, sequences, -d) / torch.bincount(sequences)
    return {
        "kl": float(-d.mean()),
        "kl_k3": float((torch.expm1(d) - d).mean()),
        "ess": float(weight.sum() ** 2 / (len(weight) * weight.square().sum())),
        "chi2": float(weight.square().mean() - 1.0),
        "ppl_gap": float(means.mean()),
    }


@dataclass(frozen=True, slots=True)
class Corrected:
    """The rows of a step after correction.

    Attributes:
        rows: Rows with importance weights, their loss masks without the rejected tokens.
        kept: Per row, bool over its trained tokens: whether they are still trained.
        metrics: Metrics by name.
    """

    rows: list[TrainRow]
    kept: dict[RowKey, Tensor]
    metrics: dict[str, float]


def correct(rows: Sequence[TrainRow], trainer: Mapping[RowKey, Tensor], config: CorrectionConfig) -> Corrected:
    """Weight and reject the trained tokens of a step.

    ``trainer`` has, by row, the trainer's log-probabilities of the trained tokens before the first update.
    """
    trained_rows = [row for row in rows if row.sample.trained_tokens]
    if not trained_rows:
        return Corrected(list(rows), {row.sample.key: torch.zeros(0, dtype=torch.bool) for row in rows}, {})
    mine = torch.cat([trainer[row.sample.key] for row in trained_rows])
    theirs = torch.cat([torch.from_numpy(row.sample.rollout_logprobs[row.sample.loss_mask]) for row in trained_rows])
    spans: dict[str, Tensor] = {
        level: span_indices(trained_rows, level) for level in ("token", "turn", "sequence", "trajectory")
    }
    weights = torch.ones_like(mine)
    if config.weights != "none":
        low = config.lower if config.weights == "mask" else None
        weights = importance_weights(mine, theirs, spans[config.level], high=config.high, low=low)
    out = torch.zeros(len(mine), dtype=torch.bool)
    for each in config.reject:
        out |= rejected(
            mine,
            theirs,
            spans[each.level],
            statistic=each.statistic,
            reduction=each.reduction,
            high=each.high,
            low=each.low,
        )
    if config.normalize and bool((weights[~out] > 0).any()):
        weights = weights / weights[~out].mean()
    gap = gap_metrics(mine, theirs, spans["sequence"])
    metrics = {f"correction/{name}": value for name, value in gap.items()} | {
        "correction/weight": float(weights.mean()),
        "correction/weight_max": float(weights.max()),
        "correction/zero_weights": float((weights == 0).float().mean()),
        "correction/rejected": float(out.float().mean()),
    }
    sizes = [row.sample.trained_tokens for row in trained_rows]
    parts = zip(trained_rows, torch.split(weights, sizes), torch.split(~out, sizes), strict=True)
    by_row = {row.sample.key: (weight, keep) for row, weight, keep in parts}
    untrained = torch.zeros(0, dtype=torch.bool)
    return Corrected(
        [_applied(row, *by_row[row.sample.key]) if row.sample.key in by_row else row for row in rows],
        {row.sample.key: by_row[row.sample.key][1] if row.sample.key in by_row else untrained for row in rows},
        metrics,
    )


def span_indices(rows: Sequence[TrainRow], level: str) -> Tensor:
    """Return the span of each trained token at a level, numbered from 0; int64 of shape [N]."""
    if level == "token":
        return torch.arange(sum(row.sample.trained_tokens for row in rows))
    seen: dict[object, int] = {}
    found: list[int] = []
    for number, row in enumerate(rows):
        whole = row.sample.trajectory_id if level == "trajectory" else number
        turns = row.sample.turn_ids[row.sample.loss_mask].tolist()
        found += [seen.setdefault((whole, turn) if level == "turn" else whole, len(seen)) for turn in turns]
    return torch.tensor(found, dtype=torch.int64)


def _applied(row: TrainRow, weights: Tensor, keep: Tensor) -> TrainRow:
    places = np.flatnonzero(row.sample.loss_mask)
    importance = np.ones(len(row.sample.loss_mask), np.float32)
    importance[places] = weights.numpy()
    mask = row.sample.loss_mask.copy()
    mask[places] = keep.numpy()
    return replace(row, sample=replace(row.sample, loss_mask=mask), importance=importance)
