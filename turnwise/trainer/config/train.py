"""The configuration of training runs: ``turnwise train``, and what other ways of training share with it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, model_validator

from turnwise.config import ConfigPath, ConfigReference
from turnwise.errors import RegistryError
from turnwise.evaluation.config import EvalPlan
from turnwise.inference.config import InferenceConfig, RendererConfig
from turnwise.rollout.config import RolloutConfig
from turnwise.rollout.producer import MemberRule
from turnwise.rollout.replay.config import ReplayConfig, RunFacts
from turnwise.rollout.replay.strategies import StragglerDeadline
from turnwise.tasks import TasksConfig
from turnwise.tasks.order import CurriculumConfig
from turnwise.trainer.algorithms.config import AlgorithmConfig
from turnwise.trainer.config.batch import BatchConfig, check_leftover
from turnwise.trainer.model.lora import LoRAConfig
from turnwise.trainer.observe.loggers.core import LoggersConfig
from turnwise.trainer.run.budget import UNKNOWN_STEPS, BudgetConfig, check_limits
from turnwise.trainer.run.hooks import HookNames
from turnwise.types import StopReason

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


Mode: TypeAlias = Literal["sync", "colocate_async", "separate_async"]


class OverlapConfig(BaseModel):
    """What goes on while the trainer updates, in the two asynchronous modes.

    Attributes:
        sampling: ``colocate_async``: whether servers ``continue`` to sample during an update, or ``pause`` because both
            do not fit the device. Tools and environments go on in either case.
        stream: ``separate_async``: in how many parts a batch is trained, each by one optimizer step as soon as its
            groups are there.
    """

    model_config = ConfigDict(extra="forbid")

    sampling: Literal["continue", "pause"] = "continue"
    stream: Annotated[int, Field(ge=1)] = 1


def check_mode(mode: Mode, overlap: OverlapConfig, *, groups: int, passes: int) -> None:
    """Refuse keys of ``overlap`` that the mode does not read.

    Args:
        mode: Which loop trains.
        overlap: What goes on at the same time.
        groups: Groups of a batch.
        passes: Optimizer steps of a batch that comes whole: epochs times minibatches.

    Raises:
        ValueError: What is wrong, and what to do.
    """
    if mode == "sync" and overlap != OverlapConfig():
        raise ValueError(
            "overlap is given, but mode is sync, where nothing overlaps: remove it, or set mode to colocate_async or "
            "separate_async"
        )
    if overlap.sampling == "pause" and mode != "colocate_async":
        raise ValueError(
            f"overlap.sampling is pause, but mode is {mode}, whose servers never stand still: remove it, or set "
            "mode to colocate_async"
        )
    if overlap.stream == 1:
        return
    if mode != "separate_async":
        raise ValueError(f"overlap.stream is {overlap.stream}, but mode is {mode}: only separate_async streams")
    if overlap.stream > groups:
        raise ValueError(f"overlap.stream is {overlap.stream}, but a batch has {groups} groups (batch.groups)")
    if passes > 1:
        raise ValueError(
            f"overlap.stream is {overlap.stream}, and each part is gone through once by one optimizer step: set "
            "algorithm.epochs and algorithm.minibatches to 1"
        )


PositiveFloat: TypeAlias = Annotated[float, Field(gt=0)]
Fraction: TypeAlias = Annotated[float, Field(ge=0, le=1)]

RunName: TypeAlias = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
"""A name that is also a directory's."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ModelConfig(_Section):
    """The model that is trained, and where.

    Attributes:
        path: Directory of a Hugging Face causal language model. Nothing is downloaded.
        device: A torch device; ``auto`` is the first GPU where there is one, else the CPU.
        compute_dtype: What matrix products are computed in. Parameters and optimizer state are float32.
        threads: CPU threads of the trainer process; by default torch decides.
        gradient_checkpointing: Recompute activations in the backward pass: less memory, about a third more time.
        lora: Train low-rank adapters and leave the model as it is; None trains all of it.
    """

    path: ConfigPath
    device: str = "auto"
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    threads: PositiveInt | None = None
    gradient_checkpointing: bool = False
    lora: LoRAConfig | None = None

    @property
    def continues_adapter(self) -> bool:
        """Whether training begins with an adapter, so that the model in ``path`` is not what it begins with."""
        return self.lora is not None and self.lora.path is not None


