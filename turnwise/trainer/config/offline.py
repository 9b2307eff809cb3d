"""The configuration of offline training: ``turnwise sft``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from turnwise.config import ConfigPath, Section
from turnwise.inference.config import RendererConfig
from turnwise.trainer.algorithms.losses.core import LossAggregation
from turnwise.trainer.config.policy import (
    LoggersConfig,
    ModelConfig,
    OptimConfig,
    PolicyConfig,
    PositiveFloat,
    PositiveInt,
    ScheduleConfig,
)
from turnwise.trainer.config.train import RunName


class RecordedConfig(Section):
    """Recorded trajectories of an evaluation, a training run, or the gateway, and which of them are trained.

    Attributes:
        path: The directory of a run or an evaluation, or a file of trajectories.
        policy: Only trajectories of this policy.
        partition: Only ``train`` or only ``val``; by default both.
        min_reward: Minimal reward.
        best_per_task: Maximum per task, best first; ties prefer fewer sampled tokens.
        dedupe: Drop trajectories with the same tokens as another one of the task.
    """

    path: ConfigPath
    policy: str = "main"
    partition: Literal["train", "val"] | None = None
    min_reward: float | None = None
    best_per_task: PositiveInt | None = None
    dedupe: bool = True


class SFTConfig(Section):
    """``turnwise sft``.

    Attributes:
        name: Name of the run; its directory is ``runs/name``, its model ``runs/name/model``.
        runs: Parent of run directories.
        overwrite: Whether an existing model is replaced.
        seed: Seed of the data order.
        data: A jsonl file.
        trajectories: Instead of it: recorded trajectories, whose sampled tokens are trained (rejection sampling).
        held_out: A jsonl file of held-out conversations, whose loss (``held_out/nll``) is shown beside the trained one.
        limit: Maximum number of conversations.
        epochs: Passes over the data, unless ``steps`` is given.
        steps: Optimizer steps.
        conversations: Conversations per optimizer step.
        loss_aggregation: What the loss is averaged over.
        loss_scale: Divisor of ``loss_aggregation: seq_mean_token_sum_norm``.
        share_prefixes: Compute common prefixes of a micro-batch's conversations once (system prompt and tools, the
            prompt of a task). The result is the same up to rounding.
        max_tokens_per_micro_batch: Tokens of one forward and backward pass; bounds memory.
        max_tokens_per_row: Truncate longer conversations, counting the cut tokens; None truncates nothing.
        model: The initial model.
        optim: The optimizer.
        schedule: The learning-rate schedule.
        renderer: The renderer of messages.
        loggers: Loggers beside the console and ``metrics.jsonl`` (docs/metrics.md).
    """

    name: RunName
    runs: ConfigPath = Field(default=Path("runs"), validate_default=True)
    overwrite: bool = False
    seed: Annotated[int, Field(ge=0)] = 0
    data: ConfigPath | None = None
    trajectories: RecordedConfig | None = None
    held_out: ConfigPath | None = None
    limit: PositiveInt | None = None
    epochs: PositiveInt = 1
    steps: PositiveInt | None = None
    conversations: PositiveInt = 32
    loss_aggregation: LossAggregation = "token_mean"
    loss_scale: PositiveFloat | None = None
    share_prefixes: bool = False
    max_tokens_per_micro_batch: PositiveInt = 4096
    max_tokens_per_row: PositiveInt | None = None
    model: ModelConfig
    optim: OptimConfig = OptimConfig(lr=1e-5)
    schedule: ScheduleConfig = ScheduleConfig()
    renderer: RendererConfig = RendererConfig()
    loggers: LoggersConfig = Field(default_factory=list)

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.data is None) == (self.trajectories is None):
            raise ValueError("either data (a jsonl file) or trajectories (recorded ones), and one")
        return self

    @model_validator(mode="after")
    def _has_its_scale(self) -> Self:
        if (self.loss_aggregation == "seq_mean_token_sum_norm") != (self.loss_scale is not None):
            raise ValueError(
                f"loss_scale is {self.loss_scale}, and loss_aggregation is {self.loss_aggregation}: the one belongs to "
                "seq_mean_token_sum_norm, which needs it"
            )
        return self

    @property
    def policy(self) -> PolicyConfig:
        """Model, optimizer and schedule as one section."""
        return PolicyConfig(model=self.model, optim=self.optim, schedule=self.schedule)

    def steps_over(self, count: int) -> int:
        """Return the optimizer steps over ``count`` conversations."""
        return self.steps or self.epochs * -(-count // self.conversations)
