"""What a critic is trained by.

Owns: :func:`value_loss`. Refuses: returns, which advantages make (``advantages/critic.py``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from turnwise.trainer.losses.core import LossSums


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
