"""Forms of a train step with less time or memory: which of them a device, a type and a model have."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from turnwise.engine.accelerator import has_kernels, main_memory, on_cpu
from turnwise.trainer.config.policy import BASES, Optimization
from turnwise.trainer.model.attention import varlen_obstacle

_INSTEAD: dict[Optimization, str] = {
    "varlen": "attention over gathered segments",
    "compile": "blocks as they are",
    "fused_loss": "log-probabilities by separate kernels",
    "bfloat16_weights": "float32 weights, rounded in each product",
    "bfloat16_base": "frozen weights in float32",
    "offload_activations": "activations where they are",
    "release_gradients": "gradients until the step",
}

# Smaller tensors are not worth a copy.
_LEAST_OFFLOADED = 1 << 16

_log = logging.getLogger(__name__)


def choose_optimizations(
    configured: Sequence[Optimization] | None, device: torch.device, compute_dtype: str, uncompiled: str | None
) -> frozenset[Optimization]:
    """Return those of the configured optimizations that can be used; a line in the log names each of the others.

    For ``bfloat16_base``, which loading needs to know, ask :func:`holds_bfloat16`; loading reads ``nf4_base`` itself.

    Args:
        configured: Their names; None for ``varlen`` (in bfloat16) and ``fused_loss`` on a GPU, and none on a CPU.
        device: The model's.
        compute_dtype: Type of its matrix products.
        uncompiled: Why its layers cannot be compiled.
    """
    names: Sequence[Optimization] = [name for name in configured or () if name not in BASES]
    if configured is None and not on_cpu(device):
        names = ("varlen", "fused_loss") if compute_dtype == "bfloat16" else ("fused_loss",)
    obstacles = {name: _obstacle(name, device, compute_dtype, uncompiled) for name in names}
    for name, obstacle in obstacles.items():
        if obstacle is not None:
            _warn(name, obstacle)
    return frozenset(name for name, obstacle in obstacles.items() if obstacle is None)


def holds_bfloat16(configured: Sequence[Optimization] | None, device: torch.device, obstacle: str | None) -> bool:
    """Return whether frozen matrices are held in bfloat16; by default where nothing stands against it on a GPU.

    With ``nf4_base`` those that are not quantized are.
    """
    chosen = not on_cpu(device) if configured is None else not BASES.isdisjoint(configured)
    if obstacle is not None and "bfloat16_base" in (configured or ()):
        _warn("bfloat16_base", obstacle)
    return chosen and obstacle is None


def _warn(name: Optimization, obstacle: str) -> None:
    _log.warning("model.optimizations: %s is left out, as %s: %s instead", name, obstacle, _INSTEAD[name])


def _obstacle(name: Optimization, device: torch.device, compute_dtype: str, uncompiled: str | None) -> str | None:
    if name in ("varlen", "bfloat16_weights") and compute_dtype != "bfloat16":
        return f"model.compute_dtype is {compute_dtype}"
    if name == "compile" and uncompiled is not None:
        return uncompiled
    if name in ("compile", "fused_loss") and not (on_cpu(device) or has_kernels(device)):
        return f"there is no Triton for {device.type}"
    if name == "offload_activations" and on_cpu(device):
        return "they are in main memory already"
    return varlen_obstacle(device) if name == "varlen" else None


@contextmanager
def offloading(model: nn.Module) -> Iterator[None]:
    """Keep what the backward pass needs of a forward pass within in main memory, but for parameters and small tensors.

    Copies are of page-locked memory and in the order of the device's kernels, which no one waits for.
    """
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def store(tensor: Tensor) -> Tensor | tuple[torch.device, Tensor]:
        if tensor.nbytes < _LEAST_OFFLOADED or tensor.untyped_storage().data_ptr() in weights:
            return tensor
        # Strides are kept: kernels choose their order of sums by them.
        copy = torch.empty_like(tensor, device=main_memory(), pin_memory=not on_cpu(tensor.device))
        return tensor.device, copy.copy_(tensor, non_blocking=True)

    def load(stored: Tensor | tuple[torch.device, Tensor]) -> Tensor:
        return stored if isinstance(stored, Tensor) else stored[1].to(stored[0], non_blocking=True)

    with torch.autograd.graph.saved_tensors_hooks(store, load):
        yield


@contextmanager
def bfloat16_weights(model: nn.Module) -> Iterator[None]:
    """Compute with bfloat16 copies of a model's float32 parameters, which keep the sums of the gradients.

    Within, each parameter holds its copy, made at the start, and the states between layers are bfloat16 too. Each
    gradient is added to the float32 sum as soon as it is complete. Afterwards parameters and gradients are float32.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.dtype == torch.float32]
    masters = [parameter.data for parameter in parameters]
    sums = [parameter.grad for parameter in parameters]
    hooks = []

    def add(number: int, parameter: Tensor) -> None:
        assert parameter.grad is not None, "it was just accumulated"
        total = sums[number]
        sums[number] = parameter.grad.float() if total is None else total.add_(parameter.grad)
        parameter.grad = None

    try:
        for number, parameter in enumerate(parameters):
            parameter.grad = None
            parameter.data = masters[number].to(torch.bfloat16)
            if parameter.requires_grad:
                hook: Any = parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    partial(add, number)
                )
                hooks.append(hook)
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for parameter, master, total in zip(parameters, masters, sums, strict=True):
            parameter.grad = None
            parameter.data = master
            parameter.grad = total
