"""From training rows to packed micro-batches.

Everything rests on one array: sorted by ids, each row's common prefix with the one before it. A row then adds
``length - prefix`` tokens, and the common prefix of any two rows is the smallest one between them. Lowering
a prefix shares less and is always correct.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from turnwise.errors import TrainError
from turnwise.trainer.config.train import BatchConfig
from turnwise.trainer.core import MicroBatch, RowKey, TrainRow
from turnwise.trainer.kept_sets import KeptSets
from turnwise.trajectory import TrainSample
from turnwise.types import Media, join_masks, recorded

SHORTEST_SHARED = 8
"""Tokens: a shared stretch of fewer costs more as a separate segment than it saves."""

Ids = npt.NDArray[np.int32]
_Piece = tuple[list[int], int]


@dataclass(frozen=True, slots=True)
class RowSegments:
    """Rows of a micro-batch as segments.

    Attributes:
        segments: (start, length, parent) of each, in depth-first order.
        sources: Per segment (row, first, end): the row and range that its ids are copied from.
        paths: Per row its segments, from the root.
    """

    segments: tuple[tuple[int, int, int], ...]
    sources: tuple[tuple[int, int, int], ...]
    paths: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """Rows sorted by their ids.

    Attributes:
        order: Row indices.
        lengths: Row lengths, in this order.
        prefixes: Tokens shared with the previous row; 0 for the first.
    """

    order: tuple[int, ...]
    lengths: tuple[int, ...]
    prefixes: tuple[int, ...]

    @classmethod
    def of(cls, rows: Sequence[Ids], shortest: int | None = None) -> PrefixTree:
        """Sort rows of token ids and find the common prefixes of neighbours.

        Shared stretches below ``shortest`` tokens (default :data:`SHORTEST_SHARED`) are duplicated instead.
        """
        shortest = SHORTEST_SHARED if shortest is None else shortest
        # Bytes of big-endian unsigned numbers compare as the numbers do, in one memcmp.
        keys = [row.astype(">u4").tobytes() for row in rows]
        order = sorted(range(len(rows)), key=keys.__getitem__)
        prefixes = [0] * len(rows)
        for position in range(1, len(order)):
            prefixes[position] = _common_prefix(rows[order[position - 1]], rows[order[position]])
        for position, lowered in enumerate(_without_short_stretches(prefixes, shortest)):
            prefixes[position] = lowered
        prefixes = [0, *_without_short_stretches(prefixes[:0:-1], shortest)[::-1]][: len(rows)]
        return cls(tuple(order), tuple(len(rows[index]) for index in order), tuple(prefixes))

    @classmethod
    def without_sharing(cls, lengths: Sequence[int]) -> RowSegments:
        """Lay rows of these lengths out end to end, without shared prefixes."""
        count = len(lengths)
        return cls(tuple(range(count)), tuple(lengths), (0,) * count).as_segments(range(count))

    def partition(self, budget: int) -> list[list[int]]:
        """Assign rows to micro-batches of at most ``budget`` tokens, shared ones counted once, as places in ``order``.

        Bottom-up: the children of a fork stay together where they fit; else they are combined best-fit decreasing, and
        the fork's prefix is repeated in each. A row above the budget stays alone. Places are ascending.
        """
        open_forks: list[tuple[int, list[_Piece]]] = [(0, [])]
        for position, length in enumerate(self.lengths):
            next_prefix = self.prefixes[position + 1] if position + 1 < len(self.lengths) else 0
            if next_prefix > open_forks[-1][0]:
                open_forks.append((next_prefix, []))
            open_forks[-1][1].append(([position], length))
            while open_forks[-1][0] > next_prefix:
                depth, pieces = open_forks.pop()
                if open_forks[-1][0] < next_prefix:
                    open_forks.append((next_prefix, []))
                open_forks[-1][1].extend(_combine_children(pieces, depth, budget))
        return [sorted(positions) for positions, _ in _combine_children(open_forks[0][1], 0, budget) if positions]

    def as_segments(self, positions: Sequence[int]) -> RowSegments:
        """Lay rows out as segments; ``positions`` are ascending indices into ``order``, as ``RowSegments.sources``."""
        ends, parents, rows, tails = [0], [-1], [-1], []
        path = [0]
        previous = -1
        for row, position in enumerate(positions):
            shared = min(self.prefixes[previous + 1 : position + 1]) if previous >= 0 else 0
            previous = position
            popped = -1
            while ends[path[-1]] > shared:
                popped = path.pop()
            if ends[path[-1]] < shared:
                # The fork lies inside a stretch: its upper part becomes a separate segment.
                ends.append(shared)
                parents.append(path[-1])
                rows.append(rows[popped])
                parents[popped] = len(ends) - 1
                path.append(len(ends) - 1)
            if self.lengths[position] > ends[path[-1]]:
                ends.append(self.lengths[position])
                parents.append(path[-1])
                rows.append(row)
                path.append(len(ends) - 1)
            tails.append(path[-1])
        return _depth_first(ends, parents, rows, tails)


def _common_prefix(first: Ids, second: Ids) -> int:
    length = min(len(first), len(second))
    differs = first[:length] != second[:length]
    difference = int(differs.argmax()) if length else 0
    return difference if length and differs[difference] else length


def _without_short_stretches(prefixes: Sequence[int], shortest: int) -> list[int]:
    """Lower a prefix to the fork above it where fewer than ``shortest`` tokens lie between them."""
    forks = [0]
    lowered = []
    for prefix in prefixes:
        while forks[-1] > prefix:
            forks.pop()
        if prefix - forks[-1] >= max(1, shortest):
            forks.append(prefix)
        lowered.append(forks[-1])
    return lowered


def _combine_children(pieces: list[_Piece], depth: int, budget: int) -> list[_Piece]:
    """Combine the children of a fork, its ``depth`` prefix tokens counted once per result."""
    total = depth + sum(cost - depth for _, cost in pieces)
    if total <= budget:
        return [([position for positions, _ in pieces for position in positions], total)]
    combined: list[_Piece] = []
    free_tokens: list[tuple[int, int]] = []
    for positions, cost in sorted(pieces, key=lambda piece: -piece[1]):
        index = bisect_left(free_tokens, (cost - depth, -1))
        if index < len(free_tokens):
            free, number = free_tokens.pop(index)
            combined[number] = (combined[number][0] + positions, combined[number][1] + cost - depth)
            insort(free_tokens, (free - cost + depth, number))
        else:
            insort(free_tokens, (budget - cost, len(combined)))
            combined.append((positions, cost))
    return combined


def _depth_first(ends: Sequence[int], parents: Sequence[int], rows: Sequence[int], tails: Sequence[int]) -> RowSegments:
    """Number the nodes of a tree (0 is the empty root) in depth-first order."""
    # A node's row is the first that goes through it, so rows and then depth are the order of a walk.
    order = sorted(range(1, len(ends)), key=lambda node: (rows[node], ends[node]))
    numbers = {node: number for number, node in enumerate(order)} | {0: -1}
    segments, sources = [], []
    start = 0
    for node in order:
        first = ends[parents[node]]
        segments.append((start, ends[node] - first, numbers[parents[node]]))
        sources.append((rows[node], first, ends[node]))
        start += ends[node] - first
    paths = []
    for node in tails:
        path = []
        while node:
            path.append(numbers[node])
            node = parents[node]
        paths.append(tuple(path[::-1]))
    return RowSegments(tuple(segments), tuple(sources), tuple(paths))


def pack(rows: Sequence[TrainRow], max_tokens: int, *, share_prefixes: bool = False) -> list[MicroBatch]:
    """Pack rows into micro-batches of at most ``max_tokens`` tokens.

    Rows without a trained token are dropped; a row above the budget gets its own micro-batch. Results per token do not
    depend on the packing.

    Args:
        rows: The rows.
        max_tokens: Token budget of a micro-batch; shared tokens count once.
        share_prefixes: Store common prefixes once (rows of a group, branches of a trajectory), and drop the tokens
            after the last trained one. Else rows are packed whole, first-fit decreasing.

    Raises:
        TrainError: A row cannot be trained; the message names row and field.
    """
    for index, row in enumerate(rows):
        _check_row(index, row)
    trained_rows = [index for index, row in enumerate(rows) if row.sample.trained_tokens]
    if not share_prefixes:
        lengths = [len(rows[index].sample.input_ids) for index in trained_rows]
        parts = first_fit(lengths, max_tokens)
        layouts = [PrefixTree.without_sharing([lengths[number] for number in part]) for part in parts]
        return [_make_batch(rows, *part) for part in zip(_rows_of(parts, trained_rows), layouts, strict=True)]
    # The state that predicts the last trained token is the last one that anything needs.
    needed_lengths = [int(np.flatnonzero(rows[index].sample.loss_mask)[-1]) for index in trained_rows]
    media_numbers: dict[str, int] = {}
    tree = PrefixTree.of(
        [
            _ids_with_media(rows[index].sample, media_numbers)[:end]
            for index, end in zip(trained_rows, needed_lengths, strict=True)
        ]
    )
    parts = tree.partition(max_tokens)
    members = _rows_of([[tree.order[position] for position in part] for part in parts], trained_rows)
    return [_make_batch(rows, names, tree.as_segments(part)) for names, part in zip(members, parts, strict=True)]


def _ids_with_media(sample: TrainSample, media_numbers: dict[str, int]) -> Ids:
    """Return the ids of a sample with negative numbers, one per content, in place of media: equal ids are equal inputs.

    ``media_numbers`` are the numbers by digest, and are extended.
    """
    if not sample.media:
        return sample.input_ids
    ids = sample.input_ids.copy()
    for media in sample.media:
        ids[media.position : media.end] = -1 - media_numbers.setdefault(media.digest, len(media_numbers))
    return ids


def _rows_of(parts: Sequence[Sequence[int]], row_indices: Sequence[int]) -> list[list[int]]:
    return [[row_indices[number] for number in part] for part in parts]


def first_fit(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Assign rows of these lengths to micro-batches, longest first (stable); return the indices of each one's."""
    batches: list[list[int]] = []
    free_tokens: list[int] = []
    first_open = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        number = next((n for n in range(first_open, len(batches)) if free_tokens[n] >= lengths[index]), len(batches))
        if number == len(batches):
            batches.append([])
            free_tokens.append(max_tokens)
        batches[number].append(index)
        free_tokens[number] -= lengths[index]
        # Lengths only fall from here on, so full bins at the front need no second look.
        while first_open < len(batches) and free_tokens[first_open] <= 0:
            first_open += 1
    return batches


