"""From training rows to packed micro-batches.

Owns: :class:`TrainRow`, :class:`MicroBatch` and :func:`pack`. Refuses: padding (a micro-batch is ``[1, T]`` with
segments, nothing else exists) and any decision about advantages or weights; rows bring theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from turnwise.errors import TrainError
from turnwise.trajectory import TrainSample


@dataclass(frozen=True, slots=True)
class TrainRow:
    """A sample and what the step decided about it.

    Attributes:
        sample: The ids, the mask and what the rollout recorded.
        advantage: One number for all its trained tokens, or float32 of shape [tokens]. 0 where a loss reads none.
        weight: Loss weight of each of its trained tokens (see ``aggregation.py``).
        importance: What ``weight`` is multiplied by (``correction.py``): one number, or float32 of shape [tokens].
        temperature: What the logits were divided by when it was sampled; 0 (greedy) counts as 1.
    """

    sample: TrainSample
    advantage: float | npt.NDArray[np.float32] = 0.0
    weight: float = 1.0
    temperature: float = 1.0
    importance: float | npt.NDArray[np.float32] = 1.0


@dataclass(slots=True)
class MicroBatch:
    """Rows laid end to end, and the N tokens of them that are trained, in the order of ``rows`` and of their tokens.

    What the forward pass sees has shape [1, T], what is known of a trained token shape [N].

    Attributes:
        input_ids: int64 of shape [1, T].
        position_ids: int64 of shape [1, T], starting again at 0 in each segment without a parent.
        segments: (start, length, parent) of each segment; parent is the segment whose ids come before, -1 for none.
        rows: Indices of the rows in what was packed.
        predictors: int64, the position in [0, T) whose state predicts the token.
        target_ids: int64, the token.
        rollout_logprobs: float32, what the inference server reported of it.
        advantages: float32.
        weights: float32, its loss weight.
        temperatures: float32, the divisor of the logits that predict it (never 0).
        sequences: int64, the number (from 0) of the row that it belongs to: its place in ``rows``.
        turns: int64, the number (from 0) of its turn; turns of different rows have different numbers.
        old_logprobs: float32, log-probabilities that the ratio of a policy loss divides by; None means those of the
            forward pass itself (the ratio is then exactly 1).
        ref_logprobs: float32, log-probabilities of the reference policy, or None where nothing reads them.
        selected: bool, what the loss chose of the whole step (``losses.Loss.select``), or None.
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

    @property
    def tokens(self) -> int:
        """How many tokens the forward pass sees."""
        return self.input_ids.shape[1]

    @property
    def trained_tokens(self) -> int:
        """How many tokens are trained."""
        return self.predictors.shape[0]


def pack(rows: Sequence[TrainRow], max_tokens: int) -> list[MicroBatch]:
    """Lay rows into micro-batches of at most ``max_tokens`` tokens.

    First-fit over rows sorted by length, longest first (equal lengths keep their order), so the result depends on the
    rows alone. Rows without a trained token are left out: nothing would read them. A row longer than the budget gets
    a micro-batch of its own.

    Args:
        rows: What to pack.
        max_tokens: Token budget of a micro-batch.

    Raises:
        TrainError: The budget is below 1, or a row cannot be trained (its message names the row and the field).
    """
    if max_tokens < 1:
        raise TrainError(f"max_tokens_per_micro_batch is {max_tokens}; it must be at least 1")
    for index, row in enumerate(rows):
        _check(index, row)
    lengths = [len(row.sample.input_ids) for row in rows]
    trained = [index for index, row in enumerate(rows) if row.sample.trained_tokens]
    bins: list[list[int]] = []
    room: list[int] = []
    first_open = 0
    for index in sorted(trained, key=lambda i: -lengths[i]):
        number = next((n for n in range(first_open, len(bins)) if room[n] >= lengths[index]), len(bins))
        if number == len(bins):
            bins.append([])
            room.append(max_tokens)
        bins[number].append(index)
        room[number] -= lengths[index]
        # Lengths only fall from here on, so full bins at the front need no second look.
        while first_open < len(bins) and room[first_open] <= 0:
            first_open += 1
    return [_lay(rows, members) for members in bins]


