"""The layers of a model in training: activations recomputed in the backward pass, and layers compiled."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from turnwise.engine.numerics.compilation import CompiledFunction
from turnwise.errors import TrainError, requires_extra

with requires_extra("transformers", "train", "training a model"):
    from transformers.modeling_layers import GradientCheckpointingLayer

# Their results are kept: they are what is slow to compute, and less than half of what a layer holds.
_MATMULS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]

# Sizes of padded rows between a power of two and the next: at most an eighth of a row is padding.
_SIZES_PER_DOUBLING = 8
_SMALLEST_ROW = 64


def padded_tokens(tokens: int) -> int:
    """Return the next of a few sizes, to which a row is padded for compiled layers."""
    if tokens <= _SMALLEST_ROW:
        return _SMALLEST_ROW
    step = (1 << (tokens - 1).bit_length() - 1) // _SIZES_PER_DOUBLING
    return -(-tokens // step) * step


def prepare_layers(model: Any, *, checkpointing: bool | Literal["matmuls"], compiled: bool) -> None:
    """Have each layer recompute its activations in the backward pass, and compute compiled.

    Compiled layers keep the results of matrix products by themselves, so that ``matmuls`` adds nothing to them.

    Raises:
        TrainError: The model's layers cannot.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not (layers and model.supports_gradient_checkpointing):
        key = "gradient_checkpointing" if checkpointing else "optimizations (compile)"
        raise TrainError(f"model.{key} is set, but {type(model).__name__} does not support it")
    context: Callable[[], Any] | None = None
    if checkpointing is True:
        context = noop_context_fn
    elif checkpointing and not compiled:
        context = partial(create_selective_checkpoint_contexts, _MATMULS)
    kinds: set[Any] = {type(layer) for layer in layers} if compiled else set()
    # One function for all layers of a class, which is what transformers' wrapper would call.
    functions = {kind: CompiledFunction(kind.forward.__wrapped__, dynamic=False) for kind in kinds}
    for layer in layers:
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = partial(_run_layer, layer, functions.get(type(layer)), context)
        # Transformers asks for it in training mode only: the layer's flag is set, and reset while it computes.
        layer.training = True


def _run_layer(
    layer: nn.Module,
    compiled: CompiledFunction | None,
    context: Callable[[], Any] | None,
    forward: partial[Any],
    *inputs: Any,
) -> Any:
    """Run a layer in evaluation mode, with ``context`` under checkpointing: dropout and router noise stay off."""

    def evaluate(*inputs: Any) -> Any:
        layer.training = False
        try:
            return (compiled or forward.func)(*forward.args, *inputs, **forward.keywords)
        finally:
            layer.training = True

    if context is None:
        return evaluate(*inputs)
    return checkpoint(evaluate, *inputs, use_reentrant=False, context_fn=context)
