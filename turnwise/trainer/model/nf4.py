"""Frozen matrices under adapters in four bits (QLoRA, arXiv:2305.14314), by torchao."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from turnwise.errors import MissingExtraError, TrainError

BLOCK = 64
"""Numbers of a matrix that share a scale."""

# Scales are quantized too, at most so many together.
_SCALES = 256


def check_adapted(adapted: bool) -> None:
    """Check that matrices are frozen and can be quantized.

    Raises:
        TrainError: All weights are trained.
        MissingExtraError: torchao is not installed.
    """
    if not adapted:
        raise TrainError(
            "model.optimizations has nf4_base, but all weights are trained: give model.lora, or remove nf4_base"
        )
    _torchao()


def quantize_base(model: Any, *, served_merged: bool) -> None:
    """Replace the frozen matrices of linear layers by NF4 tensors, one layer after another.

    Each block of 64 numbers has a scale, and becomes the nearest of 16 quantiles of a normal distribution (QLoRA,
    sections 2 and 3). The output matrix, which may be the embedding, and matrices that no blocks divide stay.

    Args:
        model: The model, on any device.
        served_merged: Whether servers are sent its weights.

    Raises:
        TrainError: They are.
    """
    if served_merged:
        raise TrainError(
            "model.optimizations has nf4_base, but adapters on experts are merged for servers, into weights that are "
            "not quantized: name other model.lora.targets, or remove nf4_base"
        )
    quantize, output = _torchao().to_nf4, model.get_output_embeddings()
    for name, layer in model.named_modules():
        if not isinstance(layer, nn.Linear) or layer is output or ".lora_" in name or layer.weight.numel() % BLOCK:
            continue
        scales = layer.weight.numel() // BLOCK
        # The largest power of two that divides them.
        matrix = quantize(layer.weight.detach(), BLOCK, min(_SCALES, scales & -scales))
        layer.weight = nn.Parameter(matrix, requires_grad=False)


def is_nf4(matrix: Tensor) -> bool:
    """Return whether a matrix is held in four bits."""
    # Without torchao there is none.
    return type(matrix).__name__ == "NF4Tensor"


def nf4_bytes(numbers: int) -> float:
    """Return the bytes of so many numbers: half of one, of each block a scale of 8 bits, and theirs in float32."""
    return numbers * (0.5 + 1 / BLOCK + 4 / BLOCK / _SCALES)


def _torchao() -> Any:
    try:
        from torchao import quantization
    except ImportError as error:
        raise MissingExtraError("torchao", "nf4", "frozen matrices in four bits (optimizations: nf4_base)") from error
    return quantization
