"""From a scored micro-batch to its loss: the one place where configuration, batch and formulas meet.

Owns: :class:`PolicyObjective` and :class:`CrossEntropyObjective`, what ``Learner.forward_backward`` calls per
micro-batch. Refuses: formulas, which are pure functions in ``losses.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, Self

from turnwise.trainer.config import AlgorithmConfig
from turnwise.trainer.losses import LossSums, cross_entropy_loss, entropy_bonus, logprob_gap, ppo_clip_loss
from turnwise.trainer.packing import MicroBatch
from turnwise.trainer.policy import TokenScores


class Objective(Protocol):
    """What is minimised. ``entropy`` says whether it reads the entropy of the scores."""

    @property
    def entropy(self) -> bool:
        """Whether ``TokenScores.entropy`` has to be there."""

    def __call__(self, batch: MicroBatch, scores: TokenScores) -> LossSums:
        """Return the summed loss of a micro-batch."""


@dataclass(frozen=True, slots=True)
class PolicyObjective:
    """The clipped policy-gradient loss with an entropy bonus.

    Besides the sums of ``losses.ppo_clip_loss`` it reports ``entropy`` and the gap between the trainer's and the
    rollout's log-probabilities, which is that of equal weights as long as no update was made since the rollout.

    Attributes:
        clip_low: How far the ratio may fall below 1.
        clip_high: How far it may rise above 1.
        dual_clip: Bound of the ratio for tokens with negative advantage, or None.
        entropy_coef: Weight of the entropy bonus.
    """

    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = None
    entropy_coef: float = 0.0

    @classmethod
    def of(cls, config: AlgorithmConfig) -> Self:
        """Make the objective that a configuration describes."""
        return cls(config.clip_low, config.clip_high, config.dual_clip, config.entropy_coef)

    @property
    def entropy(self) -> bool:
        """Always: entropy is reported even where it is not rewarded."""
        return True

    def __call__(self, batch: MicroBatch, scores: TokenScores) -> LossSums:
        """Return the summed loss of a micro-batch."""
        logprobs, entropy = scores.logprobs, scores.entropy
        device = logprobs.device
        old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs.to(device)
        weights = batch.at_targets(batch.weights).to(device)
        result = ppo_clip_loss(
            logprobs,
            old,
            batch.at_targets(batch.advantages).to(device),
            weights,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=self.dual_clip,
        )
        gap = logprob_gap(logprobs, batch.at_targets(batch.rollout_logprobs).to(device))
        result.sums |= gap.sums
        result.maxima |= gap.maxima
        if entropy is not None:
            result.sums["entropy"] = entropy.detach().sum()
            if self.entropy_coef:
                result.loss = result.loss + entropy_bonus(entropy, weights, self.entropy_coef)
        return result


@dataclass(frozen=True, slots=True)
class CrossEntropyObjective:
    """Supervised learning: the negative log-likelihood of the trained tokens."""

    @property
    def entropy(self) -> bool:
        """Never."""
        return False

    def __call__(self, batch: MicroBatch, scores: TokenScores) -> LossSums:
        """Return the summed loss of a micro-batch."""
        weights = batch.at_targets(batch.weights).to(scores.logprobs.device)
        return cross_entropy_loss(scores.logprobs, weights)
