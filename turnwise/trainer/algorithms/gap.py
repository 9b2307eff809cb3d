"""The gap between the trainer's and the inference server's log-probabilities, by turn and by token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from turnwise.model.core import Renderer
from turnwise.trainer.core import TrainRow
from turnwise.trajectory import Trajectory

# How many ids before a token are shown with it.
_SHOWN_BEFORE = 12


@dataclass(frozen=True, slots=True)
class Gaps:
    """The gaps of a step, as JSON values.

    Attributes:
        turns: Of each turn number (``turn``, in commit order from 0), ascending: compared ``tokens`` over all
            trajectories, ``mean`` and ``max`` of |trainer - rollout| in nats.
        largest: The tokens that differ most, in descending order: ``trajectory``, ``leaf`` of the row that trains it,
            ``turn``, ``place`` among the ids of its turn from 0, ``token`` id, log-probabilities of the server
            (``rollout``) and the ``trainer``, and their ``gap``.
    """

    turns: list[dict[str, Any]] = field(default_factory=list)
    largest: list[dict[str, Any]] = field(default_factory=list)

    def metrics(self) -> dict[str, float]:
        """Return ``gap/worst_turn``, the largest mean gap over turn numbers; empty without tokens."""
        return {"gap/worst_turn": max(turn["mean"] for turn in self.turns)} if self.turns else {}


@dataclass(slots=True)
class _Part:
    """The trained tokens of one micro-batch, each of shape [N]."""

    rows: tuple[int, ...]
    sequences: npt.NDArray[np.int64]
    trainer: npt.NDArray[np.float32]
    rollout: npt.NDArray[np.float32]


class GapWatch:
    """Collects the tokens of an update while its loss is computed, and reports the gaps afterwards."""

    def __init__(self) -> None:
        self._parts: list[_Part] = []
        self._rows: Sequence[TrainRow] = ()

    def record(self, rows: Sequence[int], sequences: Tensor, trainer: Tensor, rollout: Tensor) -> None:
        """Record the trained tokens of a micro-batch, in the order of its rows and of a row's ids.

        ``rows`` has the index of each row among those packed, ``sequences`` each token's row as an index into ``rows``.
        """
        arrays = (logprobs.detach().float().cpu().numpy() for logprobs in (trainer, rollout))
        self._parts.append(_Part(tuple(rows), sequences.cpu().numpy(), *arrays))

    def join(self, other: GapWatch) -> None:
        """Add the records of another process, whose rows are those of :meth:`set_rows` here."""
        self._parts += other._parts

    @property
    def has_tokens(self) -> bool:
        """Whether any tokens were recorded."""
        return bool(self._parts)

    def set_rows(self, rows: Sequence[TrainRow]) -> None:
        """Set the rows that the indices of :meth:`record` refer to."""
        self._rows = rows

    def take_gaps(self, count: int = 5) -> Gaps:
        """Return the gap by turn, and the ``count`` tokens that differ most; clears the records."""
        parts, rows = self._parts, self._rows
        self._parts, self._rows = [], ()
        if not parts:
            return Gaps()
        owners = np.concatenate([np.asarray(part.rows, np.int64)[part.sequences] for part in parts])
        trainer = np.concatenate([part.trainer for part in parts])
        rollout = np.concatenate([part.rollout for part in parts])
        positions = np.concatenate(
            [np.flatnonzero(rows[index].sample.loss_mask) for part in parts for index in _in_order(part)]
        )
        turns = np.concatenate(
            [rows[index].sample.turn_ids[rows[index].sample.loss_mask] for part in parts for index in _in_order(part)]
        )
        gap = np.abs(trainer.astype(np.float64) - rollout)
        largest = np.argsort(-gap, kind="stable")[:count]
        return Gaps(
            _by_turn(turns, gap),
            [
                _token(rows[owners[i]], int(positions[i]), float(rollout[i]), float(trainer[i]))
                for i in largest
                if gap[i] > 0
            ],
        )


def _in_order(part: _Part) -> list[int]:
    return [part.rows[number] for number in dict.fromkeys(part.sequences.tolist())]


def _by_turn(turns: npt.NDArray[np.int32], gap: npt.NDArray[np.float64]) -> list[dict[str, Any]]:
    numbers, inverse, counts = np.unique(turns, return_inverse=True, return_counts=True)
    sums = np.bincount(inverse, weights=gap)
    peaks = np.zeros(len(numbers))
    np.maximum.at(peaks, inverse, gap)
    figures = zip(numbers.tolist(), counts.tolist(), (sums / counts).tolist(), peaks.tolist(), strict=True)
    return [dict(zip(("turn", "tokens", "mean", "max"), of_turn, strict=True)) for of_turn in figures]


def _token(row: TrainRow, position: int, rollout: float, trainer: float) -> dict[str, Any]:
    sample = row.sample
    turn = int(sample.turn_ids[position])
    return {
        "trajectory": sample.trajectory_id,
        "leaf": sample.leaf,
        "turn": turn,
        "place": position - int(np.argmax(sample.turn_ids == turn)),
        "token": int(sample.input_ids[position]),
        "rollout": rollout,
        "trainer": trainer,
        "gap": abs(trainer - rollout),
    }


def gap_record(gaps: Gaps, trajectories: Mapping[str, Trajectory], renderer: Renderer) -> dict[str, Any]:
    """Return the gaps as one record, the worst tokens with their texts where their trajectory is given."""
    largest = [token | _place(token, trajectories.get(token["trajectory"]), renderer) for token in gaps.largest]
    return {"turns": gaps.turns, "largest": largest}


def _place(gap: Mapping[str, Any], trajectory: Trajectory | None, renderer: Renderer) -> dict[str, Any]:
    """Return the message of a token, and the text of it and its context."""
    if trajectory is None:
        return {}
    segment = [segment for segment in trajectory.segments if segment.sampled][gap["turn"]]
    token_ids, position = segment.token_ids, gap["place"]
    return {
        "agent": trajectory.agent,
        "turn_id": segment.turn_id,
        "segment": segment.index,
        "tokens": len(token_ids),
        "text": renderer.decode(token_ids[position : position + 1]),
        "before": renderer.decode(token_ids[max(0, position - _SHOWN_BEFORE) : position]),
    }


def describe_gap(record: Mapping[str, Any]) -> str:
    """Describe the worst token of a :func:`gap_record`; empty without one."""
    if not record["largest"]:
        return ""
    worst = record["largest"][0]
    text = f" {worst['text']!r} after {worst['before']!r}" if "text" in worst else ""
    of = f" of {worst['tokens']}" if "tokens" in worst else ""
    return (
        f"the largest is at token {worst['token']}{text}, number {worst['place'] + 1}{of} in turn {worst['turn'] + 1} "
        f"of trajectory {worst['trajectory']}: server {worst['rollout']:.4g}, trainer {worst['trainer']:.4g}"
    )
