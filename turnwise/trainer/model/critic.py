"""The critic: a value head on its own or the policy's model, its loss, optimizer and checkpoints."""

from __future__ import annotations

import logging
import math
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from turnwise.chat.model_dir import check_same_vocabulary
from turnwise.errors import CheckpointError, TrainError
from turnwise.placement.devices import CPU
from turnwise.trainer.algorithms.losses.core import LossSums, value_loss
from turnwise.trainer.algorithms.objectives import Objective
from turnwise.trainer.batch.packing import MicroBatch
from turnwise.trainer.config.policy import CriticConfig, ModelConfig, PolicyConfig
from turnwise.trainer.learn.learner import Learner, ModelHost, Stats, StepResult
from turnwise.trainer.learn.optim import OptimizerSet, schedule_factor
from turnwise.trainer.learn.torch_learner import TorchLearner, pick_device
from turnwise.trainer.model.policy import Policy, TokenScores, load_model, load_weights
from turnwise.types import StopReason

KEY = "policies.main.critic.path"
HEAD_FILE = "critic.pt"
DEFAULT_COEF = 0.5
VALUE_SUMS = ("critic/loss", "critic/clip_fraction")

# So many updates in a row without a finite gradient do not heal by themselves.
_MOST_BAD_STEPS = 10

_log = logging.getLogger(__name__)


class ValueHead(nn.Module):
    """States of shape [N, hidden] to values of shape [N], in float32. Initialised to zero."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        # Not drawn before it is set to zero: nothing random in a run may depend on whether it has a critic.
        self.linear: nn.Linear = nn.utils.skip_init(nn.Linear, hidden, 1)  # type: ignore[no-untyped-call]
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, states: Tensor) -> Tensor:
        """Return the values."""
        values: Tensor = self.linear(states.float())[:, 0]
        return values

    def get_output_embeddings(self) -> nn.Linear:
        """Return the layer that an optimizer treats as the output matrix."""
        return self.linear


class ValueModel(nn.Module):
    """A model and its value head as one module, without the language-model head."""

    def __init__(self, model: Any, head: ValueHead) -> None:
        super().__init__()
        self.model = model
        self.head = head
        output = model.get_output_embeddings()
        if output.weight is not model.get_input_embeddings().weight:
            output.requires_grad_(False)

    def get_output_embeddings(self) -> nn.Linear:
        """Return the layer that an optimizer treats as the output matrix."""
        return self.head.linear


@dataclass(frozen=True, slots=True)
class ValueObjective:
    """The loss of a critic, alone or added to that of the policy.

    Attributes:
        clip: Clip range of a value.
        rate: Trained tokens per valued token: with one value per turn, the mean length of a turn, which makes sums over
            trained tokens means over values.
        coef: Weight beside the policy's loss.
        policy: The policy's objective to add to, if any.
    """

    clip: float | None
    rate: float = 1.0
    coef: float = 1.0
    policy: Objective | None = None

    @property
    def entropy(self) -> bool:
        """Whether the policy's objective reads it."""
        return self.policy is not None and self.policy.entropy

    def __call__(self, batch: MicroBatch, scores: TokenScores) -> LossSums:
        """Return the summed loss of a micro-batch.

        Raises:
            TrainError: The model has no value head, or the rows have no returns.
        """
        if scores.values is None or batch.returns is None or batch.old_values is None:
            raise TrainError("a critic learns from the values and returns of a micro-batch, and this one has none")
        device = scores.values.device
        asked = ~batch.returns.isnan()
        returns, old, weights = (each[asked].to(device) for each in (batch.returns, batch.old_values, batch.weights))
        found = value_loss(scores.values[asked.to(device)], returns, weights, old_values=old, clip=self.clip)
        sums = {name: value * self.rate for name, value in found.sums.items()}
        loss = found.loss * (self.rate * self.coef)
        if self.policy is None:
            return LossSums(loss, sums)
        result = self.policy(batch, scores)
        return LossSums(result.loss + loss, result.sums | sums, result.maxima)


