"""What needs no ratio: the likelihood of demonstrations, and the entropy bonus.

Owns: :func:`cross_entropy_loss` and :func:`entropy_bonus`. Refuses: policy losses.
"""

from __future__ import annotations

from torch import Tensor

from turnwise.trainer.losses.core import LossSums


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
