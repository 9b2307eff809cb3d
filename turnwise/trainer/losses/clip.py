"""PPO: the ratio of each token, clipped.

Owns: :func:`ppo_clip_loss`. Refuses: advantages and weights, which come with the tokens.
"""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from turnwise.trainer.losses.core import ClipLow, LossSums, NotNegative, bounded_log_ratio, ratio_sums


def ppo_clip_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    clip_low: ClipLow = 0.2,
    clip_high: NotNegative = 0.28,
    dual_clip: Annotated[float, Field(gt=1)] | None = None,
) -> LossSums:
    """Clipped policy-gradient loss, summed over tokens.

    ``ratio = exp(clamp(logprobs - old_logprobs, -20, 20))`` and per token
    ``L = max(-A * ratio, -A * clip(ratio, 1 - clip_low, 1 + clip_high))``: Schulman et al. 2017, PPO
    (arXiv:1707.06347), eq. 7, with separate bounds as in DAPO (arXiv:2503.14476). With ``dual_clip`` c > 1
    and A < 0 the loss is at most ``-A * c``: Ye et al. 2020 (arXiv:1912.09729). The sum is
    ``sum(weights * L)``.

    Args:
        logprobs: Shape [N], of the policy being trained; gradients flow through it.
        old_logprobs: Shape [N], of the policy that sampled; constants.
        advantages: Shape [N]; constants.
        weights: Shape [N]; constants.
        clip_low: How far the ratio may fall below 1 (in [0, 1)).
        clip_high: How far it may rise above 1.
        dual_clip: The bound for tokens with negative advantage, or None.

    Returns:
        The loss; the sums ``ratio``, ``approx_kl`` (k3, ``ratio - 1 - log ratio``: Schulman, "Approximating KL
        divergence", 2020), ``clip_fraction`` (tokens whose gradient the upper or lower bound cut off) and
        ``dual_clip_fraction``; the maximum ``ratio_max``.
    """
    log_ratio = bounded_log_ratio(logprobs, old_logprobs)
    ratio = log_ratio.exp()
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    token_loss = torch.maximum(plain, bounded)
    clipped = bounded > plain
    dual = torch.zeros_like(clipped)
    if dual_clip is not None:
        limit = -advantages * dual_clip
        dual = (advantages < 0) & (token_loss > limit)
        token_loss = torch.where(dual, limit, token_loss)
    sums, maxima = ratio_sums(log_ratio, ratio)
    sums["clip_fraction"] = clipped.sum().float()
    sums["dual_clip_fraction"] = dual.sum().float()
    return LossSums((weights * token_loss).sum(), sums, maxima)
