"""Attention over the KV cache, for every sequence of a step in one packed forward.

A step is one [1, T] forward. Tokens are ordered by pool; in each pool, decoding sequences (one token each, in order of
their rows, so that attention reads a view of the pool) come before prefill chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from turnwise.engine.accelerator import on_cpu
from turnwise.engine.batching.kv_cache import Geometry, KVPool
from turnwise.engine.numerics.exact import KEY_BLOCK, exact_attention

IMPLEMENTATION = "turnwise"
_MASK_ELEMENTS = 1 << 23
"""Most elements of one prefill mask; longer pieces are attended in blocks of queries."""
_LENGTHS = 64
"""Keys that decoding reads are rounded up to a multiple of this, except on a CPU."""


class AttentionPlan(Protocol):
    """Attention plan of a forward pass, in place of a KV cache object."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None
    ) -> Tensor:
        """Attend for one layer: [T, heads, dim] each; returns [T, query heads, value dim]."""


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001 - None: masks come from the plan
    scaling: float | None = None,
    sliding_window: int | None = None,
    plan: AttentionPlan | None = None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """Attention function for ``transformers.AttentionInterface``; the plan is a keyword argument of ``forward``."""
    for name in ("softcap", "s_aux", "position_bias"):
        if arguments.get(name) is not None:
            raise ValueError(f"its attention uses {name!r}")
    if plan is None:
        raise TypeError("this model does not pass the keyword arguments of forward() on to its attention layers")
    layer: Any = module.layer_idx
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return plan.attend(layer, query, key, value, scaling, sliding_window).unsqueeze(0), None


class GeometryProbe:
    """Attention plan of one probing forward, which records what the layers store.

    Attributes:
        windows: The sliding windows that they attend with.
    """

    def __init__(self) -> None:
        self.seen: dict[int, tuple[int, int, int]] = {}
        self.windows: set[int | None] = set()

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None
    ) -> Tensor:
        """Record shapes and window; return zeros of the right shape."""
        del scale
        self.windows.add(window)
        if layer in self.seen:
            raise ValueError(f"layer {layer} attends twice in one forward pass")
        self.seen[layer] = (key.shape[1], key.shape[2], value.shape[2])
        return query.new_zeros((query.shape[0], query.shape[1], value.shape[2]))

    def geometry(self) -> Geometry:
        """Return the recorded geometry. Raises ValueError if layers differ or are not numbered from 0."""
        shapes = set(self.seen.values())
        if len(shapes) != 1 or sorted(self.seen) != list(range(len(self.seen))):
            raise ValueError(f"attention layers of one shape are needed, numbered from 0; found {self.seen}")
        return Geometry(len(self.seen), *shapes.pop())


@dataclass(slots=True)
class Masks:
    """Additive attention masks by sliding window, made on demand."""

    positions: Tensor
    """Positions of the queries, [batch, queries]."""
    length: int
    dtype: torch.dtype
    by_window: dict[int | None, Tensor] = field(default_factory=dict)

    def get(self, window: int | None) -> Tensor:
        """Return the mask [batch, 1, queries, length] for a window (None: causal)."""
        if window is not None and window >= self.length:
            window = None
        mask = self.by_window.get(window)
        if mask is None:
            keys = torch.arange(self.length, device=self.positions.device)
            queries = self.positions.unsqueeze(-1)
            hidden = keys > queries
            if window is not None:
                hidden |= keys <= queries - window
            mask = torch.zeros(hidden.shape, dtype=self.dtype, device=hidden.device)
            mask = mask.masked_fill_(hidden, float("-inf")).unsqueeze(1)
            self.by_window[window] = mask
        return mask


@dataclass(slots=True)
class DecodeBlock:
    """One new token for each of some rows of a pool; attention reads the pool's first ``region`` rows.

    Attributes:
        stop: Number of its tokens, the first of the pool's part.
        row_index: Rows that have a token, or None for all.
        masks: For all rows of the region.
    """

    stop: int
    region: int
    row_index: Tensor | None
    masks: Masks


