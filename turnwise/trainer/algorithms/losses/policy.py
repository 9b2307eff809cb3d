"""Policy losses: what becomes of each sampled token's advantage and ratio, summed over tokens.

The value of losses whose ratio is a constant weight (``cispo``, ``dppo_tv``, ``dppo_kl``, ``gpg``) is no estimate of an
improvement; their gradient is what counts. A sequence is a row: a branch with the tokens that it owns. All report the
sums ``ratio`` (of the weight that a token has) and ``approx_kl`` (k3, ``ratio - 1 - log ratio``: Schulman,
"Approximating KL divergence", 2020) and the maximum ``ratio_max`` beside what they return of their own.

Selection reads the whole optimizer step and the old policy's log-probabilities, not those of a micro-batch's forward
pass: it does not depend on how rows are split, and is made before the first gradient.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat
from torch import Tensor

from turnwise.trainer.algorithms.losses.core import ClipLow, LossSums, bounded_log_ratio, ratio_sums, span_mean


def ppo_clip_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    clip_low: ClipLow = 0.2,
    clip_high: NonNegativeFloat = 0.28,
    dual_clip: Annotated[float, Field(gt=1)] | None = None,
) -> LossSums:
    """Clipped policy-gradient loss, summed over tokens.

    ``ratio = exp(clamp(logprobs - old_logprobs, -20, 20))`` and per token
    ``L = max(-A * ratio, -A * clip(ratio, 1 - clip_low, 1 + clip_high))``: Schulman et al. 2017, PPO
    (arXiv:1707.06347), eq. 7, with separate bounds as in DAPO (arXiv:2503.14476). With ``dual_clip`` c > 1
    and A < 0 the loss is at most ``-A * c``: Ye et al. 2020 (arXiv:1912.09729). The sum is ``sum(weights * L)``.

    Returns:
        The loss; ``clip_fraction`` (tokens whose gradient the upper or lower bound cut off), ``dual_clip_fraction``.
    """
    log_ratio = bounded_log_ratio(logprobs, old_logprobs)
    ratio = log_ratio.exp()
    unclipped_loss = -advantages * ratio
    clipped_loss = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    token_loss = torch.maximum(unclipped_loss, clipped_loss)
    is_clipped = clipped_loss > unclipped_loss
    is_dual_clipped = torch.zeros_like(is_clipped)
    if dual_clip is not None:
        limit = -advantages * dual_clip
        is_dual_clipped = (advantages < 0) & (token_loss > limit)
        token_loss = torch.where(is_dual_clipped, limit, token_loss)
    sums, maxima = ratio_sums(log_ratio, ratio)
    sums["clip_fraction"] = is_clipped.sum().float()
    sums["dual_clip_fraction"] = is_dual_clipped.sum().float()
    return LossSums((weights * token_loss).sum(), sums, maxima)


def gspo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    sequences: Tensor,
    clip_low: ClipLow = 3e-4,
    clip_high: NonNegativeFloat = 4e-4,
) -> LossSums:
    """Group sequence policy optimization: PPO's clipping on the ratio of the whole sequence.

    ``s_i = exp(mean_t log ratio_t)`` over the tokens of sequence i, and per token ``s_it = sg[s_i] * p_t / sg[p_t]``;
    ``L = max(-A * s_it, -A * clip(s_it, 1 - clip_low, 1 + clip_high))``: Zheng et al. 2025, GSPO (arXiv:2507.18071),
    eq. 7 in the form of GSPO-token, which also takes advantages that differ within a sequence. The sum is
    ``sum(weights * L)``; the paper's objective is the aggregation ``seq_mean_token_mean``.

    Returns:
        The loss; ``clip_fraction``. ``ratio`` is that of sequences.
    """
    log_ratio = bounded_log_ratio(logprobs, old_logprobs)
    mean_log_ratio = span_mean(log_ratio.detach(), sequences)
    ratio = (mean_log_ratio + logprobs - logprobs.detach()).exp()
    unclipped_loss = -advantages * ratio
    clipped_loss = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    sums, maxima = ratio_sums(log_ratio, ratio)
    sums["clip_fraction"] = (clipped_loss > unclipped_loss).sum().float()
    return LossSums((weights * torch.maximum(unclipped_loss, clipped_loss)).sum(), sums, maxima)


def gmpo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    sequences: Tensor,
    clip_low: NonNegativeFloat = 0.4,
    clip_high: NonNegativeFloat = 0.4,
) -> LossSums:
    """Geometric-mean policy optimization: the geometric mean of clipped token ratios.

    Per token ``c_t = sign(A) * min(sign(A) * x_t, sign(A) * clip(x_t, -clip_low, clip_high))`` with ``x_t`` the
    log-ratio, per sequence ``L_i = -A_i * exp(mean_t c_t)``: Zhao et al. 2025, GMPO (arXiv:2507.20673), whose bounds
    are exp(-clip_low) and exp(clip_high). Computed per token, so that advantages may differ within a sequence:
    ``L_it = -A_it * sg[exp(mean_t c_t)] * exp(c_t - sg[c_t])``. The sum is ``sum(weights * L)``;
    ``seq_mean_token_mean`` is the paper's objective.

    Returns:
        The loss; ``clip_fraction``. ``ratio`` is that of sequences.
    """
    log_ratio = bounded_log_ratio(logprobs, old_logprobs)
    sign = advantages.sign()
    clamped_log_ratio = log_ratio.clamp(-clip_low, clip_high)
    clipped_log_ratio = sign * torch.minimum(sign * log_ratio, sign * clamped_log_ratio)
    ratio = (span_mean(clipped_log_ratio.detach(), sequences) + clipped_log_ratio - clipped_log_ratio.detach()).exp()
    sums, maxima = ratio_sums(log_ratio, ratio)
    sums["clip_fraction"] = (sign * clamped_log_ratio < sign * log_ratio).sum().float()
    return LossSums((weights * -advantages * ratio).sum(), sums, maxima)


def sapo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    tau_pos: PositiveFloat = 1.0,
    tau_neg: PositiveFloat = 1.05,
) -> LossSums:
    """Soft adaptive policy optimization: a sigmoid gate in place of clipping.

    ``L = -A * (4 / tau) * sigmoid(tau * (ratio - 1))`` with tau_pos where A > 0 and tau_neg elsewhere: Gao et al.
    2025, SAPO (arXiv:2511.20347), eq. 6. At ratio 1 the gradient is that of REINFORCE for any tau.

    Returns:
        The loss; the sums ``ratio``, ``approx_kl`` and ``gate`` (the gradient's weight, 1 at ratio 1); ``ratio_max``.
    """
    log_ratio = bounded_log_ratio(logprobs, old_logprobs)
    ratio = log_ratio.exp()
    tau = torch.where(advantages > 0, tau_pos, tau_neg).to(ratio.dtype)
    gate = torch.sigmoid(tau * (ratio - 1.0))
    sums, maxima = ratio_sums(log_ratio, ratio)
    sums["gate"] = (4.0 * gate * (1.0 - gate)).detach().sum()
    return LossSums(-(weights * advantages * gate * 4.0 / tau).sum(), sums, maxima)


def dro_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, weights: Tensor, *, beta: PositiveFloat = 0.1
) -> LossSums:
    """Direct reward optimization: REINFORCE with a quadratic penalty on the log-ratio.

    ``L = -(A * log p - beta / 2 * (log p - log p_old)^2)``: Richemond et al. 2024, DRO (arXiv:2405.19107), the policy's
    update of DRO-V, here per token with the advantage in place of ``r - V``. The log-ratio is not clamped, and tokens
    without advantage are penalised, too.

    Returns:
        The loss; the sums ``ratio``, ``approx_kl`` and ``quadratic`` (half the squared log-ratio); ``ratio_max``.
    """
    half_square = 0.5 * (logprobs - old_logprobs.detach()).square()
    log_ratio = bounded_log_ratio(logprobs.detach(), old_logprobs)
    sums, maxima = ratio_sums(log_ratio, log_ratio.exp())
    sums["quadratic"] = half_square.detach().sum()
    return LossSums((weights * (beta * half_square - advantages * logprobs)).sum(), sums, maxima)


def cispo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    clip_low: NonNegativeFloat = 1.0,
    clip_high: NonNegativeFloat = 0.28,
) -> LossSums:
    """Clipped importance-sampling weights: no token loses its gradient.

    ``L = -sg[clip(ratio, 1 - clip_low, 1 + clip_high)] * A * log p``: MiniMax 2025, MiniMax-M1 (arXiv:2506.13585),
    eq. 4 and 5. With clip_low 1 there is no lower bound, as in the paper.

    Returns:
        The loss; the sums ``ratio``, ``approx_kl`` and ``clip_fraction`` (tokens with a clipped weight); ``ratio_max``.
    """
    log_ratio = bounded_log_ratio(logprobs.detach(), old_logprobs)
    ratio = log_ratio.exp()
    clipped_ratio = ratio.clamp(max(0.0, 1.0 - clip_low), 1.0 + clip_high)
    sums, maxima = ratio_sums(log_ratio, ratio)
    sums["clip_fraction"] = (clipped_ratio != ratio).sum().float()
    return LossSums(-(weights * clipped_ratio * advantages * logprobs).sum(), sums, maxima)


def dppo_tv_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    clip_low: PositiveFloat = 0.2,
    clip_high: PositiveFloat = 0.2,
    ratio_cap: PositiveFloat = 20.0,
) -> LossSums:
    """Divergence PPO with the binary total variation: tokens are masked by the change of their probability.

    ``L = -m * sg[min(ratio, ratio_cap)] * A * log p``, where m is 0 if A > 0 and ``p - p_old > clip_high``, or A < 0
    and ``p - p_old < -clip_low``, else 1: Qi et al. 2026, Rethinking the Trust Region in LLM Reinforcement Learning
    (arXiv:2602.04879), DPPO with the binary approximation of TV. ``old_logprobs`` are those of the policy that sampled,
    the only ones that the paper uses. Rare tokens keep their gradient.

    Returns:
        The loss; the sums ``ratio``, ``approx_kl`` and ``clip_fraction`` (tokens masked); ``ratio_max``.
    """
    log_ratio = bounded_log_ratio(logprobs.detach(), old_logprobs)
    change = logprobs.detach().exp() - old_logprobs.exp()
    masked = torch.where(advantages > 0, change > clip_high, change < -clip_low)
    return _masked_gradient(logprobs, log_ratio, advantages, weights, masked, ratio_cap)


def dppo_kl_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    clip_low: PositiveFloat = 0.05,
    clip_high: PositiveFloat = 0.05,
    ratio_cap: PositiveFloat = 20.0,
) -> LossSums:
    """Divergence PPO with the binary KL divergence.

    As :func:`dppo_tv_loss` with ``D = p_old * log(p_old / p) + (1 - p_old) * log((1 - p_old) / (1 - p))``: m is 0 if
    A > 0, p > p_old and ``D > clip_high``, or A < 0, p < p_old and ``D > clip_low``, else 1: Qi et al. 2026
    (arXiv:2602.04879), DPPO with the binary approximation of KL.

    Returns:
        The loss; the sums ``ratio``, ``approx_kl`` and ``clip_fraction`` (tokens masked); ``ratio_max``.
    """
    detached_logprobs = logprobs.detach()
    log_ratio = bounded_log_ratio(detached_logprobs, old_logprobs)
    p, p_old = detached_logprobs.exp(), old_logprobs.exp()
    # q = 1 - p, away from 0, where log q is not finite.
    q, q_old = (1.0 - p).clamp(min=1e-7), (1.0 - p_old).clamp(min=1e-7)
    divergence = -p_old * log_ratio + q_old * (q_old / q).log()
    masked = torch.where(advantages > 0, (p > p_old) & (divergence > clip_high), (p < p_old) & (divergence > clip_low))
    return _masked_gradient(logprobs, log_ratio, advantages, weights, masked, ratio_cap)


def gpg_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, weights: Tensor) -> LossSums:
    """Group policy gradient: REINFORCE without a ratio.

    ``L = -A * log p``: Chu et al. 2025, GPG (arXiv:2504.02546): the policy gradient of Williams 1992; GPG's scaling of
    advantages is the estimator ``gpg``. ``old_logprobs`` is only reported.
    """
    log_ratio = bounded_log_ratio(logprobs.detach(), old_logprobs)
    sums, maxima = ratio_sums(log_ratio, log_ratio.exp())
    return LossSums(-(weights * advantages * logprobs).sum(), sums, maxima)


def _masked_gradient(
    logprobs: Tensor, log_ratio: Tensor, advantages: Tensor, weights: Tensor, masked: Tensor, ratio_cap: float
) -> LossSums:
    """Return ``-sum(weights * unmasked * min(ratio, cap) * A * log p)``; ``clip_fraction`` counts masked tokens."""
    ratio = log_ratio.exp()
    unmasked = (~masked).to(ratio.dtype)
    sums, maxima = ratio_sums(log_ratio, ratio)
    sums["clip_fraction"] = (masked & (advantages != 0)).sum().float()
    return LossSums(-(weights * unmasked * ratio.clamp(max=ratio_cap) * advantages * logprobs).sum(), sums, maxima)


Share: TypeAlias = Annotated[float, Field(gt=0, le=1)]


def covariance(old_logprobs: Tensor, advantages: Tensor) -> Tensor:
    """Return ``(A - mean A) * (log p - mean log p)`` per token of an optimizer step, shape [N].

    Cui et al. 2025, The Entropy Mechanism of RL for Reasoning LMs (arXiv:2505.22617), token-wise covariance.
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
    """Return the tokens that lose their gradient, drawn from those with ``cov_low < cov_t < cov_high``: bool [N].

    ``share`` of the tokens of an optimizer step (at least one) are drawn: Cui et al. 2025 (arXiv:2505.22617), Clip-Cov.
    """
    selected = torch.zeros(old_logprobs.shape, dtype=torch.bool)
    if not old_logprobs.numel():
        return selected
    covariances = covariance(old_logprobs, advantages)
    candidates = torch.nonzero((covariances > cov_low) & (covariances < cov_high)).flatten()
    permutation = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(seed))
    selected[candidates[permutation[: max(1, int(share * old_logprobs.numel()))]]] = True
    return selected


