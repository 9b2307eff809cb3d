"""The nouns of a train step: a row to train on, rows packed into a micro-batch, and the scores of their tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from torch import Tensor

from turnwise.trainer.kept_sets import KeptSets
from turnwise.trajectory import TrainSample
from turnwise.types import Media

RowKey = tuple[str, int]
"""Key of a row within a step: trajectory id and leaf."""


@dataclass(frozen=True, slots=True)
class TrainRow:
    """A sample with its advantage and weights.

    Attributes:
        sample: The token ids, the loss mask and the rollout's records.
        advantage: A scalar for all trained tokens, or float32 of shape [tokens]; 0 where the loss reads none.
        weight: Loss weight of each trained token (``algorithms/losses/core.py``).
        importance: Factor of ``weight`` (``algorithms/correction.py``): a scalar, or float32 of shape [tokens].
        temperature: Of sampling; 0 (greedy) counts as 1.
        values: float32 of shape [tokens], the critic's values; None without a critic.
        returns: float32 of shape [tokens], the critic's targets; NaN on tokens that it is not trained on.
    """

    sample: TrainSample
    advantage: float | npt.NDArray[np.float32] = 0.0
    weight: float = 1.0
    temperature: float = 1.0
    importance: float | npt.NDArray[np.float32] = 1.0
    values: npt.NDArray[np.float32] | None = None
    returns: npt.NDArray[np.float32] | None = None

    def freely_routed(self) -> TrainRow:
        """Return the row for another model than the one whose servers reported experts."""
        return replace(self, sample=replace(self.sample, routes=None))


def consistently_routed(sample: TrainSample) -> TrainSample:
    """Return the row, without routes where several weight versions sampled it.

    A server computes what precedes a token by the weights that sample it: experts that others chose for it before are
    not those of that computation.
    """
    several = len(np.unique(sample.weight_versions[sample.weight_versions >= 0])) > 1
    return replace(sample, routes=None) if several else sample


@dataclass(slots=True)
class MicroBatch:
    """Rows laid out end to end or as trees, and their N trained tokens, in the order of ``rows`` and of a row's tokens.

    Inputs of the forward pass have shape [1, T], data of trained tokens shape [N].

    Attributes:
        input_ids: int64 of shape [1, T].
        position_ids: int64 of shape [1, T], from 0 in each root segment, else continuing the parent's.
        segments: (start, length, parent) of each segment in depth-first order; parent is the segment with the preceding
            tokens, -1 for none.
        rows: Indices of the rows among those packed.
        predictors: int64, the position in [0, T) whose state predicts the token.
        target_ids: int64, the token.
        rollout_logprobs: float32, reported by the inference server; of the kept sets where there are any.
        advantages: float32.
        weights: float32, the loss weight.
        temperatures: float32, the divisor of the logits (never 0).
        sequences: int64, the token's row as an index into ``rows``.
        turns: int64, the token's turn, numbered from 0 over all rows.
        old_logprobs: float32, denominator of the policy ratio; None means those of the forward pass itself (ratio 1).
        ref_logprobs: float32, of the reference policy, or None where nothing reads them.
        selected: bool, selected by the loss over the whole step (``losses.Loss.select``), or None.
        old_values: float32, the critic's values before the first update of the step, or None without a critic.
        returns: float32, the critic's targets; NaN on tokens that it is not trained on.
        media: Media by their positions in [0, T), ascending. Each lies within one segment.
        routes: int16 of shape [T, layers, k], the experts that computed each token in the server, -1 where it did not
            report them; None without router replay.
        sets: The ids that each token was sampled from; None where no token's were truncated. Log-probabilities and
            entropies are those of the distribution over them.
    """

    input_ids: Tensor
    position_ids: Tensor
    segments: tuple[tuple[int, int, int], ...]
    rows: tuple[int, ...]
    predictors: Tensor
    target_ids: Tensor
    rollout_logprobs: Tensor
    advantages: Tensor
    weights: Tensor
    temperatures: Tensor
    sequences: Tensor
    turns: Tensor
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    selected: Tensor | None = None
    old_values: Tensor | None = None
    returns: Tensor | None = None
    media: tuple[Media, ...] = ()
    routes: Tensor | None = None
    sets: KeptSets | None = None

    @property
    def tokens(self) -> int:
        """Tokens of the forward pass, T."""
        return self.input_ids.shape[1]

    @property
    def trained_tokens(self) -> int:
        """Trained tokens, N."""
        return self.predictors.shape[0]

    def freely_routed(self) -> MicroBatch:
        """Return the micro-batch for routers that choose experts themselves."""
        return replace(self, routes=None)


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Scores of the trained tokens from a forward pass.

    Attributes:
        logprobs: float32 of shape [N], of the logits divided by each token's temperature, over its kept set.
        entropy: float32 of shape [N], of that distribution in nats, or None if not requested.
        values: float32 of shape [N], state values before each token, or None without a value head.
        rerouted: float32 of shape [N], share of the replayed experts that the routers would not choose for the token
            before each, or None without router replay.
        imbalance: By how much the busiest expert of a layer is above the mean, as a factor: the mean over layers; None
            for a model without experts.
    """

    logprobs: Tensor
    entropy: Tensor | None = None
    values: Tensor | None = None
    rerouted: Tensor | None = None
    imbalance: Tensor | None = None