@dataclass(slots=True)
class PrefillBlock:
    """Prefill chunks of similar lengths, padded to the longest.

    Attributes:
        rows: Rows of the pool.
        width: Tokens of the longest chunk.
        length: Keys read per row.
        packed: Index of each padded token in the pool's part, [chunks, width]; padding repeats a chunk's last token.
        real: Indices of the real tokens in the flattened block, and in the pool's part.
        fresh: Whether all chunks begin at position 0.
        masks: [chunks, width] positions.
    """

    rows: Tensor
    width: int
    length: int
    packed: Tensor
    real: tuple[Tensor, Tensor]
    fresh: bool
    masks: Masks


@dataclass(slots=True)
class PoolPlan:
    """The part [``start``, ``stop``) of a step in one pool; ``index`` is where keys and values go in its flat view."""

    pool: KVPool
    start: int
    stop: int
    index: Tensor
    decode: DecodeBlock | None
    prefills: Sequence[PrefillBlock]

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None
    ) -> Tensor:
        """Write the new keys and values, then attend: [tokens, heads, dim] in and out."""
        pool = self.pool
        pool.flat_keys[layer].index_copy_(0, self.index, key.reshape(-1, key.shape[-1]))
        pool.flat_values[layer].index_copy_(0, self.index, value.reshape(-1, value.shape[-1]))
        keys, values = pool.keys[layer], pool.values[layer]
        attend = _attention_of(pool)
        if self.decode is not None and not self.prefills:
            return _decode(self.decode, attend, query, keys, values, scale, window)
        out = query.new_empty((query.shape[0], query.shape[1], value.shape[2]))
        if self.decode is not None:
            stop = self.decode.stop
            out[:stop] = _decode(self.decode, attend, query[:stop], keys, values, scale, window)
        for block in self.prefills:
            in_block, in_pool = block.real
            out[in_pool] = _prefill(block, attend, query, keys, values, scale, window)[in_block]
        return out


@dataclass(slots=True)
class StepPlan:
    """The attention plan of a step, by pool in order of its tokens."""

    parts: Sequence[PoolPlan]

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None
    ) -> Tensor:
        """Attend for all tokens of the step."""
        if len(self.parts) == 1:
            return self.parts[0].attend(layer, query, key, value, scale, window)
        spans = [(part, slice(part.start, part.stop)) for part in self.parts]
        return torch.cat(
            [part.attend(layer, query[span], key[span], value[span], scale, window) for part, span in spans]
        )


_Attend: TypeAlias = Callable[..., Tensor]
"""``scaled_dot_product_attention``, or what has its arguments."""


def _attention_of(pool: KVPool) -> _Attend:
    return exact_attention if pool.geometry.exact else scaled_dot_product_attention


def _decode(
    block: DecodeBlock,
    attend: _Attend,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float | None,
    window: int | None,
) -> Tensor:
    """Attend with one query per row. Grouped query heads become queries of their key head, without copies."""
    tokens, heads, dim = query.shape
    grouped = query.reshape(tokens, keys.shape[1], -1, dim)
    if block.row_index is not None:
        spread = grouped.new_zeros((block.region, *grouped.shape[1:]))
        grouped = spread.index_copy_(0, block.row_index, grouped)
    length = block.masks.length
    out = attend(
        grouped,
        keys[: block.region, :, :length],
        values[: block.region, :, :length],
        attn_mask=block.masks.get(window),
        scale=scale,
    )
    if block.row_index is not None:
        out = out[block.row_index]
    return out.reshape(tokens, heads, -1)


