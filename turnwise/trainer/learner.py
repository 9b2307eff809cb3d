"""The contract of learners: gradients from micro-batches, updates from gradients.

Owns: :class:`Learner`, what training loops use, and what it returns. Refuses: any implementation (``engines/``),
formulas (``objectives.py``), batches (``packing.py``), and deciding when to update, save or evaluate (the loops).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from torch import Tensor

from turnwise.trainer.config import PolicyConfig
from turnwise.trainer.objectives import Objective
from turnwise.trainer.packing import MicroBatch


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

    Gradients add up over calls of :meth:`forward_backward` until :meth:`optim_step` uses and forgets them.

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

        Args:
            config: Model, optimizer and schedule.
            total_steps: Optimizer steps of the whole run, for the schedule.
            model_path: Load the model from here instead (a checkpoint).

        Raises:
            TrainError: The model cannot be loaded or trained.
        """

    @abstractmethod
    def forward_backward(self, batches: Sequence[MicroBatch], objective: Objective, normalizer: float) -> Stats:
        """Add the gradient of ``sum of losses / normalizer`` to what is accumulated.

        Args:
            batches: The micro-batches; how rows are split over them does not change the result.
            objective: The loss.
            normalizer: What sums are divided by: that of the whole optimizer step (``aggregation.py``).

        Raises:
            TrainError: The normaliser is not above 0.
        """

    @abstractmethod
    def optim_step(self) -> StepResult:
        """Clip the accumulated gradients, update the parameters, and forget the gradients.

        An update whose gradient norm is not finite is left out, counted and logged as an error.

        Raises:
            TrainError: Too many updates in a row had no finite gradient.
        """

    @abstractmethod
    def logprobs(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Return the log-probabilities of the trained tokens, one [N] tensor per micro-batch, without gradients."""

    def initial_weights(self) -> AbstractContextManager[None] | None:
        """Return a context in which :meth:`logprobs` are those of the model before training.

        None, as here, where that model is not at hand: whoever needs it loads it a second time. Nothing is trained,
        exported or saved within.
        """
        return None

    @abstractmethod
    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, tensor) of all weights, tied ones once. The tensors are live: copy to keep."""

    @abstractmethod
    def save_model(self, directory: Path, *, extra: Callable[[Path], object] | None = None) -> None:
        """Write the model in Hugging Face format, with the tokenizer files that it came with.

        Args:
            directory: Where to; made if missing.
            extra: Called with the directory at the end, to add files.
        """

    @abstractmethod
    def save(self, directory: Path, *, extra: Callable[[Path], object] | None = None) -> None:
        """Write the model in Hugging Face format and the state of the optimizer beside it.

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
