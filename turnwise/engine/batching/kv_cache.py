"""KV cache: pools of rows by capacity, and the slots that own them.

Rows of one capacity are dense, because attention over them is memory-bound. Used rows are kept at the low end of their
pool, so that one attention call reads a view; a few holes cost less than moving rows at once.
"""

from __future__ import annotations

import math
import mmap
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from turnwise.engine.accelerator import on_cpu
from turnwise.engine.experts.route_rows import RouteRows
from turnwise.engine.numerics.exact import KEY_BLOCK


@dataclass(frozen=True, slots=True)
class Geometry:
    """KV cache layout of a model.

    Attributes:
        layers: Number of layers.
        heads: Key/value heads.
        key_dim: Size of a key.
        value_dim: Size of a value.
        exact: Whether attention reads whole blocks of keys, which rows then hold (``engine/numerics/exact.py``).
    """

    layers: int
    heads: int
    key_dim: int
    value_dim: int
    exact: bool = False

    @property
    def smallest_row(self) -> int:
        """Tokens of the shortest rows."""
        return KEY_BLOCK if self.exact else _SMALLEST_ROW


_SMALLEST_ROW = 32
# Python 3.11 does not name it; the value of Linux on x86-64 and arm64.
_MAP_NORESERVE = 0x4000


def _reserve(size: int) -> mmap.mmap | None:
    """Reserve address space whose pages the system allocates, zeroed, at their first use; None where it refuses."""
    if sys.platform != "linux" or not size:
        return None
    try:
        # Private: MADV_DONTNEED does not free pages of a shared mapping.
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    except OSError:
        # Strict accounting (vm.overcommit_memory 2), or a limit of address space.
        return None


