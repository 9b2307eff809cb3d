"""Sequence parallelism over attention heads (DeepSpeed-Ulysses, arXiv:2309.14509): ranks share one micro-batch.

Each rank of a group computes a slice of a micro-batch's tokens. Attention needs all tokens of a sequence and is
independent between heads, so around it tokens are exchanged for heads: each rank attends over all tokens with its share
of the heads, and gets back all heads of its slice. Everything else in a layer treats each token alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the name everybody reads
from torch import Tensor

from turnwise.errors import TrainError


def split_heads(heads: int, key_heads: int, ranks: int) -> str | None:
    """Return why attention heads cannot be shared by so many ranks; None where they can.

    Queries are shared equally. Keys and values too, or each of them is repeated for several ranks.
    """
    if heads % ranks:
        return f"{heads} attention heads"
    if key_heads % ranks and ranks % key_heads:
        return f"{key_heads} heads of keys and values"
    return None


@dataclass(frozen=True, slots=True)
class SequenceGroup:
    """The ranks that compute a micro-batch together, seen from one of them.

    Attributes:
        ranks: Their number.
        rank: The own place, from 0.
        group: Their process group.
    """

    ranks: int
    rank: int
    group: dist.ProcessGroup

    def slice_length(self, tokens: int) -> int:
        """Return the tokens of a rank's slice; the last slices are padded to it."""
        return -(-tokens // self.ranks)

    def slice_tokens(self, values: Tensor) -> Tensor:
        """Return the own slice of [1, T], padded with zeros."""
        length = self.slice_length(values.shape[1])
        padded = F.pad(values, (0, length * self.ranks - values.shape[1]))
        return padded[:, self.rank * length : (self.rank + 1) * length]

    def own_places(self, positions: Tensor, tokens: int) -> Tensor:
        """Return int64 indices of the positions that are in the own slice, and so computed here."""
        length = self.slice_length(tokens)
        return torch.nonzero(positions // length == self.rank).flatten()

    def slice_positions(self, positions: Tensor, tokens: int) -> Tensor:
        """Return positions of the own slice, counted from its beginning."""
        return positions - self.rank * self.slice_length(tokens)

    def gather(self, computed: Tensor, positions: Tensor, total: int) -> Tensor:
        """Return all values, [total], of which each rank has computed those at its own places.

        The gradient of each value goes to the rank that has computed it, once: a loss that all ranks compute has in sum
        over ranks the gradient of one.
        """
        return _gather(computed, positions, total, self.group)

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """Exchange the own slice of all heads, [1, H, t, D], for all tokens of the own heads, [1, H / ranks, T, D].

        Raises:
            TrainError: The heads cannot be shared.
        """
        heads, key_heads = query.shape[1], key.shape[1]
        if problem := split_heads(heads, key_heads, self.ranks):
            raise TrainError(f"an attention layer has {problem}, which {self.ranks} ranks cannot share")
        if key_heads % self.ranks:
            # In order, so that each rank gets the one that its queries belong to.
            key, value = (heads_of.repeat_interleave(self.ranks // key_heads, 1) for heads_of in (key, value))
        return self._to_heads(query, tokens), self._to_heads(key, tokens), self._to_heads(value, tokens)

    def own_heads(self, per_head: Tensor) -> Tensor:
        """Return the own heads' part of [H]."""
        return per_head.chunk(self.ranks)[self.rank]

    def to_tokens(self, out: Tensor) -> Tensor:
        """Exchange all tokens of the own heads, [1, T, H / ranks, V], for the own slice of all heads, [1, t, H, V]."""
        _, tokens, heads, width = out.shape
        length = self.slice_length(tokens)
        padded = F.pad(out[0], (0, 0, 0, 0, 0, length * self.ranks - tokens))
        swapped = _swap(padded.reshape(self.ranks, length, heads, width), self.group)
        return swapped.transpose(0, 1).reshape(1, length, self.ranks * heads, width)

    def _to_heads(self, values: Tensor, tokens: int) -> Tensor:
        _, heads, length, width = values.shape
        swapped = _swap(values.reshape(self.ranks, heads // self.ranks, length, width), self.group)
        return swapped.transpose(0, 1).reshape(1, heads // self.ranks, self.ranks * length, width)[:, :, :tokens]


def _exchanged(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send part i of the first dimension to rank i; return the parts received, in the order of the ranks."""
    values = values.contiguous()
    received = torch.empty_like(values)
    dist.all_to_all_single(received, values, group=group)
    return received


class _Swap(torch.autograd.Function):
    """:func:`_exchanged`, which is its own transpose."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchanged(values, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _exchanged(grad, ctx.group), None


class _Gather(torch.autograd.Function):
    """Own values to all values; backward takes those of the own places."""

    @staticmethod
    def forward(ctx: Any, computed: Tensor, positions: Tensor, total: int, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(positions)
        # Each place is filled by one rank: the sum is exact.
        gathered = computed.new_zeros(total).index_copy_(0, positions, computed)
        dist.all_reduce(gathered, group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (positions,) = ctx.saved_tensors
        return grad.index_select(0, positions), None, None, None


_swap: Callable[..., Tensor] = _Swap.apply
_gather: Callable[..., Tensor] = _Gather.apply
