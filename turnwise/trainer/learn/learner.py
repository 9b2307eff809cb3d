"""The learner contract, and the registry of engines that implement it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final, Protocol, Self

import torch
from torch import Tensor

from turnwise.engine.weights import WeightSender
from turnwise.errors import TrainError
from turnwise.model.core import AdapterInfo, WeightManifest
from turnwise.trainer.algorithms.losses.core import LossSums
from turnwise.trainer.algorithms.registry import ClassRegistry, ConfiguredFunction, bind
from turnwise.trainer.config.policy import PolicyConfig
from turnwise.trainer.core import MicroBatch, TokenScores


@dataclass(slots=True)
class Stats:
    """Statistics of the forward and backward passes of an update.

    Attributes:
        loss: The loss, divided by the normaliser.
        tokens: Number of trained tokens.
        means: Sums of the objective divided by the number of trained tokens.
        maxima: Maxima over the micro-batches.
    """

    loss: float = 0.0
    tokens: int = 0
    means: dict[str, float] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of an optimizer step.

    Attributes:
        grad_norm: Global gradient norm before clipping; 0 without gradients.
        learning_rates: Of each optimizer (``adamw``, ``muon``) in this step.
        skipped: Why nothing was updated (``no_gradient``, ``non_finite``), or None.
        update_ratio: Norm of the change over that of the weights, of a sample of them; None where it was not measured.
    """

    grad_norm: float
    learning_rates: dict[str, float]
    skipped: str | None = None
    update_ratio: float | None = None


class EngineProcesses(Protocol):
    """The processes of an engine that computes outside of the trainer's.

    Attributes:
        lost: Whether the weights are gone with a process that died, so that nothing can be saved.
    """

    lost: bool

    def close(self) -> None:
        """End them. Idempotent."""


def no_check(config: PolicyConfig, options: Mapping[str, Any]) -> None:
    """Check nothing: whatever is configured can be tried."""


class Objective(Protocol):
    """The function to minimise."""

    @property
    def entropy(self) -> bool:
        """Whether ``TokenScores.entropy`` is read."""

    def __call__(self, batch: MicroBatch, scores: TokenScores) -> LossSums:
        """Return the summed loss of a micro-batch."""


class Learner(ABC):
    """Trains one policy.

    Gradients accumulate over calls of :meth:`forward_backward` until :meth:`optim_step`; up to rounding, results depend
    neither on the micro-batches nor on the number of calls. Micro-batches come from ``packing.pack``; their tensors may
    be on another device than the model. Methods that are not abstract are optional for an engine.

    Attributes:
        check: Checks what ``create`` with these options needs of the configuration and of this machine, and returns
            what would compute, for the plan of a run (None for ``model.device``); raises TrainError. By default
            nothing is checked.
        placement_options: Engine options that say where is computed, not what is learned: a resumed run may change
            them.
        processes: The engine's processes, which a run ends; None for an engine in this process.
        steps: Optimizer steps taken so far, skipped ones included.
        skipped: Number of skipped steps by reason.
        total_steps: Optimizer steps of the whole run, for the schedule. A loop adjusts it between steps where another
            budget ends the run.
    """

    check: ClassVar[staticmethod[[PolicyConfig, Mapping[str, Any]], str | None]] = staticmethod(no_check)
    placement_options: ClassVar[frozenset[str]] = frozenset()
    processes: EngineProcesses | None = None
    steps: int
    total_steps: int
    skipped: Counter[str]

    @classmethod
    @abstractmethod
    def create(cls, config: PolicyConfig, total_steps: int, *, model_path: Path | None = None) -> Self:
        """Load the configured model and create its learner.

        A subclass may take keyword options; ``engine_options`` is validated against their annotations beforehand.

        Args:
            config: Model, optimizer and schedule.
            total_steps: Optimizer steps of the whole run, for the schedule; at least 1.
            model_path: Load the model from here instead (a checkpoint; :meth:`load` is called afterwards).

        Raises:
            TrainError: The model cannot be loaded or trained.
        """

    @abstractmethod
    def forward_backward(self, batches: Sequence[MicroBatch], objective: Objective, normalizer: float) -> Stats:
        """Accumulate the gradient of ``sum of losses / normalizer``.

        Neither weights nor optimizer state change, even where it raises: the run then saves those of the previous step.

        Args:
            batches: The micro-batches; may be empty.
            objective: The loss.
            normalizer: The divisor of the whole optimizer step (``algorithms/losses/core.py``).

        Returns:
            Statistics of this call; losses of several calls add up.

        Raises:
            TrainError: The normaliser is not above 0, or a batch does not fit the model.
        """

    @abstractmethod
    def optim_step(self) -> StepResult:
        """Clip the accumulated gradients, update the parameters, and zero the gradients.

        An update with a non-finite gradient norm is skipped, counted and logged as an error. A step without gradients
        changes nothing but is counted.

        Raises:
            TrainError: Too many consecutive updates had a non-finite gradient.
        """

    @abstractmethod
    def logprobs(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Return the log-probabilities of the trained tokens under the present weights, without gradients.

        Logits are divided by each token's temperature.

        Returns:
            Per micro-batch float32 of shape [N], in nats and in the order of its targets, on any device.

        Raises:
            TrainError: A batch does not fit the model.
        """

    def values(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Return the state values before each trained token, float32 of shape [N] per micro-batch.

        Raises:
            TrainError: The learner has no value head (the default).
        """
        raise TrainError(f"{type(self).__name__} has no value head: it cannot evaluate {len(batches)} micro-batches")

    def initial_weights(self) -> AbstractContextManager[None] | None:
        """Return a context in which :meth:`logprobs` uses the initial weights, or None (the default).

        With None, callers load the initial model separately. The context does not train, export or save.
        """
        return None

    @property
    def adapter(self) -> AdapterInfo | None:
        """The adapter whose factors :meth:`export_weights` yields; None (the default) for full weights."""
        return None

    @abstractmethod
    def export_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) of the weights that servers need. The tensors may be live: copy to keep.

        All weights by their names in the checkpoint, tied ones once, parameters rounded to ``dtype``; or the factors
        of :attr:`adapter` as they are.
        """

    @abstractmethod
    def save_model(self, directory: Path) -> None:
        """Write the whole model in Hugging Face format, with its tokenizer files."""

    @abstractmethod
    def save(self, directory: Path) -> None:
        """Write a checkpoint: the trained weights, loadable, and the optimizer's state."""

    @abstractmethod
    def load(self, directory: Path) -> None:
        """Restore parameters, optimizer state and counters of :meth:`save`, bit for bit.

        Raises:
            CheckpointError: A file is missing or unreadable, or belongs to another model or optimizer.
        """

    def offload(self, *, keep_weights: bool = False) -> int:
        """Move weights, gradients and optimizer state to CPU memory, until :meth:`onload`; return the bytes moved.

        Until then only :meth:`export_weights`, :meth:`save` and :meth:`save_model` may be called. With ``keep_weights``
        only the optimizer state moves, and a later call moves the rest.
        """
        del keep_weights
        return 0

    def onload(self) -> int:
        """Move offloaded tensors back. Returns the bytes moved."""
        return 0


