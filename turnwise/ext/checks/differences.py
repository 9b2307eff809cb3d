"""The first difference of two executions of a run: the row of a step, the token of an episode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from turnwise.rollout.records import BatchRow, without_attempt
from turnwise.trajectory import Segment, Trajectory


def first_row(recorded: Sequence[BatchRow], again: Sequence[BatchRow]) -> int | None:
    """Return the index of the first row in which two executions of a step differ; None where they are equal."""
    one, other = (
        [replace(row, trajectory=without_attempt(row.trajectory)) for row in rows] for rows in (recorded, again)
    )
    return _first(one, other)


def first_token(recorded: Trajectory, again: Trajectory) -> str:
    """Return turn and token in which two recordings of an episode differ first, with both values."""
    turn = 0
    for one, other in zip(recorded.segments, again.segments, strict=False):
        difference = segment_difference(one, other)
        if difference is not None:
            return f"{f'turn {turn}' if one.sampled else f'the context before turn {turn}'}, {difference}"
        turn += one.sampled
    if len(recorded.segments) != len(again.segments):
        return f"turn {turn}: it had {len(recorded.segments)} segments and has {len(again.segments)}"
    return f"reward or versions: its reward was {recorded.reward:g} and is {again.reward:g}"


def segment_difference(one: Segment, other: Segment) -> str | None:
    """Return the first token in which two segments differ, with both values; None for equal ones."""
    index = _first(one.token_ids.tolist(), other.token_ids.tolist())
    if index is not None:
        before, after = (
            str(segment.token_ids[index]) if index < len(segment.token_ids) else "none" for segment in (one, other)
        )
        return f"token {index}: its id was {before} and is {after}"
    if one.logprobs is None or other.logprobs is None:
        return None
    # As bits: a difference of the last one is a difference.
    index = _first(one.logprobs.view(np.int32).tolist(), other.logprobs.view(np.int32).tolist())
    if index is None:
        return None
    return (
        f"token {index}: its log-probability was {float(one.logprobs[index])!r} and is {float(other.logprobs[index])!r}"
    )


def _first(one: Sequence[Any], other: Sequence[Any]) -> int | None:
    """Return the first index in which two sequences differ, also by their lengths; None for equal ones."""
    pairs = enumerate(zip(one, other, strict=False))
    index = next((index for index, (before, after) in pairs if before != after), None)
    if index is None and len(one) != len(other):
        return min(len(one), len(other))
    return index
