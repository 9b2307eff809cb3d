"""The KL penalty against a reference model: its section, its coefficient over a run, and what tokens pay in rewards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from turnwise.config import ConfigPath
from turnwise.trainer.algorithms.losses.kl import KL_ESTIMATORS, adapted_coef, kl_estimate
from turnwise.trainer.algorithms.rewards import RowKey

HORIZON = 10_000
"""Trajectories over which an adaptive coefficient changes by about a fifth, where the configuration says nothing."""


class KLConfig(BaseModel):
    """How far the policy may go from a reference model.

    Attributes:
        coef: Weight of the penalty; where it is adapted, at the start.
        estimator: Of KL(policy || reference) on a sampled token: ``k1``, ``abs``, ``k2``, ``k3``, or one of these with
            ``+`` behind it (its value, with the gradient of k2). As a loss ``k1`` is noise alone: its gradient is zero
            in expectation.
        where: ``loss``, a term beside the policy loss that is differentiated; or ``reward``, taken from the rewards
            before advantages are estimated.
        target: The divergence per token that the coefficient is adapted to keep (``losses.kl.adapted_coef``); None
            leaves it as it is.
        horizon: Over how many trajectories it may grow or fall by about a fifth; read where there is a target.
        reference: ``initial``, the model that the run began with (``policies.main.model.path``, also after a resume),
            or the directory of another one with the same tokenizer.
        offload: Keep the reference in main memory between steps. It costs two copies a step, and spares a GPU its
            parameters.
    """

    model_config = ConfigDict(extra="forbid")

    coef: Annotated[float, Field(gt=0)]
    estimator: str = "k3"
    where: Literal["loss", "reward"] = "loss"
    target: Annotated[float, Field(gt=0)] | None = None
    horizon: Annotated[float, Field(gt=0)] | None = None
    reference: Literal["initial"] | ConfigPath = "initial"
    offload: bool = False

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.estimator.removesuffix("+") not in KL_ESTIMATORS:
            known = ", ".join([*KL_ESTIMATORS, *(f"{name}+" for name in KL_ESTIMATORS)])
            raise ValueError(f"estimator is {self.estimator!r}; known: {known}")
        if self.where == "reward" and self.estimator.endswith("+"):
            raise ValueError(
                f"estimator is {self.estimator!r}, but a reward has no gradient that + could change: write "
                f"{self.estimator.removesuffix('+')!r}, or where: loss"
            )
        if self.horizon is not None and self.target is None:
            raise ValueError(f"horizon is {self.horizon:g}, but there is no target to adapt coef to: give one")
        return self


@dataclass(slots=True)
class KLControl:
    """The coefficient of a run's penalty.

    Attributes:
        config: What is asked for.
        coef: The coefficient of the next step.
    """

    config: KLConfig
    coef: float

    def adapt(self, kl: float, trajectories: int) -> None:
        """Take the coefficient towards the target, after a step in which ``kl`` per token was measured."""
        if self.config.target is not None:
            horizon = HORIZON if self.config.horizon is None else self.config.horizon
            self.coef = adapted_coef(self.coef, kl, target=self.config.target, horizon=horizon, count=trajectories)


@dataclass(frozen=True, slots=True)
class KLTerm:
    """The penalty as a term of the loss of one step.

    Attributes:
        estimator: A name for :func:`turnwise.trainer.algorithms.losses.kl.kl_estimate`.
        coef: Its weight.
        ref_logprobs: The reference's log-probabilities of the rows' trained tokens, by row.
    """

    estimator: str
    coef: float
    ref_logprobs: Mapping[RowKey, Tensor]


@dataclass(frozen=True, slots=True)
class Charge:
    """The KL penalties that a step's sampled tokens pay in the reward.

    Attributes:
        tokens: For each row what each of its trained tokens pays, shape [N].
        kl: The estimate, mean over tokens; 0 where there are none.
        mean: What a trajectory pays, mean over those that have rows.
    """

    tokens: dict[RowKey, Tensor]
    kl: float
    mean: float


def charge(
    logprobs: Mapping[RowKey, Tensor], ref_logprobs: Mapping[RowKey, Tensor], *, estimator: str, coef: float
) -> Charge:
    """Return what each trained token pays: ``coef * KL(policy || reference)`` as estimated on the token itself.

    Ziegler et al. 2019, Fine-Tuning Language Models from Human Preferences (arXiv:1909.08593), eq. 2, token by token.

    Args:
        logprobs: Of the policy before the step's first update, by row, each of shape [N].
        ref_logprobs: Of the reference, by row, each of shape [N].
        estimator: A name for :func:`turnwise.trainer.algorithms.losses.kl.kl_estimate`.
        coef: Weight of the penalty.
    """
    values = {key: kl_estimate(estimator, logprobs[key], ref).double() for key, ref in ref_logprobs.items()}
    total = sum(float(value.sum()) for value in values.values())
    count = sum(len(value) for value in values.values())
    trajectories = {name for name, _ in values}
    tokens = {key: coef * value for key, value in values.items()}
    return Charge(tokens, total / max(1, count), coef * total / max(1, len(trajectories)))
