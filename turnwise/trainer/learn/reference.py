"""The reference model of the KL penalty, and the penalty of a run step by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from turnwise.chat.model_dir import check_same_vocabulary, model_settings
from turnwise.engine.accelerator import main_memory, require_device
from turnwise.trainer.algorithms.kl import HORIZON, KLConfig, KLTerm, adapted_coef, reward_penalties
from turnwise.trainer.batch.experience import StepTrajectories
from turnwise.trainer.batch.packing import Scorer, recompute_logprobs
from turnwise.trainer.config.policy import ModelConfig, PolicyConfig
from turnwise.trainer.config.train import BatchConfig, TrainConfig
from turnwise.trainer.core import MicroBatch, RowKey, TrainRow
from turnwise.trainer.learn.learner import Learner, ModelHost
from turnwise.trainer.model.policy import Policy, load_model

KEY = "algorithm.kl.reference"


def _frozen_model(policy: Policy, *, offload: bool) -> Scorer:
    """Return the scores of a second model in memory; ``offload`` moves it off the device between uses."""
    device = policy.device
    policy.model.requires_grad_(False)
    if offload:
        policy.model.to(main_memory())

    def logprobs(batches: Sequence[MicroBatch]) -> list[Tensor]:
        if offload:
            policy.model.to(device)
        try:
            with torch.no_grad():
                return [policy.forward(batch).logprobs.cpu() for batch in batches]
        finally:
            if offload:
                policy.model.to(main_memory())

    return logprobs


def _initial_logprobs(learner: Learner, batches: Sequence[MicroBatch]) -> list[Tensor]:
    """Score with the initial model inside of its learner, where the engine can provide it (adapters off)."""
    with learner.initial_weights() or nullcontext():
        return [logprobs.cpu() for logprobs in learner.logprobs(batches)]


def reference_path(config: KLConfig, model: ModelConfig) -> Path:
    """Return the directory of the reference: the initial model, or the configured one.

    Raises:
        ConfigError: There is no such model, or it has another tokenizer than the trained one.
    """
    if not isinstance(config.reference, Path):
        return model.path
    directory = config.reference
    model_settings(directory, KEY, weights=False)
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
        return partial(_initial_logprobs, learner)
    # Adapters that went on from saved ones: without them it would be another model.
    lora = policy.model.lora if config.reference == "initial" else None
    model = policy.model.model_copy(update={"path": reference_path(config, policy.model), "lora": lora})
    if isinstance(learner, ModelHost):
        second = learner.second_model(policy.model_copy(update={"model": model}), None, offload=config.offload)
        return second.logprobs
    device = require_device(model.device, "model.device")
    frozen = load_model(model.path, device=device, compute_dtype=model.compute_dtype, lora=lora, exact=policy.exact)
    return _frozen_model(frozen, offload=config.offload)


@dataclass(slots=True)
class KLGuard:
    """The KL penalty of a run, step by step.

    Attributes:
        config: The penalty's section.
        coef: Its weight in the next step.
        reference: The reference.
        batch: Token budget and prefix sharing.
        temperature: Of the rollouts.
        recompute: Whether the policy's log-probabilities are recomputed before the first update; else those that the
            server reported are used.
    """

    config: KLConfig
    coef: float
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
        moved = kl.model_copy(update={"offload": kl.offload or config.layout == "colocated"})
        return cls(
            kl,
            kl.coef if saved is None else saved,
            open_reference(moved, config.policy, learner),
            config.batch,
            config.rollout.temperature,
            config.algorithm.old_logprobs == "recompute",
        )

    def reward_penalties(self, collected: StepTrajectories, learner: Learner) -> StepTrajectories:
        """Add the reward penalties of the tokens, where the penalty is in the reward."""
        config = self.config
        if config.where != "reward":
            return collected
        rows = [TrainRow(sample, temperature=self.temperature) for branches in collected.samples for sample in branches]
        reference = self._score(rows)
        logprobs: Mapping[RowKey, Tensor] = (
            recompute_logprobs(learner.logprobs, rows, self.batch)
            if self.recompute
            else {row.sample.key: torch.from_numpy(row.sample.rollout_logprobs[row.sample.loss_mask]) for row in rows}
        )
        penalties = reward_penalties(logprobs, reference, estimator=config.estimator, coef=self.coef)
        # Where nothing was sampled nothing was measured, and nothing is to be adapted to.
        paid = {"kl/value": penalties.kl, "kl/penalty": penalties.mean} if penalties.tokens else {}
        return replace(collected, penalties=penalties.tokens, metrics=collected.metrics | paid)

    def term(self, rows: Sequence[TrainRow]) -> KLTerm | None:
        """Return the loss term of a step's rows, where the penalty is in the loss."""
        if self.config.where != "loss":
            return None
        return KLTerm(self.config.estimator, self.coef, self._score(rows))

    def step(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Adapt the coefficient to a step's measurement; return the metrics of the step."""
        used, target = {"kl/coef": self.coef}, self.config.target
        if "kl/value" in metrics and target is not None:
            kl, count = metrics["kl/value"], metrics["batch/trajectories"]
            self.coef = adapted_coef(self.coef, kl, target=target, horizon=HORIZON, count=count)
        return used

    def _score(self, rows: Sequence[TrainRow]) -> dict[RowKey, Tensor]:
        return recompute_logprobs(self.reference, [row.freely_routed() for row in rows], self.batch)
