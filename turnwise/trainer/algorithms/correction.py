"""Correction for the gap between rollout and trainer log-probabilities: importance weights and rejection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self, TypeAlias, get_args

import numpy as np
import torch
from pydantic import Field, PositiveFloat, model_validator
from torch import Tensor

from turnwise.config import Section
from turnwise.trainer.algorithms.losses.core import MAX_LOG_RATIO, span_mean
from turnwise.trainer.core import RowKey, TrainRow

Level: TypeAlias = Literal["token", "turn", "sequence", "trajectory"]


class RejectionConfig(Section):
    """Rejection of tokens whose log-probabilities differ too much.

    Attributes:
        statistic: Per token, with d = log p_trainer - log p_rollout: ``k1``, d; ``k2``, d^2 / 2; ``k3``,
            exp(d) - 1 - d.
        level: Unit of rejection, over which the statistic is averaged: ``token``, ``turn``, ``sequence`` (a row) or
            ``trajectory``.
        high: Upper bound; for ``k1`` of the ratio exp(d), whose lower bound is 1 / high.
    """

    statistic: Literal["k1", "k2", "k3"]
    level: Level = "sequence"
    high: PositiveFloat

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.statistic == "k1" and not self.high > 1:
            raise ValueError(f"ratios from {1 / self.high:g} to {self.high:g} keep nothing; high must be above 1")
        return self


class CorrectionConfig(Section):
    """Correction for the gap between trainer and rollout. Costs a forward pass over the step's rows.

    Attributes:
        weights: Importance weights: ``truncate`` at ``high``, ``mask`` (0 outside of low to high, IcePop), or ``none``.
        level: Unit over which ratios are multiplied into a weight: ``token``, ``turn``, ``sequence`` (a row) or
            ``trajectory``.
        high: Largest weight.
        low: Smallest weight, for ``mask``; None is 1 / high.
        reject: Rejection rules, each applied independently.
    """

    weights: Literal["truncate", "mask", "none"] = "truncate"
    level: Level = "token"
    high: PositiveFloat = 2.0
    low: PositiveFloat | None = None
    reject: list[RejectionConfig] = Field(default_factory=list)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.low is not None and self.weights != "mask":
            raise ValueError(f"low is {self.low:g}, but only weights: mask has a lower bound")
        if self.weights == "mask" and not self.lower < self.high:
            raise ValueError(f"weights from {self.lower:g} to {self.high:g} keep nothing; high must be above low")
        for name, value in {"level": self.level, "high": self.high}.items():
            if self.weights == "none" and value != CorrectionConfig.model_fields[name].default:
                raise ValueError(f"{name} is {value}, but weights is none, so nothing is weighted: remove it")
        if self.weights == "none" and not self.reject:
            raise ValueError("weights is none, reject empty: nothing is corrected; leave algorithm.correction out")
        return self

    @property
    def lower(self) -> float:
        """The smallest weight that ``mask`` keeps."""
        return 1.0 / self.high if self.low is None else self.low


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
    weight = _span_sum(trainer - rollout, spans).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    if low is None:
        return weight.clamp(max=high)
    return weight.masked_fill((weight < low) | (weight > high), 0.0)


def _span_sum(values: Tensor, spans: Tensor) -> Tensor:
    """Return for each element the sum over its span, shape [N]."""
    if not values.numel():
        return values
    return values.new_zeros(int(spans.max()) + 1).index_add(0, spans, values)[spans]


def rejected_tokens(trainer: Tensor, rollout: Tensor, spans: Tensor, *, statistic: str, high: float) -> Tensor:
    """Return the tokens of rejected spans, bool of shape [N].

    With ``d = log p_trainer - log p_rollout``: k1 keeps ``1 / high <= exp(mean d) <= high``, the geometric mean of
    ratios, k2 keeps ``mean d^2 / 2 <= high``, k3 keeps ``mean (exp(d) - 1 - d) <= high``. Spans are int64 of shape [N],
    each token's span, numbered from 0.
    The estimators are those of Schulman, "Approximating KL divergence", 2020; masking whole sequences by them is Trust
    Region Masking, Li et al. 2025 (arXiv:2512.23075).
    """
    d = (trainer - rollout).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if statistic == "k1":
        ratio = span_mean(d, spans).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        return (ratio > high) | (ratio < 1.0 / high)
    return span_mean(0.5 * d.square() if statistic == "k2" else torch.expm1(d) - d, spans) > high


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
class CorrectedRows:
    """The rows of a step after correction.

    Attributes:
        rows: Rows with importance weights, their loss masks without the rejected tokens.
        kept: Per row, bool over its trained tokens: whether they are still trained; empty where all are.
        metrics: Metrics by name.
    """

    rows: list[TrainRow]
    kept: dict[RowKey, Tensor]
    metrics: dict[str, float]

    def of_kept_tokens(self, values: Mapping[RowKey, Tensor]) -> Mapping[RowKey, Tensor]:
        """Return values of trained tokens without those of the rejected ones."""
        return {key: tensor[self.kept[key]] for key, tensor in values.items()} if self.kept else values


def correct(rows: Sequence[TrainRow], trainer: Mapping[RowKey, Tensor], config: CorrectionConfig) -> CorrectedRows:
    """Weight and reject the trained tokens of a step.

    ``trainer`` has, by row, the trainer's log-probabilities of the trained tokens before the first update.
    """
    trained = [row for row in rows if row.sample.trained_tokens]
    untrained = torch.zeros(0, dtype=torch.bool)
    if not trained:
        return CorrectedRows(list(rows), {row.sample.key: untrained for row in rows}, {})
    logprobs = torch.cat([trainer[row.sample.key] for row in trained])
    rollout = torch.cat([torch.from_numpy(row.sample.rollout_logprobs[row.sample.loss_mask]) for row in trained])
    spans: dict[str, Tensor] = {level: span_indices(trained, level) for level in get_args(Level)}
    weights = torch.ones_like(logprobs)
    if config.weights != "none":
        low = config.lower if config.weights == "mask" else None
        weights = importance_weights(logprobs, rollout, spans[config.level], high=config.high, low=low)
    rejected = torch.zeros(len(logprobs), dtype=torch.bool)
    for rule in config.reject:
        rejected |= rejected_tokens(logprobs, rollout, spans[rule.level], statistic=rule.statistic, high=rule.high)
    gap = gap_metrics(logprobs, rollout, spans["sequence"])
    metrics = {f"correction/{name}": figure for name, figure in gap.items()} | {
        "correction/weight": float(weights.mean()),
        "correction/weight_max": float(weights.max()),
        "correction/zero_weights": float((weights == 0).float().mean()),
        "correction/rejected": float(rejected.float().mean()),
    }
    lengths = [row.sample.trained_tokens for row in trained]
    kept_of = {row.sample.key: part for row, part in zip(trained, torch.split(~rejected, lengths), strict=True)}
    weight_of = {row.sample.key: part for row, part in zip(trained, torch.split(weights, lengths), strict=True)}
    return CorrectedRows(
        [_corrected_row(row, weight_of, kept_of) for row in rows],
        {row.sample.key: kept_of.get(row.sample.key, untrained) for row in rows},
        metrics,
    )


def span_indices(rows: Sequence[TrainRow], level: str) -> Tensor:
    """Return the span of each trained token at a level, numbered from 0; int64 of shape [N]."""
    if level == "token":
        return torch.arange(sum(row.sample.trained_tokens for row in rows))
    numbers: dict[object, int] = {}
    spans: list[int] = []
    for number, row in enumerate(rows):
        unit = row.sample.trajectory_id if level == "trajectory" else number
        turns = row.sample.turn_ids[row.sample.loss_mask].tolist()
        spans += [numbers.setdefault((unit, turn) if level == "turn" else unit, len(numbers)) for turn in turns]
    return torch.tensor(spans, dtype=torch.int64)


def _corrected_row(row: TrainRow, weights: Mapping[RowKey, Tensor], kept_tokens: Mapping[RowKey, Tensor]) -> TrainRow:
    key, mask = row.sample.key, row.sample.loss_mask.copy()
    if key not in weights:
        return row
    tokens = np.flatnonzero(mask)
    importance = np.ones(len(mask), np.float32)
    importance[tokens] = weights[key].numpy()
    mask[tokens] = kept_tokens[key].numpy()
    return replace(row, sample=replace(row.sample, loss_mask=mask), importance=importance)
