"""Which rows share how much, and how they are laid so that what they share stands there once.

Everything rests on one array: sorted by ids, each row's common prefix with the one before it. A row then brings
``length - prefix`` tokens of its own, and the common prefix of any two rows is the smallest one between them. Lowering
a prefix shares less and is always correct.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

# A shared stretch of fewer tokens costs more as a segment of its own than it saves.
SHORTEST_SHARED = 8
"""In tokens."""

Ids = npt.NDArray[np.int32]
_Piece = tuple[list[int], int]


@dataclass(frozen=True, slots=True)
class Laid:
    """Rows of a micro-batch as segments.

    Attributes:
        segments: (start, length, parent) of each, in the order of a walk through the tree.
        sources: For each segment (row, first, end): whose ids it holds, and which of them.
        paths: For each row the segments that it consists of, from the root on.
    """

    segments: tuple[tuple[int, int, int], ...]
    sources: tuple[tuple[int, int, int], ...]
    paths: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """Rows in the order of their ids.

    Attributes:
        order: The rows' indices.
        lengths: Their lengths, in this order.
        prefixes: How many tokens each shares with the one before it; 0 for the first.
    """

    order: tuple[int, ...]
    lengths: tuple[int, ...]
    prefixes: tuple[int, ...]

    @classmethod
    def of(cls, rows: Sequence[Ids], shortest: int | None = None) -> PrefixTree:
        """Sort rows and find what neighbours share.

        Args:
            rows: Ids, at least one in each.
            shortest: Stretches of the tree with fewer tokens are repeated in what follows them; None is
                :data:`SHORTEST_SHARED`.
        """
        shortest = SHORTEST_SHARED if shortest is None else shortest
        # Bytes of big-endian unsigned numbers compare as the numbers do, in one memcmp.
        keys = [row.astype(">u4").tobytes() for row in rows]
        order = sorted(range(len(rows)), key=keys.__getitem__)
        prefixes = [0] * len(rows)
        for place in range(1, len(order)):
            prefixes[place] = _common(rows[order[place - 1]], rows[order[place]])
        for place, lowered in enumerate(_without_short(prefixes, shortest)):
            prefixes[place] = lowered
        prefixes = [0, *_without_short(prefixes[:0:-1], shortest)[::-1]][: len(rows)]
        return cls(tuple(order), tuple(len(rows[index]) for index in order), tuple(prefixes))

    def partition(self, budget: int) -> list[list[int]]:
        """Deal the rows to micro-batches of at most ``budget`` tokens, those that stand there once counted once.

        From the leaves to the root: what hangs on a fork stays together where it fits; else its parts are put together
        best-fit, largest first, and the fork's own prefix is repeated in each. A row longer than the budget stands
        alone.

        Returns:
            Places in ``order``, ascending in each micro-batch.
        """
        open_forks: list[tuple[int, list[_Piece]]] = [(0, [])]
        for place, length in enumerate(self.lengths):
            after = self.prefixes[place + 1] if place + 1 < len(self.lengths) else 0
            if after > open_forks[-1][0]:
                open_forks.append((after, []))
            open_forks[-1][1].append(([place], length))
            while open_forks[-1][0] > after:
                depth, pieces = open_forks.pop()
                if open_forks[-1][0] < after:
                    open_forks.append((after, []))
                open_forks[-1][1].extend(_together(pieces, depth, budget))
        return [sorted(places) for places, _ in _together(open_forks[0][1], 0, budget) if places]

    def lay(self, places: Sequence[int]) -> Laid:
        """Lay rows as segments; ``Laid`` counts rows as ``places`` does.

        Args:
            places: Places in ``order``, ascending.
        """
        ends, parents, rows, tails = [0], [-1], [-1], []
        path = [0]
        before = -1
        for row, place in enumerate(places):
            shared = min(self.prefixes[before + 1 : place + 1]) if before >= 0 else 0
            before = place
            last = -1
            while ends[path[-1]] > shared:
                last = path.pop()
            if ends[path[-1]] < shared:
                # The fork lies inside a stretch: its upper part becomes a segment of its own.
                ends.append(shared)
                parents.append(path[-1])
                rows.append(rows[last])
                parents[last] = len(ends) - 1
                path.append(len(ends) - 1)
            if self.lengths[place] > ends[path[-1]]:
                ends.append(self.lengths[place])
                parents.append(path[-1])
                rows.append(row)
                path.append(len(ends) - 1)
            tails.append(path[-1])
        return _walk(ends, parents, rows, tails)


def _common(one: Ids, other: Ids) -> int:
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length


def _without_short(prefixes: Sequence[int], shortest: int) -> list[int]:
    """Lower each prefix to the fork above it where fewer than ``shortest`` tokens lie between them."""
    forks = [0]
    lowered = []
    for prefix in prefixes:
        while forks[-1] > prefix:
            forks.pop()
        if prefix - forks[-1] >= max(1, shortest):
            forks.append(prefix)
        lowered.append(forks[-1])
    return lowered


def _together(pieces: list[_Piece], depth: int, budget: int) -> list[_Piece]:
    """Put together what hangs on a fork, its prefix of ``depth`` tokens counted once in each result."""
    total = depth + sum(cost - depth for _, cost in pieces)
    if total <= budget:
        return [([place for places, _ in pieces for place in places], total)]
    found: list[_Piece] = []
    rooms: list[tuple[int, int]] = []
    for places, cost in sorted(pieces, key=lambda piece: -piece[1]):
        fits = bisect_left(rooms, (cost - depth, -1))
        if fits < len(rooms):
            room, number = rooms.pop(fits)
            found[number] = (found[number][0] + places, found[number][1] + cost - depth)
            insort(rooms, (room - cost + depth, number))
        else:
            insort(rooms, (budget - cost, len(found)))
            found.append((places, cost))
    return found


def _walk(ends: Sequence[int], parents: Sequence[int], rows: Sequence[int], tails: Sequence[int]) -> Laid:
    """Number the nodes of a tree (0 is its root, of no tokens) in the order of a walk."""
    # A node's row is the first that goes through it, so rows and then depth are the order of a walk.
    walk = sorted(range(1, len(ends)), key=lambda node: (rows[node], ends[node]))
    numbers = {node: number for number, node in enumerate(walk)} | {0: -1}
    segments, sources = [], []
    start = 0
    for node in walk:
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
    return Laid(tuple(segments), tuple(sources), tuple(paths))
