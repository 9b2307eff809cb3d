"""Where keys and values lie: rows of one capacity in one tensor.

Owns: :class:`KVPool` (the tensor of all layers, its views, its rows' owners) and :class:`Geometry`. Refuses: which
sequence gets which row (``kv.py``).
"""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True, slots=True)
class Geometry:
    """What a model's attention layers store.

    Attributes:
        layers: How many layers.
        heads: Key/value heads.
        key_dim: Size of a key.
        value_dim: Size of a value.
    """

    layers: int
    heads: int
    key_dim: int
    value_dim: int


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros; on the CPU as pages that cost nothing until they are written."""
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or not size:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.frombuffer(mmap.mmap(-1, size), dtype=dtype).view(shape)


class KVPool:
    """Rows that hold ``capacity`` tokens each.

    Attributes:
        capacity: Tokens per row.
        owner: int64 of shape [rows]: the slot that owns a row, or -1.
        keys: Per layer, a view of shape [rows, heads, capacity, key_dim].
        values: Per layer, a view of shape [rows, heads, capacity, value_dim].
    """

    __slots__ = ("_data", "_geometry", "capacity", "flat_keys", "flat_values", "keys", "owner", "values")

    def __init__(self, geometry: Geometry, capacity: int, dtype: torch.dtype, device: torch.device) -> None:
        self._geometry = geometry
        self.capacity = capacity
        # Zeros, not empty: what a mask hides must still be finite.
        self._bind(self._allocate(0, dtype, device))
        self.owner = np.zeros(0, dtype=np.int64)

    @property
    def rows(self) -> int:
        """How many rows are allocated."""
        return len(self.owner)

    @property
    def used(self) -> int:
        """How many rows have an owner."""
        return int((self.owner >= 0).sum())

    def _allocate(self, rows: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        shape = self._geometry
        width = max(shape.key_dim, shape.value_dim)
        return _zeros((2, shape.layers, rows, shape.heads, self.capacity, width), dtype, device)

    def _bind(self, data: torch.Tensor) -> None:
        shape = self._geometry
        self._data = data
        self.keys = [layer[..., : shape.key_dim] for layer in data[0]]
        self.values = [layer[..., : shape.value_dim] for layer in data[1]]
        width = data.shape[-1]
        self.flat_keys = [layer.view(-1, width)[:, : shape.key_dim] for layer in data[0]]
        self.flat_values = [layer.view(-1, width)[:, : shape.value_dim] for layer in data[1]]

    def resize(self, rows: int) -> npt.NDArray[np.int64]:
        """Change the number of rows; rows in use move to the low end when that is needed.

        Returns:
            int64 of shape [old rows]: the new place of each old row, -1 for rows that are gone.
        """
        places = np.full(self.rows, -1, dtype=np.int64)
        if rows >= self.rows:
            places[:] = np.arange(self.rows)
        else:
            kept = np.flatnonzero(self.owner >= 0)
            places[kept] = np.arange(len(kept))
        data = self._allocate(rows, self._data.dtype, self._data.device)
        for row in np.flatnonzero((self.owner >= 0) & (places >= 0)).tolist():
            data[:, :, int(places[row])].copy_(self._data[:, :, row])
        old = np.flatnonzero(places >= 0)
        owner = np.full(rows, -1, dtype=np.int64)
        owner[places[old]] = self.owner[old]
        self.owner = owner
        self._bind(data)
        return places

    def copy_row(self, row: int, source: KVPool, source_row: int, tokens: int) -> None:
        """Copy the first ``tokens`` keys and values of a row, of this pool or another."""
        self._data[:, :, row, :, :tokens].copy_(source._data[:, :, source_row, :, :tokens])

    def exchange(self, left: npt.NDArray[np.int64], right: npt.NDArray[np.int64], tokens: int) -> None:
        """Swap rows pairwise, contents and owners, up to ``tokens`` tokens of each."""
        # Row by row, with plain copies of long runs: indexing all rows at once takes three times as long.
        for low, high in zip(left.tolist(), right.tolist(), strict=True):
            one, other = self._data[:, :, low, :, :tokens], self._data[:, :, high, :, :tokens]
            kept = one.clone()
            one.copy_(other)
            other.copy_(kept)
        self.owner[left], self.owner[right] = self.owner[right].copy(), self.owner[left].copy()

    def zero_row(self, row: int) -> None:
        """Overwrite a row with zeros (it held values that are not finite)."""
        self._data[:, :, row].zero_()
