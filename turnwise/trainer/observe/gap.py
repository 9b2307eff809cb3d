"""The gap between the trainer's log-probabilities and the inference server's, by turn and by token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from turnwise.model.core import Renderer
from turnwise.trainer.batch.packing import TrainRow
from turnwise.trajectory import Trajectory

# How many ids before a token are shown with it.
_SHOWN_BEFORE = 12


@dataclass(frozen=True, slots=True)
class TurnGap:
    """The gap in turns of one number, over all trajectories.

    Attributes:
        turn: The number of the turn in its trajectory, in commit order from 0.
        tokens: How many tokens were compared.
        mean: Their mean |trainer - rollout|, in nats.
        max: The largest of them.
    """

    turn: int
    tokens: int
    mean: float
    max: float


@dataclass(frozen=True, slots=True)
class TokenGap:
    """One token on which trainer and server disagree.

    Attributes:
        trajectory: Its trajectory.
        leaf: The leaf of the row that trains it.
        turn: The number of its turn, in commit order from 0.
        place: Its place among the ids of its turn, from 0.
        token: Its id.
        rollout: What the server reported.
        trainer: What the trainer computed.
    """

    trajectory: str
    leaf: int
    turn: int
    place: int
    token: int
    rollout: float
    trainer: float

    @property
    def gap(self) -> float:
        """The distance of the two, in nats."""
        return abs(self.trainer - self.rollout)


@dataclass(frozen=True, slots=True)
class Gaps:
    """What was found in a step.

    Attributes:
        turns: By the number of the turn, ascending.
        largest: The tokens that differ most, the worst first.
    """

    turns: list[TurnGap] = field(default_factory=list)
    largest: list[TokenGap] = field(default_factory=list)

    def metrics(self) -> dict[str, float]:
        """Return ``gap/worst_turn``: the largest mean gap among the turns of one number; nothing without tokens."""
        return {"gap/worst_turn": max(each.mean for each in self.turns)} if self.turns else {}


@dataclass(slots=True)
class _Part:
    """The trained tokens of one micro-batch, each of shape [N]."""

    rows: tuple[int, ...]
    sequences: npt.NDArray[np.int64]
    trainer: npt.NDArray[np.float32]
    rollout: npt.NDArray[np.float32]


class GapWatch:
    """Is told of the tokens of an update while its loss is computed, and says afterwards where they differ."""

    def __init__(self) -> None:
        self._parts: list[_Part] = []
        self._rows: Sequence[TrainRow] = ()

    def note(self, rows: Sequence[int], sequences: Tensor, trainer: Tensor, rollout: Tensor) -> None:
        """Take the trained tokens of a micro-batch, in the order of its rows and within a row in that of its ids.

        Args:
            rows: Index of each of its rows in what was packed.
            sequences: Shape [N], the place in ``rows`` of the row that each token belongs to.
            trainer: Shape [N], the trainer's log-probabilities.
            rollout: Shape [N], the server's.
        """
        arrays = (each.detach().float().cpu().numpy() for each in (trainer, rollout))
        self._parts.append(_Part(tuple(rows), sequences.cpu().numpy(), *arrays))

    @property
    def noted(self) -> bool:
        """Whether anything was."""
        return bool(self._parts)

    def packed(self, rows: Sequence[TrainRow]) -> None:
        """Say which rows the indices of :meth:`note` mean."""
        self._rows = rows

    def found(self, most: int = 5) -> Gaps:
        """Return the gap by turn, and the ``most`` tokens that differ most; what was noted is forgotten."""
        parts, rows = self._parts, self._rows
        self._parts, self._rows = [], ()
        if not parts:
            return Gaps()
        owners = np.concatenate([np.asarray(part.rows, np.int64)[part.sequences] for part in parts])
        trainer = np.concatenate([part.trainer for part in parts])
        rollout = np.concatenate([part.rollout for part in parts])
        places = np.concatenate(
            [np.flatnonzero(rows[index].sample.loss_mask) for part in parts for index in _in_order(part)]
        )
        turns = np.concatenate(
            [rows[index].sample.turn_ids[rows[index].sample.loss_mask] for part in parts for index in _in_order(part)]
        )
        gap = np.abs(trainer.astype(np.float64) - rollout)
        largest = np.argsort(-gap, kind="stable")[:most]
        return Gaps(
            _by_turn(turns, gap),
            [
                _token(rows[owners[i]], int(places[i]), float(rollout[i]), float(trainer[i]))
                for i in largest
                if gap[i] > 0
            ],
        )


def _in_order(part: _Part) -> list[int]:
    """Return the rows of a part that have tokens, in the order in which their tokens stand."""
    return [part.rows[place] for place in dict.fromkeys(part.sequences.tolist())]


def _by_turn(turns: npt.NDArray[np.int32], gap: npt.NDArray[np.float64]) -> list[TurnGap]:
    numbers, inverse, counts = np.unique(turns, return_inverse=True, return_counts=True)
    sums = np.bincount(inverse, weights=gap)
    peaks = np.zeros(len(numbers))
    np.maximum.at(peaks, inverse, gap)
    found = zip(numbers.tolist(), counts.tolist(), (sums / counts).tolist(), peaks.tolist(), strict=True)
    return [TurnGap(*each) for each in found]


def _token(row: TrainRow, place: int, rollout: float, trainer: float) -> TokenGap:
    sample = row.sample
    turn = int(sample.turn_ids[place])
    first = int(np.argmax(sample.turn_ids == turn))
    return TokenGap(
        sample.trajectory_id, sample.leaf, turn, place - first, int(sample.input_ids[place]), rollout, trainer
    )


def gap_record(gaps: Gaps, trajectories: Mapping[str, Trajectory], renderer: Renderer) -> dict[str, Any]:
    """Return what was found as JSON values, the worst tokens with their texts.

    Args:
        gaps: What was found.
        trajectories: By id; a token of another one is named by its numbers only.
        renderer: Reads ids.
    """
    return {
        "turns": [asdict(each) for each in gaps.turns],
        "largest": [
            {**asdict(each), "gap": each.gap, **_place(each, trajectories.get(each.trajectory), renderer)}
            for each in gaps.largest
        ],
    }


def _place(gap: TokenGap, trajectory: Trajectory | None, renderer: Renderer) -> dict[str, Any]:
    """Return which message a token is of, and what it and those before it say."""
    if trajectory is None:
        return {}
    segment = [each for each in trajectory.segments if each.sampled][gap.turn]
    ids = segment.ids
    return {
        "agent": trajectory.agent,
        "turn_id": segment.turn_id,
        "segment": segment.index,
        "tokens": len(ids),
        "text": renderer.decode(ids[gap.place : gap.place + 1]),
        "before": renderer.decode(ids[max(0, gap.place - _SHOWN_BEFORE) : gap.place]),
    }


def gap_words(record: Mapping[str, Any]) -> str:
    """Return in words which token of a :func:`gap_record` differs most; the empty text where none does."""
    if not record["largest"]:
        return ""
    worst = record["largest"][0]
    text = f" {worst['text']!r} after {worst['before']!r}" if "text" in worst else ""
    of = f" of {worst['tokens']}" if "tokens" in worst else ""
    return (
        f"the largest is at token {worst['token']}{text}, number {worst['place'] + 1}{of} in turn {worst['turn'] + 1} "
        f"of trajectory {worst['trajectory']}: server {worst['rollout']:.4g}, trainer {worst['trainer']:.4g}"
    )
