"""The kernels of decoding in plain torch, on rows in main memory: for a CPU, where Triton compiles none."""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from turnwise.engine.batching.kv_cache import Geometry


class PlainKernels:
    """``turnwise.engine.decoding.kernels`` for float32 rows of a CPU."""

    def store(self, key: torch.Tensor, value: torch.Tensor, rows: torch.Tensor, geometry: Geometry, layer: int) -> None:
        for token, (position, *row) in enumerate(rows.T.tolist()):
            if position >= 0:
                keys, values = views(row, geometry, layer)
                keys[:, position], values[:, position] = key[token], value[token]

    def attend(
        self,
        query: torch.Tensor,
        rows: torch.Tensor,
        geometry: Geometry,
        layer: int,
        scale: float | None,
        window: int | None,
    ) -> torch.Tensor:
        out = query.new_zeros((*query.shape[:2], geometry.value_dim))
        for token, (position, *row) in enumerate(rows.T.tolist()):
            if position >= 0:
                first = 0 if window is None else max(0, position + 1 - window)
                keys, values = (view[:, first : position + 1] for view in views(row, geometry, layer))
                queries = query[token].view(geometry.heads, -1, geometry.key_dim)
                scores = queries @ keys.transpose(1, 2) * (geometry.key_dim**-0.5 if scale is None else scale)
                out[token] = (scores.softmax(-1) @ values).reshape(query.shape[1], -1)
        return out


def views(row: list[int], geometry: Geometry, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and values of a row, [heads, capacity, dim], by its address, layer size and capacity."""
    address, step, capacity = row
    width = max(geometry.key_dim, geometry.value_dim)

    def view(offset: int, size: int) -> torch.Tensor:
        count = geometry.heads * capacity * width
        memory = (ctypes.c_float * count).from_address(address + 4 * offset * step)
        return torch.from_numpy(np.ctypeslib.as_array(memory)).view(geometry.heads, capacity, width)[..., :size]

    return view(layer, geometry.key_dim), view(geometry.layers + layer, geometry.value_dim)
