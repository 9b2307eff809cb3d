"""Exact numerics: operations whose result for a token does not depend on what is computed beside it.

Kernels choose their order of sums by the shape of the whole call, so that a token's log-probabilities depend on its
batch. The operations here have one order: products with a weight by oneDNN's prepacked layout, attention over whole
blocks of keys, logarithms of softmax over whole rows. Engine and trainer both compute by them in float32 on a CPU, and
get equal bits.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from turnwise.engine.accelerator import on_cpu

KEY_BLOCK = 512
"""Keys that torch's attention kernel for CPUs adds up at a time; MKL's sum over keys depends on a block's length."""
_QUERIES = 8
"""Queries are padded to a multiple of this: products of fewer rows have another order of sums."""
_ROWS = 8
"""Fewest rows of a product, for the same reason."""
_LAYOUT_ROWS = 32
"""Rows that prepacked layouts are made for; results do not depend on it."""
DIGEST_EVERY = 16
"""Of one in so many sampled ids the logits are recorded, by digest."""

_attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def pack_weight(weight: Tensor) -> Tensor:
    """Return a copy of a weight of shape [out, in] in oneDNN's layout."""
    # A tensor made in inference mode could not be used outside of it.
    with torch.inference_mode(False), torch.no_grad():
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight.default(weight.detach(), _LAYOUT_ROWS)
    return packed