class Critic(ABC):
    """A value head on its own or the policy's model.

    Attributes:
        shared: Whether the model is the policy's, whose backward passes then train the head too.
        steps: Optimizer steps taken so far, skipped ones included.
        total_steps: Expected optimizer steps of the whole run, for the schedule.
    """

    def __init__(self, config: CriticConfig, total_steps: int) -> None:
        self.shared = config.kind == "shared"
        self.steps = 0
        self.total_steps = total_steps
        self._config = config
        self._updates: list[tuple[Stats, float]] = []

    @classmethod
    def create(
        cls, config: PolicyConfig, learner: Learner, total_steps: int, *, directory: Path | None = None
    ) -> Critic | None:
        """Create the configured critic for ``total_steps`` optimizer steps, or load a saved one; None without a critic.

        It is where the policy is: in the processes of the engine, or in this one.

        Raises:
            ConfigError: Its initial model has another tokenizer.
            TrainError: Its model cannot be loaded or trained, or the policy's cannot be shared.
            CheckpointError: The saved critic cannot be read.
        """
        critic = config.critic
        if critic is None:
            return None
        made: Critic
        if critic.kind == "shared":
            if not isinstance(learner, TorchLearner):
                raise TrainError(
                    "policies.main.critic.kind is shared, which needs the engine torch: choose own, or that engine"
                )
            made = TorchCritic(learner.policy, critic, total_steps)
        else:
            path = critic.path or config.model.path
            check_same_vocabulary(directory or path, config.model.path, KEY)
            model = config.model.model_copy(update={"path": path, "lora": None})
            if isinstance(learner, ModelHost):
                own = config.model_copy(update={"model": model, "optim": critic.optim, "schedule": critic.schedule})
                second = learner.second_model(own, total_steps, model_path=directory, values=True)
                made = EngineCritic(second, critic, total_steps)
            else:
                made = TorchCritic.load_own(model, critic, total_steps, directory)
        if directory is not None:
            made.load(directory)
        return made

    @property
    def bootstrap(self) -> tuple[StopReason, ...]:
        """Stop reasons that truncate an episode."""
        return self._config.bootstrap

    def learns_alone(self, step: int) -> bool:
        """Whether the policy is frozen in a train step (from 1)."""
        return step <= self._config.warmup_steps

    @abstractmethod
    def values(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Return the values before each trained token, one [N] tensor per micro-batch, without gradients."""

    def update(
        self,
        learner: Learner,
        batches: Sequence[MicroBatch],
        objective: Objective,
        normalizer: float,
        *,
        alone: bool,
        changing: Callable[[], object] = lambda: None,
    ) -> tuple[Stats, StepResult] | None:
        """Take one optimizer step of the critic, and of the policy unless ``alone``.

        ``batches`` have old values and returns; ``changing`` is called after the gradients, before any weights change.

        Returns:
            Statistics and result of the policy's step, or None where it is frozen.

        Raises:
            TrainError: Too many consecutive updates had a non-finite gradient.
        """
        tokens = sum(batch.trained_tokens for batch in batches)
        asked = sum(int((~batch.returns.isnan()).sum()) for batch in batches if batch.returns is not None)
        own = ValueObjective(self._config.value_clip, tokens / max(1, asked))
        done: tuple[Stats, StepResult] | None = None
        if alone or not self.shared:
            stats = self._forward_backward(batches, own, normalizer)
        if not alone:
            coef = DEFAULT_COEF if self._config.coef is None else self._config.coef
            joined = replace(own, coef=coef, policy=objective) if self.shared else objective
            found = learner.forward_backward(batches, joined, normalizer)
            if self.shared:
                stats = Stats(tokens=tokens, means={name: found.means.pop(name, 0.0) for name in VALUE_SUMS})
            changing()
            done = found, learner.optim_step()
        changing()
        self._updates.append((stats, self._optim_step()))
        return done

    def metrics(self) -> dict[str, float]:
        """Return and reset the token-weighted metrics of the updates since the last call."""
        tokens = sum(stats.tokens for stats, _ in self._updates) or 1
        found = {
            name: sum(stats.means.get(name, 0.0) * stats.tokens for stats, _ in self._updates) / tokens
            for name in VALUE_SUMS
        }
        norms = [norm for _, norm in self._updates if math.isfinite(norm)]
        factor = schedule_factor(max(0, self.steps - 1), self.total_steps, self._config.schedule)
        found["critic/grad_norm"] = sum(norms) / max(1, len(norms))
        found["critic/lr"] = self._config.optim.lr * factor
        self._updates = []
        return found

    @abstractmethod
    def save(self, directory: Path) -> None:
        """Write head and optimizer state, and the model unless it is shared."""

    @abstractmethod
    def load(self, directory: Path) -> None:
        """Restore :meth:`save`, bit for bit.

        Raises:
            CheckpointError: A file is missing or unreadable, or belongs to another model or optimizer.
        """

    @abstractmethod
    def _forward_backward(self, batches: Sequence[MicroBatch], objective: ValueObjective, normalizer: float) -> Stats:
        """Accumulate the critic's gradient; shared layers get none."""

    @abstractmethod
    def _optim_step(self) -> float:
        """Clip, update and zero the critic's own gradients; return their norm before clipping."""


class EngineCritic(Critic):
    """A critic with its own model in the processes of the policy's engine, spread over them as the policy is."""

    def __init__(self, learner: Learner, config: CriticConfig, total_steps: int) -> None:
        """Wrap the engine's model with a value head (:meth:`turnwise.trainer.learn.learner.ModelHost.second_model`)."""
        super().__init__(config, total_steps)
        self._learner = learner

    def values(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Return the values before each trained token, one [N] tensor per micro-batch, without gradients."""
        return self._learner.values(batches)

    def save(self, directory: Path) -> None:
        """Write model, head and optimizer state."""
        self._learner.save(directory)

    def load(self, directory: Path) -> None:
        """Restore :meth:`save`, bit for bit.

        Raises:
            CheckpointError: A file is missing or unreadable, or belongs to another model or optimizer.
        """
        self._learner.load(directory)
        self.steps = self._learner.steps

    def _forward_backward(self, batches: Sequence[MicroBatch], objective: ValueObjective, normalizer: float) -> Stats:
        return self._learner.forward_backward(batches, objective, normalizer)

    def _optim_step(self) -> float:
        self._learner.total_steps = self.total_steps
        result = self._learner.optim_step()
        self.steps = self._learner.steps
        return result.grad_norm


class TorchCritic(Critic):
    """A critic in this process.

    Attributes:
        policy: The model under the head.
        head: The head.
    """

    def __init__(self, policy: Policy, config: CriticConfig, total_steps: int) -> None:
        """Put a head on a model, the policy's own for a shared critic."""
        super().__init__(config, total_steps)
        self.policy = policy
        self.head = ValueHead(policy.model.get_output_embeddings().weight.shape[1]).to(policy.device)
        self._bad_steps = 0
        trained: nn.Module = self.head if self.shared else ValueModel(policy.model, self.head)
        self._parameters = [each for each in trained.parameters() if each.requires_grad]
        self._optimizers = OptimizerSet(trained, config.optim)
        if self.shared:
            policy.value_head = self.head

    @classmethod
    def load_own(cls, model: ModelConfig, config: CriticConfig, total_steps: int, directory: Path | None) -> Self:
        """Load the model of a separate critic, with the head where one is saved; ``directory`` is a checkpoint's.

        Raises:
            TrainError: The model cannot be loaded or trained.
            CheckpointError: The saved head cannot be read.
        """
        policy = load_model(
            directory or model.path,
            device=pick_device(model.device),
            compute_dtype=model.compute_dtype,
            gradient_checkpointing=model.gradient_checkpointing,
        )
        made = cls(policy, config, total_steps)
        if directory is None and (model.path / HEAD_FILE).is_file():
            made.head.load_state_dict(read_head(model.path)["head"])
        return made

    def values(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Return the values before each trained token, one [N] tensor per micro-batch, without gradients."""
        with torch.no_grad():
            return [self.head(self.policy.states(batch)) for batch in batches]

    def save(self, directory: Path) -> None:
        """Write head and optimizer state, and the model unless it is shared."""
        directory.mkdir(parents=True, exist_ok=True)
        if not self.shared:
            self.policy.save_hf(directory)
        state = {
            "head": self.head.state_dict(),
            "optimizer": self._optimizers.state_dict(),
            "steps": self.steps,
            "bad_steps": self._bad_steps,
        }
        torch.save(state, directory / HEAD_FILE)

    def load(self, directory: Path) -> None:
        """Restore :meth:`save`, bit for bit.

        Raises:
            CheckpointError: A file is missing or unreadable, or belongs to another model or optimizer.
        """
        state = read_head(directory)
        if "optimizer" not in state:
            raise CheckpointError(
                f"checkpoint {directory} was written by the engine fsdp, whose optimizer state the engine torch cannot "
                "load: resume with policies.main.engine: fsdp (one rank suffices)"
            )
        if not self.shared:
            load_weights(self.policy, directory)
        self.head.load_state_dict(state["head"])
        self._optimizers.load_state_dict(state["optimizer"])
        self.steps = int(state["steps"])
        self._bad_steps = int(state["bad_steps"])

    def _forward_backward(self, batches: Sequence[MicroBatch], objective: ValueObjective, normalizer: float) -> Stats:
        sums = dict.fromkeys(VALUE_SUMS, 0.0)
        for batch in batches:
            with torch.set_grad_enabled(not self.shared):
                states = self.policy.states(batch)
            found = objective(batch, TokenScores(states.new_zeros(0), values=self.head(states)))
            (found.loss / normalizer).backward()  # type: ignore[no-untyped-call]
            for name, value in found.sums.items():
                sums[name] += float(value)
        tokens = sum(batch.trained_tokens for batch in batches)
        return Stats(tokens=tokens, means={name: value / max(1, tokens) for name, value in sums.items()})

    def _optim_step(self) -> float:
        factor = schedule_factor(self.steps, self.total_steps, self._config.schedule)
        self.steps += 1
        limit = self._config.optim.max_grad_norm
        found = [each for each in self._parameters if each.grad is not None]
        norm = float(torch.nn.utils.clip_grad_norm_(found, math.inf if limit is None else limit))
        if math.isfinite(norm):
            self._bad_steps = 0
            self._optimizers.step(factor)
            return norm
        self._optimizers.zero_grad()
        self._bad_steps += 1
        _log.error("step %d of the critic skipped: the gradient norm is %s", self.steps, norm)
        if self._bad_steps >= _MOST_BAD_STEPS:
            raise TrainError(
                f"{self._bad_steps} steps of the critic in a row had no finite gradient (last norm: {norm}); lower "
                "policies.main.critic.optim.lr, or resume from an earlier checkpoint"
            )
        return norm


def read_head(directory: Path) -> dict[str, Any]:
    """Read the file of a saved critic beside its model.

    Raises:
        CheckpointError: The file is missing or unreadable.
    """
    file = directory / HEAD_FILE
    if not file.is_file():
        raise CheckpointError(f"checkpoint {directory} lacks {HEAD_FILE}")
    try:
        state: dict[str, Any] = torch.load(file, map_location=CPU, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, OSError, EOFError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    return state