def select_kl_cov(old_logprobs: Tensor, advantages: Tensor, *, share: Share = 2e-4) -> Tensor:
    """Return the tokens that get a KL penalty: the ``max(1, share * N)`` of largest :func:`covariance`, bool [N].

    Cui et al. 2025 (arXiv:2505.22617), KL-Cov. The tensors are those of a whole optimizer step, of shape [N].
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
    clip_high: NonNegativeFloat = 0.2,
) -> LossSums:
    """PPO's clipped loss without the gradient of the ``selected`` tokens, bool of shape [N].

    ``L = 0`` where ``selected``, else ``max(-A * ratio, -A * clip(ratio, 1 - clip_low, 1 + clip_high))``: Cui et al.
    2025 (arXiv:2505.22617), Clip-Cov; tokens by :func:`select_clip_cov`.

    Returns:
        The loss; the sums ``ratio``, ``approx_kl``, ``clip_fraction`` and ``selected_fraction``; ``ratio_max``.
    """
    weights = weights.masked_fill(selected, 0.0)
    result = ppo_clip_loss(logprobs, old_logprobs, advantages, weights, clip_low=clip_low, clip_high=clip_high)
    del result.sums["dual_clip_fraction"]
    result.sums["selected_fraction"] = selected.sum().float()
    return result


def kl_cov_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    selected: Tensor,
    penalty: NonNegativeFloat = 1.0,
) -> LossSums:
    """The unclipped policy gradient with a KL penalty on the ``selected`` tokens, bool of shape [N].

    ``L = -A * ratio``, plus ``penalty * |log ratio|`` where ``selected``: Cui et al. 2025 (arXiv:2505.22617), KL-Cov;
    tokens by :func:`select_kl_cov`.

    Returns:
        The loss; the sums ``ratio``, ``approx_kl`` and ``selected_fraction``; ``ratio_max``.
    """
    log_ratio = bounded_log_ratio(logprobs, old_logprobs)
    ratio = log_ratio.exp()
    token_loss = -advantages * ratio + penalty * log_ratio.abs() * selected
    sums, maxima = ratio_sums(log_ratio, ratio)
    sums["selected_fraction"] = selected.sum().float()
    return LossSums((weights * token_loss).sum(), sums, maxima)
