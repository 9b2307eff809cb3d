"""Objectives: from a scored micro-batch to its summed loss, with entropy bonus and KL penalty."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from torch import Tensor

from turnwise.errors import TrainError
from turnwise.trainer.algorithms.config import AlgorithmConfig
from turnwise.trainer.algorithms.gap import GapWatch
from turnwise.trainer.algorithms.kl import KLTerm, kl_penalty
from turnwise.trainer.algorithms.losses.core import LossSums, cross_entropy_loss, entropy_bonus, logprob_gap, value_loss
from turnwise.trainer.algorithms.losses.policy import ppo_clip_loss
from turnwise.trainer.algorithms.registry import ConfiguredFunction
from turnwise.trainer.core import MicroBatch, TokenScores
from turnwise.trainer.learn.learner import Objective

VALUE_SUMS = ("critic/loss", "critic/clip_fraction")
"""The sums of a critic's loss."""

PPO_CLIP = ConfiguredFunction("ppo_clip", ppo_clip_loss, {})


@dataclass(frozen=True, slots=True)
class PolicyObjective:
    """A policy loss with an entropy bonus and an optional KL penalty.

    Beside the sums of the loss it reports ``entropy``, the gap between the trainer's and the rollout's
    log-probabilities, and the replayed experts that the trainer would not choose; the weights are equal until the first
    update after the rollout.

    Attributes:
        loss: The loss with its options.
        entropy_coef: Weight of the entropy bonus.
        kl: Estimator and weight of a KL penalty against the batch's ``ref_logprobs``, or None.
        watch: Optional callback with every token's log-probabilities.
    """

    entropy: ClassVar[bool] = True  # it is reported even without a bonus
    loss: ConfiguredFunction = PPO_CLIP
    entropy_coef: float = 0.0
    kl: tuple[str, float] | None = None
    watch: GapWatch | None = None

    @classmethod
    def of(cls, config: AlgorithmConfig, kl: KLTerm | None = None) -> Self:
        """Create the objective of a configuration, with an optional KL penalty.

        Raises:
            RegistryError: No such loss, or a wrong option.
        """
        return cls(config.chosen_loss(), config.entropy_coef, None if kl is None else (kl.estimator, kl.coef))

    def __call__(self, batch: MicroBatch, scores: TokenScores) -> LossSums:
        """Return the summed loss of a micro-batch.

        Raises:
            TrainError: A custom loss did not return :class:`LossSums`.
        """
        logprobs, entropy = scores.logprobs, scores.entropy
        device = logprobs.device
        old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs.to(device)
        weights = batch.weights.to(device)
        rollout = batch.rollout_logprobs.to(device)
        data = {"sequences": batch.sequences, "turns": batch.turns, "selected": batch.selected}
        read = {name: value.to(device) for name, value in data.items() if value is not None and name in self.loss.reads}
        advantages = batch.advantages.to(device)
        result: LossSums = self.loss(
            logprobs, old, advantages, weights, rollout_logprobs=rollout, entropy=entropy, **read
        )
        self._check(result, logprobs)
        gap = logprob_gap(logprobs, rollout)
        result.sums |= gap.sums
        result.maxima |= gap.maxima
        if scores.rerouted is not None:
            result.sums["gap_rerouted"] = scores.rerouted.sum()
        if scores.imbalance is not None:
            result.sums["expert_imbalance"] = scores.imbalance * len(logprobs)
        if self.watch is not None:
            self.watch.record(batch.rows, batch.sequences, logprobs, rollout)
        if entropy is not None:
            result.sums["entropy"] = entropy.detach().sum()
            if self.entropy_coef:
                result.loss = result.loss + entropy_bonus(entropy, weights, self.entropy_coef)
        if self.kl is not None and batch.ref_logprobs is not None:
            estimator, coef = self.kl
            penalty = kl_penalty(logprobs, batch.ref_logprobs.to(device), weights, estimator=estimator, coef=coef)
            result.loss = result.loss + penalty.loss
            result.sums |= penalty.sums
        return result

    def _check(self, result: LossSums, logprobs: Tensor) -> None:
        if not isinstance(result, LossSums):
            raise TrainError(
                f"algorithm.loss {self.loss.name!r} returned a {type(result).__name__}; it must return "
                "turnwise.trainer.algorithms.losses.LossSums (loss, sums, maxima)"
            )
        if result.loss.shape != ():
            raise TrainError(
                f"algorithm.loss {self.loss.name!r} returned a loss of shape {tuple(result.loss.shape)} for "
                f"{logprobs.shape[0]} tokens; it must be their weighted sum, (weights * token_loss).sum()"
            )


@dataclass(frozen=True, slots=True)
class CrossEntropyObjective:
    """Supervised learning: the negative log-likelihood of the trained tokens."""

    entropy: ClassVar[bool] = False

    def __call__(self, batch: MicroBatch, scores: TokenScores) -> LossSums:
        """Return the summed loss of a micro-batch."""
        weights = batch.weights.to(scores.logprobs.device)
        return cross_entropy_loss(scores.logprobs, weights)


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
        valued = ~batch.returns.isnan()
        returns, old, weights = (
            tensor[valued].to(device) for tensor in (batch.returns, batch.old_values, batch.weights)
        )
        value_sums = value_loss(scores.values[valued.to(device)], returns, weights, old_values=old, clip=self.clip)
        sums = {name: value * self.rate for name, value in value_sums.sums.items()}
        loss = value_sums.loss * (self.rate * self.coef)
        if self.policy is None:
            return LossSums(loss, sums)
        result = self.policy(batch, scores)
        return LossSums(result.loss + loss, result.sums | sums, result.maxima)