def _check_row(index: int, row: TrainRow) -> None:
    where = f"row {index} (trajectory {row.sample.trajectory_id})"
    if row.sample.loss_mask[0]:
        raise TrainError(f"{where}: loss_mask[0] is true, but nothing stands before the first token to predict it from")
    if not (np.isfinite(row.advantage).all() and np.isfinite(row.weight) and np.isfinite(row.importance).all()):
        raise TrainError(f"{where}: advantage or weight is not finite; look at the rewards of its group")


def _make_batch(rows: Sequence[TrainRow], members: Sequence[int], layout: RowSegments) -> MicroBatch:
    packed = [rows[index] for index in members]
    ids = [packed[number].sample.input_ids[first:end] for number, first, end in layout.sources]
    targets = [np.flatnonzero(row.sample.loss_mask) for row in packed]

    def of_tokens(values: Sequence[float | npt.NDArray[np.float32]]) -> Tensor:
        picked = [
            np.broadcast_to(np.asarray(value, np.float32), row.sample.loss_mask.shape)[tokens]
            for value, row, tokens in zip(values, packed, targets, strict=True)
        ]
        return torch.from_numpy(np.concatenate(picked))

    return MicroBatch(
        input_ids=torch.from_numpy(np.concatenate(ids).astype(np.int64))[None],
        position_ids=torch.from_numpy(np.concatenate([np.arange(first, end) for _, first, end in layout.sources]))[
            None
        ],
        segments=layout.segments,
        rows=tuple(members),
        predictors=torch.from_numpy(np.concatenate(_predictors(layout, targets))),
        target_ids=torch.from_numpy(
            np.concatenate(
                [row.sample.input_ids[tokens] for row, tokens in zip(packed, targets, strict=True)], dtype=np.int64
            )
        ),
        rollout_logprobs=of_tokens([row.sample.rollout_logprobs for row in packed]),
        advantages=of_tokens([row.advantage for row in packed]),
        weights=of_tokens([row.weight * row.importance for row in packed]),
        temperatures=of_tokens([row.temperature or 1.0 for row in packed]),
        sequences=torch.from_numpy(np.repeat(np.arange(len(packed)), [len(tokens) for tokens in targets])),
        turns=torch.from_numpy(_turn_numbers(packed)),
        media=_media(packed, layout),
        old_values=None if (values := _all_or_none([row.values for row in packed])) is None else of_tokens(values),
        returns=None if (returns := _all_or_none([row.returns for row in packed])) is None else of_tokens(returns),
        routes=_routes(packed, layout),
        sets=_kept_sets(packed, targets),
    )