class KVPool:
    """Rows of ``capacity`` tokens each.

    On a CPU, address space for all rows is reserved once and the system backs what is written: growing copies nothing,
    and pages of dropped rows return to the system. Elsewhere each change of size is a new tensor.

    Attributes:
        capacity: Tokens per row.
        owner: int64 of shape [rows]: owning slot, or -1.
        keys: Per layer, a view of shape [at least rows, heads, capacity, key_dim].
        values: Per layer, a view of shape [at least rows, heads, capacity, value_dim].
    """

    __slots__ = (
        "_data", "_reserved", "capacity", "device", "dtype", "flat_keys", "flat_values", "geometry", "keys", "owner",
        "values",
    )  # fmt: skip

    def __init__(
        self, geometry: Geometry, capacity: int, dtype: torch.dtype, device: torch.device, *, max_rows: int
    ) -> None:
        """Create an empty pool that may grow to ``max_rows`` rows."""
        self.geometry, self.capacity, self.dtype, self.device = geometry, capacity, dtype, device
        shape = self._shape(max_rows)
        self._reserved = _reserve(math.prod(shape) * dtype.itemsize) if on_cpu(device) else None
        # Zeros, not empty: what a mask hides must still be finite.
        if self._reserved is None:
            self._bind(torch.zeros(self._shape(0), dtype=dtype, device=device))
        else:
            self._bind(torch.frombuffer(self._reserved, dtype=dtype).view(shape))
        self.owner = np.zeros(0, dtype=np.int64)

    @property
    def rows(self) -> int:
        """Number of allocated rows."""
        return len(self.owner)

    @property
    def used(self) -> int:
        """Number of owned rows."""
        return int((self.owner >= 0).sum())

    @property
    def growth(self) -> int:
        """Rows to add where one is needed: several where that copies the others."""
        return self.spare if self._reserved is None else 1

    @property
    def spare(self) -> int:
        """Rows without owner that are kept for the next sequences."""
        return self.used // 4 + max(1, min(_SPARE_ROWS, _SPARE_TOKENS // self.capacity))

    def _shape(self, rows: int) -> tuple[int, ...]:
        shape = self.geometry
        return (2, shape.layers, rows, shape.heads, self.capacity, max(shape.key_dim, shape.value_dim))

    def _bind(self, data: torch.Tensor) -> None:
        shape = self.geometry
        self._data = data
        self.keys = [layer[..., : shape.key_dim] for layer in data[0]]
        self.values = [layer[..., : shape.value_dim] for layer in data[1]]
        width = data.shape[-1]
        self.flat_keys = [layer.view(-1, width)[:, : shape.key_dim] for layer in data[0]]
        self.flat_values = [layer.view(-1, width)[:, : shape.value_dim] for layer in data[1]]

    def resize(self, rows: int, cached: npt.NDArray[np.int64]) -> None:
        """Change the number of rows, which holds those with an owner; owned ones beyond it move to free ones below.

        Args:
            rows: The new number.
            cached: int64 of shape [slots]: tokens of each owner that are copied when it moves.
        """
        rows_before = self.rows
        owner = np.full(rows, -1, dtype=np.int64)
        owner[: min(rows, rows_before)] = self.owner[:rows]
        high = rows + np.flatnonzero(self.owner[rows:] >= 0)
        low = np.flatnonzero(owner < 0)[: len(high)]
        owner[low] = self.owner[high]
        if self._reserved is None:
            data = self._data.new_zeros(self._shape(rows))
            data[:, :, : min(rows, rows_before)] = self._data[:, :, :rows]
        else:
            data = self._data
        for target, row in zip(low.tolist(), high.tolist(), strict=True):
            tokens = int(cached[self.owner[row]])
            data[:, :, target, :, :tokens].copy_(self._data[:, :, row, :, :tokens])
        self.owner = owner
        if self._reserved is None:
            self._bind(data)
        else:
            self._free_rows(rows, rows_before)

    def _free_rows(self, first: int, stop: int) -> None:
        """Return the pages of rows [first, last) to the system, which makes them zeros."""
        reserved, data = self._reserved, self._data
        if reserved is None or first >= stop:
            return
        size = data.element_size()
        for kind in range(data.shape[0]):
            for layer in range(data.shape[1]):
                start = size * (kind * data.stride(0) + layer * data.stride(1) + first * data.stride(2))
                end = start + size * (stop - first) * data.stride(2)
                # A page that other rows share stays.
                start += -start % mmap.PAGESIZE
                end -= end % mmap.PAGESIZE
                if start < end:
                    reserved.madvise(mmap.MADV_DONTNEED, start, end - start)

    def addresses(self, rows: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], int]:
        """Return the address of each row in the first layer's keys, and the elements from one layer to the next.

        Values come after the keys of all layers.
        """
        data = self._data
        return data.data_ptr() + rows * (data.stride(2) * data.element_size()), data.stride(1)

    def copy_row(self, row: int, source: KVPool, source_row: int, tokens: int) -> None:
        """Copy the first ``tokens`` keys and values of a row, of this pool or another."""
        self._data[:, :, row, :, :tokens].copy_(source._data[:, :, source_row, :, :tokens])

    def exchange(self, low_rows: npt.NDArray[np.int64], right: npt.NDArray[np.int64], tokens: int) -> None:
        """Swap rows pairwise, contents (up to ``tokens`` tokens) and owners."""
        # Row by row, with plain copies of long runs: indexing all rows at once takes three times as long.
        for low, high in zip(low_rows.tolist(), right.tolist(), strict=True):
            one, other = self._data[:, :, low, :, :tokens], self._data[:, :, high, :, :tokens]
            copy = one.clone()
            one.copy_(other)
            other.copy_(copy)
        self.owner[low_rows], self.owner[right] = self.owner[right].copy(), self.owner[low_rows].copy()

    def zero_row(self, row: int) -> None:
        """Zero a row that held values that are not finite."""
        self._data[:, :, row].zero_()


FREE, ACTIVE, RETAINED = 0, 1, 2
_SPARE_ROWS, _SPARE_TOKENS = 16, 512
_FIRST_WIDTH = 256
_HOLES_ALLOWED = 4
_MOVE_COST = 8
"""Moving a row costs about as much as attention over it in this many steps."""


