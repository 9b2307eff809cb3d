"""The layout of packed segments: their forest, and the dense buckets over which attention runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from turnwise.trainer.model.sequence_parallel import SequenceGroup

# Shorter segments join a bucket down to this share of its longest: less wastes calls, more wastes padding.
_BUCKET_RATIO = 0.75

# Segments of at least this length get their own attention call, without copying: that costs less than gathering their
# tokens and computing padding.
_LONG_ALONE = 96

Segments = Sequence[tuple[int, int, int]]
_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Bucket:
    """n segments of similar shape, as dense [n, L] queries and [n, S] keys, padded at the end.

    Attributes:
        shape: (n, L).
        queries: int64 of shape [n * L]: packed positions of the queries (padding: of the first one).
        keys: int64 of shape [n * S]: packed positions of the segments' paths from the root (padding: of the first one).
        depths: int64 of shape [n * L]: positions of the queries within their paths.
        valid: bool of shape [n * L]: queries that are no padding.
        square: Whether no segment has an ancestor; queries and keys are then the same.
    """

    shape: tuple[int, int]
    queries: Tensor
    keys: Tensor
    depths: Tensor
    valid: Tensor
    square: bool


@dataclass(frozen=True, slots=True)
class OwnBucket:
    """The own tokens of n segments of similar length, as dense [n, L].

    Attributes:
        shape: (n, L).
        start: Start of a single segment; -1 for several.
        gather: int64 of shape [n * L]: packed positions (padding: of the first token).
        valid: int64: dense positions without padding, or ``None`` where all are valid.
        pads: int64: dense positions of padding.
        packed: int64: packed positions of the valid ones.
    """

    shape: tuple[int, int]
    start: int
    gather: Tensor
    valid: Tensor | None
    pads: Tensor
    packed: Tensor


@dataclass(frozen=True)
class PackedLayout:
    """The segments of a packed row as a forest in depth-first order.

    Attributes:
        segments: (start, length, parent) of each; they cover [0, T) in order.
        device: Device of the layout's tensors.
        ends: Per segment the end of its last descendant; descendants are between its own end and there.
        depths: Per segment the tokens before it on its path.
        block_masks: Cache of :func:`turnwise.trainer.model.attention.block_mask` by window, shared by all layers.
        sequence: The ranks that share the row's tokens; None where one rank computes them all.
        exact: Whether attention is over whole blocks of the keys of a path (``engine/numerics/exact.py``).
        varlen: Whether segments without ancestors are attended to by torch's kernel for rows of any length.
        windows: The sliding windows of the layers that have attended.
    """

    segments: tuple[tuple[int, int, int], ...]
    device: torch.device
    ends: tuple[int, ...] = field(repr=False)
    depths: tuple[int, ...] = field(repr=False)
    block_masks: dict[int | None, Any] = field(default_factory=dict, repr=False, compare=False)
    sequence: SequenceGroup | None = None
    exact: bool = False
    varlen: bool = False
    windows: set[int | None] = field(default_factory=set, repr=False, compare=False)

    @classmethod
    def of(cls, segments: Segments, device: torch.device, sequence: SequenceGroup | None = None) -> PackedLayout:
        """Create the layout of (start, length, parent) segments, which cover the row in depth-first order."""
        ends = [start + length for start, length, _ in segments]
        depths: list[int] = []
        for _, _, parent in segments:
            depths.append(0 if parent == -1 else depths[parent] + segments[parent][1])
        for number in range(len(segments) - 1, -1, -1):
            parent = segments[number][2]
            if parent != -1:
                ends[parent] = max(ends[parent], ends[number])
        return cls(tuple(segments), device, tuple(ends), tuple(depths), sequence=sequence)

    @property
    def tokens(self) -> int:
        """Number of tokens, T."""
        start, length, _ = self.segments[-1]
        return start + length

    @cached_property
    def is_tree(self) -> bool:
        """Whether any segment has a parent."""
        return any(parent != -1 for _, _, parent in self.segments)

    @cached_property
    def longest_path(self) -> int:
        """Maximum tokens from a root to a token, inclusive."""
        return max(depth + length for depth, (_, length, _) in zip(self.depths, self.segments, strict=True))

    @cached_property
    def shared(self) -> tuple[tuple[int, int, int], ...]:
        """(start, end, last) of each segment with descendants, whose tokens are [``end``, ``last``)."""
        shared = []
        for (start, length, _), below_end in zip(self.segments, self.ends, strict=True):
            if below_end > start + length:
                shared.append((start, start + length, below_end))
        return tuple(shared)

    @cached_property
    def until(self) -> Tensor:
        """int64 of shape [T]: exclusive end of the later tokens that see each token."""
        lengths = [length for _, length, _ in self.segments]
        return torch.from_numpy(np.repeat(np.asarray(self.ends, np.int64), lengths)).to(self.device)

    @cached_property
    def bounds(self) -> Tensor:
        """int32 of shape [segments + 1]: the start of each segment, and the end of the last one."""
        return self._tensor(np.asarray([*(start for start, _, _ in self.segments), self.tokens], np.int32))

    @cached_property
    def positions(self) -> Tensor:
        """int64 of shape [T]: tokens before each on its path."""
        parts = [np.arange(d, d + n) for d, (_, n, _) in zip(self.depths, self.segments, strict=True)]
        return torch.from_numpy(np.concatenate(parts)).to(self.device)

    @cached_property
    def own_buckets(self) -> tuple[OwnBucket, ...]:
        """The segments bucketed by length, each over its own tokens."""
        starts = np.asarray([start for start, _, _ in self.segments])
        lengths = np.asarray([length for _, length, _ in self.segments])
        buckets = []
        for members in _alone_if_long(_similar([(length, 0) for length in lengths.tolist()]), lengths):
            longest = int(lengths[members].max())
            offsets, first = np.arange(longest)[None, :], starts[members][:, None]
            inside = offsets < lengths[members][:, None]
            valid, gather = inside.ravel(), np.where(inside, first + offsets, first).ravel()
            dense = np.flatnonzero(valid)
            buckets.append(
                OwnBucket(
                    shape=(len(members), longest),
                    start=int(starts[members[0]]) if len(members) == 1 else -1,
                    gather=self._tensor(gather),
                    valid=None if valid.all() else self._tensor(dense),
                    pads=self._tensor(np.flatnonzero(~valid)),
                    packed=self._tensor(gather[dense]),
                )
            )
        return tuple(buckets)

    @cached_property
    def path_buckets(self) -> tuple[Bucket, ...]:
        """The segments bucketed by shape, each over its whole path."""
        shapes = [(length, depth) for depth, (_, length, _) in zip(self.depths, self.segments, strict=True)]
        buckets = []
        for members in _similar(shapes):
            longest = max(shapes[n][0] for n in members)
            reach = max(sum(shapes[n]) for n in members)
            queries = np.stack([_padded(self._own(n), longest) for n in members])
            keys = np.stack([_padded(self._path(n), reach) for n in members])
            depths = np.stack([_padded(np.arange(shapes[n][1], sum(shapes[n])), longest) for n in members])
            valid = np.stack([np.arange(longest) < shapes[n][0] for n in members])
            square = all(shapes[n][1] == 0 for n in members)
            q, k, d, v = (self._tensor(values.ravel()) for values in (queries, keys, depths, valid))
            buckets.append(Bucket((len(members), longest), q, k, d, v, square))
        return tuple(buckets)

    @cached_property
    def scatter(self) -> Tensor:
        """int64 of shape [T]: place of each packed position in the queries of all ``path_buckets``, concatenated."""
        queries = torch.cat([bucket.queries for bucket in self.path_buckets])
        dense = torch.cat([bucket.valid for bucket in self.path_buckets]).nonzero().flatten()
        positions = torch.empty_like(dense)
        positions[queries[dense]] = dense
        return positions

    def _own(self, number: int) -> _Ints:
        start, length, _ = self.segments[number]
        return np.arange(start, start + length)

    def _path(self, number: int) -> _Ints:
        parts = []
        while number != -1:
            parts.append(self._own(number))
            number = self.segments[number][2]
        return np.concatenate(parts[::-1])

    def _tensor(self, values: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device)


def _padded(values: _Ints, length: int) -> _Ints:
    return np.concatenate([values, np.full(length - len(values), values[0])])


def _similar(shapes: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Group (length, tokens before) with little padding; roots are grouped separately."""
    groups: list[list[int]] = []
    for number in sorted(range(len(shapes)), key=lambda n: (shapes[n][1] > 0, -shapes[n][0], -shapes[n][1])):
        length, ancestors = shapes[number]
        if groups:
            longest, first = shapes[groups[-1][0]]
            alike = length >= _BUCKET_RATIO * longest and (ancestors > 0) == (first > 0)
            reach = max(sum(shapes[n]) for n in groups[-1]) if ancestors or first else longest
            if alike and length + ancestors >= _BUCKET_RATIO * reach >= _BUCKET_RATIO**2 * (length + ancestors):
                groups[-1].append(number)
                continue
        groups.append([number])
    return groups


def _alone_if_long(groups: Sequence[list[int]], lengths: _Ints) -> list[list[int]]:
    """Split long segments off their groups."""
    split: list[list[int]] = []
    for members in groups:
        split += [[number] for number in members if lengths[number] >= _LONG_ALONE]
        if short := [number for number in members if lengths[number] < _LONG_ALONE]:
            split.append(short)
    return split
