"""The critic of a run: its optimizer steps, its checkpoints, and the values that it gives to trajectories."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import Tensor, nn

from turnwise.chat.model_dir import check_same_vocabulary
from turnwise.errors import CheckpointError, TrainError
from turnwise.trainer.batch.packing import pack
from turnwise.trainer.batch.value_targets import Floats, TrajectoryValues
from turnwise.trainer.config.policy import ModelConfig, PolicyConfig
from turnwise.trainer.config.train import BatchConfig
from turnwise.trainer.core import MicroBatch, TokenScores, TrainRow
from turnwise.trainer.learn.learner import Learner, ModelHost, Objective, Stats, StepResult
from turnwise.trainer.learn.objectives import VALUE_SUMS, ValueObjective
from turnwise.trainer.learn.optim import OptimizerSet, schedule_factor
from turnwise.trainer.learn.torch_learner import TorchLearner, pick_device
from turnwise.trainer.model.policy import Policy, load_model, load_weights
from turnwise.trainer.model.value_head import HEAD_FILE, ValueHead, ValueModel, read_head
from turnwise.trajectory import TrainSample, Trajectory
from turnwise.types import StopReason

KEY = "policies.main.critic.path"
DEFAULT_COEF = 0.5

# So many updates in a row without a finite gradient do not heal by themselves.
_MOST_BAD_STEPS = 10

_log = logging.getLogger(__name__)


class Critic(ABC):
    """A value head on its own or the policy's model.

    Attributes:
        shared: Whether the model is the policy's, whose backward passes then train the head too.
        steps: Optimizer steps taken so far, skipped ones included.
        total_steps: Expected optimizer steps of the whole run, for the schedule.
    """

    def __init__(self, config: PolicyConfig, total_steps: int) -> None:
        if config.critic is None:
            raise TrainError("the policy has no critic: give policies.main.critic")
        self.shared = config.critic.kind == "shared"
        self.steps = 0
        self.total_steps = total_steps
        self._config = config.critic
        self._optim, self._schedule = config.critic_optim, config.schedule
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
        opened: Critic
        if critic.kind == "shared":
            if not isinstance(learner, TorchLearner):
                raise TrainError(
                    "policies.main.critic.kind is shared, which needs the engine torch: choose own, or that engine"
                )
            opened = TorchCritic(learner.policy, config, total_steps)
        else:
            path = critic.path or config.model.path
            check_same_vocabulary(directory or path, config.model.path, KEY)
            model = config.model.model_copy(update={"path": path, "lora": None})
            if isinstance(learner, ModelHost):
                critic_config = config.model_copy(update={"model": model, "optim": config.critic_optim})
                second = learner.second_model(critic_config, total_steps, model_path=directory, values=True)
                opened = EngineCritic(second, config, total_steps)
            else:
                opened = TorchCritic.load_own(model, config, total_steps, directory)
        if directory is not None:
            opened.load(directory)
        return opened

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
        valued_tokens = sum(int((~batch.returns.isnan()).sum()) for batch in batches if batch.returns is not None)
        value_objective = ValueObjective(self._config.value_clip, tokens / max(1, valued_tokens))
        done: tuple[Stats, StepResult] | None = None
        if alone or not self.shared:
            stats = self._forward_backward(batches, value_objective, normalizer)
        if not alone:
            coef = DEFAULT_COEF if self._config.coef is None else self._config.coef
            joined = replace(value_objective, coef=coef, policy=objective) if self.shared else objective
            policy_stats = learner.forward_backward(batches, joined, normalizer)
            if self.shared:
                stats = Stats(tokens=tokens, means={name: policy_stats.means.pop(name, 0.0) for name in VALUE_SUMS})
            changing()
            done = policy_stats, learner.optim_step()
        changing()
        self._updates.append((stats, self._optim_step()))
        return done

    def metrics(self) -> dict[str, float]:
        """Return and reset the token-weighted metrics of the updates since the last call."""
        tokens = sum(stats.tokens for stats, _ in self._updates) or 1
        metrics = {
            name: sum(stats.means.get(name, 0.0) * stats.tokens for stats, _ in self._updates) / tokens
            for name in VALUE_SUMS
        }
        norms = [norm for _, norm in self._updates if math.isfinite(norm)]
        factor = schedule_factor(max(0, self.steps - 1), self.total_steps, self._schedule)
        metrics["critic/grad_norm"] = sum(norms) / max(1, len(norms))
        metrics["critic/lr"] = self._optim.lr * factor
        self._updates = []
        return metrics

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

    def __init__(self, learner: Learner, config: PolicyConfig, total_steps: int) -> None:
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

    def __init__(self, policy: Policy, config: PolicyConfig, total_steps: int) -> None:
        """Put a head on a model, the policy's own for a shared critic."""
        super().__init__(config, total_steps)
        self.policy = policy
        self.head = ValueHead(policy.model.get_output_embeddings().weight.shape[1]).to(policy.device)
        self._bad_steps = 0
        trained: nn.Module = self.head if self.shared else ValueModel(policy.model, self.head)
        self._parameters = [parameter for parameter in trained.parameters() if parameter.requires_grad]
        self._optimizers = OptimizerSet(trained, self._optim)
        if self.shared:
            policy.value_head = self.head

    @classmethod
    def load_own(cls, model: ModelConfig, config: PolicyConfig, total_steps: int, directory: Path | None) -> Self:
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
        critic = cls(policy, config, total_steps)
        if directory is None and (model.path / HEAD_FILE).is_file():
            critic.head.load_state_dict(read_head(model.path)["head"])
        return critic

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
            value_sums = objective(batch, TokenScores(states.new_zeros(0), values=self.head(states)))
            (value_sums.loss / normalizer).backward()  # type: ignore[no-untyped-call]
            for name, value in value_sums.sums.items():
                sums[name] += float(value)
        tokens = sum(batch.trained_tokens for batch in batches)
        return Stats(tokens=tokens, means={name: value / max(1, tokens) for name, value in sums.items()})

    def _optim_step(self) -> float:
        factor = schedule_factor(self.steps, self.total_steps, self._schedule)
        self.steps += 1
        limit = self._optim.max_grad_norm
        trained = [parameter for parameter in self._parameters if parameter.grad is not None]
        norm = float(torch.nn.utils.clip_grad_norm_(trained, math.inf if limit is None else limit))
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
                "policies.main.critic.lr, or resume from an earlier checkpoint"
            )
        return norm