def capacities(longest: int, smallest: int = _SMALLEST_ROW) -> list[int]:
    """Return the row capacities, ``smallest`` (a power of 2) * {1, 2, 3, 4, 6, 8, ...}, up to ``longest`` tokens."""
    sizes = [smallest]
    while sizes[-1] < longest:
        size = sizes[-1]
        power = 1 << (size.bit_length() - 1)
        sizes.append(2 * size if size == smallest else power + power // 2 if size == power else 2 * power)
    return sizes


def widen(array: npt.NDArray[Any], width: int) -> npt.NDArray[Any]:
    """Return a copy of [rows, columns] with more columns, zero-filled."""
    wider = np.zeros((array.shape[0], width), dtype=array.dtype)
    wider[:, : array.shape[1]] = array
    return wider


class KVCache:
    """Slots for sequences, each with its tokens and a KV row.

    Attributes:
        longest: Maximum tokens of a slot.
        token_ids: int32 of shape [slots, width]: tokens of each slot; grows up to ``longest``.
        length: int64 of shape [slots]: number of known tokens.
        cached: int64 of shape [slots]: number of tokens with KV entries.
        pool_of: int64 of shape [slots]: index into ``pools``.
        row_of: int64 of shape [slots]: row in that pool.
        state: int8 of shape [slots]: free, active or retained.
        adapter: int64 of shape [slots]: number of the adapter that its keys and values belong to.
        pools: One per capacity, smallest first.
        capacity: int64 of shape [pools].
        routes: Routed experts of the cached tokens; None where they are not kept.
    """

    def __init__(
        self, geometry: Geometry, dtype: torch.dtype, device: torch.device, *, slots: int, longest: int, budget: int
    ) -> None:
        sizes = capacities(longest, geometry.smallest_row)
        if budget < sizes[-1]:
            raise ValueError(
                f"kv_tokens is {budget}, but one sequence of max_context={longest} tokens takes {sizes[-1]}: "
                f"raise kv_tokens to at least {sizes[-1]}, or lower max_context"
            )
        self.budget = budget
        self.pools = [KVPool(geometry, size, dtype, device, max_rows=budget // size) for size in sizes]
        self.capacity = np.asarray(sizes)
        self.longest = longest
        self.routes: RouteRows | None = None
        self.token_ids = np.zeros((slots, min(longest, _FIRST_WIDTH)), dtype=np.int32)
        self.length = np.zeros(slots, dtype=np.int64)
        self.cached = np.zeros(slots, dtype=np.int64)
        self.pool_of = np.zeros(slots, dtype=np.int64)
        self.row_of = np.zeros(slots, dtype=np.int64)
        self.state = np.zeros(slots, dtype=np.int8)
        self.adapter = np.zeros(slots, dtype=np.int64)
        self._used_at = np.zeros(slots, dtype=np.int64)
        self._clock = 0
        self._top = 0
        self._waste = np.zeros(len(sizes), dtype=np.int64)
        self._freed = False

    @property
    def allocated(self) -> int:
        """Allocated memory, in tokens."""
        return sum(pool.rows * pool.capacity for pool in self.pools)

    def count(self, state: int) -> int:
        """Return the number of slots in a state."""
        return int((self.state == state).sum())

    def take(self, token_ids: npt.NDArray[np.int32], adapter: int = 0, *, source: int | None = None) -> int | None:
        """Allocate an active slot and row for uncached tokens, without evicting ``source``; None if memory is short."""
        if source is not None and self.state[source] == RETAINED:
            self.state[source] = ACTIVE
            slot = self.take(token_ids, adapter)
            self.state[source] = RETAINED
            return slot
        free = np.flatnonzero(self.state == FREE)
        if not len(free):
            oldest = self._oldest(RETAINED)
            if oldest is None:
                return None
            self.release(oldest)
            free = np.asarray([oldest])
        slot = int(free[0])
        pool = self._pool_for(len(token_ids) + 1)
        row = self._row(pool)
        if row is None:
            return None
        self._top = max(self._top, slot + 1)
        self.pools[pool].owner[row] = slot
        self.pool_of[slot], self.row_of[slot] = pool, row
        self.state[slot] = ACTIVE
        self.adapter[slot] = adapter
        self.cached[slot] = 0
        self._write(slot, token_ids)
        return slot

    def reuse(self, slot: int, token_ids: npt.NDArray[np.int32], shared: int) -> bool:
        """Reactivate a retained slot for a sequence with its first ``shared`` tokens; False if no row is free."""
        self.state[slot] = ACTIVE
        if not self.grow(slot, len(token_ids) + 1):
            self.state[slot] = RETAINED
            return False
        self.cached[slot] = min(shared, int(self.cached[slot]))
        self._write(slot, token_ids)
        return True

    def share(self, slot: int, source: int, tokens: int) -> None:
        """Copy the KV entries of the first ``tokens`` tokens from another slot."""
        to, origin = self.pools[self.pool_of[slot]], self.pools[self.pool_of[source]]
        to.copy_row(int(self.row_of[slot]), origin, int(self.row_of[source]), tokens)
        self.cached[slot] = tokens
        if self.routes is not None:
            self.routes.copy(slot, source, tokens)
        self._touch(source)

    def grow(self, slot: int, tokens: int) -> bool:
        """Make a slot's row hold ``tokens`` tokens, moving it if needed; False, and no change, if no memory is left."""
        old = int(self.pool_of[slot])
        if self.pools[old].capacity >= tokens:
            return True
        new = self._pool_for(tokens)
        row = self._row(new)
        if row is None:
            return False
        old_row = int(self.row_of[slot])
        self.pools[new].copy_row(row, self.pools[old], old_row, int(self.cached[slot]))
        self.pools[old].owner[old_row] = -1
        self._freed = True
        self.pools[new].owner[row] = slot
        self.pool_of[slot], self.row_of[slot] = new, row
        return True

    def append(
        self, slots: npt.NDArray[np.int64], token_ids: npt.NDArray[np.int64], counted: npt.NDArray[np.bool_]
    ) -> None:
        """Append one token to each of these slots; where ``counted`` is False it is stored but not counted."""
        positions = self.length[slots]
        self._widen(int(positions.max()) + 1)
        self.token_ids[slots, positions] = token_ids
        self.length[slots] += counted

    def retain(self, slot: int) -> None:
        """Keep a finished sequence's KV entries until their memory is needed."""
        self.state[slot] = RETAINED
        self._touch(slot)

    def release(self, slot: int, *, poisoned: bool = False) -> None:
        """Free a slot and its row. ``poisoned`` rows (values not finite) are zeroed."""
        pool, row = self.pools[self.pool_of[slot]], int(self.row_of[slot])
        if poisoned:
            pool.zero_row(row)
        pool.owner[row] = -1
        self._freed = True
        self.state[slot] = FREE
        if self.routes is not None:
            self.routes.drop(slot)
        self.length[slot] = self.cached[slot] = 0

    def drop_retained(self, adapter: int | None = None) -> None:
        """Free the retained prefixes of an adapter (None: all), and give all memory without owner back."""
        dropped = self.state == RETAINED
        if adapter is not None:
            dropped &= self.adapter == adapter
        for slot in np.flatnonzero(dropped):
            self.release(int(slot))
        for index in range(len(self.pools)):
            self._shrink(index, 0)

    def trim(self) -> bool:
        """Free memory of rows without owner, except some of each pool; return whether rows moved.

        A page that is taken again costs little beside computing what it holds.
        """
        if not self._freed:
            return False
        self._freed = False
        slack = [index for index, pool in enumerate(self.pools) if pool.rows - pool.used > pool.spare]
        moved = [self._shrink(index, self.pools[index].spare // 2) for index in slack]
        return any(moved)

    def shared_prefixes(self, token_ids: npt.NDArray[np.int32], adapter: int = 0) -> npt.NDArray[np.int64]:
        """Return the length of the prefix shared with ``token_ids``, for each slot up to the last one in use.

        Slots of another ``adapter`` share nothing.
        """
        top, size = self._top, len(token_ids)
        lengths = np.minimum(self.length[:top], size)
        head = min(size, 64)
        equal = self.token_ids[:top, :head] == token_ids[:head]
        shared = np.where(equal.all(axis=1), head, equal.argmin(axis=1))
        if size > head:
            deep = np.flatnonzero((shared == head) & (lengths > head))
            # Nothing that is known reaches beyond the width of the table.
            width = min(size, self.token_ids.shape[1])
            equal = self.token_ids[deep, :width] == token_ids[:width]
            shared[deep] = np.where(equal.all(axis=1), width, equal.argmin(axis=1))
        return np.where(self.adapter[:top] == adapter, np.minimum(shared, lengths), 0)

    def compact(self, slots: npt.NDArray[np.int64]) -> bool:
        """Move these slots to the low end of their pools if too many holes lie between; return whether rows moved."""
        moved = False
        pools, rows = self.pool_of[slots], self.row_of[slots]
        for index in np.unique(pools).tolist():
            occupied = rows[pools == index]
            holes = int(occupied.max()) + 1 - len(occupied)
            # Holes are often filled again soon. They are moved away when what they have cost equals the move.
            self._waste[index] = self._waste[index] + holes if holes else 0
            if holes <= _HOLES_ALLOWED or self._waste[index] < _MOVE_COST * holes:
                continue
            self._waste[index] = 0
            pool = self.pools[index]
            high = occupied[occupied >= len(occupied)]
            low = np.setdiff1d(np.arange(len(occupied)), occupied)[: len(high)]
            owners = np.concatenate([pool.owner[low], pool.owner[high]])
            owners = owners[owners >= 0]
            pool.exchange(low, high, int(self.cached[owners].max(initial=0)))
            self._locate(index)
            moved = True
        return moved

    def _touch(self, slot: int) -> None:
        self._clock += 1
        self._used_at[slot] = self._clock

    def _widen(self, tokens: int) -> None:
        width = self.token_ids.shape[1]
        if width < tokens:
            self.token_ids = widen(self.token_ids, min(max(tokens, 2 * width), self.longest))

    def _write(self, slot: int, token_ids: npt.NDArray[np.int32]) -> None:
        start = int(self.cached[slot])
        self._widen(len(token_ids))
        self.token_ids[slot, start : len(token_ids)] = token_ids[start:]
        self.length[slot] = len(token_ids)
        self._touch(slot)

    def _pool_for(self, tokens: int) -> int:
        return min(int(np.searchsorted(self.capacity, tokens)), len(self.pools) - 1)

    def _oldest(self, state: int, pool: int | None = None) -> int | None:
        eligible = self.state == state
        if pool is not None:
            eligible &= self.pool_of == pool
        slots = np.flatnonzero(eligible)
        return int(slots[self._used_at[slots].argmin()]) if len(slots) else None

    def _row(self, index: int) -> int | None:
        """Find a row without owner: a free one, a new one, or the least recently used prefix's."""
        pool = self.pools[index]
        free = np.flatnonzero(pool.owner < 0)
        if len(free):
            return self._lower(index, int(free[0]))
        room = (self.budget - self.allocated) // pool.capacity
        if not room:
            oldest = self._oldest(RETAINED, index)
            if oldest is not None:
                row = int(self.row_of[oldest])
                self.release(oldest)
                return self._lower(index, row)
            self._reclaim(pool.capacity)
            room = (self.budget - self.allocated) // pool.capacity
            if not room:
                return None
        rows = pool.rows
        pool.resize(rows + int(min(room, pool.growth)), self.cached)
        return self._lower(index, rows)

    def _lower(self, index: int, row: int) -> int:
        """Return ``row``, or a lower one evicted from a prefix: attention reads all rows below the last."""
        pool = self.pools[index]
        low = pool.owner[: min(row, int(((self.state == ACTIVE) & (self.pool_of == index)).sum()) + _HOLES_ALLOWED)]
        idle = low[self.state[low] == RETAINED]
        if not len(idle):
            return row
        slot = int(idle[self._used_at[idle].argmin()])
        target = int(self.row_of[slot])
        pool.copy_row(row, pool, target, int(self.cached[slot]))
        pool.owner[row], pool.owner[target] = slot, -1
        self.row_of[slot] = row
        return target

    def _reclaim(self, tokens: int) -> None:
        """Free ``tokens`` tokens of memory: rows without owner first, then prefixes, the oldest first."""
        while self.budget - self.allocated < tokens:
            slack = [index for index, pool in enumerate(self.pools) if pool.used < pool.rows]
            if slack:
                for index in slack:
                    self._shrink(index, 0)
                continue
            oldest = self._oldest(RETAINED)
            if oldest is None:
                return
            self.release(oldest)

    def _shrink(self, index: int, spare: int) -> bool:
        """Drop the rows of a pool but those with an owner and ``spare`` more; return whether rows moved."""
        pool = self.pools[index]
        rows = min(pool.rows, pool.used + spare)
        moved = bool((pool.owner[rows:] >= 0).any())
        pool.resize(rows, self.cached)
        self._locate(index)
        return moved

    def _locate(self, index: int) -> None:
        rows = np.flatnonzero(self.pools[index].owner >= 0)
        self.row_of[self.pools[index].owner[rows]] = rows
