"""Estimators of KL(policy || reference) per token, the penalty in the loss, and the adapted coefficient."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from turnwise.errors import RegistryError
from turnwise.trainer.algorithms.losses.core import MAX_LOG_RATIO, LossSums

MAX_K3 = 10.0
"""k3 grows exponentially where the policy has all but given up a token that the reference likes."""


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """``log p - log p_ref``: unbiased, of either sign; its gradient is zero in expectation (Schulman 2020, k1).

    Schulman, "Approximating KL divergence", 2020 (http://joschu.net/blog/kl-approx.html).
    """
    return logprobs - ref_logprobs


def absolute(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """``|log p - log p_ref|``: the magnitude of k1 (Schulman 2020, http://joschu.net/blog/kl-approx.html)."""
    return (logprobs - ref_logprobs).abs()


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """``(log p - log p_ref)^2 / 2``: biased, but its gradient is that of the KL divergence in expectation.

    Schulman, "Approximating KL divergence", 2020 (http://joschu.net/blog/kl-approx.html), k2.
    """
    return 0.5 * (logprobs - ref_logprobs).square()


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """``p_ref / p - 1 - log(p_ref / p)``: unbiased and never negative; the penalty of GRPO.

    Schulman, "Approximating KL divergence", 2020 (http://joschu.net/blog/kl-approx.html), k3; Shao et al. 2024,
    DeepSeekMath (arXiv:2402.03300), eq. 4. The log-ratio is clamped to +-20 and the value to at most 10.
    """
    difference = (ref_logprobs - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (torch.expm1(difference) - difference).clamp(max=MAX_K3)


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "abs": absolute, "k2": k2, "k3": k3}
"""Estimators by name. A name with ``+`` behind it has the gradient of k2 and the value of its own."""


def kl_estimate(name: str, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return an estimate of KL(policy || reference) per sampled token, shape [N].

    ``NAME+`` is the straight-through form: ``k2 - sg[k2] + sg[NAME]`` (k1 and k3 estimate the value well, but only
    k2 has the gradient of the divergence: Tang and Munos 2025, arXiv:2506.09477).

    Args:
        name: One of :data:`KL_ESTIMATORS`, perhaps with ``+``.
        logprobs: Shape [N], of the policy that sampled the tokens.
        ref_logprobs: Shape [N], of the reference; constants.

    Raises:
        RegistryError: No such estimator.
    """
    estimator = KL_ESTIMATORS.get(name.removesuffix("+"))
    if estimator is None:
        known = ", ".join([*KL_ESTIMATORS, *(f"{each}+" for each in KL_ESTIMATORS)])
        raise RegistryError(f"the KL estimator is {name!r}; known: {known}")
    value = estimator(logprobs, ref_logprobs.detach())
    if not name.endswith("+"):
        return value
    gradient = k2(logprobs, ref_logprobs.detach())
    return gradient - gradient.detach() + value.detach()


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, weights: Tensor, *, estimator: str, coef: float) -> LossSums:
    """Return ``coef * sum(weights * KL)``, to be added to a loss, with the unweighted sum ``kl``.

    Args:
        logprobs: Shape [N]; gradients flow through it.
        ref_logprobs: Shape [N]; constants.
        weights: Shape [N]; constants.
        estimator: A name for :func:`kl_estimate`.
        coef: Weight of the penalty.
    """
    value = kl_estimate(estimator, logprobs, ref_logprobs)
    return LossSums(coef * (weights * value).sum(), {"kl": value.detach().sum()})


def adapted_coef(coef: float, kl: float, *, target: float, horizon: float, count: float) -> float:
    """Return the coefficient for the next step, which keeps the KL divergence near a target.

    ``coef * (1 + clip(kl / target - 1, -0.2, 0.2) * count / horizon)``: Ziegler et al. 2019, Fine-Tuning Language
    Models from Human Preferences (arXiv:1909.08593), section 2.2. More trajectories than the horizon count as so many:
    the coefficient never falls below zero.

    Args:
        coef: The coefficient now.
        kl: What was measured with it.
        target: What is wanted.
        horizon: Over how many trajectories the coefficient may grow or fall by about a fifth.
        count: How many trajectories were measured.
    """
    error = min(max(kl / target - 1.0, -0.2), 0.2)
    return coef * (1.0 + error * min(count / horizon, 1.0))