def critic_values(
    critic: Critic | None,
    trajectories: Sequence[Trajectory],
    samples: Sequence[Sequence[TrainSample]],
    batch: BatchConfig,
) -> list[TrajectoryValues] | None:
    """Return the critic's values of the rows before any update; None without a critic."""
    if critic is None:
        return None
    ends = [
        _open_end(trajectory, branches) if trajectory.stop_reason in critic.bootstrap else -1
        for trajectory, branches in zip(trajectories, samples, strict=True)
    ]
    rows = [
        TrainRow(_one_longer(sample) if number == end else sample)
        for branches, end in zip(samples, ends, strict=True)
        for number, sample in enumerate(branches)
    ]
    batches = pack(rows, batch.max_tokens_per_micro_batch, share_prefixes=batch.share_prefixes)
    by_row: dict[int, Floats] = {}
    for micro, values in zip(batches, critic.values(batches), strict=True):
        parts = torch.split(values.float().cpu(), [rows[index].sample.trained_tokens for index in micro.rows])
        by_row |= {index: part.numpy() for index, part in zip(micro.rows, parts, strict=True)}
    numbers = iter(range(len(rows)))
    by_trajectory: list[TrajectoryValues] = []
    for branches, end in zip(samples, ends, strict=True):
        of_rows = [by_row[next(numbers)] for _ in branches]
        if end < 0:
            by_trajectory.append(TrajectoryValues(of_rows))
            continue
        last_value = float(of_rows[end][-1])
        of_rows[end] = of_rows[end][:-1]
        by_trajectory.append(TrajectoryValues(of_rows, last_value))
    return by_trajectory


def _open_end(trajectory: Trajectory, samples: Sequence[TrainSample]) -> int:
    """Return the row of the last turn with ids, or -1 where it was cut off."""
    turns = [segment for segment in trajectory.segments if segment.sampled]
    last_turn = max((number for number, turn in enumerate(turns) if len(turn.token_ids)), default=-1)
    for number, sample in enumerate(samples):
        path_length = sum(len(segment.token_ids) for segment in trajectory.path(sample.leaf))
        # Whether any of it is trained says nothing: an agent's account may leave the last turn out.
        if len(sample.input_ids) == path_length and bool((sample.turn_ids == last_turn).any()):
            return number
    return -1


def _one_longer(sample: TrainSample) -> TrainSample:
    """Append a dummy token, whose value is that of the state after the row."""
    return replace(
        sample,
        input_ids=np.append(sample.input_ids, sample.input_ids[-1:]),
        loss_mask=np.append(sample.loss_mask, True),
        rollout_logprobs=np.append(sample.rollout_logprobs, np.float32(0)),
        weight_versions=np.append(sample.weight_versions, np.int32(-1)),
        turn_ids=np.append(sample.turn_ids, np.int32(-1)),
    )
