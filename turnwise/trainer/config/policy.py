"""The configuration of a trained policy: its model, optimizer, learning-rate schedule and critic."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, model_validator

from turnwise.config import ConfigPath, ConfigReference
from turnwise.errors import RegistryError
from turnwise.plugins import load_object
from turnwise.types import StopReason

PositiveInt: TypeAlias = Annotated[int, Field(gt=0)]
PositiveFloat: TypeAlias = Annotated[float, Field(gt=0)]
Fraction: TypeAlias = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """A section that refuses unknown keys."""

    model_config = ConfigDict(extra="forbid")


class LoRAConfig(BaseModel):
    """Low-rank adapters that are trained while the model itself stays as it is.

    Attributes:
        rank: Columns of each factor; by default 16, or that of ``path``.
        alpha: Divided by the rank it is what the product is multiplied by; by default twice the rank, or that of
            ``path``.
        targets: Ends of the names of the linear layers that get one (``[q_proj, v_proj]``); by default all of them but
            the output matrix, or those of ``path``.
        path: A folder with an adapter in peft's layout to go on from; by default they begin at zero.
        seed: Decides the first factor of each, whose second begins at zero.
    """

    model_config = ConfigDict(extra="forbid")

    rank: Annotated[int, Field(gt=0)] | None = None
    alpha: Annotated[float, Field(gt=0)] | None = None
    targets: Annotated[list[str], Field(min_length=1)] | None = None
    path: ConfigPath | None = None
    seed: Annotated[int, Field(ge=0)] = 0


class ModelConfig(Section):
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


class MuonConfig(Section):
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


class OptimConfig(Section):
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


class ScheduleConfig(Section):
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


class CriticConfig(Section):
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


class PolicyConfig(Section):
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
        # By name: engines stand above the configuration that names them.
        try:
            load_object("turnwise.trainer.learn.learner:chosen_engine", "engine")(self)
        except RegistryError as error:
            raise ValueError(str(error)) from error
        return self
