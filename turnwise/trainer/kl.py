"""A KL penalty against a reference: what is configured, its coefficient over a run, and what it takes from rewards.

Owns: :class:`KLConfig`, :class:`KLControl` (the coefficient, fixed or adapted; part of a checkpoint) and
:func:`penalised`. Refuses: the estimators (``losses/kl.py``), and the reference model (``reference.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from turnwise.config import ConfigPath
from turnwise.trainer.losses.kl import KL_ESTIMATORS, adapted_coef, kl_estimate
from turnwise.trainer.packing import TrainRow
from turnwise.trajectory import Trajectory

RowKey = tuple[str, int]

HORIZON = 10_000
"""Trajectories over which an adaptive coefficient changes by about a fifth, where the configuration says nothing."""


class KLConfig(BaseModel):
    """How far the policy may go from a reference model.

    Attributes:
        coef: Weight of the penalty; where it is adapted, at the start.
        estimator: Of KL(policy || reference) on a sampled token: ``k1``, ``abs``, ``k2``, ``k3``, or one of these with
            ``+`` behind it (its value, with the gradient of k2). As a loss ``k1`` is noise alone: its gradient is zero in
            expectation.
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

    @classmethod
    def of(cls, config: KLConfig | None, saved: float | None) -> Self | None:
        """Begin, or go on with the coefficient of a checkpoint; None where nothing is penalised."""
        return None if config is None else cls(config, config.coef if saved is None else saved)

    def adapt(self, kl: float, trajectories: int) -> None:
        """Take the coefficient towards the target, after a step in which ``kl`` per token was measured."""
        if self.config.target is not None:
            horizon = HORIZON if self.config.horizon is None else self.config.horizon
            self.coef = adapted_coef(self.coef, kl, target=self.config.target, horizon=horizon, count=trajectories)


@dataclass(frozen=True, slots=True)
class Penalty:
    """What a step's sampled tokens pay in the reward.

    Attributes:
        tokens: For each row what each of its trained tokens pays (``coef`` times the estimate), float32 of shape [N].
        kl: The estimate, mean over tokens; 0 where there are none.
        mean: What a trajectory pays, mean over those that have rows.
    """

    tokens: dict[RowKey, Tensor]
    kl: float
    mean: float

    def metrics(self) -> dict[str, float]:
        """Return the names of ``metrics.py``."""
        return {"kl/value": self.kl, "kl/penalty": self.mean}


def penalty(
    rows: Sequence[TrainRow],
    logprobs: Mapping[RowKey, Tensor],
    ref_logprobs: Mapping[RowKey, Tensor],
    *,
    estimator: str,
    coef: float,
) -> Penalty:
    """Return ``coef * KL(policy || reference)`` of each trained token, as estimated on the token itself.

    Ziegler et al. 2019, Fine-Tuning Language Models from Human Preferences (arXiv:1909.08593), eq. 2, per token.

    Args:
        rows: The rows of the step.
        logprobs: Of the policy before the step's first update, by row, each of shape [N].
        ref_logprobs: Of the reference, by row, each of shape [N].
        estimator: A name for :func:`turnwise.trainer.losses.kl.kl_estimate`.
        coef: Weight of the penalty.
    """
    keys = [_key(row) for row in rows if row.sample.trained_tokens]
    values = {key: kl_estimate(estimator, logprobs[key], ref_logprobs[key]) for key in keys}
    every = torch.cat([*values.values()]) if values else torch.zeros(0)
    trajectories = {name for name, _ in keys}
    return Penalty(
        {key: coef * value for key, value in values.items()},
        float(every.double().mean()) if len(every) else 0.0,
        coef * float(every.double().sum()) / max(1, len(trajectories)),
    )


def penalised(trajectories: Sequence[Trajectory], rows: Sequence[TrainRow], found: Penalty) -> list[Trajectory]:
    """Return trajectories with what their turns pay among their rewards, as events named ``kl``.

    A trajectory's reward then is ``r - sum_t penalty_t`` over its sampled tokens, and what a turn earns its own rewards
    less the penalties of its own tokens. What no row holds (cut off, left out by an agent) pays nothing.

    Args:
        trajectories: The members of a step; they are not changed.
        rows: Their rows.
        found: What the rows' tokens pay.
    """
    paid: dict[str, dict[int, float]] = {}
    for row in rows:
        turns = row.sample.turn_ids[row.sample.loss_mask].tolist()
        mine = paid.setdefault(row.sample.trajectory_id, {})
        for turn, value in zip(turns, found.tokens[_key(row)].double().tolist() if turns else (), strict=True):
            mine[turn] = mine.get(turn, 0.0) + value
    result = []
    for trajectory in trajectories:
        names = [segment.turn_id for segment in trajectory.segments if segment.sampled]
        events = [(names[turn], "kl", -value) for turn, value in sorted(paid.get(trajectory.id, {}).items())]
        result.append(replace(trajectory, rewards=[*trajectory.rewards, *events]))
    return result