class WeightHost(ABC):
    """A learner whose weights are in other processes."""

    @abstractmethod
    def send_weights(self, sender: WeightSender, dtype: torch.dtype | None = None) -> WeightManifest:
        """Pickle a sender to one of these processes and call it there; see :func:`send_weights`."""


def send_weights(learner: Learner, sender: WeightSender, dtype: torch.dtype | None = None) -> WeightManifest:
    """Call a sender with what :meth:`Learner.export_weights` yields, where the weights are; return its result.

    Raises:
        TrainError: The weights cannot be written.
    """
    if isinstance(learner, WeightHost):
        return learner.send_weights(sender, dtype)
    return sender(learner.export_weights(dtype))


class ModelHost(ABC):
    """A learner whose engine can hold further models beside the policy: a critic's, a reference.

    Models of a run whose learner is none are loaded in the trainer's process.
    """

    @abstractmethod
    def second_model(
        self,
        config: PolicyConfig,
        total_steps: int | None,
        *,
        model_path: Path | None = None,
        values: bool = False,
        offload: bool = False,
    ) -> Learner:
        """Load another model where the policy is, spread over the engine's processes alike.

        Args:
            config: Its model, optimizer and schedule.
            total_steps: Its optimizer steps in the whole run; None for a model that only scores.
            model_path: Load it from here instead (a checkpoint; :meth:`Learner.load` is called afterwards).
            values: Give it a value head, which is trained with it: it has :meth:`Learner.values` and no
                :meth:`Learner.logprobs`.
            offload: Keep its weights in main memory between uses, where it computes elsewhere.

        Raises:
            TrainError: The model cannot be loaded or trained.
        """


ENGINES: Final = ClassRegistry(
    Learner,
    "engine",
    "engine",
    {
        "torch": "turnwise.trainer.learn.torch_learner:TorchLearner",
        "fsdp": "turnwise.trainer.learn.fsdp_learner:FSDPLearner",
    },
)
"""Learners by the name that a configuration uses."""

register_engine = ENGINES.register
"""Registers a :class:`Learner` for ``policies.main.engine``, as a decorator."""


def find_engine(name: str) -> type[Learner]:
    """Return a learner's class by its name or by reference (``pkg.mod:Class``). Raises RegistryError."""
    return ENGINES.find(name)


def chosen_engine(config: PolicyConfig) -> ConfiguredFunction:
    """Return the engine's ``create`` with its validated options.

    Raises:
        RegistryError: No such engine, or a wrong option.
    """
    engine = find_engine(config.engine)
    return bind(
        config.engine,
        engine.create,
        config.engine_options,
        key="policy.engine_options",
        arguments=("config", "total_steps"),
        data=("model_path",),
    )


def check_engine(config: PolicyConfig) -> str | None:
    """Check what the configured engine needs; return what would compute, or None for ``model.device``.

    Raises:
        RegistryError: No such engine, or a wrong option.
        TrainError: The policy cannot be trained with it here.
    """
    return find_engine(config.engine).check(config, chosen_engine(config).options)


def open_learner(config: PolicyConfig, total_steps: int, *, model_path: Path | None = None) -> Learner:
    """Create the configured learner; see :meth:`~turnwise.trainer.learn.learner.Learner.create`.

    Raises:
        RegistryError: No such engine, or a wrong option.
        TrainError: The model cannot be loaded or trained.
    """
    learner: Learner = chosen_engine(config)(config, total_steps, model_path=model_path)
    return learner
