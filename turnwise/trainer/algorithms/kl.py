"""The KL penalty against a reference model: configuration, adaptive coefficient, loss term and reward penalty."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, Self

import torch
from pydantic import PositiveFloat, model_validator
from torch import Tensor

from turnwise.config import ConfigPath, Section
from turnwise.trainer.algorithms.losses.core import MAX_LOG_RATIO, LossSums
from turnwise.trainer.core import RowKey

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
"""Estimators by name. A name followed by ``+`` has the gradient of k2 and the value of the estimator."""


def kl_estimate(name: str, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return an estimate of KL(policy || reference) per sampled token, shape [N]; a name of :data:`KL_ESTIMATORS`.

    ``NAME+`` is the straight-through form: ``k2 - sg[k2] + sg[NAME]`` (k1 and k3 estimate the value well, but only
    k2 has the gradient of the divergence: Tang and Munos 2025, arXiv:2506.09477).
    """
    value = KL_ESTIMATORS[name.removesuffix("+")](logprobs, ref_logprobs.detach())
    if not name.endswith("+"):
        return value
    gradient = k2(logprobs, ref_logprobs.detach())
    return gradient - gradient.detach() + value.detach()


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, weights: Tensor, *, estimator: str, coef: float) -> LossSums:
    """Return ``coef * sum(weights * KL)``, to be added to a loss, with the unweighted sum ``kl``."""
    value = kl_estimate(estimator, logprobs, ref_logprobs)
    return LossSums(coef * (weights * value).sum(), {"kl": value.detach().sum()})


def adapted_coef(coef: float, kl: float, *, target: float, horizon: float, count: float) -> float:
    """Return the next step's coefficient, adapted to keep the KL divergence near a target.

    ``coef * (1 + clip(kl / target - 1, -0.2, 0.2) * count / horizon)``: Ziegler et al. 2019, Fine-Tuning Language
    Models from Human Preferences (arXiv:1909.08593), section 2.2. ``kl`` is the divergence measured over ``count``
    trajectories, capped at ``horizon``, which keeps the coefficient above zero.
    """
    error = min(max(kl / target - 1.0, -0.2), 0.2)
    return coef * (1.0 + error * min(count / horizon, 1.0))


HORIZON: Final = 10_000
"""Trajectories over which an adaptive coefficient changes by at most a fifth, as in Ziegler et al. 2019."""


class KLConfig(Section):
    """Penalty for diverging from a reference model.

    Attributes:
        coef: Weight of the penalty; the initial one where it is adapted.
        estimator: Of KL(policy || reference) on a sampled token: ``k1``, ``abs``, ``k2``, ``k3``, or one of these with
            ``+`` appended (its value, with the gradient of k2). As a loss ``k1`` is noise alone: its gradient is zero
            in expectation.
        where: ``loss``, a differentiated term beside the policy loss; or ``reward``, subtracted from the rewards before
            advantages are estimated.
        target: KL per token that the coefficient is adapted to (:func:`adapted_coef`); None keeps it constant.
        reference: ``initial``, the model that the run began with (``policies.main.model.path``, also after a resume),
            or the directory of another model with the same tokenizer.
        offload: Keep the reference in main memory between steps: two copies a step, in return for the memory of its
            parameters on the GPU.
    """

    coef: PositiveFloat
    estimator: str = "k3"
    where: Literal["loss", "reward"] = "loss"
    target: PositiveFloat | None = None
    reference: Literal["initial"] | ConfigPath = "initial"
    offload: bool = False

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.estimator.removesuffix("+") not in KL_ESTIMATORS:
            allowed = ", ".join([*KL_ESTIMATORS, *(f"{name}+" for name in KL_ESTIMATORS)])
            raise ValueError(f"estimator is {self.estimator!r}; known: {allowed}")
        if self.where == "reward" and self.estimator.endswith("+"):
            raise ValueError(
                f"estimator is {self.estimator!r}, but a reward has no gradient that + could change: write "
                f"{self.estimator.removesuffix('+')!r}, or where: loss"
            )
        return self


@dataclass(frozen=True, slots=True)
class KLTerm:
    """The penalty as a term of the loss of one step.

    Attributes:
        estimator: A name for :func:`turnwise.trainer.algorithms.kl.kl_estimate`.
        coef: Its weight.
        ref_logprobs: The reference's log-probabilities of the rows' trained tokens, by row.
    """

    estimator: str
    coef: float
    ref_logprobs: Mapping[RowKey, Tensor]


@dataclass(frozen=True, slots=True)
class RewardPenalties:
    """The KL penalties subtracted from a step's rewards.

    Attributes:
        tokens: By row, the penalty of each trained token, shape [N].
        kl: KL estimate, mean over tokens; 0 without any.
        mean: Penalty per trajectory, mean over those that have rows.
    """

    tokens: dict[RowKey, Tensor]
    kl: float
    mean: float


def reward_penalties(
    logprobs: Mapping[RowKey, Tensor], ref_logprobs: Mapping[RowKey, Tensor], *, estimator: str, coef: float
) -> RewardPenalties:
    """Return what each trained token pays: ``coef * KL(policy || reference)`` as estimated on the token itself.

    Ziegler et al. 2019, Fine-Tuning Language Models from Human Preferences (arXiv:1909.08593), eq. 2, token by token.

    Args:
        logprobs: Of the policy before the step's first update, by row, each of shape [N].
        ref_logprobs: Of the reference, by row, each of shape [N].
        estimator: A name for :func:`turnwise.trainer.algorithms.kl.kl_estimate`.
        coef: Weight of the penalty.
    """
    values = {key: kl_estimate(estimator, logprobs[key], ref).double() for key, ref in ref_logprobs.items()}
    total = sum(float(value.sum()) for value in values.values())
    count = sum(len(value) for value in values.values())
    trajectories = {name for name, _ in values}
    tokens = {key: coef * value for key, value in values.items()}
    return RewardPenalties(tokens, total / max(1, count), coef * total / max(1, len(trajectories)))
