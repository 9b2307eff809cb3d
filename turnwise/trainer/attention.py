"""Causal attention over packed segments, for any Hugging Face model.

Owns: the attention function that ``transformers`` calls under :data:`ATTENTION`. The layout of the segments
(``layout.py``) travels as a keyword argument of the model's forward. A token sees the tokens of its own segment up to
itself and all of its segment's ancestors; which of three ways computes that is decided here (``shared_attention.py`` on
a CPU, ``flex_attention.py`` for trees on a GPU, and the one of this file for everything else). Refuses: models whose
attention asks for something that none of them computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody reads
from torch import Tensor, nn

from turnwise.errors import TrainError
from turnwise.trainer.flex_attention import flex_tree_attention
from turnwise.trainer.layout import Bucket, PackedLayout
from turnwise.trainer.shared_attention import shared_attention

ATTENTION = "turnwise_packed"
"""The name under which :func:`packed_attention` is registered with ``transformers.AttentionInterface``."""

LAYOUT_ARGUMENT = "turnwise_layout"
"""The keyword argument of the forward that holds the :class:`PackedLayout`."""


class _Collect(torch.autograd.Function):
    """[P, ...] to [T, ...]. The gradient of padding is set to zero, which keeps it out of keys and values."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, gather: Tensor, scatter: Tensor, pads: Tensor) -> Tensor:
        ctx.save_for_backward(gather, pads)
        return values.index_select(0, scatter)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        gather, pads = ctx.saved_tensors
        return grad.index_select(0, gather).index_fill_(0, pads, 0.0), None, None, None


_collect: Callable[..., Tensor] = _Collect.apply


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend within each segment and to its ancestors, causally. The signature is the one that ``transformers`` calls.

    Args:
        module: The attention layer (not read).
        query: Shape [1, H, T, D].
        key: Shape [1, K, T, D], H a multiple of K.
        value: Shape [1, K, T, V].
        attention_mask: None: the layout says everything.
        dropout: Not applied: rollout and training must compute the same function.
        scaling: Factor of the scores; None is ``D ** -0.5``.
        sliding_window: A token sees this many tokens of its path, itself included; None is all before it.
        softcap: Scores become ``softcap * tanh(scores / softcap)``; None leaves them.
        s_aux: Shape [H], a score per head that takes part in the softmax and has no value (attention sinks).
        **kwargs: Holds the layout.

    Returns:
        Shape [1, T, H, V], and None for the weights.

    Raises:
        TrainError: No layout arrived, a mask or position bias did, or the batch is not one packed row.
    """
    del module, dropout
    layout = _layout_of(query, attention_mask, kwargs)
    window = None if sliding_window is None or sliding_window >= layout.longest_path else sliding_window
    if torch.is_autocast_enabled(query.device.type):
        # What scaled_dot_product_attention would do; rotary embeddings leave queries and keys in float32.
        query, key, value = (x.to(torch.get_autocast_dtype(query.device.type)) for x in (query, key, value))
    plain = window is None and softcap is None and s_aux is None and value.shape[-1] == query.shape[-1]
    if plain and query.device.type == "cpu":
        return shared_attention(query, key, value, layout, scaling), None
    if layout.is_tree and query.device.type == "cuda":
        return flex_tree_attention(query, key, value, layout, scaling, window, softcap, s_aux), None
    return _by_paths(query, key, value, layout, scaling, window, softcap, s_aux), None


def _layout_of(query: Tensor, attention_mask: Tensor | None, given: Mapping[str, Any]) -> PackedLayout:
    """Return the layout among the keyword arguments of an attention call, if nothing else says who sees whom."""
    layout = given.get(LAYOUT_ARGUMENT)
    if not isinstance(layout, PackedLayout):
        raise TrainError(
            "the layout of the packed segments did not reach the attention layer: this model does not hand keyword "
            "arguments of its forward on to attention, so it cannot be trained packed"
        )
    if attention_mask is not None or given.get("position_bias") is not None:
        raise TrainError("this model gives its attention a mask or position bias, which packed training cannot follow")
    if query.shape[0] != 1:
        raise TrainError(f"packed attention takes one packed row, not a batch of {query.shape[0]}")
    return layout


def _by_paths(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: PackedLayout,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention by segments of similar shape, each over the keys of its whole path: computes everything, on any device.

    The keys of a shared ancestor are copied to each of its segments; their gradients add up in the backward pass.
    """
    # [1, H, T, D] -> [T, H, D]: heads stay together, so that one gather moves whole tokens.
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    outputs = []
    for bucket in layout.path_buckets:
        bq = q.index_select(0, bucket.queries).view(*bucket.shape, *q.shape[1:]).transpose(1, 2)
        count = bucket.shape[0]
        bk, bv = (x.index_select(0, bucket.keys).view(count, -1, *x.shape[1:]).transpose(1, 2) for x in (k, v))
        mask = _path_mask(bucket, window)
        if softcap is None and sinks is None:
            grouped = bq.shape[1] != bk.shape[1]
            out = F.scaled_dot_product_attention(
                bq, bk, bv, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped
            )
        else:
            out = _explicit_attention(bq, bk, bv, mask, scaling, softcap, sinks)
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    dense = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
    return _collect(dense, layout.dense_queries, layout.scatter, layout.pads)[None]


def _path_mask(bucket: Bucket, window: int | None) -> Tensor | None:
    """Return who sees whom, [n, 1, L, S]; None where that is plainly causal."""
    if bucket.square and window is None:
        return None
    depth = torch.arange(bucket.keys.shape[0] // bucket.shape[0], device=bucket.keys.device)
    # The key at index j of a path has position j, so padding behind a path is seen by padding only.
    distance = bucket.depths.view(*bucket.shape)[:, :, None] - depth
    seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    return seen[:, None]


def _explicit_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention written out, for what the fused kernels lack. Shapes as in ``scaled_dot_product_attention``."""
    groups, length = query.shape[1] // key.shape[1], query.shape[2]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is None:
        mask = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
    scores = scores.float().masked_fill(~mask, -torch.inf)
    if sinks is not None:
        column = sinks.float().view(1, -1, 1, 1).expand(scores.shape[0], -1, length, 1)
        weights = torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return weights.to(value.dtype) @ value
