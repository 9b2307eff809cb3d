"""The critic of a run: its optimizer steps, its checkpoints, and the values that it gives to trajectories."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import nn

from turnwise.chat.model_dir import check_same_vocabulary
from turnwise.engine.accelerator import require_device
from turnwise.errors import TrainError
from turnwise.trainer.batch.packing import score_rows
from turnwise.trainer.batch.value_targets import TrajectoryValues
from turnwise.trainer.config.policy import PolicyConfig
from turnwise.trainer.config.train import BatchConfig
from turnwise.trainer.core import MicroBatch, TokenScores, TrainRow
from turnwise.trainer.learn.learner import Learner, ModelHost, Objective, Stats, StepResult
from turnwise.trainer.learn.objectives import VALUE_SUMS, ValueObjective
from turnwise.trainer.learn.optim import schedule_factor
from turnwise.trainer.learn.torch_learner import TorchLearner
from turnwise.trainer.model.policy import Policy, load_model
from turnwise.trainer.model.value_head import HEAD_FILE, ValueModel, open_head, read_state
from turnwise.trajectory import TrainSample, Trajectory
from turnwise.types import StopReason

KEY = "policies.main.critic.path"
DEFAULT_COEF = 0.5


class Critic:
    """A value head on its own or the policy's model.

    Attributes:
        learner: Trains it: where the policy is, in the processes of the engine or in this one.
        shared: Whether the model is the policy's, whose backward passes then train the head too.
        total_steps: Expected optimizer steps of the whole run, for the schedule.
    """

    def __init__(self, learner: Learner, config: PolicyConfig, total_steps: int) -> None:
        """Wrap a learner of a model with a value head; ``config`` is the policy's, which has a critic."""
        assert config.critic is not None, "the configuration of a critic"
        self.learner = learner
        self.shared = config.critic.kind == "shared"
        self.total_steps = total_steps
        self._config = config.critic
        self._lr, self._schedule = config.critic.lr, config.schedule
        self._updates: list[tuple[Stats, float]] = []

    @classmethod
    def create(
        cls, config: PolicyConfig, learner: Learner, total_steps: int, *, directory: Path | None = None
    ) -> Self | None:
        """Create the configured critic for ``total_steps`` optimizer steps, or load a saved one; None without a critic.

        Raises:
            ConfigError: Its initial model has another tokenizer.
            TrainError: Its model cannot be loaded or trained, or the policy's cannot be shared.
            CheckpointError: The saved critic cannot be read.
        """
        if config.critic is None:
            return None
        critic = cls(_open_learner(config, learner, total_steps, directory), config, total_steps)
        if directory is not None:
            critic.learner.load(directory)
        return critic

    @property
    def steps(self) -> int:
        """Optimizer steps taken so far, skipped ones included."""
        return self.learner.steps

    @property
    def bootstrap(self) -> tuple[StopReason, ...]:
        """Stop reasons that truncate an episode."""
        return self._config.bootstrap

    def learns_alone(self, step: int) -> bool:
        """Whether the policy is frozen in a train step (from 1)."""
        return step <= self._config.warmup_steps

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
            valued = batches if self.shared else [batch.freely_routed() for batch in batches]
            stats = self.learner.forward_backward(valued, value_objective, normalizer)
        if not alone:
            coef = DEFAULT_COEF if self._config.coef is None else self._config.coef
            joined = replace(value_objective, coef=coef, policy=objective) if self.shared else objective
            policy_stats = learner.forward_backward(batches, joined, normalizer)
            if self.shared:
                stats = Stats(tokens=tokens, means={name: policy_stats.means.pop(name, 0.0) for name in VALUE_SUMS})
            changing()
            done = policy_stats, learner.optim_step()
        changing()
        self.learner.total_steps = self.total_steps
        self._updates.append((stats, self.learner.optim_step().grad_norm))
        return done

    def metrics(self) -> dict[str, float]:
        """Return and reset the token-weighted metrics of the updates since the last call."""
        tokens = sum(stats.tokens for stats, _ in self._updates) or 1
        metrics = {
            name: sum(stats.means.get(name, 0.0) * stats.tokens for stats, _ in self._updates) / tokens
            for name in VALUE_SUMS
        }
        norms = [norm for _, norm in self._updates if math.isfinite(norm)]
        metrics["critic/grad_norm"] = sum(norms) / max(1, len(norms))
        metrics["critic/lr"] = self._lr * schedule_factor(max(0, self.steps - 1), self.total_steps, self._schedule)
        self._updates = []
        return metrics


class ValueLearner(TorchLearner):
    """Trains a value head in this process: with the model under it, or alone on the policy's.

    Attributes:
        head: The head, which is saved beside the model.
    """

    def __init__(self, policy: Policy, config: PolicyConfig, total_steps: int, directory: Path | None) -> None:
        """Put a head on a model; ``config`` has the critic's optimizer.

        ``directory`` is the model's, where a head may be saved; None for the policy's model, on which it is alone.
        """
        self.head = open_head(policy.model, directory).to(policy.device)
        self._shared = directory is None
        trained: nn.Module = self.head if self._shared else ValueModel(policy.model, self.head)
        super().__init__(policy, config, total_steps, trained=trained)
        policy.value_head = self.head

    def _score(self, batch: MicroBatch, *, entropy: bool) -> TokenScores:
        del entropy
        with torch.set_grad_enabled(not self._shared):
            states = self.policy.states(batch)
        return TokenScores(states.new_zeros(0), values=self.head(states))

    def _save_weights(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        torch.save({"head": self.head.state_dict()}, directory / HEAD_FILE)
        if not self._shared:
            super()._save_weights(directory)

    def _load_weights(self, directory: Path) -> None:
        self.head.load_state_dict(read_state(directory, HEAD_FILE)["head"])
        if not self._shared:
            super()._load_weights(directory)


def _open_learner(config: PolicyConfig, learner: Learner, total_steps: int, directory: Path | None) -> Learner:
    """Load the model of the policy's critic, or that of a checkpoint's directory, and the head where one is saved."""
    critic = config.critic
    assert critic is not None, "the configuration of a critic"
    critic_config = config.model_copy(update={"optim": config.critic_optim})
    if critic.kind == "shared":
        if not isinstance(learner, TorchLearner):
            raise TrainError(
                "policies.main.critic.kind is shared, which needs the engine torch: choose own, or that engine"
            )
        return ValueLearner(learner.policy, critic_config, total_steps, None)
    path = critic.path or config.model.path
    check_same_vocabulary(directory or path, config.model.path, KEY)
    model = config.model.without_adapters(path)
    critic_config = critic_config.model_copy(update={"model": model})
    if isinstance(learner, ModelHost):
        return learner.second_model(critic_config, total_steps, model_path=directory, values=True)
    policy = load_model(
        directory or path,
        device=require_device(model.device, "model.device"),
        compute_dtype=model.compute_dtype,
        gradient_checkpointing=model.gradient_checkpointing,
        optimizations=model.optimizations,
    )
    return ValueLearner(policy, critic_config, total_steps, directory or path)


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
    if not critic.shared:
        rows = [row.freely_routed() for row in rows]
    by_row = score_rows(critic.learner.values, rows, batch)
    numbers = iter(range(len(rows)))
    by_trajectory: list[TrajectoryValues] = []
    for branches, end in zip(samples, ends, strict=True):
        of_rows = [by_row[next(numbers)].float().numpy() for _ in branches]
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
