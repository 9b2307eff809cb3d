"""From "these sequences, so many tokens each" to the arrays of one packed forward.

Owns: the order of tokens in a step and where each is written. Refuses: deciding who runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from turnwise.inference.attention import DecodeBlock, PoolPlan, PrefillBlock, StepPlan, decode_block, prefill_blocks
from turnwise.inference.kv import KVCache


@dataclass(frozen=True, slots=True)
class Step:
    """One packed forward.

    Attributes:
        plan: What its tokens attend to.
        ids: int64 of shape [T].
        positions: int64 of shape [T].
        slots: The sequences that run, in the order of their tokens.
        sizes: How many tokens each has in this step.
        sampling: Which of ``slots`` have all their tokens read after this step.
        keep: Index of the last token of each of those in the packed step.
    """

    plan: StepPlan
    ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    slots: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    sampling: npt.NDArray[np.int64]
    keep: npt.NDArray[np.int64]


def arrange(cache: KVCache, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return slots ordered by pool and row, as :func:`build_step` needs them."""
    return slots[np.lexsort((cache.row_of[slots], cache.pool_of[slots]))]


def build_step(
    cache: KVCache,
    slots: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int64],
    *,
    heads: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Step:
    """Lay out a step.

    Args:
        cache: Where the sequences lie.
        slots: Those that run, as :func:`arrange` orders them.
        sizes: How many tokens each runs, from its first token without keys and values on.
        heads: Key/value heads of the model.
        dtype: Of the model.
        device: Of the model.
    """
    pools = cache.pool_of[slots]
    single = sizes == 1
    if not single.all():
        order = np.lexsort((cache.row_of[slots], ~single, pools))
        slots, sizes, pools = slots[order], sizes[order], pools[order]
    starts = cache.cached[slots]
    ends = np.cumsum(sizes)
    begins = ends - sizes
    total = int(ends[-1])
    capacity = cache.capacity[pools]
    base = cache.row_of[slots] * heads * capacity
    if total == len(slots):
        owner, positions = slots, starts
        base_of, capacity_of = base, capacity
    else:
        owner, base_of, capacity_of = np.repeat(slots, sizes), np.repeat(base, sizes), np.repeat(capacity, sizes)
        positions = np.repeat(starts - begins, sizes) + np.arange(total)
    index = (base_of + positions)[:, None] + capacity_of[:, None] * np.arange(heads)
    flat = torch.from_numpy(index.reshape(-1)).to(device)
    parts = []
    borders = np.flatnonzero(np.diff(pools)) + 1
    for first, last in zip([0, *borders.tolist()], [*borders.tolist(), len(slots)], strict=True):
        start, stop = int(begins[first]), int(ends[last - 1])
        pool = cache.pools[int(pools[first])]
        decode, prefills = _blocks(
            cache.row_of[slots[first:last]], starts[first:last], sizes[first:last], dtype, device
        )
        parts.append(PoolPlan(pool, start, stop, flat[start * heads : stop * heads], decode, prefills))
    complete = starts + sizes == cache.length[slots]
    return Step(
        plan=StepPlan(parts),
        ids=cache.ids[owner, positions].astype(np.int64),
        positions=positions,
        slots=slots,
        sizes=sizes,
        sampling=slots[complete],
        keep=(ends - 1)[complete],
    )


def _blocks(
    rows: npt.NDArray[np.int64],
    starts: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int64],
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[DecodeBlock | None, list[PrefillBlock]]:
    """Plan one pool's tokens: the sequences that decode stand first, in order of their rows."""
    count = int((sizes == 1).sum())
    decode = decode_block(rows[:count], starts[:count], dtype, device) if count else None
    return decode, prefill_blocks(rows[count:], starts[count:], sizes[count:], count, dtype, device)