def _prefill(
    block: PrefillBlock,
    attend: _Attend,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float | None,
    window: int | None,
) -> Tensor:
    """Attend with the padded chunks; returns [chunks * width, heads, value dim]."""
    padded = query[block.packed].transpose(1, 2)
    # The keys of this step's tokens were just written, so a chunk reads all of its keys from the pool.
    seen_keys = keys[:, :, : block.length][block.rows]
    seen_values = values[:, :, : block.length][block.rows]
    heads, width = padded.shape[1], block.width
    grouped = heads != seen_keys.shape[1]
    if block.fresh and block.length == width and (window is None or window >= block.length):
        out = attend(padded, seen_keys, seen_values, is_causal=True, scale=scale, enable_gqa=grouped)
    else:
        if grouped and not on_cpu(query.device):
            # With a mask, only the CPU kernel shares key heads without a copy.
            repeats = heads // seen_keys.shape[1]
            seen_keys = seen_keys.repeat_interleave(repeats, dim=1)
            seen_values = seen_values.repeat_interleave(repeats, dim=1)
            grouped = False
        rows = max(1, _MASK_ELEMENTS // (len(block.rows) * block.length))
        parts = []
        for start in range(0, width, rows):
            masks = block.masks
            if rows < width:
                masks = Masks(masks.positions[:, start : start + rows], masks.length, masks.dtype)
            parts.append(
                attend(
                    padded[:, :, start : start + rows],
                    seen_keys,
                    seen_values,
                    attn_mask=masks.get(window),
                    scale=scale,
                    enable_gqa=grouped,
                )
            )
        out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
    return out.transpose(1, 2).reshape(-1, heads, out.shape[-1])


def decode_block(pool: KVPool, rows: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> DecodeBlock:
    """Plan the tokens of decoding sequences, by rows of the pool, ascending, and positions."""
    region, device = int(rows[-1]) + 1, pool.device
    row_index = None
    if region != len(rows):
        row_index = torch.from_numpy(rows).to(device)
        spread = np.zeros(region, dtype=np.int64)
        spread[rows] = positions
        positions = spread
    length = int(positions.max()) + 1
    if pool.geometry.exact or not on_cpu(device):
        # On a GPU kernels are chosen, and some are planned, anew for each length.
        unit = KEY_BLOCK if pool.geometry.exact else _LENGTHS
        length = min(-(-length // unit) * unit, pool.capacity)
    masks = Masks(torch.from_numpy(positions).to(device).unsqueeze(1), length, pool.dtype)
    return DecodeBlock(len(rows), region, row_index, masks)


def prefill_blocks(
    pool: KVPool,
    rows: npt.NDArray[np.int64],
    starts: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int64],
    offset: int = 0,
) -> list[PrefillBlock]:
    """Plan prefill chunks, grouped by similar size.

    Args:
        pool: Where their keys and values are.
        rows: Row of each chunk.
        starts: Position of its first token.
        sizes: Number of its tokens.
        offset: Start of the first chunk in the pool's part of the step.
    """
    device = pool.device
    begins = offset + np.cumsum(sizes) - sizes
    order = np.argsort(-sizes, kind="stable")
    blocks = []
    first = 0
    while first < len(order):
        width = int(sizes[order[first]])
        # A block ends where padding would be more than a third of it.
        stop = first + int(np.searchsorted(-sizes[order[first:]], -(2 * width) // 3, side="right"))
        chunks = order[first : max(stop, first + 1)]
        steps = np.minimum(np.arange(width)[None, :], sizes[chunks][:, None] - 1)
        real = (np.arange(width)[None, :] < sizes[chunks][:, None]).reshape(-1)
        packed = begins[chunks][:, None] + steps
        length = int((starts[chunks] + sizes[chunks]).max())
        if pool.geometry.exact:
            length = -(-length // KEY_BLOCK) * KEY_BLOCK
        in_block = np.flatnonzero(real)
        in_pool = packed.reshape(-1)[in_block]
        blocks.append(
            PrefillBlock(
                rows=torch.from_numpy(rows[chunks]).to(device),
                width=width,
                length=length,
                packed=torch.from_numpy(packed).to(device),
                real=(torch.from_numpy(in_block).to(device), torch.from_numpy(in_pool).to(device)),
                fresh=not starts[chunks].any(),
                masks=Masks(torch.from_numpy(starts[chunks][:, None] + steps).to(device), length, pool.dtype),
            )
        )
        first += len(chunks)
    return blocks
