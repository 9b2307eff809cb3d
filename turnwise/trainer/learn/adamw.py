"""AdamW whose moments may take 8 bits each."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

BLOCK = 64
"""Elements of a row that share a scale. Blocks end with their row, so that any number of ranks can share the rows."""
_SMALLEST = 4096
"""Elements of the smallest tensor whose moments are compressed."""
_PIECE = 1 << 21
"""Elements whose moments are float32 at a time."""
_LEVELS = {torch.int8: 127.0, torch.uint8: 255.0}


class Int8AdamW(torch.optim.AdamW):
    """AdamW by torch's fused kernel, whose moments are float32 only while a piece of a parameter is updated."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # noqa: ARG002 - torch's signature
        """Update the parameters that have a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    update(parameter, self.state, group, "int8")
        return None


def new_state(parameter: Tensor, state_dtype: str) -> dict[str, Tensor]:
    """Return AdamW's state of a parameter before its first update.

    Of ``int8`` that is ``exp_avg`` (int8) and ``exp_avg_sq`` (uint8), of the parameter's shape, each with a scale for
    every :data:`BLOCK` elements of a row. Vectors, small tensors and rows that blocks do not divide have float32.
    """
    state = {"step": torch.zeros((), dtype=torch.float32, device=parameter.device)}
    if state_dtype == "float32" or parameter.numel() < _SMALLEST or parameter.shape[-1] % BLOCK:
        return state | {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
    for name, dtype in (("exp_avg", torch.int8), ("exp_avg_sq", torch.uint8)):
        scale = torch.zeros_like(parameter[..., ::BLOCK], memory_format=torch.contiguous_format)
        state |= {name: torch.zeros_like(parameter, dtype=dtype), f"{name}_scale": scale}
    return state


def update(
    parameter: Tensor, states: MutableMapping[Tensor, dict[str, Tensor]], group: Mapping[str, Any], state_dtype: str
) -> None:
    """Update the part of a parameter that is here, piece by piece, and its state among an optimizer's."""
    assert parameter.grad is not None, "it has a gradient"
    state = states[parameter] = states.get(parameter) or new_state(parameter, state_dtype)
    weights, gradients = _local(parameter).view(-1), _local(parameter.grad).reshape(-1)
    stored = [_local(state[name]).view(-1) for name in ("exp_avg", "exp_avg_sq")]
    scales = [_local(state[name]).view(-1) for name in ("exp_avg_scale", "exp_avg_sq_scale") if name in state]
    settings = {name: group[name] for name in ("lr", "weight_decay", "eps", "amsgrad", "maximize")}
    settings["beta1"], settings["beta2"] = group["betas"]
    for start in range(0, weights.numel(), _PIECE):
        piece, blocks = slice(start, start + _PIECE), slice(start // BLOCK, (start + _PIECE) // BLOCK)
        moments = [codes[piece] for codes in stored]
        if scales:
            moments = [expand(codes, scale[blocks]) for codes, scale in zip(moments, scales, strict=True)]
        steps = [state["step"].clone()]
        adamw([weights[piece]], [gradients[piece]], moments[:1], moments[1:], [], steps, fused=True, **settings)
        for moment, codes, scale in zip(moments, stored, scales, strict=False):
            compress(moment, codes[piece], scale[blocks])
    state["step"].add_(1)


def _local(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def compress(moments: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Write moments as 8-bit codes with a scale for each block, the largest magnitude in it.

    Block-wise scales are those of Dettmers et al. 2022 (arXiv:2110.02861). Codes are even steps of the square root of
    a first moment, and of the fourth root of a second one: both then end at the same size of a gradient, so that a
    first moment is not divided by a second one that was rounded to zero.
    """
    blocks = moments.view(-1, BLOCK)
    torch.amax(blocks.abs(), 1, out=scales)
    shares = blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
    roots = shares.abs().sqrt_()
    roots = roots.mul_(shares.sign()) if codes.dtype == torch.int8 else roots.sqrt_()
    codes.copy_(roots.mul_(_LEVELS[codes.dtype]).round_().view(-1))


def expand(codes: Tensor, scales: Tensor) -> Tensor:
    """Return what :func:`compress` wrote, in float32."""
    roots = codes.view(-1, BLOCK).float().mul_(1 / _LEVELS[codes.dtype])
    shares = roots.mul_(roots.abs()) if codes.dtype == torch.int8 else roots.square_().square_()
    return shares.mul_(scales[:, None]).view(-1)
