"""Causal attention over packed segments, for any Hugging Face model.

Owns: :class:`PackedLayout` and the attention function that ``transformers`` calls under :data:`ATTENTION`. The layout
travels as a keyword argument of the model's forward. Refuses: segments with a parent, and models whose attention asks
for something this function does not compute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody reads
from torch import Tensor, nn

from turnwise.errors import TrainError

ATTENTION = "turnwise_packed"
"""The name under which :func:`packed_attention` is registered with ``transformers.AttentionInterface``."""

LAYOUT_ARGUMENT = "turnwise_layout"
"""The keyword argument of the forward that holds the :class:`PackedLayout`."""

# Shorter segments join a bucket down to this share of its longest: less wastes calls, more wastes padding.
_BUCKET_RATIO = 0.75


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """How a packed row is spread over dense [n, L] buckets of segments of similar length, and back.

    Attributes:
        gather: int64 of shape [P]: for each dense position the packed position it shows (any, where it is padding).
        scatter: int64 of shape [T]: for each packed position its dense position.
        pads: int64: the dense positions that are padding.
        buckets: (n, L) of each bucket, in the order in which they lie in the dense positions.
    """

    gather: Tensor
    scatter: Tensor
    pads: Tensor
    buckets: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, segments: Sequence[tuple[int, int, int]], device: torch.device) -> PackedLayout:
        """Make the layout of (start, length, parent) segments that cover [0, T) in order.

        Raises:
            TrainError: A segment has a parent.
        """
        for number, (_, _, parent) in enumerate(segments):
            if parent != -1:
                raise TrainError(
                    f"segment {number} has parent {parent}: segments that share a prefix are not supported by "
                    "this attention; pack rows with parent -1"
                )
        groups: list[list[int]] = []
        for number in sorted(range(len(segments)), key=lambda n: -segments[n][1]):
            if groups and segments[number][1] >= _BUCKET_RATIO * segments[groups[-1][0]][1]:
                groups[-1].append(number)
            else:
                groups.append([number])
        starts = torch.tensor([start for start, _, _ in segments])
        lengths = torch.tensor([length for _, length, _ in segments])
        gathers, valids, buckets = [], [], []
        for group in groups:
            longest = segments[group[0]][1]
            members = torch.tensor(group)
            offsets = torch.arange(longest)[None, :]
            valid = offsets < lengths[members][:, None]
            gathers.append(torch.where(valid, starts[members][:, None] + offsets, starts[members][:, None]).flatten())
            valids.append(valid.flatten())
            buckets.append((len(group), longest))
        gather, valid = torch.cat(gathers), torch.cat(valids)
        dense = torch.nonzero(valid).flatten()
        scatter = torch.empty(int(lengths.sum()), dtype=torch.int64)
        scatter[gather[dense]] = dense
        pads = torch.nonzero(~valid).flatten()
        return cls(gather.to(device), scatter.to(device), pads.to(device), tuple(buckets))


class _Spread(torch.autograd.Function):
    """[T, ...] to [P, ...]. Padding receives no gradient, so the backward pass is a plain gather, not a scatter-add."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, gather: Tensor, scatter: Tensor) -> Tensor:
        ctx.save_for_backward(scatter)
        return values.index_select(0, gather)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (scatter,) = ctx.saved_tensors
        return grad.index_select(0, scatter), None, None


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


_spread: Callable[..., Tensor] = _Spread.apply
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
    """Attend within each segment, causally. The signature is the one that ``transformers`` calls.

    Args:
        module: The attention layer (not read).
        query: Shape [1, H, T, D].
        key: Shape [1, K, T, D], H a multiple of K.
        value: Shape [1, K, T, V].
        attention_mask: None: the layout says everything.
        dropout: Not applied: rollout and training must compute the same function.
        scaling: Factor of the scores; None is ``D ** -0.5``.
        sliding_window: A token sees this many tokens, itself included; None is all before it.
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
    # [1, H, T, D] -> [P, H, D]: heads stay together, so that one gather moves whole tokens.
    q, k, v = (_spread(x[0].transpose(0, 1), layout.gather, layout.scatter) for x in (query, key, value))
    outputs, start = [], 0
    for count, length in layout.buckets:
        end = start + count * length
        bq, bk, bv = (x[start:end].view(count, length, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        mask = _window_mask(length, sliding_window, query.device)
        if softcap is None and s_aux is None:
            grouped = bq.shape[1] != bk.shape[1]
            out = F.scaled_dot_product_attention(
                bq, bk, bv, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped
            )
        else:
            out = _explicit_attention(bq, bk, bv, mask, scaling, softcap, s_aux)
        outputs.append(out.transpose(1, 2).reshape(count * length, *out.shape[1:2], out.shape[3]))
        start = end
    dense = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
    return _collect(dense, layout.gather, layout.scatter, layout.pads)[None], None


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


def _window_mask(length: int, window: int | None, device: torch.device) -> Tensor | None:
    if window is None or length <= window:
        return None
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)[None, :]
    return (distance >= 0) & (distance < window)


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
