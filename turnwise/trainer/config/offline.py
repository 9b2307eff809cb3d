"""The configuration of what trains on data that is there: ``turnwise sft``, ``dpo`` and ``reward-model``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from turnwise.config import ConfigPath
from turnwise.inference.config import RendererConfig
from turnwise.trainer.algorithms.losses.core import LossAggregation
from turnwise.trainer.config.policy import (
    ModelConfig,
    OptimConfig,
    PolicyConfig,
    PositiveFloat,
    PositiveInt,
    ScheduleConfig,
)
from turnwise.trainer.config.train import RunName
from turnwise.trainer.observe.loggers import LoggersConfig

NotNegative = Annotated[float, Field(ge=0)]


class OfflineConfig(BaseModel):
    """What all of them have.

    Attributes:
        name: Name of the run; its directory is ``runs/name``, its model ``runs/name/model``.
        runs: Where run directories lie.
        overwrite: Whether a model that is there already is replaced.
        seed: Decides the order of the data.
        data: A jsonl file.
        limit: Take at most this many of its rows.
        epochs: How often the data is gone through, unless ``steps`` is given.
        steps: Optimizer steps.
        max_tokens_per_micro_batch: Tokens of one forward and backward pass; more needs more memory.
        max_tokens_per_row: Longer conversations are cut; what is cut off is counted. None cuts nothing.
        model: The model to start from.
        optim: How gradients become updates.
        schedule: How the learning rate changes.
        renderer: How messages become tokens.
        loggers: Where metrics go beside the console and ``metrics.jsonl`` (docs/metrics.md).
    """

    model_config = ConfigDict(extra="forbid")

    name: RunName
    runs: ConfigPath = Field(default=Path("runs"), validate_default=True)
    overwrite: bool = False
    seed: Annotated[int, Field(ge=0)] = 0
    data: ConfigPath | None = None
    limit: PositiveInt | None = None
    epochs: PositiveInt = 1
    steps: PositiveInt | None = None
    max_tokens_per_micro_batch: PositiveInt = 4096
    max_tokens_per_row: PositiveInt | None = None
    model: ModelConfig
    optim: OptimConfig = OptimConfig(lr=1e-5)
    schedule: ScheduleConfig = ScheduleConfig()
    renderer: RendererConfig = RendererConfig()
    loggers: LoggersConfig = Field(default_factory=list)

    @property
    def policy(self) -> PolicyConfig:
        """Model, optimizer and schedule as one."""
        return PolicyConfig(model=self.model, optim=self.optim, schedule=self.schedule)

    def steps_over(self, count: int, at_once: int) -> int:
        """Return how many optimizer steps are taken over ``count`` things, ``at_once`` in each."""
        return self.steps or self.epochs * -(-count // at_once)


class RecordedConfig(BaseModel):
    """Trajectories that were recorded: those of an evaluation, of a training run, or of the gateway.

    Attributes:
        path: The directory of a run or an evaluation, or a file of trajectories.
        policy: Only trajectories of this policy.
        partition: Only ``train`` or only ``val``; by default both.
    """

    model_config = ConfigDict(extra="forbid")

    path: ConfigPath
    policy: str = "main"
    partition: Literal["train", "val"] | None = None


class FilterConfig(RecordedConfig):
    """Which of the recorded trajectories are good enough to learn from.

    Attributes:
        min_reward: Only those whose reward is at least this.
        best_per_task: Of each task at most so many, the best ones; of equal ones those with fewer sampled tokens.
        dedupe: Whether a trajectory is left out whose tokens are those of another one of its task.
    """

    min_reward: float | None = None
    best_per_task: PositiveInt | None = None
    dedupe: bool = True


class PairingConfig(RecordedConfig):
    """Which trajectories of a group make pairs: the best against the worst, the second best against the second worst...

    Attributes:
        pairs_per_group: At most so many of each group.
        min_gap: By how much the reward of the better one must be larger, at least; equal ones are never a pair.
    """

    pairs_per_group: PositiveInt = 1
    min_gap: NotNegative = 0.0


class SFTConfig(OfflineConfig):
    """``turnwise sft``.

    Attributes:
        trajectories: Instead of ``data``: recorded trajectories, of which the sampled tokens are trained as they are
            (rejection sampling).
        conversations: Conversations per optimizer step.
        loss_aggregation: What the loss is averaged over.
        loss_scale: What sums are divided by where ``loss_aggregation`` is ``seq_mean_token_sum_norm``.
        share_prefixes: Compute once what the conversations of a micro-batch have in common at their beginning (a system
            prompt with its tools, the prompt of a task). The result is the same up to rounding.
    """

    trajectories: FilterConfig | None = None
    conversations: PositiveInt = 32
    loss_aggregation: LossAggregation = "token_mean"
    loss_scale: PositiveFloat | None = None
    share_prefixes: bool = False

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.data is None) == (self.trajectories is None):
            raise ValueError("either data (a jsonl file of demonstrations) or trajectories (recorded ones), and one")
        if (self.loss_aggregation == "seq_mean_token_sum_norm") != (self.loss_scale is not None):
            raise ValueError(
                f"loss_scale is {self.loss_scale}, and loss_aggregation is {self.loss_aggregation}: the one belongs to "
                "seq_mean_token_sum_norm, which needs it"
            )
        return self


class DPOConfig(OfflineConfig):
    """``turnwise dpo``.

    Attributes:
        trajectories: Instead of ``data``: pairs of recorded trajectories of one group.
        pairs: Pairs per optimizer step.
        loss: ``sigmoid`` (DPO) or ``ipo``.
        beta: How strongly the policy is held to the reference.
        label_smoothing: Share of the preferences that is taken to be wrong (``sigmoid`` only).
        length_normalised: Whether log-probabilities are means over the tokens of a completion, not sums.
        nll_coef: Weight of the likelihood of what was chosen, beside the preference.
        reference: Directory of the reference model; by default the model to start from, as it is then.
    """

    trajectories: PairingConfig | None = None
    pairs: PositiveInt = 32
    loss: Literal["sigmoid", "ipo"] = "sigmoid"
    beta: PositiveFloat = 0.1
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    length_normalised: bool = False
    nll_coef: NotNegative = 0.0
    reference: ConfigPath | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if (self.data is None) == (self.trajectories is None):
            raise ValueError("either data (a jsonl file of preferences) or trajectories (recorded ones), and one")
        if self.label_smoothing and self.loss != "sigmoid":
            raise ValueError(f"no label_smoothing: the loss {self.loss} has none")
        return self


class RewardModelConfig(OfflineConfig):
    """``turnwise reward-model``.

    Attributes:
        trajectories: Instead of ``data``: pairs of recorded trajectories of one group, as the messages that they say.
        pairs: Pairs per optimizer step.
        center_coef: Weight of the square of a pair's rewards added up: keeps rewards around 0.
        held_out: A jsonl file of preferences that are not trained: how many of them the finished model gets right.
    """

    trajectories: PairingConfig | None = None
    pairs: PositiveInt = 32
    center_coef: NotNegative = 0.0
    held_out: ConfigPath | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.data is None) == (self.trajectories is None):
            raise ValueError("either data (a jsonl file of preferences) or trajectories (recorded ones), and one")
        return self
