"""The ``algorithm`` section of a training run: estimator, credit, loss and their options, checked by name."""

from __future__ import annotations

import inspect
from typing import Annotated, Any, Literal, Self

from pydantic import (
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
    model_validator,
)

from turnwise.config import ConfigReference, Section, shorthand
from turnwise.errors import RegistryError
from turnwise.trainer.algorithms.advantages import (
    ADVANTAGE_ARGUMENTS,
    ADVANTAGE_DATA,
    TURN_COMPARISONS,
    WITH_GROUPS,
    advantage_fn,
)
from turnwise.trainer.algorithms.correction import CorrectionConfig
from turnwise.trainer.algorithms.credit import CreditConfig
from turnwise.trainer.algorithms.gae import CRITIC_ADVANTAGES, CRITIC_ARGUMENTS
from turnwise.trainer.algorithms.kl import KLConfig
from turnwise.trainer.algorithms.losses import (
    LOSS_ARGUMENTS,
    LOSS_DATA,
    LOSSES,
    SELECT_ARGUMENTS,
    SELECT_DATA,
    find_loss,
)
from turnwise.trainer.algorithms.losses.core import LossAggregation
from turnwise.trainer.algorithms.registry import ConfiguredFunction, bind, find
from turnwise.trainer.algorithms.teacher_contexts import CONTEXTS


class DistillConfig(Section):
    """On-policy distillation: the teacher, and the weight of the rewards beside it.

    Attributes:
        teacher: Name of a policy in ``rollout.frozen``: a model served for the run, or a running server.
        reward_coef: Weight of the advantage from rewards, beside that of the teacher's log-probabilities, which is 1; 0
            learns from the teacher alone.
    """

    teacher: str
    reward_coef: NonNegativeFloat = 0.0


class SelfDistillConfig(Section):
    """Self-distillation at turns (``trainer/batch/self_distill.py``): the teacher is the policy, told more.

    Attributes:
        contexts: What is made known of a turn, of all that apply: ``error`` (the answers of its tools, where a call
            failed), ``sibling`` (the continuation of a better attempt that parted at this turn), ``critique`` (notes of
            judges), ``correction`` (the user's reply), or ``pkg.module:function``, which maps a ``RecordedTurn`` of
            ``trainer/algorithms/teacher_contexts.py`` to a text or None.
        weight: Share of the teacher's advantages, beside those of the rewards: 0 learns from rewards alone, 1 from the
            teacher alone.
    """

    contexts: Annotated[list[ConfigReference], Field(min_length=1)]
    weight: Annotated[float, Field(ge=0, le=1)] = 0.5

    @field_validator("contexts")
    @classmethod
    def _are_known(cls, names: list[str]) -> list[str]:
        for name in names:
            try:
                find(name, CONTEXTS, "contexts")
            except RegistryError as error:
                raise ValueError(str(error)) from error
        return names

    @property
    def reward_coef(self) -> float:
        """Weight of the rewards' advantages."""
        return 1 - self.weight


