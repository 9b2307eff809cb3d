"""The configuration of a trained policy: its model, optimizer, learning-rate schedule and critic."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Self, TypeAlias, TypeVar

from pydantic import BaseModel, Field, ValidationError, model_validator

from turnwise.agents.roles import MAIN
from turnwise.config import ConfigPath, ConfigReference, Section, shorthand
from turnwise.errors import RegistryError
from turnwise.inference.config import InferenceConfig, RendererConfig
from turnwise.placement.devices import AUTO, CPU
from turnwise.plugins import load_object
from turnwise.trainer.algorithms.config import AlgorithmConfig
from turnwise.types import StopReason

if TYPE_CHECKING:
    from turnwise.rollout.config import RolloutConfig

PositiveInt: TypeAlias = Annotated[int, Field(gt=0)]
PositiveFloat: TypeAlias = Annotated[float, Field(gt=0)]
Fraction: TypeAlias = Annotated[float, Field(ge=0, le=1)]


Optimization: TypeAlias = Literal[
    "varlen",
    "compile",
    "fused_loss",
    "bfloat16_weights",
    "bfloat16_base",
    "nf4_base",
    "offload_activations",
    "release_gradients",
]
"""A form of a train step that takes less time or memory (:attr:`ModelConfig.optimizations`)."""

BASES: Final[frozenset[Optimization]] = frozenset({"bfloat16_base", "nf4_base"})
"""Those that hold frozen matrices under adapters in fewer bits."""

MACHINE_OF_MODEL: Final = frozenset({"device", "threads", "gradient_checkpointing", "optimizations"})
"""Keys of :class:`ModelConfig` that say how is computed, not what is learned: a resumed run may change them."""

SectionT = TypeVar("SectionT", bound=BaseModel)


def _checked_by(reference: str, section: SectionT) -> SectionT:
    """Return a section after a check that stands above the configuration. Raises ValueError."""
    try:
        load_object(reference, "check")(section)
    except RegistryError as error:
        raise ValueError(str(error)) from error
    return section


class LoRAConfig(Section):
    """Low-rank adapters on a frozen model.

    Attributes:
        rank: Columns of each factor; by default 16, or that of ``path``.
        alpha: Alpha / rank scales the product; by default twice the rank, or that of ``path``.
        targets: Name suffixes of the adapted linear layers (``[q_proj, v_proj]``), or of experts' matrices
            (``experts.down_proj``); by default all linear layers but the output matrix, or those of ``path``.
        path: Directory of a peft adapter to continue from; by default adapters start at zero.
    """

    rank: Annotated[int, Field(gt=0)] | None = None
    alpha: Annotated[float, Field(gt=0)] | None = None
    targets: Annotated[list[str], Field(min_length=1)] | None = None
    path: ConfigPath | None = None


class ModelConfig(Section):
    """The trained model and its device.

    Attributes:
        path: Directory of a Hugging Face causal language model or vision-language model. Nothing is downloaded.
        device: A torch device; ``auto`` is the first GPU, else the CPU.
        compute_dtype: Type of matrix products. Parameters and optimizer state are float32.
        threads: CPU threads of the trainer process; by default torch's choice.
        gradient_checkpointing: Which activations the backward pass recomputes: false none; ``matmuls`` all but the
            results of matrix products, for 40 % less memory at a tenth more time; true all within a layer, for the
            least memory at a fifth to a third more time.
        lora: Train low-rank adapters on the frozen model; None trains all weights.
        freeze_vision: Whether the vision tower of a vision-language model, and its connector, keep their weights.
        optimizations: Forms of a train step with less time or memory: ``varlen`` torch's flash attention where rows
            share no prefix; ``compile`` layers by torch.compile, rows padded to a few sizes; ``fused_loss`` compiled
            log-probabilities; ``bfloat16_weights`` bfloat16 copies of the weights and bfloat16 states between layers;
            ``bfloat16_base``
            frozen matrices under adapters in the bfloat16 of their file, ``nf4_base`` in four bits;
            ``offload_activations`` activations in main memory until the backward pass; ``release_gradients`` each
            parameter updated within it, in steps of one micro-batch. What device, type or model do not have is left
            out, with a line in the log; ``nf4_base``, which changes what is computed, is refused. By default
            ``varlen``, ``fused_loss`` and ``bfloat16_base`` on a GPU, none on a CPU.
    """

    path: ConfigPath
    device: str = "auto"
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    threads: PositiveInt | None = None
    gradient_checkpointing: bool | Literal["matmuls"] = False
    lora: LoRAConfig | None = None
    freeze_vision: bool = False
    optimizations: list[Optimization] | None = None

    @property
    def continues_adapter(self) -> bool:
        """Whether training starts from a saved adapter, so that ``path`` is not the initial policy."""
        return self.lora is not None and self.lora.path is not None

    def without_adapters(self, path: Path) -> Self:
        """Return the section of a model in another directory, all of whose weights are trained or none."""
        names = self.optimizations and [name for name in self.optimizations if name not in BASES]
        return self.model_copy(update={"path": path, "lora": None, "optimizations": names})


class MuonConfig(Section):
    """Muon, which updates the weight matrices where ``optim.name`` is ``muon``.

    Attributes:
        lr: Its learning rate (that of AdamW is ``optim.lr``).
    """

    lr: PositiveFloat = 0.02


class OptimConfig(Section):
    """The optimizer.

    Attributes:
        name: ``adamw`` for all parameters; ``adamw_int8`` with moments of 8 bits, which take a quarter of the memory;
            or ``muon`` for weight matrices and AdamW for the rest (embeddings, output
            matrix, norms, biases).
        lr: Peak learning rate of AdamW.
        betas: Decay rates of AdamW's first and second moment.
        eps: Added to AdamW's denominator.
        weight_decay: Decoupled; matrices only, norms and biases never decay.
        max_grad_norm: Global norm that gradients are clipped to; None does not clip.
        muon: Read where ``name`` is ``muon``.
    """

    name: Literal["adamw", "adamw_int8", "muon"] = "adamw"
    lr: PositiveFloat = 1e-6
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    max_grad_norm: PositiveFloat | None = 1.0
    muon: MuonConfig = MuonConfig()

    @property
    def state_dtype(self) -> str:
        """Type of AdamW's moments: float32 or int8."""
        return "int8" if self.name == "adamw_int8" else "float32"


