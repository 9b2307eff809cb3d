"""The learner behind a LoRA model of the API: its losses, what they read, and Adam's settings of each step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Final

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field, NonNegativeFloat
from pydantic.dataclasses import dataclass as pydantic_dataclass
from torch import Tensor

from turnwise.errors import FormatError, TrainError
from turnwise.ext.tinker.messages import Datum
from turnwise.trainer.algorithms.losses.core import LossSums, cross_entropy_loss
from turnwise.trainer.algorithms.losses.policy import cispo_loss, ppo_clip_loss
from turnwise.trainer.batch.packing import pack
from turnwise.trainer.core import MicroBatch, TokenScores, TrainRow
from turnwise.trainer.learn.torch_learner import TorchLearner
from turnwise.trajectory import TrainSample

_MAX_TOKENS: Final = 8192
_LOW, _HIGH = "clip_low_threshold", "clip_high_threshold"
# What each loss reads besides target_tokens, and by default its bounds of the ratio.
LOSSES: Final[Mapping[str, tuple[tuple[str, ...], Mapping[str, float]]]] = {
    "cross_entropy": (("weights",), {}),
    "importance_sampling": (("logprobs", "advantages"), {}),
    "ppo": (("logprobs", "advantages"), {_LOW: 0.8, _HIGH: 1.2}),
    "cispo": (("logprobs", "advantages"), {_LOW: 0.0, _HIGH: 4.0}),
}


@pydantic_dataclass(frozen=True)
class AdamSettings:
    """Adam's settings of one step; ``grad_clip_norm`` 0 does not clip."""

    learning_rate: NonNegativeFloat = 1e-4
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: NonNegativeFloat = 1e-12
    weight_decay: NonNegativeFloat = 0.0
    grad_clip_norm: NonNegativeFloat = 0.0


@dataclass(frozen=True, slots=True)
class APIObjective:
    """A loss of the API, summed over tokens; it keeps the log-probabilities that it saw.

    Attributes:
        loss: Its name in :data:`LOSSES`.
        bounds: Of the ratio, by name.
        logprobs: Of each micro-batch so far, float32 of shape [N].
    """

    entropy: ClassVar[bool] = False
    loss: str
    bounds: Mapping[str, float] = field(default_factory=dict)
    logprobs: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, loss: str, config: Mapping[str, float | str]) -> APIObjective:
        """Return the objective of a request. Raises FormatError for a loss or an option that is not there."""
        if loss not in LOSSES:
            raise FormatError(
                f"loss_fn is {loss!r}, which is not computed here: name one of {', '.join(LOSSES)}, or give your own "
                "to forward_backward_custom, which computes it in the client"
            )
        bounds = dict(LOSSES[loss][1])
        for name, value in config.items():
            if name not in bounds or not isinstance(value, int | float) or not value >= 0:
                options = " and ".join(bounds) or "none"
                raise FormatError(
                    f"loss_fn_config.{name} is {value!r}: options of {loss} are {options}, bounds of the ratio"
                )
            bounds[name] = float(value)
        return cls(loss, bounds)

    def __call__(self, batch: MicroBatch, scores: TokenScores) -> LossSums:
        """Return the summed loss of a micro-batch."""
        logprobs = scores.logprobs
        self.logprobs.append(logprobs.detach())
        weights, advantages, old = (
            one.to(logprobs.device) for one in (batch.weights, batch.advantages, batch.rollout_logprobs)
        )
        if self.loss == "cross_entropy":
            return cross_entropy_loss(logprobs, weights)
        # Importance sampling is PPO's loss without bounds.
        loss: Callable[..., LossSums] = cispo_loss if self.loss == "cispo" else ppo_clip_loss
        low, high = self.bounds.get(_LOW, 0.0), self.bounds.get(_HIGH, math.inf)
        return loss(logprobs, old, advantages, weights, clip_low=1.0 - low, clip_high=high - 1.0)


def pack_data(data: Sequence[Datum], loss: str, *, vocabulary: int, context: int) -> list[MicroBatch]:
    """Return micro-batches that score a target after each input token of a datum; those without effect are marked.

    Args:
        data: The rows. Targets need not be the inputs' next tokens.
        loss: Decides what a datum must have.
        vocabulary: Ids are below it.
        context: Longest input.

    Raises:
        FormatError: A datum lacks an input, one has another length than its tokens, or an id does not exist.
    """
    rows = []
    for index, datum in enumerate(data):
        _check_datum(f"data[{index}]", datum, loss, vocabulary, context)
        length = len(datum.tokens)
        # The state of the last input token predicts a target, too: one more id stands for it.
        token_ids = np.append(datum.tokens, datum.tokens[-1:]).astype(np.int32)
        shifted = {name: np.append(np.float32(0), one).astype(np.float32) for name, one in datum.inputs.items()}
        zeros = np.zeros(length + 1, np.float32)
        mask = np.arange(length + 1) > 0
        sample = TrainSample(
            token_ids, mask, shifted.get("logprobs", zeros), np.full(length + 1, -1, np.int32),
            np.where(mask, 0, -1).astype(np.int32), str(index), "", 0,
        )  # fmt: skip
        weights = shifted["weights"] if loss == "cross_entropy" else np.ones(length + 1, np.float32)
        rows.append(TrainRow(sample, advantage=shifted.get("advantages", zeros), importance=weights))
    batches = pack(rows, _MAX_TOKENS, share_prefixes=True)
    for batch in batches:
        targets = np.concatenate([data[row].inputs["target_tokens"] for row in batch.rows])
        batch.target_ids = torch.from_numpy(targets.astype(np.int64))
        batch.selected = (batch.weights if loss == "cross_entropy" else batch.advantages) != 0
    return batches