def multiply(rows: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``rows @ weight.T + bias``, given the packed weight: [..., in] to [..., out]."""
    flat = rows.reshape(-1, rows.shape[-1])
    count = len(flat)
    if count < _ROWS:
        flat = nn.functional.pad(flat, (0, 0, 0, _ROWS - count))
    out: Tensor = torch.ops.mkldnn._linear_pointwise.default(flat, packed, bias, "none", [], "")
    return out[:count].view(*rows.shape[:-1], out.shape[-1])


class _Product(torch.autograd.Function):
    """(rows, weight, bias, packed weight) to the product; gradients by plain products."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, packed: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.biased = bias is not None
        return multiply(rows, packed, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        flat = grad.reshape(-1, grad.shape[-1])
        of_rows = grad @ weight if ctx.needs_input_grad[0] else None
        of_weight = flat.T @ rows.reshape(-1, rows.shape[-1]) if ctx.needs_input_grad[1] else None
        return of_rows, of_weight, flat.sum(0) if ctx.biased else None, None


class ExactLinear(nn.Linear):
    """A linear layer by the packed layout; ``weight`` and ``bias`` stay in place, so that tied ones stay tied."""

    def __init__(self, layer: nn.Linear) -> None:
        """Take the place of a layer; its weight, which may change, is packed in each call until :meth:`pack`."""
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias = layer.weight, layer.bias
        self._packed: Tensor | None = None

    @property
    def packed(self) -> Tensor:
        """The weight in oneDNN's layout."""
        return pack_weight(self.weight) if self._packed is None else self._packed

    def pack(self) -> None:
        """Keep a packed copy of the weight as it is now."""
        self._packed = pack_weight(self.weight)

    def unpack(self) -> None:
        """Drop the packed copy, until the next :meth:`pack`."""
        self._packed = None

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        """Return ``input @ weight.T + bias``: [..., in] to [..., out]."""
        if torch.is_grad_enabled():
            out: Tensor = _Product.apply(input, self.weight, self.bias, self.packed)  # type: ignore[no-untyped-call]
            return out
        return multiply(input, self.packed, self.bias)


@contextmanager
def packed_once(layers: Sequence[ExactLinear]) -> Iterator[None]:
    """Keep packed copies within the context, in which no weight may change."""
    for layer in layers:
        layer.pack()
    try:
        yield
    finally:
        for layer in layers:
            layer.unpack()


class _Activation(torch.autograd.Function):
    """An activation by operations without a scalar tail, with torch's gradient: (states, approximate) to its values.

    ``approximate`` is that of GELU; None is SiLU. torch's own kernels compute the elements that fill no vector by other
    functions.
    """

    @staticmethod
    def forward(ctx: Any, states: Tensor, approximate: str | None) -> Tensor:
        ctx.save_for_backward(states)
        ctx.approximate = approximate
        if approximate is None:
            # Hendrycks and Gimpel 2016, arXiv:1606.08415: x / (1 + exp(-x)).
            return states / states.neg().exp_().add_(1.0)
        # The same paper: 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))).
        inner = (states * states).mul_(states).mul_(0.044715).add_(states).mul_(math.sqrt(2.0 / math.pi))
        return inner.tanh_().add_(1.0).mul_(states).mul_(0.5)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (states,) = ctx.saved_tensors
        if ctx.approximate is None:
            return torch.ops.aten.silu_backward.default(grad, states), None
        return torch.ops.aten.gelu_backward.default(grad, states, approximate=ctx.approximate), None


class ExactActivation(nn.Module):
    """SiLU, or with ``approximate`` GELU by tanh."""

    def __init__(self, approximate: str | None = None) -> None:
        super().__init__()
        self._approximate = approximate

    def forward(self, states: Tensor) -> Tensor:
        """Return the activation of each element."""
        # Views of a fused product would be computed line by line.
        active: Tensor = _Activation.apply(states.contiguous(), self._approximate)  # type: ignore[no-untyped-call]
        return active


class _Attention(torch.autograd.Function):
    """Attention on whole blocks of keys, whose gradients are computed without the keys that fill a block."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float | None
    ) -> Tensor:
        out, normalizer = _attend_blocks(query, key, value, mask, causal, scale)
        ctx.save_for_backward(query, key, value, mask, out, normalizer)
        ctx.causal, ctx.scale = causal, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, out, normalizer = ctx.saved_tensors
        gradients: tuple[Tensor, ...] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
            grad, query, key, value, out, normalizer, 0.0, ctx.causal, attn_mask=mask, scale=ctx.scale
        )
        return *gradients, None, None, None


def _attend_blocks(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Return attention and the logarithm of its normalizer, after filling up queries and blocks of keys."""
    count = query.shape[2]
    if queries := -count % _QUERIES:
        query = nn.functional.pad(query, (0, 0, 0, queries))
        if mask is not None and mask.shape[2] > 1:
            mask = nn.functional.pad(mask, (0, 0, 0, queries))
    if keys := -key.shape[2] % KEY_BLOCK:
        key, value = (nn.functional.pad(states, (0, 0, 0, keys)) for states in (key, value))
        if mask is not None:
            mask = nn.functional.pad(mask, (0, keys), value=-math.inf)
    out, normalizer = _attend(query, key, value, 0.0, causal, attn_mask=mask, scale=scale)
    return out[:, :, :count], normalizer[:, :, :count]


def exact_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``scaled_dot_product_attention`` on whole blocks of keys, which stand at their positions: [n, K, S, D].

    ``attn_mask`` is added to the scores, or None where each query sees the keys up to its own number.
    """
    del enable_gqa  # the kernel shares key heads unasked
    if value.shape[3] != query.shape[3] or (attn_mask is None and not is_causal):
        raise ValueError(f"attention without a mask, or to values of {value.shape[3]} by queries of {query.shape[3]}")
    if torch.is_grad_enabled():
        out: Tensor = _Attention.apply(query, key, value, attn_mask, is_causal, scale)  # type: ignore[no-untyped-call]
        return out
    return _attend_blocks(query, key, value, attn_mask, is_causal, scale)[0]


def token_logprobs(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the log-probability of an id in each row: [N, vocabulary] and [N] to [N]."""
    return logits.log_softmax(-1).gather(1, ids[:, None])[:, 0]


def digest_logits(row: Tensor) -> str:
    """Return a digest of an id's float32 logits, before temperature and masks: [vocabulary] to 8 hex digits."""
    return hashlib.blake2b(row.numpy().tobytes(), digest_size=4).hexdigest()


def make_exact(model: Any, device: torch.device) -> list[ExactLinear]:
    """Substitute the operations of a float32 model on a CPU, and return its products; attention is its caller's choice.

    The model may have no memory yet: ``device`` is that of its products.

    Raises:
        ValueError: The model, its type or its device has no exact form; names the operation.
    """
    weight = next(iter(model.parameters()))
    if not on_cpu(device):
        raise ValueError(f"products on {device.type} add up in an order that depends on their rows")
    if weight.dtype != torch.float32:
        raise ValueError(
            f"its weights are {str(weight.dtype).removeprefix('torch.')}: the trainer's products are float32"
        )
    kernels: Any = torch.backends.mkldnn
    if not kernels.is_available():
        raise ValueError("this torch has no oneDNN, whose packed products have one order of sums")
    packed: list[ExactLinear] = []
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                packed.append(layer := ExactLinear(child))
                setattr(parent, name, layer)
            elif (kind := type(child).__name__) in _ACTIVATIONS:
                setattr(parent, name, ExactActivation(_ACTIVATIONS[kind]))
            elif kind in _MIXTURES:
                # Else all experts are one product, whose rows are those of a batch.
                model.set_experts_implementation("eager")
                child.forward = partial(_by_packed_products, child.forward)
            elif getattr(child, "gate_up_proj", None) is not None and isinstance(child.gate_up_proj, nn.Parameter):
                raise ValueError(f"the products of its experts ({type(child).__name__}) have no exact form")
    return packed


class _PackedProducts(TorchFunctionMode):
    """Computes products of functions by layouts that are packed for the call: weights of mixtures are in no layer."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not nn.functional.linear:
            return func(*args, **(kwargs or {}))
        rows, weight = args
        if torch.is_grad_enabled():
            return _Product.apply(rows, weight, None, pack_weight(weight))  # type: ignore[no-untyped-call]
        return multiply(rows, pack_weight(weight))


def _by_packed_products(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _PackedProducts():
        return forward(*args, **kwargs)


_MIXTURES = {"Qwen3MoeTopKRouter", "Qwen3MoeExperts"}
_ACTIVATIONS = {"SiLU": None, "SiLUActivation": None, "GELUTanh": "tanh", "PytorchGELUTanh": "tanh"}