def _kept_sets(rows: Sequence[TrainRow], targets: Sequence[npt.NDArray[np.int64]]) -> KeptSets | None:
    """Return the kept sets of the trained tokens of rows."""
    masks = [
        None if row.sample.mask is None else row.sample.mask.select(tokens)
        for row, tokens in zip(rows, targets, strict=True)
    ]
    joined = join_masks(
        [(np.zeros(len(tokens), np.float32), mask) for tokens, mask in zip(targets, masks, strict=True)]
    )
    return None if joined is None else KeptSets.of([joined])


def _routes(rows: Sequence[TrainRow], layout: RowSegments) -> Tensor | None:
    """Return the experts of the packed tokens; a token's own stand in its row beside the token after it."""
    like = next((row.sample.routes for row in rows if row.sample.routes is not None), None)
    if like is None:
        return None
    parts = []
    for number, first, end in layout.sources:
        part = np.full((end - first, *like.shape[1:]), -1, np.int16)
        if (routes := rows[number].sample.routes) is not None:
            after = routes[first + 1 : end + 1]
            known = np.flatnonzero(recorded(after))
            part[known] = after[known]
        parts.append(part)
    return torch.from_numpy(np.concatenate(parts))


def _media(rows: Sequence[TrainRow], layout: RowSegments) -> tuple[Media, ...]:
    """Return the media of rows at their packed positions."""
    return tuple(
        media.at(start + media.position - first)
        for (start, _, _), (number, first, end) in zip(layout.segments, layout.sources, strict=True)
        for media in rows[number].sample.media
        if first <= media.position < end
    )


