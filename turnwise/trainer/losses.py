"""Losses: pure functions of tensors that return sums.

Owns: the formulas. Refuses: means. Whoever calls divides by a normaliser of the whole step (``aggregation.py``), which
makes gradients independent of how rows are split over micro-batches and ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this magnitude before they are exponentiated: exp(20) is 4.9e8, finite in float32."""


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


def ppo_clip_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> LossSums:
    """Clipped policy-gradient loss, summed over tokens.

    ``ratio = exp(clamp(logprobs - old_logprobs, -20, 20))`` and per token
    ``L = max(-A * ratio, -A * clip(ratio, 1 - clip_low, 1 + clip_high))``: Schulman et al. 2017, PPO
    (arXiv:1707.06347), eq. 7, with separate bounds as in DAPO (arXiv:2503.14476), eq. 8. With ``dual_clip`` c > 1
    and A < 0 the loss is at most ``-A * c``: Ye et al. 2020 (arXiv:1912.09729), eq. 5. The sum is
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
    log_ratio = (logprobs - old_logprobs.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
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
    with torch.no_grad():
        sums = {
            "ratio": ratio.sum(),
            "approx_kl": (ratio - 1.0 - log_ratio).sum(),
            "clip_fraction": clipped.sum().float(),
            "dual_clip_fraction": dual.sum().float(),
        }
        maxima = {"ratio_max": ratio.max() if ratio.numel() else ratio.new_tensor(0.0)}
    return LossSums((weights * token_loss).sum(), sums, maxima)


def cross_entropy_loss(logprobs: Tensor, weights: Tensor) -> LossSums:
    """Negative log-likelihood of the trained tokens: ``sum(weights * -logprobs)``, with its unweighted sum ``nll``.

    Args:
        logprobs: Shape [N]; gradients flow through it.
        weights: Shape [N]; constants.
    """
    return LossSums(-(weights * logprobs).sum(), {"nll": -logprobs.detach().sum()})


def entropy_bonus(entropy: Tensor, weights: Tensor, coef: float) -> Tensor:
    """Return ``-coef * sum(weights * entropy)``, to be added to a loss (Mnih et al. 2016, arXiv:1602.01783, section 4).

    Args:
        entropy: Shape [N], of the distribution that each token was drawn from; gradients flow through it.
        weights: Shape [N]; constants.
        coef: How strongly entropy is rewarded.
    """
    return -coef * (weights * entropy).sum()


def logprob_gap(trainer: Tensor, rollout: Tensor) -> LossSums:
    """How far the trainer's log-probabilities lie from the inference server's, on equal weights and ids.

    Args:
        trainer: Shape [N].
        rollout: Shape [N].

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