class MuonConfig(_Section):
    """Muon, which updates the weight matrices where ``optim.name`` is ``muon``.

    Attributes:
        lr: Its learning rate (that of AdamW is ``optim.lr``).
        momentum: Share of the old momentum that stays in a step.
        weight_decay: Decoupled, for these matrices.
        adjust_lr: How the rate depends on a matrix's shape: ``original`` (rows over columns, Jordan 2024) or
            ``match_rms_adamw`` (updates as large as AdamW's, arXiv:2502.16982).
    """

    lr: PositiveFloat = 0.02
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    adjust_lr: Literal["original", "match_rms_adamw"] = "original"


class OptimConfig(_Section):
    """How gradients become updates.

    Attributes:
        name: ``adamw`` for all parameters, or ``muon`` for weight matrices and AdamW for the rest (embeddings, output
            matrix, norms, biases).
        lr: Peak learning rate of AdamW.
        betas: Decay rates of AdamW's first and second moment.
        eps: Added to AdamW's denominator.
        weight_decay: Decoupled; matrices only, norms and biases never decay.
        max_grad_norm: Gradients are scaled down to this global norm; None leaves them.
        muon: Read where ``name`` is ``muon``.
    """

    name: Literal["adamw", "muon"] = "adamw"
    lr: PositiveFloat = 1e-6
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    max_grad_norm: PositiveFloat | None = 1.0
    muon: MuonConfig = MuonConfig()


class ScheduleConfig(_Section):
    """How the learning rate changes over a run; all rates are multiplied by the same factor.

    Attributes:
        kind: After warm-up: ``constant``; ``linear`` or ``cosine`` down to ``min_ratio`` at the end; or ``wsd``
            (warm-up, stable, decay): constant, then linear down over the last ``decay_fraction`` of all steps.
        warmup_steps: Steps over which the factor rises to 1 (the first step has 1/warmup_steps).
        min_ratio: The factor at the end of a decay.
        decay_fraction: Read by ``wsd``.
    """

    kind: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    min_ratio: Fraction = 0.0
    decay_fraction: Fraction = 0.4


class CriticConfig(_Section):
    """What ``algorithm.advantage: gae`` asks how well it goes from here (``trainer/model/critic.py``).

    Attributes:
        kind: ``own``, a model of its own; or ``shared``, a value head on the policy's model, whose loss is added to the
            policy's and goes through the layers in the same backward pass.
        path: ``own``: directory of the model that it starts from (same tokenizer), or of a critic that was saved; None
            is the policy's.
        optim: How its gradients become updates; of ``shared`` the head's (the layers are the policy's to update).
        schedule: How its learning rate changes.
        value_clip: How far a value may move with profit in a train step, in units of reward; None does not clip.
        coef: ``shared``: weight of its loss beside the policy's; None is 0.5.
        warmup_steps: In so many first train steps the critic learns alone: the policy stays as it is, and so do the
            layers that it shares.
        bootstrap: Stop reasons after which something was still to come: the critic's value of the last state counts as
            if it had been earned. After all others nothing is: an episode ended, or a limit that is part of its task
            ended it.
    """

    kind: Literal["own", "shared"] = "own"
    path: ConfigPath | None = None
    optim: OptimConfig = OptimConfig(lr=1e-5)
    schedule: ScheduleConfig = ScheduleConfig()
    value_clip: PositiveFloat | None = 0.2
    coef: PositiveFloat | None = None
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    bootstrap: tuple[StopReason, ...] = (StopReason.ENV_TRUNCATED, StopReason.TIMEOUT, StopReason.INTERRUPTED)

    @model_validator(mode="after")
    def _fits_its_kind(self) -> Self:
        if self.kind == "shared" and self.path is not None:
            raise ValueError(f"path is {self.path}, but a shared critic is a head on the policy's model: remove it")
        if self.kind == "own" and self.coef is not None:
            raise ValueError(f"coef is {self.coef:g}, but an own critic has a loss of its own: remove it, set optim.lr")
        if never := set(self.bootstrap) & {StopReason.COMPLETED, StopReason.ERROR, StopReason.CANCELLED}:
            raise ValueError(f"bootstrap holds {min(never)}, after which nothing comes that a critic could foresee")
        return self


