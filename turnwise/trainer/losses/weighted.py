"""Policy gradients whose ratio is a constant weight: clipped, masked by a trust region, or left out.

Owns: :func:`cispo_loss`, :func:`dppo_tv_loss`, :func:`dppo_kl_loss` and :func:`gpg_loss`. Refuses: losses that
differentiate the ratio. The value of these losses is no estimate of an improvement; their gradient is what counts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from turnwise.trainer.losses.core import LossSums, NotNegative, Positive, bounded_log_ratio, ratio_sums


def cispo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    clip_low: NotNegative = 1.0,
    clip_high: NotNegative = 0.28,
) -> LossSums:
    """Clipped importance-sampling weights: no token ever loses its gradient.

    ``L = -sg[clip(ratio, 1 - clip_low, 1 + clip_high)] * A * log p``: MiniMax 2025, MiniMax-M1 (arXiv:2506.13585),
    eq. 4 and 5. With clip_low 1 there is no lower bound, as in the paper.

    Args:
        logprobs: Shape [N], of the policy being trained; gradients flow through it.
        old_logprobs: Shape [N]; constants.
        advantages: Shape [N]; constants.
        weights: Shape [N]; constants.
        clip_low: How far the weight may fall below 1; from 1 on it is not bounded below.
        clip_high: How far it may rise above 1.

    Returns:
        The loss; the sums ``ratio``, ``approx_kl`` and ``clip_fraction`` (tokens whose weight a bound changed);
        ``ratio_max``.
    """
    log_ratio = bounded_log_ratio(logprobs.detach(), old_logprobs)
    ratio = log_ratio.exp()
    bounded = ratio.clamp(max(0.0, 1.0 - clip_low), 1.0 + clip_high)
    sums, maxima = ratio_sums(log_ratio, ratio)
    sums["clip_fraction"] = (bounded != ratio).sum().float()
    return LossSums(-(weights * bounded * advantages * logprobs).sum(), sums, maxima)


def dppo_tv_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    clip_low: Positive = 0.2,
    clip_high: Positive = 0.2,
    ratio_cap: Positive = 20.0,
) -> LossSums:
    """Divergence PPO with the binary total variation: tokens are masked by how far their probability moved.

    ``L = -m * sg[min(ratio, ratio_cap)] * A * log p``, where m is 0 if A > 0 and ``p - p_old > clip_high``, or A < 0
    and ``p - p_old < -clip_low``, else 1: Qi et al. 2026, Rethinking the Trust Region in LLM Reinforcement Learning
    (arXiv:2602.04879), DPPO with the binary approximation of TV. Rare tokens, whose ratio moves freely at next to no
    change of the distribution, keep their gradient.

    Args:
        logprobs: Shape [N], of the policy being trained; gradients flow through it.
        old_logprobs: Shape [N], of the policy that sampled (the paper trusts no other); constants.
        advantages: Shape [N]; constants.
        weights: Shape [N]; constants.
        clip_low: How far a probability may fall.
        clip_high: How far it may rise.
        ratio_cap: The largest weight of a token.

    Returns:
        The loss; the sums ``ratio``, ``approx_kl`` and ``clip_fraction`` (tokens masked); ``ratio_max``.
    """
    log_ratio = bounded_log_ratio(logprobs.detach(), old_logprobs)
    moved = logprobs.detach().exp() - old_logprobs.exp()
    masked = torch.where(advantages > 0, moved > clip_high, moved < -clip_low)
    return _masked_gradient(logprobs, log_ratio, advantages, weights, masked, ratio_cap)


def dppo_kl_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    clip_low: Positive = 0.05,
    clip_high: Positive = 0.05,
    ratio_cap: Positive = 20.0,
) -> LossSums:
    """Divergence PPO with the binary KL divergence.

    As :func:`dppo_tv_loss` with ``D = p_old * log(p_old / p) + (1 - p_old) * log((1 - p_old) / (1 - p))``: m is 0 if
    A > 0, p > p_old and ``D > clip_high``, or A < 0, p < p_old and ``D > clip_low``, else 1: Qi et al. 2026
    (arXiv:2602.04879), DPPO with the binary approximation of KL.

    Args:
        logprobs: Shape [N], of the policy being trained; gradients flow through it.
        old_logprobs: Shape [N], of the policy that sampled; constants.
        advantages: Shape [N]; constants.
        weights: Shape [N]; constants.
        clip_low: The largest divergence of a token that becomes less likely.
        clip_high: The largest of one that becomes likelier.
        ratio_cap: The largest weight of a token.

    Returns:
        The loss; the sums ``ratio``, ``approx_kl`` and ``clip_fraction`` (tokens masked); ``ratio_max``.
    """
    current = logprobs.detach()
    log_ratio = bounded_log_ratio(current, old_logprobs)
    p, p_old = current.exp(), old_logprobs.exp()
    # Away from 1, where log(1 - p) is not finite.
    rest, rest_old = (1.0 - p).clamp(min=1e-7), (1.0 - p_old).clamp(min=1e-7)
    divergence = -p_old * log_ratio + rest_old * (rest_old / rest).log()
    masked = torch.where(advantages > 0, (p > p_old) & (divergence > clip_high), (p < p_old) & (divergence > clip_low))
    return _masked_gradient(logprobs, log_ratio, advantages, weights, masked, ratio_cap)


def gpg_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, weights: Tensor) -> LossSums:
    """Group policy gradient: REINFORCE without a ratio.

    ``L = -A * log p``: Chu et al. 2025, GPG (arXiv:2504.02546): the policy gradient of Williams 1992;
    what is GPG's own, how it scales advantages, is the estimator ``gpg``.

    Args:
        logprobs: Shape [N], of the policy being trained; gradients flow through it.
        old_logprobs: Shape [N]; only for what is reported.
        advantages: Shape [N]; constants.
        weights: Shape [N]; constants.

    Returns:
        The loss; the sums ``ratio`` and ``approx_kl``; ``ratio_max``.
    """
    log_ratio = bounded_log_ratio(logprobs.detach(), old_logprobs)
    sums, maxima = ratio_sums(log_ratio, log_ratio.exp())
    return LossSums(-(weights * advantages * logprobs).sum(), sums, maxima)


def _masked_gradient(
    logprobs: Tensor, log_ratio: Tensor, advantages: Tensor, weights: Tensor, masked: Tensor, ratio_cap: float
) -> LossSums:
    """Return ``-sum(weights * kept * min(ratio, cap) * A * log p)`` and what was masked of tokens with an advantage."""
    ratio = log_ratio.exp()
    kept = (~masked).to(ratio.dtype)
    sums, maxima = ratio_sums(log_ratio, ratio)
    sums["clip_fraction"] = (masked & (advantages != 0)).sum().float()
    return LossSums(-(weights * kept * ratio.clamp(max=ratio_cap) * advantages * logprobs).sum(), sums, maxima)