class ScheduleConfig(Section):
    """The learning-rate schedule: a factor of all learning rates.

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
    """The critic of ``algorithm.advantage: gae`` (``trainer/learn/critic.py``).

    Attributes:
        kind: ``own``, a separate model; or ``shared``, a value head on the policy's model, whose loss is added to the
            policy's in the same backward pass.
        path: ``own``: directory of the initial model (same tokenizer), or of a saved critic; None is the policy's.
        lr: Its peak learning rate; of ``shared`` the head's. Optimizer and schedule are otherwise those of the policy.
        value_clip: Clip range of a value in a train step, in units of reward; None does not clip.
        coef: ``shared``: weight of its loss beside the policy's; None is 0.5.
        warmup_steps: First train steps in which only the critic learns; the policy, and layers shared with it, are
            frozen.
        bootstrap: Stop reasons that truncate an episode: the critic's value of the last state is added to the return.
            All others terminate it.
    """

    kind: Literal["own", "shared"] = "own"
    path: ConfigPath | None = None
    lr: PositiveFloat = 1e-5
    value_clip: PositiveFloat | None = 0.2
    coef: PositiveFloat | None = None
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    bootstrap: tuple[StopReason, ...] = (StopReason.ENV_TRUNCATED, StopReason.TIMEOUT, StopReason.INTERRUPTED)

    @model_validator(mode="after")
    def _fits_its_kind(self) -> Self:
        if self.kind == "shared" and self.path is not None:
            raise ValueError(f"path is {self.path}, but a shared critic is a head on the policy's model: remove it")
        if self.kind == "own" and self.coef is not None:
            raise ValueError(f"coef is {self.coef:g}, but a critic of kind own has a separate loss: remove it, set lr")
        if never := set(self.bootstrap) & {StopReason.COMPLETED, StopReason.ERROR, StopReason.CANCELLED}:
            raise ValueError(
                f"bootstrap holds {min(never)}, after which there is no return that a critic could estimate"
            )
        return self


class WeightTransportConfig(Section):
    """How new weights reach a policy's servers (``trainer/weight_sync.py``).

    Attributes:
        name: ``shared_memory``; without files ``gloo``, ``nccl`` (between GPUs) or ``ipc`` (on one machine); another
            registered name, or a custom class as ``pkg.mod:Class``.
        config: Its options by name.
    """

    name: ConfigReference = "shared_memory"
    config: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _can_be_made(self) -> Self:
        if self.name == "shared_memory" and not self.config:
            # Importing it takes seconds, and every configuration is checked.
            return self
        return _checked_by("turnwise.trainer.weight_sync:chosen_transport", self)


class PolicyConfig(Section):
    """One policy: its model and how it learns.

    Attributes:
        model: The model.
        optim: The optimizer.
        schedule: The learning-rate schedule.
        engine: The learner (``trainer/learn/learner.py``): ``torch``, ``fsdp``, another registered name, or a custom
            class as ``pkg.mod:Class``.
        engine_options: Options of that engine by name.
        weight_transport: How its weights reach its servers; a text is its ``name``.
        critic: The critic that ``algorithm.advantage: gae`` reads.
        algorithm: Keys of the run's ``algorithm`` that differ for this policy.
        inference: Keys of the run's ``inference`` that differ for its servers.
        served_by: Another policy, whose servers sample for this one too: both have ``model.lora`` on one model, and
            requests name the adapter. By default a policy has its own servers.
        renderer: Its renderer of messages; by default the run's.
    """

    model: ModelConfig
    optim: OptimConfig = OptimConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    engine: ConfigReference = "torch"
    engine_options: dict[str, Any] = Field(default_factory=dict)
    weight_transport: Annotated[WeightTransportConfig, shorthand("name")] = WeightTransportConfig()
    critic: CriticConfig | None = None
    algorithm: AlgorithmConfig | None = None
    inference: InferenceConfig | None = None
    served_by: str | None = None
    renderer: RendererConfig | None = None

    @property
    def exact(self) -> bool:
        """Whether its log-probabilities are those of its servers to the last bit."""
        return self.inference is not None and self.inference.exact

    @property
    def critic_optim(self) -> OptimConfig:
        """The optimizer of the critic."""
        return self.optim if self.critic is None else self.optim.model_copy(update={"lr": self.critic.lr})

    @model_validator(mode="before")
    @classmethod
    def _not_hosted(cls, data: Any) -> Any:
        if isinstance(data, dict) and "hosted" in data:
            raise ValueError(
                "hosted is given, but a hosted endpoint returns no token ids and takes no weights, so that its policy "
                "cannot be trained: name a model, or move the policy to rollout.frozen"
            )
        return data

    @model_validator(mode="after")
    def _has_an_engine(self) -> Self:
        if self.engine == "torch" and not self.engine_options:
            # Importing it takes seconds, and every configuration is checked.
            return self
        return _checked_by("turnwise.trainer.learn.learner:chosen_engine", self)


class LoggerConfig(Section):
    """One logger beside the console and ``metrics.jsonl`` (``trainer/observe/loggers.py``).

    Attributes:
        name: ``tensorboard``, ``wandb``, ``trackio``, ``mlflow``, another registered name, or a custom class as
            ``pkg.mod:Class``.
        config: Its options by name (docs/metrics.md).
    """

    name: ConfigReference
    config: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _can_be_made(self) -> Self:
        return _checked_by("turnwise.trainer.observe.loggers:chosen_logger", self)


LoggersConfig: TypeAlias = list[Annotated[LoggerConfig, shorthand("name")]]
"""``loggers`` of a configuration; a name alone is a logger without options."""


def check_exact(name: str, policy: PolicyConfig) -> None:
    """Check that a policy with exact numerics computes by operations that have an exact form.

    Raises:
        ValueError: One has none; names key, value and operation.
    """
    model, device, options = policy.model, policy.model.device, policy.engine_options
    inexact = {
        "engine": (
            policy.engine, policy.engine not in ("torch", "fsdp"), "whose learner has other products: set it to torch"
        ),
        **{
            f"engine_options.{option}": (options.get(option), options.get(option, exact) != exact, why)
            for option, (exact, why) in _INEXACT_OPTIONS.items()
        },
        "model.device": (device, device not in (AUTO, CPU), "whose products depend on the batch: set it to cpu"),
        "model.compute_dtype": (
            model.compute_dtype, model.compute_dtype != "float32", "which rounds products: set it to float32"
        ),
        "model.lora": (model.lora, model.lora is not None, "whose product servers merge into its matrix: remove it"),
        "model.optimizations": (model.optimizations, model.optimizations, "which are other kernels: remove them"),
    }  # fmt: skip
    for key, (value, wrong, why) in inexact.items():
        if wrong:
            raise ValueError(
                f"inference.engine is exact, but policies.{name}.{key} is {value}, {why}, or set inference.engine to "
                "builtin"
            )


_INEXACT_OPTIONS = {
    "mixed_precision": (False, "which rounds weights: remove it"),
    "expert_parallel": (1, "whose ranks compute experts by other products: set it to 1"),
}


def merged_section(defaults: SectionT, policy: SectionT, key: str) -> SectionT:
    """Return a section of a policy with the run's values of the keys that it does not set."""
    keys = {name: getattr(defaults, name) for name in defaults.model_fields_set}
    keys |= {name: getattr(policy, name) for name in policy.model_fields_set}
    try:
        return type(defaults).model_validate(keys)
    except ValidationError as error:
        raise ValueError(f"{key}, with the keys that the run gives: {error.errors()[0]['msg']}") from error


