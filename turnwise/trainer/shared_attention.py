"""Attention over a forest of segments on a CPU, where keys that many tokens share are read where they stand.

Owns: :func:`shared_attention`. Each segment attends to itself, causally; and each segment that has descendants is
attended to by all their tokens at once, as one rectangle without a mask (their tokens stand right behind it). A token's
parts are put together by the logarithms of their softmax denominators, as ring and cascade attention do
(arXiv:2310.01889, arXiv:2402.05099). Refuses: windows, soft caps and sinks (``attention.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from turnwise.trainer.layout import OwnBucket, PackedLayout

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

# In place of a denominator's logarithm where a query is padding: its weights, and so its gradients, become 0.
_NO_WEIGHT = 1e30


def shared_attention(query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, scaling: float | None) -> Tensor:
    """Attend to one's own segment up to oneself, and to its ancestors.

    Args:
        query: Shape [1, H, T, D].
        key: Shape [1, K, T, D], H a multiple of K.
        value: Shape [1, K, T, D].
        layout: The segments.
        scaling: Factor of the scores; None is ``D ** -0.5``.

    Returns:
        Shape [1, T, H, D].
    """
    return _apply(query, key, value, layout, scaling)


class _SharedAttention(torch.autograd.Function):
    """Softmax over several blocks of keys.

    With the denominator over all blocks, weights and gradients of each block are those of plain attention restricted to
    it: dS = P * (dP - sum(dO * O)) needs O and the denominator as a whole and nothing else of the other blocks.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, scale: float | None) -> Tensor:
        tokens, heads = q.shape[2], q.shape[1]
        shared = layout.shared
        out = q.new_empty((1, tokens, heads, q.shape[3]))
        # As the kernel returns and expects it: heads are the innermost dimension.
        lse = q.new_empty((1, tokens, heads), dtype=torch.float32)
        for bucket in layout.own_buckets:
            part, denominator = _forward(*(_dense(x, bucket) for x in (q, k, v)), 0.0, True, scale=scale)
            _put(out, part.transpose(1, 2), bucket)
            _put(lse, denominator.transpose(1, 2), bucket)
        if shared and out.dtype != torch.float32:
            # Parts are added up in float32.
            out = out.float()
        for start, end, last in shared:
            part, denominator = _forward(q[:, :, end:last], k[:, :, start:end], v[:, :, start:end], scale=scale)
            _merge(out[:, end:last], lse[:, end:last], part.transpose(1, 2), denominator.transpose(1, 2))
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.layout, ctx.scale = layout, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, out, lse = ctx.saved_tensors
        layout, scale = ctx.layout, ctx.scale
        given, out, lse = (x.transpose(1, 2) for x in (grad, out, lse))
        # Laid out with heads inside, as queries, keys and values are made.
        grads = [torch.empty_like(x.transpose(1, 2)).transpose(1, 2) for x in (q, k, v)]
        for bucket in layout.own_buckets:
            dense = [_dense(x, bucket) for x in (given, q, k, v, out, lse)]
            if bucket.pads.numel():
                _flat(dense[0]).index_fill_(0, bucket.pads, 0.0)
                _flat(dense[5]).index_fill_(0, bucket.pads, _NO_WEIGHT)
            for total, part in zip(grads, _backward(*dense, 0.0, True, scale=scale), strict=True):
                _put(total.transpose(1, 2), part.transpose(1, 2), bucket)
        for start, end, last in layout.shared:
            below, above = slice(end, last), slice(start, end)
            parts = _backward(
                given[:, :, below], q[:, :, below], k[:, :, above], v[:, :, above], out[:, :, below], lse[:, :, below],
                0.0, False, scale=scale,
            )  # fmt: skip
            for total, part, where in zip(grads, parts, (below, above, above), strict=True):
                total[:, :, where] += part
        return grads[0], grads[1], grads[2], None, None


_apply: Callable[..., Tensor] = _SharedAttention.apply


def _flat(dense: Tensor) -> Tensor:
    """Return [n, H, L, ...] as a view [n * L, H, ...]; it was made by :func:`_dense`."""
    return dense.transpose(1, 2).flatten(0, 1)


def _dense(values: Tensor, bucket: OwnBucket) -> Tensor:
    """[1, H, T, ...] to [n, H, L, ...]; of one segment a view."""
    count, length = bucket.shape
    if bucket.start >= 0:
        return values[:, :, bucket.start : bucket.start + length]
    packed = values[0].transpose(0, 1)
    return packed.index_select(0, bucket.gather).view(count, length, *packed.shape[1:]).transpose(1, 2)


def _put(packed: Tensor, dense: Tensor, bucket: OwnBucket) -> None:
    """Write [n, L, H, ...] where it belongs in [1, T, H, ...]; padding is left out."""
    if bucket.start >= 0:
        packed[:, bucket.start : bucket.start + bucket.shape[1]] = dense
        return
    flat = dense.flatten(0, 1)
    packed[0].index_copy_(0, bucket.packed, flat if bucket.valid is None else flat.index_select(0, bucket.valid))


def _merge(out: Tensor, lse: Tensor, part: Tensor, denominator: Tensor) -> None:
    """Add a block's attention, in place: out [1, t, H, D] and lse [1, t, H] then cover its keys, too."""
    both = torch.logaddexp(lse, denominator)
    out.mul_(torch.exp(lse - both)[..., None]).addcmul_(part.to(out.dtype), torch.exp(denominator - both)[..., None])
    lse.copy_(both)
