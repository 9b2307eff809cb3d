"""The reference model of the KL penalty, and the penalty of a run step by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from turnwise.chat.model_dir import check_same_vocabulary
from turnwise.engine.accelerator import main_memory
from turnwise.errors import ConfigError
from turnwise.trainer.algorithms.kl import KLConfig, KLControl, KLTerm, reward_penalties
from turnwise.trainer.batch.experience import StepTrajectories
from turnwise.trainer.batch.packing import Scorer, recompute_logprobs
from turnwise.trainer.config.policy import ModelConfig, PolicyConfig
from turnwise.trainer.config.train import BatchConfig, TrainConfig
from turnwise.trainer.core import MicroBatch, RowKey, TrainRow
from turnwise.trainer.learn.learner import Learner, ModelHost
from turnwise.trainer.learn.torch_learner import pick_device
from turnwise.trainer.model.policy import Policy, load_model

KEY = "algorithm.kl.reference"


class FrozenReference:
    """A second model in memory, without gradients or optimizer; ``offload`` moves it off the device between uses."""

    def __init__(self, policy: Policy, *, offload: bool = False) -> None:
        self._policy = policy
        self._device = policy.device
        self._offload = offload
        for parameter in policy.model.parameters():
            parameter.requires_grad_(requires_grad=False)
        if offload:
            policy.model.to(main_memory())

    def logprobs(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Return the log-probabilities of the trained tokens, one [N] tensor per micro-batch, in main memory."""
        if self._offload:
            self._policy.model.to(self._device)
        try:
            with torch.no_grad():
                return [self._policy.forward(batch).logprobs.cpu() for batch in batches]
        finally:
            if self._offload:
                self._policy.model.to(main_memory())


class InitialWeights:
    """The initial model inside of its learner, where the engine can provide it (adapters off)."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner

    def logprobs(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Return the log-probabilities of the trained tokens, one [N] tensor per micro-batch, in main memory."""
        with self._learner.initial_weights() or nullcontext():
            return [logprobs.cpu() for logprobs in self._learner.logprobs(batches)]


def reference_path(config: KLConfig, model: ModelConfig) -> Path:
    """Return the directory of the reference: the initial model, or the configured one.

    Raises:
        ConfigError: There is no such model, or it has another tokenizer than the trained one.
    """
    if not isinstance(config.reference, Path):
        return model.path
    directory = config.reference
    if not (directory / "config.json").is_file():
        what = "no config.json is in it" if directory.is_dir() else "there is no such folder"
        raise ConfigError(f"{KEY} is {directory}: {what}: name the directory of a Hugging Face model, or initial")
    check_same_vocabulary(directory, model.path, KEY)
    return directory


def open_reference(config: KLConfig, policy: PolicyConfig, learner: Learner) -> Scorer:
    """Return the reference of a run, with the device and precision of the trained model; resuming does not change it.

    It is where the trained model is: in the processes of the engine, or in this one.

    Raises:
        ConfigError: There is no such model, or it has another tokenizer.
        TrainError: It cannot be loaded, or cannot score packed rows.
    """
    if config.reference == "initial" and learner.initial_weights() is not None:
        return InitialWeights(learner)
    # Adapters that went on from saved ones: without them it would be another model.
    lora = policy.model.lora if config.reference == "initial" else None
    model = policy.model.model_copy(update={"path": reference_path(config, policy.model), "lora": lora})
    if isinstance(learner, ModelHost):
        return learner.second_model(policy.model_copy(update={"model": model}), None, offload=config.offload)
    frozen = load_model(model.path, device=pick_device(model.device), compute_dtype=model.compute_dtype, lora=lora)
    return FrozenReference(frozen, offload=config.offload)


@dataclass(slots=True)
class KLGuard:
    """The KL penalty of a run, step by step.

    Attributes:
        control: The coefficient.
        reference: The reference.
        batch: Token budget and prefix sharing.
        temperature: Of the rollouts.
        recompute: Whether the policy's log-probabilities are recomputed before the first update; else those that the
            server reported are used.
    """

    control: KLControl
    reference: Scorer
    batch: BatchConfig
    temperature: float
    recompute: bool

    @classmethod
    def open(cls, config: TrainConfig, learner: Learner, saved: float | None) -> Self | None:
        """Create the guard of a run from ``algorithm.kl``, if any; ``saved`` is the coefficient of a checkpoint.

        Raises:
            ConfigError: There is no such reference.
            TrainError: It cannot be loaded.
        """
        kl = config.algorithm.kl
        if kl is None:
            return None
        return cls(
            KLControl(kl, kl.coef if saved is None else saved),
            open_reference(kl, config.policy, learner),
            config.batch,
            config.rollout.temperature,
            config.algorithm.old_logprobs == "recompute",
        )

    def reward_penalties(self, collected: StepTrajectories, learner: Learner) -> StepTrajectories:
        """Add the reward penalties of the tokens, where the penalty is in the reward."""
        config = self.control.config
        if config.where != "reward":
            return collected
        rows = [TrainRow(sample, temperature=self.temperature) for branches in collected.samples for sample in branches]
        reference = self._score(rows)
        logprobs: Mapping[RowKey, Tensor] = (
            recompute_logprobs(learner, rows, self.batch)
            if self.recompute
            else {row.sample.key: torch.from_numpy(row.sample.rollout_logprobs[row.sample.loss_mask]) for row in rows}
        )
        penalties = reward_penalties(logprobs, reference, estimator=config.estimator, coef=self.control.coef)
        # Where nothing was sampled nothing was measured, and nothing is to be adapted to.
        paid = {"kl/value": penalties.kl, "kl/penalty": penalties.mean} if penalties.tokens else {}
        return replace(collected, penalties=penalties.tokens, metrics=collected.metrics | paid)

    def term(self, rows: Sequence[TrainRow]) -> KLTerm | None:
        """Return the loss term of a step's rows, where the penalty is in the loss."""
        config = self.control.config
        if config.where != "loss":
            return None
        return KLTerm(config.estimator, self.control.coef, self._score(rows))

    def step(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Adapt the coefficient to a step's measurement; return the metrics of the step."""
        used = {"kl/coef": self.control.coef}
        if "kl/value" in metrics:
            self.control.adapt(metrics["kl/value"], int(metrics["batch/trajectories"]))
        return used

    def _score(self, rows: Sequence[TrainRow]) -> dict[RowKey, Tensor]:
        return recompute_logprobs(self.reference, rows, self.batch)
