"""When checkpoints are written, and which remain.

Owns: :class:`CheckpointConfig`, the section ``checkpoint``. Refuses: writing them (``checkpoint.py``).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class BestConfig(BaseModel):
    """Which checkpoints are kept besides the newest: those with the best figure.

    Attributes:
        metric: A figure of an evaluation (``eval/sampled``, ``eval/greedy/reward`` ...) or a logged metric
            (``reward/mean`` ...).
        mode: Whether more of it is better, or less.
        keep: How many remain.
    """

    model_config = ConfigDict(extra="forbid")

    metric: str = "eval/sampled"
    mode: Literal["max", "min"] = "max"
    keep: Annotated[int, Field(gt=0)] = 1


class CheckpointConfig(BaseModel):
    """When checkpoints are written and how many remain.

    Attributes:
        every: Steps between checkpoints; the last step always has one.
        keep: How many of the newest remain; None keeps all.
        best: Which others remain; None keeps none for its figures.
    """

    model_config = ConfigDict(extra="forbid")

    every: Annotated[int, Field(gt=0)] = 10
    keep: Annotated[int, Field(gt=0)] | None = 2
    best: BestConfig | None = None

    def check_best(self, *, evaluates: bool) -> None:
        """See that somebody finds the figure by which a checkpoint is the best.

        Raises:
            ValueError: It is one of evaluations, and there are none.
        """
        if self.best is not None and self.best.metric.startswith("eval/") and not evaluates:
            raise ValueError(
                f"checkpoint.best.metric is {self.best.metric}, but nothing is evaluated: give eval, or name a logged "
                "metric such as reward/mean"
            )