class PolicyConfig(_Section):
    """One policy: its model and how it learns.

    Attributes:
        model: The model.
        optim: How gradients become updates.
        schedule: How the learning rate changes.
        engine: What computes (``trainer/engines``): a registered name, or a class of your own as ``pkg.mod:Class``.
        engine_options: Options of that engine by name.
        critic: What ``algorithm.advantage: gae`` reads; it stands here because a critic judges one policy.
    """

    model: ModelConfig
    optim: OptimConfig = OptimConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    engine: ConfigReference = "torch"
    engine_options: dict[str, Any] = Field(default_factory=dict)
    critic: CriticConfig | None = None

    @model_validator(mode="after")
    def _has_an_engine(self) -> Self:
        if self.engine == "torch" and not self.engine_options:
            # Importing it takes seconds, and every configuration is checked.
            return self
        from turnwise.trainer.learn.learner import chosen_engine

        try:
            chosen_engine(self)
        except RegistryError as error:
            raise ValueError(str(error)) from error
        return self


class TrainConfig(_Section):
    """``turnwise train``.

    Attributes:
        name: Name of the run; its directory is ``runs/name``.
        runs: Where run directories lie.
        seed: Decides reset seeds, sampling seeds and the order of tasks.
        steps: Train steps; None where only a budget limits the run.
        budget: Tokens and wall time after which the run ends, too.
        tasks: Where the tasks come from (``tasks.load_tasks``): a source, a section with its keys, or a list of
            either, which is a mix; by default those that the environment names.
        task_limit: Take at most this many (of a mix each source has its own ``limit``).
        max_prompt_tokens: Leave tasks out whose prompt has more tokens; their number is printed and logged. Counted are
            the task's own prompt and the environment's tools, not what the environment adds when it resets.
        shuffle: Whether tasks are shuffled, anew in each epoch; else they keep their order.
        curriculum: Which difficulty of tasks is preferred (``tasks/order.py``); None takes all equally often.
        policies: The trained policies by name. One for now, ``main``.
        rollout: How episodes are rolled out.
        replay: Which finished groups a step learns from, and how they wait.
        renderer: How messages become tokens.
        inference: The server that samples.
        algorithm: From rewards to a loss.
        batch: What a step is made of.
        mode: What goes on at the same time (docs/training.md): ``sync`` rolls out, then trains; ``colocate_async`` does
            both on one device, ``separate_async`` on devices of their own.
        overlap: What the asynchronous modes do at the same time.
        eval: Evaluation on held-out tasks; None evaluates nothing.
        checkpoint: When checkpoints are written.
        hooks: Classes whose methods run at named moments (``trainer/run/hooks.py``): ``path/to/file.py:Class``; one, or
            several in the order in which they are called.
        loggers: Where metrics go beside the console and ``metrics.jsonl`` (docs/metrics.md).
        custom: Handed to the extension as it is; nothing here reads it.
    """

    name: RunName
    runs: ConfigPath = Field(default=Path("runs"), validate_default=True)
    seed: Annotated[int, Field(ge=0)] = 0
    steps: PositiveInt | None = None
    budget: BudgetConfig = BudgetConfig()
    tasks: TasksConfig | None = None
    task_limit: PositiveInt | None = None
    max_prompt_tokens: PositiveInt | None = None
    shuffle: bool = True
    curriculum: CurriculumConfig | None = None
    policies: dict[str, PolicyConfig]
    rollout: RolloutConfig
    replay: ReplayConfig = ReplayConfig()
    renderer: RendererConfig = RendererConfig()
    inference: InferenceConfig = InferenceConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    batch: BatchConfig = BatchConfig()
    mode: Mode = "sync"
    overlap: OverlapConfig = OverlapConfig()
    eval: TrainEvalConfig | None = None
    checkpoint: CheckpointConfig = CheckpointConfig()
    hooks: HookNames = ()
    loggers: LoggersConfig = Field(default_factory=list)
    custom: dict[str, Any] = Field(default_factory=dict)

    @property
    def replay_facts(self) -> RunFacts:
        """What the replay buffer may depend on besides its own section."""
        members = MemberRule(self.rollout.min_members, whole=self.rollout.failed_members == "drop")
        tail = None if self.batch.tail is None else StragglerDeadline(self.batch.tail.seconds, self.batch.tail.share)
        return RunFacts(self.batch.groups, sync=self.mode == "sync", seed=self.seed, members=members, tail=tail)

    @model_validator(mode="after")
    def _ends(self) -> Self:
        check_limits(self.steps, self.budget)
        passes = self.algorithm.epochs * self.algorithm.minibatches
        check_mode(self.mode, self.overlap, groups=self.batch.groups, passes=passes)
        check_leftover(self.batch, self.replay, sync=self.mode == "sync")
        return self

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        self.checkpoint.check_best(evaluates=self.eval is not None)
        if list(self.policies) != ["main"]:
            raise ValueError(
                f"policies holds {', '.join(self.policies) or 'nothing'}; exactly one, main, can be trained"
            )
        if self.rollout.group_size < 2 and self.algorithm.compares_groups:
            raise ValueError(
                f"rollout.group_size is 1, and by algorithm.advantage {self.algorithm.advantage} a group of one has "
                "advantage zero; set at least 2, or an estimator that compares no groups (gae, remax ...)"
            )
        if self.algorithm.greedy_baseline and self.rollout.group_reward is not None:
            raise ValueError(
                f"algorithm.advantage {self.algorithm.advantage} holds trajectories against a greedy rollout, which is "
                "no member of the group that rollout.group_reward compares: its reward would lack that part; choose one"
            )
        self._check_teacher()
        begins = sorted(name for name, frozen in self.rollout.frozen.items() if frozen.start)
        if begins and self.policy.model.continues_adapter:
            raise ValueError(
                f"rollout.frozen.{begins[0]}.start is true, but the run begins with the adapter in "
                "policies.main.model.lora.path, and start serves the model without it: name the adapter's folder as "
                f"rollout.frozen.{begins[0]}.model instead"
            )
        members = self.batch.groups * self.rollout.group_size
        if self.algorithm.minibatches > members:
            raise ValueError(
                f"algorithm.minibatches is {self.algorithm.minibatches}, but a step has {members} trajectories "
                "(batch.groups x rollout.group_size)"
            )
        critic = self.policy.critic
        if self.algorithm.asks_critic and critic is None:
            raise ValueError(
                f"algorithm.advantage is {self.algorithm.advantage}, which asks a critic: give policies.main.critic, "
                "such as {kind: own}"
            )
        if critic is not None and not self.algorithm.asks_critic:
            raise ValueError(
                f"policies.main.critic is given, but algorithm.advantage {self.algorithm.advantage} asks none: remove "
                "it, or set algorithm.advantage to gae"
            )
        if critic is not None and self.steps is not None and critic.warmup_steps >= self.steps:
            raise ValueError(
                f"policies.main.critic.warmup_steps is {critic.warmup_steps} of {self.steps} steps: the policy would "
                "never learn"
            )
        return self

    def _check_teacher(self) -> None:
        distill, frozen = self.algorithm.distill, self.rollout.frozen
        if distill is None:
            return
        if distill.teacher not in frozen:
            raise ValueError(
                f"algorithm.distill.teacher is {distill.teacher!r}, but rollout.frozen holds "
                f"{', '.join(frozen) or 'nothing'}: add rollout.frozen.{distill.teacher} with model, or url and model"
            )
        if frozen[distill.teacher].hosted is not None:
            raise ValueError(
                f"algorithm.distill.teacher is {distill.teacher!r}, a hosted endpoint: it tells nothing of given ids; "
                "name a model, or a server of token ids"
            )
        if self.rollout.temperature != 1.0:
            raise ValueError(
                f"rollout.temperature is {self.rollout.temperature:g}, but servers score given ids at temperature 1, "
                "and algorithm.distill compares both: set it to 1"
            )

    @property
    def policy(self) -> PolicyConfig:
        """The one trained policy."""
        return self.policies["main"]

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps of the whole run, at most: what the learning-rate schedule counts."""
        return (self.steps - self.critic_alone if self.steps else UNKNOWN_STEPS) * self.updates_per_step

    @property
    def critic_alone(self) -> int:
        """Train steps in which the critic alone learns."""
        return self.policy.critic.warmup_steps if self.policy.critic else 0

    @property
    def critic_steps(self) -> int:
        """Optimizer steps of the critic: those of its warm-up count."""
        return (self.steps or UNKNOWN_STEPS) * self.updates_per_step

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps of a train step, at most."""
        return self.algorithm.epochs * self.algorithm.minibatches * self.overlap.stream
