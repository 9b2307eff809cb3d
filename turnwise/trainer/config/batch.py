"""The ``batch:`` section: what a train step is made of."""

from __future__ import annotations

import math
from typing import Annotated, Literal, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, model_validator

from turnwise.rollout.replay.config import ReplayConfig
from turnwise.rollout.replay.setup import allowed_staleness

PositiveInt: TypeAlias = Annotated[int, Field(gt=0)]


class TailConfig(BaseModel):
    """How long a step waits for the last groups of its batch.

    Attributes:
        seconds: So long after ``share`` of the groups is there it takes what is there.
        share: Of the groups of the batch; at least so many are trained.
    """

    model_config = ConfigDict(extra="forbid")

    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    share: Annotated[float, Field(gt=0, le=1)] = 0.9


class BatchConfig(BaseModel):
    """What a train step is made of.

    Attributes:
        groups: Groups per step (``rollout.group_size`` trajectories each).
        over_sample: ``sync``: so many times ``groups`` are started, and the first to finish are trained.
        tail: How long a step waits for the last groups; None waits for all of them.
        leftover: What becomes of groups that a step started and did not wait for: ``carry``, they are finished and
            count for the next step; ``cancel``, their episodes end. By default they are carried where ``replay`` allows
            groups of older weights. What would be too old in the next step is cancelled in either case.
        max_tokens_per_micro_batch: Tokens of one forward and backward pass; more needs more memory.
        max_tokens_per_row: Longer rows are cut; what is cut off is counted. None cuts nothing.
        share_prefixes: Compute once what rows of a micro-batch have in common at their beginning (the prompt of a
            group, the history of branches). The result is the same.
    """

    model_config = ConfigDict(extra="forbid")

    groups: PositiveInt = 16
    over_sample: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0
    tail: TailConfig | None = None
    leftover: Literal["carry", "cancel"] | None = None
    max_tokens_per_micro_batch: PositiveInt = 4096
    max_tokens_per_row: PositiveInt | None = None
    share_prefixes: bool = True

    @model_validator(mode="after")
    def _something_is_left(self) -> Self:
        if self.leftover is not None and self.tail is None and self.started == self.groups:
            raise ValueError(
                f"leftover is {self.leftover}, but every group that is started is waited for: remove it, or give "
                "over_sample or tail"
            )
        return self

    @property
    def started(self) -> int:
        """How many groups a step of ``sync`` starts where all of its batch are fresh."""
        return self.starts(self.groups)

    def starts(self, fresh: int) -> int:
        """Return how many groups a step of ``sync`` starts that takes so many fresh ones."""
        # Rounded: 1.1 times 10 is 11.000000000000002, and 11 is meant.
        return math.ceil(round(fresh * self.over_sample, 6))


def check_leftover(batch: BatchConfig, replay: ReplayConfig, *, sync: bool) -> None:
    """Refuse what the mode or the replay strategy does not allow.

    Raises:
        ValueError: What is wrong, and what to do.
    """
    if not sync and (batch.over_sample > 1 or batch.leftover == "cancel"):
        key = f"over_sample is {batch.over_sample:g}" if batch.over_sample > 1 else "leftover is cancel"
        raise ValueError(
            f"batch.{key}, but an asynchronous mode always has further groups on their way, and carries them: remove "
            "it (replay.ahead says how many)"
        )
    if batch.leftover == "carry" and allowed_staleness(replay, sync=sync) == 0:
        raise ValueError(
            "batch.leftover is carry, but replay trains no group that older weights began: set replay.strategy to "
            "bounded, with replay.max_staleness 1 or more, or batch.leftover to cancel"
        )