def _check_datum(where: str, datum: Datum, loss: str, vocabulary: int, context: int) -> None:
    names = {"target_tokens", *LOSSES[loss][0]}
    if datum.inputs.keys() != names:
        raise FormatError(
            f"{where}.loss_fn_inputs are {', '.join(datum.inputs) or 'none'}: {loss} reads {', '.join(sorted(names))}"
        )
    if not 0 < len(datum.tokens) <= context:
        raise FormatError(f"{where}.model_input has {len(datum.tokens)} tokens: the model takes 1 to {context}")
    for name, values in datum.inputs.items():
        if len(values) != len(datum.tokens):
            raise FormatError(
                f"{where}.{name} has length {len(values)} and model_input {len(datum.tokens)}: give one for each token"
            )
        if not np.isfinite(values).all():
            raise FormatError(f"{where}.{name} has a value that is not finite")
    for name, token_ids in (("model_input", datum.tokens), ("target_tokens", datum.inputs["target_tokens"])):
        wrong = np.flatnonzero((token_ids < 0) | (token_ids >= vocabulary))
        if len(wrong):
            raise FormatError(
                f"{where}.{name}[{wrong[0]}] is {token_ids[wrong[0]]}: the model's ids are 0 to {vocabulary - 1}"
            )


class APILearner(TorchLearner):
    """A learner that takes Adam's settings with each step, and scores tokens without effect without gradients."""

    def score(self, batches: Sequence[MicroBatch], objective: APIObjective) -> float:
        """Return the summed loss without gradients."""
        with torch.no_grad(), self.policy.computing():
            return sum(float(objective(batch, self._score(batch, entropy=False)).loss) for batch in batches)

    def step(self, settings: AdamSettings) -> dict[str, float]:
        """Update by the accumulated gradients; return metrics. Raises TrainError where they are not finite."""
        self._max_grad_norm = settings.grad_clip_norm or None
        self._optimizers.configure(
            settings.learning_rate, (settings.beta1, settings.beta2), settings.eps, settings.weight_decay
        )
        result = self.optim_step()
        if result.skipped == "non_finite":
            raise TrainError("the gradient is not finite, so nothing was updated: look at the data of this step")
        return {"grad_norm": result.grad_norm, "learning_rate": settings.learning_rate}

    def forget_gradients(self) -> None:
        """Zero the accumulated gradients."""
        self._optimizers.zero_grad()

    def _score(self, batch: MicroBatch, *, entropy: bool) -> TokenScores:  # noqa: ARG002 - no loss reads it
        assert batch.selected is not None
        states = self.policy.states(batch)
        chosen = torch.nonzero(batch.selected).flatten()
        others = torch.nonzero(~batch.selected).flatten()
        # Prompts of a group have equal states and mostly equal targets: each pair is scored once.
        pairs = torch.stack([batch.predictors[others], batch.target_ids[others]], 1)
        pairs, numbers = torch.unique(pairs, dim=0, return_inverse=True)
        first = torch.zeros(len(pairs), dtype=torch.long).index_put_((numbers,), others)
        with torch.no_grad():
            unweighted = self._score_tokens(batch, first, states)[numbers.to(states.device)]
        logprobs = torch.zeros(len(states), device=states.device).index_put((others.to(states.device),), unweighted)
        if not len(chosen):
            return TokenScores(logprobs.requires_grad_())
        return TokenScores(logprobs.index_put((chosen.to(states.device),), self._score_tokens(batch, chosen, states)))

    def _score_tokens(self, batch: MicroBatch, chosen: Tensor, states: Tensor) -> Tensor:
        if not len(chosen):
            return torch.zeros(0, device=states.device)
        names = ("predictors", "target_ids", "temperatures")
        part = replace(batch, **{name: getattr(batch, name)[chosen] for name in names})
        return self.policy.score(part, states[chosen.to(states.device)]).logprobs.float()


def logprobs_of(batches: Sequence[MicroBatch], objective: APIObjective, rows: int) -> list[npt.NDArray[np.float32]]:
    """Return the log-probabilities that an objective saw by row."""
    by_row: list[npt.NDArray[np.float32]] = [np.zeros(0, np.float32)] * rows
    for batch, logprobs in zip(batches, objective.logprobs, strict=True):
        values = logprobs.float().cpu().numpy()
        for number, row in enumerate(batch.rows):
            by_row[row] = values[(batch.sequences == number).numpy()]
    return by_row
