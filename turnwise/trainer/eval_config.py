"""When a training run evaluates, and on what.

Owns: :class:`TrainEvalConfig`. Refuses: what an evaluation does (``evaluation/config.py``).
"""

from __future__ import annotations

from typing import Annotated, Self, TypeAlias

from pydantic import Field, model_validator

from turnwise.evaluation.config import EvalPlan

PositiveInt: TypeAlias = Annotated[int, Field(gt=0)]


class TrainEvalConfig(EvalPlan):
    """Evaluation on held-out tasks before the first step, after the last, and in between.

    Attributes:
        every: Steps between evaluations; None evaluates before and after only.
    """

    every: PositiveInt | None = 10

    @model_validator(mode="after")
    def _held_out(self) -> Self:
        if self.tasks is None:
            raise ValueError("tasks of its own: those that an environment names may be the ones that are trained")
        return self
