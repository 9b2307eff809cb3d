"""``turnwise dpo``: direct preference optimisation on written preferences, or on pairs of recorded trajectories."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from rich.console import Console
from torch import Tensor

from turnwise.errors import TrainError
from turnwise.model.core import Renderer
from turnwise.trainer.algorithms.losses.core import LossSums
from turnwise.trainer.algorithms.losses.preference import dpo_loss, ipo_loss, pair_sums, rpo_term
from turnwise.trainer.config.offline import DPOConfig
from turnwise.trainer.core import MicroBatch, TokenScores
from turnwise.trainer.learn.learner import Learner, open_learner
from turnwise.trainer.offline.core import OfflineResult, locked_directory, make_pairs, print_notice, read_recorded
from turnwise.trainer.offline.preferences import (
    Pair,
    load_preferences,
    pack_pairs,
    preference_pairs,
    recorded_pairs,
    token_sides,
    train_pairs,
)


@dataclass(frozen=True, slots=True)
class PreferenceObjective:
    """The loss of a step's pairs, relative to a reference.

    Attributes:
        config: The loss and its options.
        sides: int64 of shape [rows], from :func:`~turnwise.trainer.offline.preferences.pack_pairs`.
        reference: float32 of shape [pairs, 2]: the reference's log-probabilities of chosen and rejected.
    """

    entropy: ClassVar[bool] = False
    config: DPOConfig
    sides: Tensor
    reference: Tensor

    def __call__(self, batch: MicroBatch, scores: TokenScores) -> LossSums:
        """Return the summed loss of the pairs of a micro-batch."""
        config = self.config
        device = scores.logprobs.device
        pairs, sides = token_sides(batch, self.sides)
        sums, lengths = pair_sums(scores.logprobs, sides.to(device), len(pairs))
        logprobs = sums / lengths if config.length_normalised else sums
        gained = logprobs - self.reference[pairs].to(device)
        margins = gained[:, 0] - gained[:, 1]
        if config.loss == "ipo":
            result = ipo_loss(margins, beta=config.beta)
        else:
            result = dpo_loss(margins, beta=config.beta, label_smoothing=config.label_smoothing)
        if config.nll_coef:
            result.loss = result.loss + rpo_term(sums[:, 0], lengths[:, 0], coef=config.nll_coef)
        with torch.no_grad():
            rewards = config.beta * gained.sum(0)
            result.sums |= {"chosen": rewards[0], "rejected": rewards[1]}
            result.sums["nll"] = -(sums[:, 0] / lengths[:, 0]).sum()
        return result


def run_dpo(config: DPOConfig, *, console: Console | None = None) -> OfflineResult:
    """Train a model on preferences and save it to ``runs/name/model``.

    Raises:
        TaskError: The data cannot be read or rendered in the model's chat format, or has no pair.
        TrainError: The model cannot be loaded or trained, or a model of this name exists.
    """
    with locked_directory(config, console):
        renderer = config.renderer.load(config.model.path)
        pairs, left_out = _pairs(config, renderer)
        if not pairs:
            raise TrainError("max_tokens_per_row leaves nothing to train of any pair: raise it")
        if left_out:
            print_notice(console, f"max_tokens_per_row {config.max_tokens_per_row} leaves {left_out} pairs out")
        steps = config.steps_over(len(pairs), config.pairs)
        learner = judge = open_learner(config.policy, steps)
        if config.reference is not None:
            model = config.model.without_adapters(config.reference)
            judge = open_learner(config.policy.model_copy(update={"model": model}), steps)
        reference = reference_sums(judge, pairs, config)
        del judge

        def objective(indices: list[int], sides: Tensor) -> PreferenceObjective:
            return PreferenceObjective(config, sides, reference[indices])

        return train_pairs(config, learner, pairs, objective, "dpo", console, renderer)


def reference_sums(learner: Learner, pairs: Sequence[Pair], config: DPOConfig) -> Tensor:
    """Return the log-probabilities of both sides of each pair, float32 of shape [pairs, 2]."""
    totals = torch.zeros(len(pairs), 2)
    micro, sides = pack_pairs(pairs, config.max_tokens_per_micro_batch)
    for batch in micro:
        sides_in_batch, of_token = token_sides(batch, sides)
        (logprobs,) = learner.logprobs([batch])
        sums, lengths = pair_sums(logprobs.cpu(), of_token, len(sides_in_batch))
        totals[sides_in_batch] = sums / lengths if config.length_normalised else sums
    return totals


def _pairs(config: DPOConfig, renderer: Renderer) -> tuple[list[Pair], int]:
    if config.trajectories is not None:
        recorded = make_pairs(read_recorded(config.trajectories, renderer), config.trajectories)
        return recorded_pairs(recorded[: config.limit], config.max_tokens_per_row)
    assert config.data is not None, "a configuration has data or trajectories"
    preferences = load_preferences(config.data, config.limit)
    return asyncio.run(preference_pairs(preferences, renderer, config.max_tokens_per_row))
