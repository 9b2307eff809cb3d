"""Trust regions without an edge: a gate, and a quadratic.

Owns: :func:`sapo_loss` and :func:`dro_loss`. Refuses: hard clipping.
"""

from __future__ import annotations

import torch
from torch import Tensor

from turnwise.trainer.losses.core import LossSums, Positive, bounded_log_ratio, ratio_sums


def sapo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    tau_pos: Positive = 1.0,
    tau_neg: Positive = 1.05,
) -> LossSums:
    """Soft adaptive policy optimization: a sigmoid fades a token's gradient out as its ratio leaves 1.

    ``L = -A * (4 / tau) * sigmoid(tau * (ratio - 1))`` with tau_pos where A > 0 and tau_neg elsewhere: Gao et al.
    2025, SAPO (arXiv:2511.20347), eq. 6. At ratio 1 the gradient is that of REINFORCE, whatever tau is.

    Args:
        logprobs: Shape [N], of the policy being trained; gradients flow through it.
        old_logprobs: Shape [N]; constants.
        advantages: Shape [N]; constants.
        weights: Shape [N]; constants.
        tau_pos: How fast tokens with positive advantage fade.
        tau_neg: How fast the others fade.

    Returns:
        The loss; the sums ``ratio``, ``approx_kl`` and ``gate`` (the gradient's weight, 1 at ratio 1); ``ratio_max``.
    """
    log_ratio = bounded_log_ratio(logprobs, old_logprobs)
    ratio = log_ratio.exp()
    tau = torch.where(advantages > 0, tau_pos, tau_neg).to(ratio.dtype)
    open_ = torch.sigmoid(tau * (ratio - 1.0))
    sums, maxima = ratio_sums(log_ratio, ratio)
    sums["gate"] = (4.0 * open_ * (1.0 - open_)).detach().sum()
    return LossSums(-(weights * advantages * open_ * 4.0 / tau).sum(), sums, maxima)


def dro_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, weights: Tensor, *, beta: Positive = 0.1
) -> LossSums:
    """Direct reward optimization: REINFORCE with a quadratic pull towards the policy that sampled.

    ``L = -(A * log p - beta / 2 * (log p - log p_old)^2)``: Richemond et al. 2024, DRO (arXiv:2405.19107), the policy's
    update of DRO-V, here per token with the advantage in place of ``r - V``. The log-ratio is not clamped: its square
    pulls the harder the further a token has gone.

    Args:
        logprobs: Shape [N], of the policy being trained; gradients flow through it.
        old_logprobs: Shape [N]; constants.
        advantages: Shape [N]; constants. Tokens without any are pulled, too.
        weights: Shape [N]; constants.
        beta: How strong the pull is.

    Returns:
        The loss; the sums ``ratio``, ``approx_kl`` and ``quadratic`` (half the squared log-ratio); ``ratio_max``.
    """
    half_square = 0.5 * (logprobs - old_logprobs.detach()).square()
    log_ratio = bounded_log_ratio(logprobs.detach(), old_logprobs)
    sums, maxima = ratio_sums(log_ratio, log_ratio.exp())
    sums["quadratic"] = half_square.detach().sum()
    return LossSums((weights * (beta * half_square - advantages * logprobs)).sum(), sums, maxima)