def _check(index: int, row: TrainRow) -> None:
    sample = row.sample
    where = f"row {index} (trajectory {sample.trajectory_id})"
    length = len(sample.input_ids)
    if length == 0:
        raise TrainError(f"{where} has no tokens")
    named = {"loss_mask": sample.loss_mask, "rollout_logprobs": sample.rollout_logprobs, "turn_ids": sample.turn_ids}
    for name, values in named.items():
        if len(values) != length:
            raise TrainError(f"{where}: {name} has {len(values)} elements for {length} input_ids")
    if sample.media:
        raise TrainError(f"{where} holds {sample.media[0].kind}; this trainer places text only")
    if sample.loss_mask[0]:
        raise TrainError(f"{where}: loss_mask[0] is true, but nothing stands before the first token to predict it from")
    if isinstance(row.advantage, np.ndarray) and row.advantage.shape != (length,):
        raise TrainError(f"{where}: advantage has shape {row.advantage.shape} for {length} input_ids")
    if isinstance(row.importance, np.ndarray) and row.importance.shape != (length,):
        raise TrainError(f"{where}: importance has shape {row.importance.shape} for {length} input_ids")
    if not (np.isfinite(row.advantage).all() and np.isfinite(row.weight) and np.isfinite(row.importance).all()):
        raise TrainError(f"{where}: advantage or weight is not finite; look at the rewards of its group")
    if not (np.isfinite(row.temperature) and row.temperature >= 0):
        raise TrainError(f"{where}: temperature is {row.temperature}; it must be 0 or more")


def _lay(rows: Sequence[TrainRow], members: Sequence[int]) -> MicroBatch:
    chosen = [rows[index] for index in members]
    lengths = [len(row.sample.input_ids) for row in chosen]
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]).tolist()
    ids = np.concatenate([row.sample.input_ids for row in chosen]).astype(np.int64)
    mask = np.concatenate([row.sample.loss_mask for row in chosen])
    targets = np.flatnonzero(mask)

    def of_tokens(values: Sequence[float | npt.NDArray[np.float32]]) -> Tensor:
        full = [np.broadcast_to(np.asarray(v, np.float32), (n,)) for v, n in zip(values, lengths, strict=True)]
        return torch.from_numpy(np.concatenate(full)[targets])

    return MicroBatch(
        input_ids=torch.from_numpy(ids)[None],
        position_ids=torch.from_numpy(np.concatenate([np.arange(n, dtype=np.int64) for n in lengths]))[None],
        segments=tuple((start, length, -1) for start, length in zip(starts, lengths, strict=True)),
        rows=tuple(members),
        # The token at position t is predicted by the state at t - 1; no row trains its first token.
        predictors=torch.from_numpy(targets - 1),
        target_ids=torch.from_numpy(ids[targets]),
        rollout_logprobs=of_tokens([row.sample.rollout_logprobs for row in chosen]),
        advantages=of_tokens([row.advantage for row in chosen]),
        weights=of_tokens([row.weight * row.importance for row in chosen]),
        temperatures=of_tokens([row.temperature or 1.0 for row in chosen]),
        sequences=torch.from_numpy(np.repeat(np.arange(len(chosen)), [row.sample.trained_tokens for row in chosen])),
        turns=torch.from_numpy(_turns(chosen)),
    )


def _turns(rows: Sequence[TrainRow]) -> npt.NDArray[np.int64]:
    """Number the turns of the trained tokens of rows, in order."""
    found: list[npt.NDArray[np.int64]] = []
    count = 0
    for row in rows:
        names, numbers = np.unique(row.sample.turn_ids[row.sample.loss_mask], return_inverse=True)
        found.append(numbers.astype(np.int64) + count)
        count += len(names)
    return np.concatenate(found)
