"""Triton kernels of decoding: each sequence's new key and value into its row, and attention over that row.

A row is given by its address, so that one launch serves rows of all pools, wherever they are allocated. Long rows are
split over several programs where few sequences decode ("flash decoding"); the parts are merged by their denominators.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from turnwise.engine.batching.kv_cache import Geometry

_KEYS = 64
"""Keys of a block."""
_PROGRAMS = 256
"""Programs that keep a GPU busy: rows are split until there are as many."""
_MOST_SPLITS = 16


def splits(tokens: int, heads: int) -> int:
    """Return in how many parts each row is attended to."""
    return max(1, min(_MOST_SPLITS, _PROGRAMS // (tokens * heads)))


def store(key: torch.Tensor, value: torch.Tensor, rows: torch.Tensor, geometry: Geometry, layer: int) -> None:
    """Write keys [T, heads, key dim] and values [T, heads, value dim] into their rows.

    Args:
        key: The new keys.
        value: The new values.
        rows: int64 of shape [4, T]: the position, or -1 for none; the address of the row in the first layer's keys; the
            elements from one layer to the next; the tokens of a row.
        geometry: Layout of the cache.
        layer: Number of the layer.
    """
    sizes = [triton.next_power_of_2(dim) for dim in (geometry.key_dim, geometry.value_dim)]
    _store[key.shape[0], geometry.heads](
        key, value, rows, key.shape[0], layer, geometry.layers,
        key.stride(0), key.stride(1), key.stride(2), value.stride(0), value.stride(1), value.stride(2),
        WIDTH=max(geometry.key_dim, geometry.value_dim), KEY=geometry.key_dim, VALUE=geometry.value_dim,
        KEYS=sizes[0], VALUES=sizes[1],
    )  # fmt: skip


def attend(
    query: torch.Tensor, rows: torch.Tensor, geometry: Geometry, layer: int, scale: float | None, window: int | None
) -> torch.Tensor:
    """Attend with one query per row to its keys up to its position: [T, query heads, key dim] to value dim.

    Args:
        query: The queries; their heads are a multiple of the row's.
        rows: As for :func:`store`.
        geometry: Layout of the cache.
        layer: Number of the layer.
        scale: Factor of the scores; None for ``key_dim ** -0.5``.
        window: Sliding window in tokens, the query included; None for all.
    """
    tokens, heads, _ = query.shape
    group, parts = heads // geometry.heads, splits(tokens, geometry.heads)
    kind = query.dtype if parts == 1 else torch.float32
    out = torch.empty((tokens, heads, parts, geometry.value_dim), dtype=kind, device=query.device)
    logarithms = torch.empty((tokens, heads, parts), dtype=torch.float32, device=query.device)
    _attend[tokens, geometry.heads, parts](
        query, out, logarithms, rows, tokens, layer, geometry.layers, parts,
        geometry.key_dim**-0.5 if scale is None else scale, query.stride(0), query.stride(1), query.stride(2), heads,
        WIDTH=max(geometry.key_dim, geometry.value_dim), KEY=geometry.key_dim, VALUE=geometry.value_dim, GROUP=group,
        GROUPS=max(16, triton.next_power_of_2(group)), KEYS=max(16, triton.next_power_of_2(geometry.key_dim)),
        VALUES=max(16, triton.next_power_of_2(geometry.value_dim)), BLOCK=_KEYS, WINDOW=window or 0,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
    )  # fmt: skip
    if parts == 1:
        return out.squeeze(2)
    weights = logarithms.softmax(2).unsqueeze(3)
    return (out * weights).sum(2).to(query.dtype)


_NUMBERS = ["tokens", "layer", "layers", "key_0", "key_1", "key_2", "value_0", "value_1", "value_2", "parts", "heads"]
_NUMBERS += ["query_0", "query_1", "query_2"]
"""Arguments whose values do not specialise a kernel."""


@triton.jit(do_not_specialize=_NUMBERS[:9])
def _store(
    key, value, rows, tokens, layer, layers, key_0, key_1, key_2, value_0, value_1, value_2,
    WIDTH: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0), tl.program_id(1)
    position = tl.load(rows + token)
    if position >= 0:
        address = tl.load(rows + tokens + token).to(tl.pointer_type(key.dtype.element_ty))
        step = tl.load(rows + 2 * tokens + token)
        offset = (head * tl.load(rows + 3 * tokens + token) + position) * WIDTH
        dims = tl.arange(0, KEYS)
        loaded = tl.load(key + token * key_0 + head * key_1 + dims * key_2, mask=dims < KEY)
        tl.store(address + layer * step + offset + dims, loaded, mask=dims < KEY)
        dims = tl.arange(0, VALUES)
        loaded = tl.load(value + token * value_0 + head * value_1 + dims * value_2, mask=dims < VALUE)
        tl.store(address + (layers + layer) * step + offset + dims, loaded, mask=dims < VALUE)


@triton.jit(do_not_specialize=_NUMBERS[:3] + _NUMBERS[9:])
def _attend(
    query, out, logarithms, rows, tokens, layer, layers, parts, scale, query_0, query_1, query_2, heads,
    WIDTH: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    token, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(rows + token) + 1
    address = tl.load(rows + tokens + token).to(tl.pointer_type(query.dtype.element_ty))
    step = tl.load(rows + 2 * tokens + token)
    begin = head * tl.load(rows + 3 * tokens + token) * WIDTH
    keys, values = address + layer * step + begin, address + (layers + layer) * step + begin
    first = tl.zeros_like(length)
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0)
    blocks = (length - first + BLOCK - 1) // BLOCK
    share = (blocks + parts - 1) // parts * BLOCK
    start = first + part * share
    stop = tl.minimum(start + share, length)
    group, dims, outs = tl.arange(0, GROUPS), tl.arange(0, KEYS), tl.arange(0, VALUES)
    lines = head * GROUP + group
    queries = tl.load(
        query + token * query_0 + lines[:, None] * query_1 + dims[None, :] * query_2,
        mask=(group[:, None] < GROUP) & (dims[None, :] < KEY),
        other=0.0,
    )
    top = tl.full([GROUPS], -float("inf"), tl.float32)
    total = tl.zeros([GROUPS], tl.float32)
    mean = tl.zeros([GROUPS, VALUES], tl.float32)
    for block in range(start, stop, BLOCK):
        positions = block + tl.arange(0, BLOCK)
        within = positions < stop
        pointers = tl.multiple_of(keys + positions[:, None] * WIDTH + dims[None, :], [16, 16])
        loaded = tl.load(pointers, mask=within[:, None] & (dims[None, :] < KEY), other=0.0)
        scores = tl.dot(queries, tl.trans(loaded), input_precision=PRECISION) * scale
        scores = tl.where(within[None, :], scores, -float("inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        powers = tl.exp(scores - higher[:, None])
        factor = tl.exp(top - higher)
        pointers = tl.multiple_of(values + positions[:, None] * WIDTH + outs[None, :], [16, 16])
        loaded = tl.load(pointers, mask=within[:, None] & (outs[None, :] < VALUE), other=0.0)
        mean = mean * factor[:, None] + tl.dot(powers.to(loaded.dtype), loaded, input_precision=PRECISION)
        total = total * factor + tl.sum(powers, 1)
        top = higher
    real = group < GROUP
    seen = total > 0
    mean = tl.where(seen[:, None], mean / tl.where(seen, total, 1.0)[:, None], 0.0)
    offset = (token * heads + lines) * parts + part
    tl.store(
        out + offset[:, None] * VALUE + outs[None, :],
        mean.to(out.dtype.element_ty),
        mask=real[:, None] & (outs[None, :] < VALUE),
    )
    tl.store(logarithms + offset, tl.where(seen, top + tl.log(tl.where(seen, total, 1.0)), -float("inf")), mask=real)