def _predictors(layout: RowSegments, targets: Sequence[npt.NDArray[np.int64]]) -> list[npt.NDArray[np.int64]]:
    """Return for each row the positions of the states that predict its trained tokens."""
    predictors = []
    for path, tokens in zip(layout.paths, targets, strict=True):
        # The token at position t is predicted by the state at t - 1, which may stand in an ancestor; no row trains its
        # first token.
        starts = np.asarray([layout.sources[segment][1] for segment in path])
        shifts = np.asarray([layout.segments[segment][0] for segment in path]) - starts
        predictors.append(tokens - 1 + shifts[np.searchsorted(starts, tokens - 1, side="right") - 1])
    return predictors


def _all_or_none(values: Sequence[npt.NDArray[np.float32] | None]) -> list[npt.NDArray[np.float32]] | None:
    present = [array for array in values if array is not None]
    if present and len(present) < len(values):
        raise TrainError("some rows of a micro-batch have a critic's values or returns, others have none")
    return present or None


def _turn_numbers(rows: Sequence[TrainRow]) -> npt.NDArray[np.int64]:
    by_row: list[npt.NDArray[np.int64]] = []
    count = 0
    for row in rows:
        names, numbers = np.unique(row.sample.turn_ids[row.sample.loss_mask], return_inverse=True)
        by_row.append(numbers.astype(np.int64) + count)
        count += len(names)
    return np.concatenate(by_row)


Scorer: TypeAlias = Callable[[Sequence[MicroBatch]], list[Tensor]]
"""Scores the trained tokens without gradients, one [N] tensor per micro-batch, as a learner's ``logprobs`` do."""


def recompute_logprobs(score: Scorer, rows: Sequence[TrainRow], batch: BatchConfig) -> dict[RowKey, Tensor]:
    """Return by row the log-probabilities of its trained tokens under the present weights."""
    return {rows[index].sample.key: part for index, part in score_rows(score, rows, batch).items()}


def score_rows(score: Scorer, rows: Sequence[TrainRow], batch: BatchConfig) -> dict[int, Tensor]:
    """Return the scores of the trained tokens, in main memory, by the index of their row."""
    batches = pack(rows, batch.micro_batch, share_prefixes=batch.share_prefixes)
    by_row: dict[int, Tensor] = {}
    for micro_batch, scores in zip(batches, score(batches), strict=True):
        parts = torch.split(scores.cpu(), [rows[index].sample.trained_tokens for index in micro_batch.rows])
        by_row |= zip(micro_batch.rows, parts, strict=True)
    return by_row