class AlgorithmConfig(Section):
    """From rewards to a loss.

    Attributes:
        advantage: Name of the estimator (``algorithms/advantages.py``), or a custom function as ``pkg.mod:function``.
        advantage_options: Options of that estimator by name.
        credit: How rewards are credited to turns (``algorithms/credit.py``); by default all turns get the same.
        drop_zero_variance: Drop groups whose rewards are all equal: they have no gradient and dilute the others.
        loss: Name of the policy loss (``algorithms/losses``), or a custom function as ``pkg.mod:function``.
        loss_options: Options of that loss by name; omitted ones keep the defaults of its function.
        entropy_coef: Weight of the entropy bonus.
        loss_aggregation: What the loss is averaged over (``algorithms/losses/core.py``); None is the aggregation that
            the loss was published with.
        loss_scale: The divisor of ``seq_mean_token_sum_norm``, such as the longest completion.
        epochs: Passes over a batch.
        minibatches: Optimizer steps per epoch.
        old_logprobs: Denominator of the ratio: ``rollout`` (reported by the server at sampling time) or ``recompute``
            (the trainer's own forward pass before the first update).
        kl: Penalty for leaving a reference model (``algorithms/kl.py``), or None.
        correction: Correction of the gap between trainer and rollout (``algorithms/correction.py``), or None.
        distill: Learning from a teacher's log-probabilities (``trainer/learn/distill.py``), or None.
        self_distill: Learning from the policy's own, when it is told more, or None.
    """

    advantage: ConfigReference = "grpo"
    advantage_options: dict[str, Any] = Field(default_factory=dict)
    credit: Annotated[CreditConfig, shorthand("name")] = CreditConfig()
    drop_zero_variance: bool = True
    loss: ConfigReference = "ppo_clip"
    loss_options: dict[str, Any] = Field(default_factory=dict)
    entropy_coef: NonNegativeFloat = 0.0
    loss_aggregation: LossAggregation | None = None
    loss_scale: PositiveFloat | None = None
    epochs: PositiveInt = 1
    minibatches: PositiveInt = 1
    old_logprobs: Literal["rollout", "recompute"] = "rollout"
    kl: KLConfig | None = None
    correction: CorrectionConfig | None = None
    distill: DistillConfig | None = None
    self_distill: SelfDistillConfig | None = None

    @field_validator("advantage", "loss")
    @classmethod
    def _is_registered(cls, name: str, field: ValidationInfo) -> str:
        try:
            advantage_fn(name) if field.field_name == "advantage" else find_loss(name)
        except RegistryError as error:
            raise ValueError(str(error)) from error
        return name

    @model_validator(mode="after")
    def _credit_is_not_given_twice(self) -> Self:
        if self.asks_critic and self.credit.name != "same":
            raise ValueError(
                f"credit is {self.credit.name!r}, but {self.advantage} derives the credit of each token from the "
                "critic: remove it (advantage_options.level: turn makes turns its steps)"
            )
        return self

    @model_validator(mode="after")
    def _turns_are_compared(self) -> Self:
        in_groups = self.credit.name == "gigpo" or self.credit.of_trees
        allowed = [name for name, (within, _) in TURN_COMPARISONS.items() if within or not in_groups]
        if self.credit.compares and self.advantage not in allowed:
            raise ValueError(
                f"credit {self.credit.name!r} compares turns as the estimator compares trajectories, but advantage is "
                f"{self.advantage!r}: choose {', '.join(allowed)}, or credit same, last or discounted"
            )
        return self

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        try:
            self.chosen_advantage()
            self.chosen_loss()
            self.chosen_selection()
        except RegistryError as error:
            raise ValueError(str(error)) from error
        weighed = self.correction is not None and self.correction.weights != "none"
        if weighed and self.old_logprobs == "rollout" and self.loss in LOSSES and LOSSES[self.loss].uses_ratio:
            raise ValueError(
                f"algorithm.correction weighs by what the ratio of {self.loss} to the rollout says already: set "
                "algorithm.old_logprobs to recompute (three policies), or correction.weights to none (rejection only)"
            )
        if self.advantage == "gpg" and self.drop_zero_variance:
            raise ValueError(
                "algorithm.advantage gpg already corrects for groups without signal: set "
                "algorithm.drop_zero_variance to false, or they count twice"
            )
        if self.kl is not None and self.kl.where == "reward" and self.advantage == "gdpo":
            raise ValueError(
                "algorithm.kl.where is reward, but gdpo normalises each named reward separately, and the penalty is "
                "not one of them: set it to loss"
            )
        normed = self.aggregation == "seq_mean_token_sum_norm"
        if normed and self.loss_scale is None:
            raise ValueError(
                "algorithm.loss_aggregation is seq_mean_token_sum_norm, which divides by algorithm.loss_scale: give "
                "it, such as the longest completion in tokens"
            )
        if self.loss_scale is not None and not normed:
            raise ValueError(
                f"algorithm.loss_scale is {self.loss_scale:g}, but {self.aggregation} divides by no constant: remove "
                "it, or set algorithm.loss_aggregation to seq_mean_token_sum_norm"
            )
        return self

    @model_validator(mode="after")
    def _rewards_are_read(self) -> Self:
        if self.distill is not None and self.self_distill is not None:
            raise ValueError("algorithm.distill and algorithm.self_distill are two teachers: remove one of them")
        if not self.taught_alone:
            return self
        unread = {
            "algorithm.kl.where is reward": self.kl is not None and self.kl.where == "reward",
            f"algorithm.advantage {self.advantage} needs a critic": self.asks_critic,
            f"algorithm.advantage {self.advantage} needs greedy rollouts": self.greedy_baseline,
            f"algorithm.credit is {self.credit.name!r}": self.credit.name != "same",
        }
        teacher = "self_distill.weight is 1" if self.distill is None else "distill.reward_coef is 0"
        if what := next((name for name, is_so in unread.items() if is_so), None):
            raise ValueError(
                f"{what}, but algorithm.{teacher}: nothing is learned from rewards; give them a weight above 0, or "
                "remove the other"
            )
        return self

    @property
    def asks_critic(self) -> bool:
        """Whether advantages are computed from a critic's values."""
        return self.advantage in CRITIC_ADVANTAGES

    @property
    def aggregation(self) -> LossAggregation:
        """The configured aggregation, or that of the loss."""
        return self.loss_aggregation or find_loss(self.loss).aggregation

    def chosen_advantage(self) -> ConfiguredFunction:
        """Return the estimator with its options.

        Raises:
            RegistryError: No such estimator, or a wrong option.
        """
        return bind(
            self.advantage,
            advantage_fn(self.advantage),
            self.advantage_options,
            key="algorithm.advantage_options",
            arguments=CRITIC_ARGUMENTS if self.asks_critic else ADVANTAGE_ARGUMENTS,
            data=ADVANTAGE_DATA,
        )

    def chosen_loss(self) -> ConfiguredFunction:
        """Return the loss with its options.

        Raises:
            RegistryError: No such loss, or a wrong option.
        """
        loss = find_loss(self.loss)
        function = bind(
            self.loss,
            loss.function,
            self._options(in_selection=False),
            key="algorithm.loss_options",
            arguments=LOSS_ARGUMENTS,
            data=LOSS_DATA,
        )
        if "selected" in function.reads and loss.select is None:
            raise RegistryError(
                f"algorithm.loss is {self.loss!r}, which takes selected, but has no select function: name a "
                "turnwise.trainer.algorithms.losses.Loss with the function and its select"
            )
        return function

    def chosen_selection(self) -> ConfiguredFunction | None:
        """Return the token selection of the loss with its options; None where the loss has none.

        Raises:
            RegistryError: A wrong option.
        """
        select = find_loss(self.loss).select
        if select is None:
            return None
        options = self._options(in_selection=True)
        return bind(
            self.loss, select, options, key="algorithm.loss_options", arguments=SELECT_ARGUMENTS, data=SELECT_DATA
        )

    @property
    def greedy_baseline(self) -> bool:
        """Whether the estimator reads the reward of a greedy rollout of each task."""
        return "baselines" in self.chosen_advantage().reads

    @property
    def teacher(self) -> DistillConfig | SelfDistillConfig | None:
        """What is learned from a teacher."""
        return self.self_distill if self.self_distill is not None and self.self_distill.weight else self.distill

    @property
    def taught_alone(self) -> bool:
        """Whether nothing is learned from rewards."""
        return self.teacher is not None and not self.teacher.reward_coef

    @property
    def compares_groups(self) -> bool:
        """Whether trajectories are compared within their group, so that a group of one has no gradient."""
        return self.advantage in WITH_GROUPS and not self.taught_alone

    @property
    def leaves_out_dead(self) -> bool:
        """Whether groups of equal rewards are dropped; with distillation they still carry the teacher's signal."""
        return self.drop_zero_variance and self.teacher is None

    @property
    def idle_at_zero(self) -> bool:
        """Whether rows whose advantages are all zero have no gradient."""
        penalised = self.kl is not None and self.kl.where == "loss"
        return find_loss(self.loss).idle_at_zero and not self.entropy_coef and not penalised

    def _options(self, *, in_selection: bool) -> dict[str, Any]:
        """Return the options of the token selection, or the other loss options."""
        select = find_loss(self.loss).select
        of_selection = set() if select is None else set(inspect.signature(select).parameters)
        return {name: option for name, option in self.loss_options.items() if (name in of_selection) is in_selection}
