"""Losses whose ratio is that of a sequence: its geometric mean over the tokens that the sequence trains.

Owns: :func:`gspo_loss` and :func:`gmpo_loss`. Refuses: deciding what a sequence is; ``sequences`` says it (a row, that
is a branch with the tokens it owns, which a micro-batch always holds whole).
"""

from __future__ import annotations

import torch
from torch import Tensor

from turnwise.trainer.losses.core import ClipLow, LossSums, NotNegative, bounded_log_ratio, ratio_sums, span_mean


def gspo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    sequences: Tensor,
    clip_low: ClipLow = 3e-4,
    clip_high: NotNegative = 4e-4,
) -> LossSums:
    """Group sequence policy optimization: PPO's clipping on the ratio of the whole sequence.

    ``s_i = exp(mean_t log ratio_t)`` over the tokens of sequence i, and per token ``s_it = sg[s_i] * p_t / sg[p_t]``
    (equal in value, each token with a gradient of its own); ``L = max(-A * s_it, -A * clip(s_it, 1 - clip_low,
    1 + clip_high))``: Zheng et al. 2025, GSPO (arXiv:2507.18071), eq. 7 in the form of GSPO-token, which also
    takes advantages that differ within a sequence. The sum is ``sum(weights * L)``; the paper's objective
    is the aggregation ``seq_mean_token_mean``.

    Args:
        logprobs: Shape [N], of the policy being trained; gradients flow through it.
        old_logprobs: Shape [N]; constants.
        advantages: Shape [N]; constants.
        weights: Shape [N]; constants.
        sequences: int64 of shape [N], the number of each token's sequence.
        clip_low: How far the sequence's ratio may fall below 1.
        clip_high: How far it may rise above 1.

    Returns:
        The loss; the sums ``ratio`` (of sequences), ``approx_kl`` (of tokens) and ``clip_fraction``; ``ratio_max``.
    """
    log_ratio = bounded_log_ratio(logprobs, old_logprobs)
    mean = span_mean(log_ratio.detach(), sequences)
    ratio = (mean + logprobs - logprobs.detach()).exp()
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    sums, maxima = ratio_sums(log_ratio, ratio)
    sums["clip_fraction"] = (bounded > plain).sum().float()
    return LossSums((weights * torch.maximum(plain, bounded)).sum(), sums, maxima)


def gmpo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    sequences: Tensor,
    clip_low: NotNegative = 0.4,
    clip_high: NotNegative = 0.4,
) -> LossSums:
    """Geometric-mean policy optimization: tokens are clipped, then the geometric mean of their ratios is taken.

    Per token ``c_t = sign(A) * min(sign(A) * x_t, sign(A) * clip(x_t, -clip_low, clip_high))`` with ``x_t`` the
    log-ratio, per sequence ``L_i = -A_i * exp(mean_t c_t)``: Zhao et al. 2025, GMPO (arXiv:2507.20673), the
    objective (its bounds are exp(-clip_low) and exp(clip_high)). As in GSPO's token form each token
    has a gradient of its own, so that advantages may differ within a sequence: ``L_it = -A_it * sg[exp(mean_t c_t)] *
    exp(c_t - sg[c_t])``. The sum is ``sum(weights * L)``; ``seq_mean_token_mean`` is the paper's objective.

    Args:
        logprobs: Shape [N], of the policy being trained; gradients flow through it.
        old_logprobs: Shape [N]; constants.
        advantages: Shape [N]; constants.
        weights: Shape [N]; constants.
        sequences: int64 of shape [N], the number of each token's sequence.
        clip_low: How far the log-ratio of a token may fall below 0.
        clip_high: How far it may rise above 0.

    Returns:
        The loss; the sums ``ratio`` (of sequences), ``approx_kl`` (of tokens) and ``clip_fraction``; ``ratio_max``.
    """
    log_ratio = bounded_log_ratio(logprobs, old_logprobs)
    sign = advantages.sign()
    clamped = log_ratio.clamp(-clip_low, clip_high)
    chosen = sign * torch.minimum(sign * log_ratio, sign * clamped)
    ratio = (span_mean(chosen.detach(), sequences) + chosen - chosen.detach()).exp()
    sums, maxima = ratio_sums(log_ratio, ratio)
    sums["clip_fraction"] = (sign * clamped < sign * log_ratio).sum().float()
    return LossSums((weights * -advantages * ratio).sum(), sums, maxima)