def check_policies(policies: Mapping[str, PolicyConfig], rollout: RolloutConfig) -> None:
    """Check that names are unique, and that each role has a policy and each trained policy a role.

    Raises:
        ValueError: They do not fit together.
    """
    shared = sorted(policies.keys() & rollout.frozen.keys())
    if shared:
        raise ValueError(
            f"policies.{shared[0]} and rollout.frozen.{shared[0]} have one name: a policy is trained "
            "or frozen; rename one"
        )
    for name, policy in policies.items():
        if policy.served_by is not None:
            _check_served_by(name, policy, policies)
    names = [*policies, *rollout.frozen]
    for role, name in rollout.roles.items():
        if name not in names:
            raise ValueError(
                f"rollout.roles.{role} is {name!r}, which is no policy: name one of {', '.join(names)}, or add "
                f"policies.{name}"
            )
    if MAIN not in policies and not rollout.roles:
        raise ValueError(
            f"policies holds {', '.join(policies)}, and rollout.roles maps no role to any of them: map each role, such "
            f"as {{main: {next(iter(policies))}}}, or name one policy main"
        )
    idle = [name for name in policies if name != MAIN and name not in rollout.roles.values()]
    if idle:
        raise ValueError(
            f"policies.{idle[0]} is trained, but no role of rollout.roles is mapped to it: add one, or remove it"
        )


