"""Clip-Cov and KL-Cov: entropy is kept by the few tokens whose log-probability goes along with their advantage.

Selection reads the whole optimizer step and the old policy's log-probabilities, not those of a micro-batch's forward
pass: it does not depend on how rows are split, and is made before the first gradient.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import torch
from pydantic import Field
from torch import Tensor

from turnwise.trainer.algorithms.losses.core import ClipLow, LossSums, NotNegative, bounded_log_ratio, ratio_sums

Share: TypeAlias = Annotated[float, Field(gt=0, le=1)]


def covariance(old_logprobs: Tensor, advantages: Tensor) -> Tensor:
    """Return ``(A - mean A) * (log p - mean log p)`` per token, shape [N].

    Cui et al. 2025, The Entropy Mechanism of RL for Reasoning LMs (arXiv:2505.22617), token-wise covariance.

    Args:
        old_logprobs: Shape [N], of all trained tokens of an optimizer step.
        advantages: Shape [N].
    """
    return (advantages - advantages.mean()) * (old_logprobs - old_logprobs.mean())


def select_clip_cov(
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    seed: int,
    share: Share = 2e-4,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
) -> Tensor:
    """Return which tokens of an optimizer step lose their gradient: some with ``cov_low < cov_t < cov_high``.

    ``share`` of all tokens (at least one) are drawn at random from them: Cui et al. 2025 (arXiv:2505.22617), Clip-Cov.

    Args:
        old_logprobs: Shape [N], of all trained tokens of the step.
        advantages: Shape [N].
        seed: Decides the draw.
        share: How many of all tokens are drawn.
        cov_low: Only tokens with a larger covariance.
        cov_high: Only tokens with a smaller covariance.

    Returns:
        bool of shape [N].
    """
    selected = torch.zeros(old_logprobs.shape, dtype=torch.bool)
    if not old_logprobs.numel():
        return selected
    values = covariance(old_logprobs, advantages)
    found = torch.nonzero((values > cov_low) & (values < cov_high)).flatten()
    drawn = torch.randperm(len(found), generator=torch.Generator().manual_seed(seed))
    selected[found[drawn[: max(1, int(share * old_logprobs.numel()))]]] = True
    return selected


def select_kl_cov(old_logprobs: Tensor, advantages: Tensor, *, share: Share = 2e-4) -> Tensor:
    """Return which tokens of an optimizer step are held back by a KL penalty: those with the largest covariance.

    The ``max(1, share * N)`` tokens of largest :func:`covariance`: Cui et al. 2025 (arXiv:2505.22617), KL-Cov.

    Args:
        old_logprobs: Shape [N], of all trained tokens of the step.
        advantages: Shape [N].
        share: How many of all tokens, at least one.

    Returns:
        bool of shape [N].
    """
    selected = torch.zeros(old_logprobs.shape, dtype=torch.bool)
    if old_logprobs.numel():
        count = max(1, int(share * old_logprobs.numel()))
        selected[covariance(old_logprobs, advantages).topk(count).indices] = True
    return selected


def clip_cov_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    selected: Tensor,
    clip_low: ClipLow = 0.2,
    clip_high: NotNegative = 0.2,
) -> LossSums:
    """PPO's clipped loss without the gradient of the selected tokens.

    ``L = 0`` where ``selected``, else ``max(-A * ratio, -A * clip(ratio, 1 - clip_low, 1 + clip_high))``: Cui et al.
    2025 (arXiv:2505.22617), Clip-Cov; tokens by :func:`select_clip_cov`.

    Args:
        logprobs: Shape [N], of the policy being trained; gradients flow through it.
        old_logprobs: Shape [N]; constants.
        advantages: Shape [N]; constants.
        weights: Shape [N]; constants.
        selected: bool of shape [N].
        clip_low: How far the ratio may fall below 1.
        clip_high: How far it may rise above 1.

    Returns:
        The loss; the sums ``ratio``, ``approx_kl``, ``clip_fraction`` and ``selected_fraction``; ``ratio_max``.
    """
    log_ratio = bounded_log_ratio(logprobs, old_logprobs)
    ratio = log_ratio.exp()
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    sums, maxima = ratio_sums(log_ratio, ratio)
    sums["clip_fraction"] = (bounded > plain).sum().float()
    sums["selected_fraction"] = selected.sum().float()
    return LossSums((weights * torch.maximum(plain, bounded).masked_fill(selected, 0.0)).sum(), sums, maxima)


def kl_cov_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    selected: Tensor,
    penalty: NotNegative = 1.0,
) -> LossSums:
    """The unclipped policy gradient with a KL penalty on the selected tokens.

    ``L = -A * ratio``, plus ``penalty * |log ratio|`` where ``selected``: Cui et al. 2025 (arXiv:2505.22617), KL-Cov;
    tokens by :func:`select_kl_cov`.

    Args:
        logprobs: Shape [N], of the policy being trained; gradients flow through it.
        old_logprobs: Shape [N]; constants.
        advantages: Shape [N]; constants.
        weights: Shape [N]; constants.
        selected: bool of shape [N].
        penalty: Weight of the penalty.

    Returns:
        The loss; the sums ``ratio``, ``approx_kl`` and ``selected_fraction``; ``ratio_max``.
    """
    log_ratio = bounded_log_ratio(logprobs, old_logprobs)
    ratio = log_ratio.exp()
    token_loss = -advantages * ratio + penalty * log_ratio.abs() * selected
    sums, maxima = ratio_sums(log_ratio, ratio)
    sums["selected_fraction"] = selected.sum().float()
    return LossSums((weights * token_loss).sum(), sums, maxima)
