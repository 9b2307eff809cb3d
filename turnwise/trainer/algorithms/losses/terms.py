"""Losses and terms without a ratio: cross entropy, entropy bonus, value loss, trainer-server gap."""

from __future__ import annotations

import torch
from torch import Tensor

from turnwise.trainer.algorithms.losses.core import MAX_LOG_RATIO, LossSums


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


def value_loss(
    values: Tensor, returns: Tensor, weights: Tensor, *, old_values: Tensor | None = None, clip: float | None = None
) -> LossSums:
    """Half the squared error of a critic, that does not reward moving further than ``clip`` from where it stood.

    ``L = sum_t w_t 1/2 max((V_t - R_t)^2, (C_t - R_t)^2)`` with ``C = V_old + clamp(V - V_old, -clip, clip)``; without
    ``clip`` the first square alone. The square is that of Schulman et al. 2017, PPO (arXiv:1707.06347), eq. 9;
    the clipped form is in that paper's published code, and as equation in Engstrom et al. 2020, Implementation Matters
    (arXiv:2005.12729), section 3.

    Args:
        values: Shape [N]; gradients flow through it.
        returns: Shape [N]; constants.
        weights: Shape [N]; constants.
        old_values: Shape [N], the critic's before the first update of the step; constants. Needed with ``clip``.
        clip: How far a value may move with profit, in units of reward.

    Returns:
        The weighted sum, and the sums ``critic/loss`` (unweighted) and ``critic/clip_fraction`` (tokens whose gradient
        the clip range cut off).
    """
    returns = returns.detach()
    squares = (values - returns).square()
    cut = torch.zeros_like(squares)
    if clip is not None and old_values is not None:
        old = old_values.detach()
        clipped = (old + (values - old).clamp(-clip, clip) - returns).square()
        cut = (clipped > squares).to(squares.dtype)
        squares = torch.maximum(squares, clipped)
    losses = 0.5 * squares
    sums = {"critic/loss": losses.detach().sum(), "critic/clip_fraction": cut.sum()}
    return LossSums((weights * losses).sum(), sums)


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