def _check_served_by(name: str, policy: PolicyConfig, policies: Mapping[str, PolicyConfig]) -> None:
    key, host = f"policies.{name}.served_by", str(policy.served_by)
    hosts = [other for other in policies if other != name]
    if host not in hosts:
        raise ValueError(
            f"{key} is {host!r}, which is no other trained policy: name one of {', '.join(hosts) or 'none'}, or "
            "remove it"
        )
    by = policies[host]
    if by.served_by is not None:
        raise ValueError(
            f"{key} is {host!r}, which has no servers (policies.{host}.served_by is {by.served_by!r}): name "
            f"{by.served_by}"
        )
    for adapter, model in ((name, policy.model), (host, by.model)):
        if model.lora is None:
            raise ValueError(
                f"{key} is {host!r}, but policies.{adapter} trains all weights, and servers are shared by adapters of "
                f"one model: give policies.{adapter}.model.lora, or remove served_by"
            )
    if policy.model.path.resolve() != by.model.path.resolve():
        raise ValueError(
            f"{key} is {host!r}, but policies.{name}.model.path is {policy.model.path} and policies.{host}.model.path "
            f"{by.model.path}: adapters share a server on one model; name the same folder, or remove served_by"
        )
    if policy.inference is not None:
        raise ValueError(
            f"{key} is {host!r}, but policies.{name}.inference is given: what serves both is policies.{host}.inference"
        )
