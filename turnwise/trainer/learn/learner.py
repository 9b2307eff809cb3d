"""The contract of learners: gradients from micro-batches, updates from gradients."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar, overload

from torch import Tensor

from turnwise.errors import RegistryError, TrainError
from turnwise.model.core import AdapterInfo
from turnwise.plugins import load_object
from turnwise.trainer.algorithms.objectives import Objective
from turnwise.trainer.algorithms.registry import Chosen, bind, enter, find
from turnwise.trainer.batch.packing import MicroBatch
from turnwise.trainer.config.policy import PolicyConfig


@dataclass(slots=True)
class Stats:
    """What the forward and backward passes of an update found.

    Attributes:
        loss: The loss, divided by the normaliser.
        tokens: How many tokens were trained.
        means: Sums of the objective divided by the number of trained tokens.
        maxima: Largest values over the micro-batches.
    """

    loss: float = 0.0
    tokens: int = 0
    means: dict[str, float] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)

    def metrics(self, prefix: str = "") -> dict[str, float]:
        """Return everything as one dictionary, names after ``prefix``."""
        named = {"loss": self.loss, "tokens": float(self.tokens), **self.means, **self.maxima}
        return {prefix + name: value for name, value in named.items()}


@dataclass(frozen=True, slots=True)
class StepResult:
    """What an optimizer step did.

    Attributes:
        grad_norm: Global norm of the gradients before clipping; 0 where there were none.
        learning_rates: Of each optimizer (``adamw``, ``muon``) in this step.
        skipped: Why nothing was updated (``no_gradient``, ``non_finite``), or None.
    """

    grad_norm: float
    learning_rates: dict[str, float]
    skipped: str | None = None


class Learner(ABC):
    """Trains one policy.

    Gradients add up over calls of :meth:`forward_backward` until :meth:`optim_step` uses and forgets them; neither how
    rows lie in micro-batches nor over how many calls they are spread changes a result beyond rounding. Micro-batches
    come from ``packing.pack``: a sequence of T tokens in segments, of which N are trained; their tensors may live on
    another device than the model.

    What is not abstract here is what an engine may lack.

    Attributes:
        steps: Optimizer steps taken so far, skipped ones included.
        skipped: How many of them updated nothing, by reason.
        total_steps: Optimizer steps of the whole run, for the schedule. A loop corrects it between steps where the run
            ends by something else than a number of steps.
    """

    steps: int
    total_steps: int
    skipped: Counter[str]

    @classmethod
    @abstractmethod
    def create(cls, config: PolicyConfig, total_steps: int, *, model_path: Path | None = None) -> Self:
        """Load the model that a configuration names, and make its learner.

        An engine may take options of its own, by keyword: what ``engine_options`` of the configuration says is checked
        against their annotations before work starts, and handed over.

        Args:
            config: Model, optimizer and schedule.
            total_steps: Optimizer steps of the whole run, for the schedule; at least 1.
            model_path: Load the model from here instead (a checkpoint, which :meth:`load` is called with afterwards).

        Raises:
            TrainError: The model cannot be loaded or trained.
        """

    @abstractmethod
    def forward_backward(self, batches: Sequence[MicroBatch], objective: Objective, normalizer: float) -> Stats:
        """Add the gradient of ``sum of losses / normalizer`` to what is accumulated.

        Neither weights nor the optimizer's state change, also where it raises: a run whose loss raised saves them as
        those of the step before.

        Args:
            batches: The micro-batches; how rows are split over them does not change the result. None are no gradient.
            objective: The loss.
            normalizer: What sums are divided by: that of the whole optimizer step (``aggregation.py``).

        Returns:
            What this call found, its loss already divided; of a step of several calls the losses add up.

        Raises:
            TrainError: The normaliser is not above 0, or a batch does not fit the model.
        """

    @abstractmethod
    def optim_step(self) -> StepResult:
        """Clip the accumulated gradients, update the parameters, and forget the gradients.

        An update whose gradient norm is not finite is left out, counted and logged as an error. Without any gradient
        nothing changes, but the step counts.

        Raises:
            TrainError: Too many updates in a row had no finite gradient.
        """

    @abstractmethod
    def logprobs(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Return the log-probabilities of the trained tokens, in nats and without gradients.

        They are those of the logits divided by each token's temperature, under the weights as they are now.

        Returns:
            float32 of shape [N] per micro-batch, in the order of its targets, on whatever device.

        Raises:
            TrainError: A batch does not fit the model.
        """

    def values(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Return what states are worth before each trained token, float32 of shape [N] per micro-batch.

        Raises:
            TrainError: This learner has no value head, as here.
        """
        raise TrainError(f"{type(self).__name__} has no value head: it says nothing of {len(batches)} micro-batches")

    def initial_weights(self) -> AbstractContextManager[None] | None:
        """Return a context in which :meth:`logprobs` are those of the model before training.

        None, as here, where that model is not at hand: whoever needs it loads it a second time. Nothing is trained,
        exported or saved within.
        """
        return None

    @property
    def adapter(self) -> AdapterInfo | None:
        """What :meth:`export_weights` yields where that is an adapter's factors; None, as here: all weights."""
        return None

    @abstractmethod
    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) of what servers need for these weights. The tensors are live: copy to keep.

        That is every weight by its name in the Hugging Face state dict, tied ones once; or, where :attr:`adapter` says
        so, what changed of the model that they were launched with.
        """

    @abstractmethod
    def save_model(self, directory: Path, *, extra: Callable[[Path], object] | None = None) -> None:
        """Write the whole model in Hugging Face format, with the tokenizer files that it came with.

        Args:
            directory: Where to; made if missing.
            extra: Called with the directory at the end, to add files.
        """

    @abstractmethod
    def save(self, directory: Path, *, extra: Callable[[Path], object] | None = None) -> None:
        """Write a checkpoint: what was trained, in a form that can be named as a model, and the optimizer's state.

        Args:
            directory: Where to; made if missing.
            extra: Called with the directory, to add files.
        """

    @abstractmethod
    def load(self, directory: Path) -> None:
        """Restore what :meth:`save` wrote: parameters, optimizer state and counts, bit for bit.

        Raises:
            CheckpointError: A file is missing or cannot be read, or belongs to another model or optimizer.
        """

    def offload(self) -> int:
        """Move weights, gradients and the optimizer's state to the memory of the CPU, until :meth:`onload`.

        In between only :meth:`export_weights`, :meth:`save` and :meth:`save_model` may be called.

        Returns:
            Bytes moved: 0, as here, where nothing lives elsewhere.
        """
        return 0

    def onload(self) -> int:
        """Move what was offloaded back. Returns the bytes moved; 0 where nothing was offloaded."""
        return 0


L = TypeVar("L", bound=type[Learner])

ENGINES: dict[str, type[Learner] | str] = {"torch": "turnwise.trainer.learn.torch_learner:TorchLearner"}
"""Learners by the name that a configuration uses: classes, or references to them."""


@overload
def register_engine(name: str) -> Callable[[L], L]: ...
@overload
def register_engine(name: str, engine: L) -> L: ...
def register_engine(name: str, engine: Any = None) -> Any:
    """Give a learner a name that ``policies.main.engine`` takes; without a class, as the decorator of one.

    Args:
        name: The name.
        engine: A class that derives from :class:`~turnwise.trainer.learn.learner.Learner`.

    Raises:
        RegistryError: The name is taken by another engine, or the class is none.
    """

    def register(cls: Any) -> Any:
        _check(name, cls)
        enter(name, cls, ENGINES, "engine", of=_loaded)
        return cls

    return register if engine is None else register(engine)


def find_engine(name: str) -> type[Learner]:
    """Return a learner's class by its name, or a user's own by a reference (``pkg.mod:Class``).

    Raises:
        RegistryError: No such learner, or what the reference names is none.
    """
    found = _loaded(find(name, ENGINES, "engine"))
    _check(name, found)
    engine: type[Learner] = found
    return engine


def chosen_engine(config: PolicyConfig) -> Chosen:
    """Return the engine's ``create`` with the options that a configuration gives it, checked.

    Raises:
        RegistryError: There is no such engine, or it does not take these options.
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


def open_learner(config: PolicyConfig, total_steps: int, *, model_path: Path | None = None) -> Learner:
    """Make the learner that a configuration names; see :meth:`~turnwise.trainer.learn.learner.Learner.create`.

    Raises:
        RegistryError: There is no such engine, or it does not take its options.
        TrainError: The model cannot be loaded or trained.
    """
    learner: Learner = chosen_engine(config)(config, total_steps, model_path=model_path)
    return learner


def _loaded(engine: Any) -> Any:
    return load_object(engine, "engine") if isinstance(engine, str) else engine


def _check(name: str, engine: Any) -> None:
    if not (isinstance(engine, type) and issubclass(engine, Learner)):
        raise RegistryError(
            f"engine {name!r} is {engine!r}: it must derive from turnwise.trainer.learn.learner.Learner"
        )
    if inspect.isabstract(engine):
        lacks = ", ".join(sorted(engine.__abstractmethods__))
        raise RegistryError(f"engine {name!r} ({engine.__module__}:{engine.__qualname__}) does not define {lacks}")
