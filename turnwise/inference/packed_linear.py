"""Matrices of a served model in the layout that the CPU's matrix kernels read fastest.

Owns: :class:`PackedLinear` (a linear layer with a second, reordered copy of its matrix) and the choice of layers that
get one. Refuses: loading; after weights changed, :meth:`PackedLinear.pack` makes the copy anew.

A decoding step multiplies few rows by large matrices. oneDNN's kernels on a reordered matrix do that up to three
times as fast as a call that gets the matrix as it lies; small matrices and single rows gain nothing.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.nn.functional import linear

_PACKED_FROM = 180_000
"""Elements of the smallest matrix that is packed."""
_SINGLE_FROM = 1_000_000
"""Elements of the smallest fp32 matrix that is read packed for a single row."""
_ROWS = 32
"""Rows that the layout is made for; it serves any other number nearly as well."""
_SHARE_OF_MEMORY = 8
"""Copies take at most the machine's memory by this."""


class PackedLinear(torch.nn.Module):
    """A linear layer; ``weight`` and ``bias`` stay what and where they were, so that tied ones stay tied."""

    def __init__(self, layer: torch.nn.Linear) -> None:
        super().__init__()
        self.weight = layer.weight
        self.bias = layer.bias
        single = layer.weight.dtype != torch.float32 or layer.weight.numel() >= _SINGLE_FROM
        self._least = layer.in_features if single else 2 * layer.in_features
        self._packed: torch.Tensor
        self.pack()

    def pack(self) -> None:
        """Copy the weight as it is now."""
        # A tensor made in inference mode could not be used outside of it.
        with torch.inference_mode(False), torch.no_grad():
            self._packed = torch.ops.mkldnn._reorder_linear_weight.default(self.weight.detach(), _ROWS)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return ``rows @ weight.T + bias``: [..., in] to [..., out]."""
        if rows.numel() < self._least:
            return linear(rows, self.weight, self.bias)
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(rows, self._packed, self.bias, "none", [], "")
        return out


def pack_linears(model: torch.nn.Module) -> list[PackedLinear]:
    """Replace the linear layers of a model on the CPU that gain from it, the largest first while memory lasts.

    Returns:
        The new layers. Empty where torch has no such kernels for the model's device or dtype.
    """
    left = _memory() // _SHARE_OF_MEMORY
    candidates = []
    for parent in model.modules():
        for name, layer in parent.named_children():
            if type(layer) is torch.nn.Linear and _gains(layer.weight):
                candidates.append((layer.weight.numel(), parent, name, layer))
    made: list[PackedLinear] = []
    for _, parent, name, layer in sorted(candidates, key=lambda candidate: -candidate[0]):
        left -= layer.weight.nbytes
        if left < 0:
            break
        packed = PackedLinear(layer)
        setattr(parent, name, packed)
        made.append(packed)
    return made


def _gains(weight: torch.Tensor) -> bool:
    kernels: Any = torch.backends.mkldnn
    if weight.device.type != "cpu" or not kernels.is_available() or weight.numel() < _PACKED_FROM:
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def _memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
