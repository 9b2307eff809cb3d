"""The ids of the vocabulary that trained tokens were sampled from, as tensors, for their log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from turnwise.errors import TrainError
from turnwise.types import SamplingMask, Words


@dataclass(frozen=True, slots=True)
class KeptSets:
    """The kept sets of N trained tokens.

    Attributes:
        truncated: bool of shape [N], whether any id is excluded.
        owners: int64 of shape [L], the token of each listed id.
        ids: int64 of shape [L], the listed ids.
        dense: int64 of shape [M], the tokens whose sets are bits.
        lines: int64 of shape [M], the line of each one's bits.
        bits: int32 of shape [lines, words], different sets, as ``pack_bits`` makes them.
    """

    truncated: Tensor
    owners: Tensor
    ids: Tensor
    dense: Tensor
    lines: Tensor
    bits: Tensor

    @classmethod
    def of(cls, masks: Sequence[SamplingMask]) -> Self | None:
        """Return the kept sets of masks, one after the other; None where they exclude nothing.

        Raises:
            TrainError: A set is recorded by the digest of a grammar's bits, which were not computed again.
        """
        sizes = np.concatenate([mask.sizes for mask in masks])
        if not sizes.any():
            return None
        words = np.concatenate([mask.words for mask in masks])
        counts = np.concatenate([mask.counts for mask in masks])
        starts = np.cumsum(counts) - counts
        owners = np.repeat(np.arange(len(sizes)), np.where(sizes > 0, sizes, 0))
        dense = np.flatnonzero(sizes < 0)
        digests = iter(np.concatenate([mask.digests() for mask in masks]).tolist())
        by_digest = {digest: line for mask in masks for digest, line in (mask.bits or {}).items()}
        by_grammar = np.concatenate([mask.by_grammar for mask in masks])
        numbers: dict[bytes, int] = {}
        sets: list[Words] = []
        lines = []
        for token in dense.tolist():
            line: Words | None = words[starts[token] : starts[token] + counts[token]]
            if by_grammar[token] and (line := by_digest.get(next(digests))) is None:
                raise TrainError("a token was sampled under a grammar whose allowed ids were not computed again")
            assert line is not None
            number = numbers.setdefault(line.tobytes(), len(sets))
            if number == len(sets):
                sets.append(line)
            lines.append(number)
        return cls(
            torch.from_numpy(sizes != 0),
            torch.from_numpy(owners),
            torch.from_numpy(words[np.repeat(sizes > 0, counts)].astype(np.int64)),
            torch.from_numpy(dense),
            torch.tensor(lines, dtype=torch.int64),
            torch.from_numpy(np.stack(sets)) if sets else torch.zeros((0, 0), dtype=torch.int32),
        )

    def to(self, device: torch.device) -> KeptSets:
        """Return them on a device."""
        tensors = (self.truncated, self.owners, self.ids, self.dense, self.lines, self.bits)
        return KeptSets(*(tensor.to(device) for tensor in tensors))

    def select(self, tokens: Tensor) -> KeptSets:
        """Return the kept sets of some tokens, int64 of shape [n], without repetitions."""
        positions = torch.full_like(self.truncated, -1, dtype=torch.int64)
        positions[tokens] = torch.arange(len(tokens), device=positions.device)
        owners, dense = positions[self.owners], positions[self.dense]
        listed, packed = owners >= 0, dense >= 0
        return KeptSets(
            self.truncated[tokens], owners[listed], self.ids[listed], dense[packed], self.lines[packed], self.bits
        )

    def excluded(self, start: int, end: int) -> Tensor:
        """Return which of the ids [start, end) each token excludes, bool of shape [N, end - start]."""
        excluded = self.truncated[:, None].expand(-1, end - start).clone()
        in_range = (self.ids >= start) & (self.ids < end)
        excluded[self.owners[in_range], self.ids[in_range] - start] = False
        if len(self.dense):
            columns = torch.arange(start, end, device=excluded.device)
            mask = (self.bits[:, columns >> 5] >> (columns & 31)) & 1
            excluded[self.dense] = (mask == 0)[self.lines]
        return excluded
