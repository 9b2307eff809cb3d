"""Causal attention over packed segments for Hugging Face models: FlexAttention, shared-prefix and gathered kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.nn.attention.varlen import varlen_attn

from turnwise.engine.accelerator import compiles_attention, on_cpu
from turnwise.engine.numerics.exact import exact_attention
from turnwise.errors import TrainError
from turnwise.trainer.model.layout import Bucket, OwnBucket, PackedLayout

# Side of the blocks that are skipped, or computed without a mask, as a whole.
_BLOCK = 128


# What the kernel for rows of any length takes of a head.
_VARLEN_DIM, _VARLEN_UNIT = 256, 8
# Releases of torch without the argument share key heads unasked.
_GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}


@dataclass(frozen=True, slots=True)
class Scoring:
    """How the scores of queries and keys are computed.

    Attributes:
        scaling: Factor of the scores; None is ``D ** -0.5``.
        window: Sliding window in tokens of the path, the query included; None is unbounded.
        softcap: Scores become ``softcap * tanh(scores / softcap)``; None leaves them.
        sinks: Attention sinks of shape [H]: a score per head in the softmax without a value.
    """

    scaling: float | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


def flex_tree_attention(query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, scoring: Scoring) -> Tensor:
    """Attend causally to the own segment and its ancestors, by FlexAttention.

    Args:
        query: Shape [1, H, T, D].
        key: Shape [1, K, T, D], H a multiple of K.
        value: Shape [1, K, T, V].
        layout: The segments.
        scoring: How scores are computed.

    Returns:
        Shape [1, T, H, V].
    """
    softcap, sinks = scoring.softcap, scoring.sinks
    attend: Any = _compiled() if compiles_attention(query.device) else flex_attention
    attended: Any = attend(
        query,
        key,
        value,
        score_mod=None if softcap is None else _capped(softcap, query.device),
        block_mask=block_mask(layout, scoring.window),
        scale=scoring.scaling,
        enable_gqa=query.shape[1] != key.shape[1],
        return_aux=None if sinks is None else AuxRequest(lse=True),
    )
    if sinks is None:
        plain: Tensor = attended.transpose(1, 2)
        return plain
    out, aux = attended
    # A sink multiplies the denominator by 1 + exp(sink - lse).
    without_sink = torch.sigmoid(aux.lse - sinks.float()[None, :, None])
    kept_out: Tensor = (out * without_sink[..., None].to(out.dtype)).transpose(1, 2)
    return kept_out


def varlen_attention(query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, scoring: Scoring) -> Tensor:
    """Attend causally within segments that have no ancestors, in one call of torch's flash attention.

    Arguments as of :func:`flex_tree_attention`, in bfloat16; scores have neither softcap nor sinks.
    """
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    bounds, longest = layout.bounds, layout.longest_path
    window = (-1 if scoring.window is None else scoring.window - 1, 0)
    out: Any = varlen_attn(
        q, k, v, bounds, bounds, longest, longest, scale=scoring.scaling, window_size=window, **_GROUPED
    )
    attended: Tensor = out[None]
    return attended


@cache
def varlen_obstacle(device: torch.device) -> str | None:
    """Return why a device cannot compute :func:`varlen_attention`, by computing; None where it can."""
    layout = PackedLayout.of(((0, 5, -1), (5, 3, -1)), device)
    query, key = (torch.ones(1, heads, 8, 64, device=device, dtype=torch.bfloat16) for heads in (4, 2))
    try:
        out = varlen_attention(query.requires_grad_(), key, key, layout, Scoring(window=4))
        torch.autograd.grad(out.float().sum(), query)
    except (RuntimeError, NotImplementedError, TypeError) as error:
        reason = str(error).partition(". ")[0].splitlines()[0]
        return f"torch {torch.__version__} has no such kernel for {device.type} ({reason})"
    return None


@cache
def _capped(softcap: float, device: torch.device) -> Callable[..., Tensor]:
    # A number that a compiled function closes over becomes a symbol there, which flex attention's kernels do not take.
    cap = torch.tensor(softcap, device=device)

    def capped(score: Tensor, *_: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return capped


@cache
def _compiled() -> Callable[..., Any]:
    """Compile FlexAttention, which is a fused kernel only then; lengths are dynamic."""
    # Each kind of scores, dtype and gradient mode is a kernel of its own; beyond the limit they are not compiled.
    torch._dynamo.config.recompile_limit = 64
    return torch.compile(flex_attention, dynamic=True)


def block_mask(layout: PackedLayout, window: int | None) -> BlockMask:
    """Return the block mask of a layout, computed from intervals; ``window`` as in :class:`Scoring`."""
    masks = layout.block_masks
    if window not in masks:
        masks[window] = _block_mask(layout, window)
    mask: BlockMask = masks[window]
    return mask


def _block_mask(layout: PackedLayout, window: int | None) -> BlockMask:
    tokens, until, positions = layout.tokens, layout.until, layout.positions
    device = until.device

    def seen(batch: Tensor, head: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        del batch, head
        on_path = (kv <= q) & (q < until[kv])
        return on_path if window is None else on_path & (positions[q] - positions[kv] < window)

    count = -(-tokens // _BLOCK)
    first = torch.arange(count, device=device) * _BLOCK
    block_end = (first + _BLOCK).clamp(max=tokens) - 1
    padded = torch.nn.functional.pad(until, (0, count * _BLOCK - tokens), value=int(until[-1])).view(count, _BLOCK)
    furthest, nearest = padded.amax(1), padded.amin(1)
    # [query block, key block]. A block that is counted as partly seen and is not costs time and changes nothing.
    some = (first[None, :] <= block_end[:, None]) & (first[:, None] < furthest[None, :])
    fully_seen = (block_end[None, :] < first[:, None]) & (block_end[:, None] < nearest[None, :])
    if window is not None:
        blocks = torch.nn.functional.pad(positions, (0, count * _BLOCK - tokens), value=int(positions[-1]))
        lowest, highest = blocks.view(count, _BLOCK).aminmax(dim=1)
        some &= lowest[:, None] - highest[None, :] < window
        fully_seen &= highest[:, None] - lowest[None, :] < window
    return BlockMask.from_kv_blocks(
        *_ordered(some & ~fully_seen),
        *_ordered(fully_seen),
        BLOCK_SIZE=_BLOCK,
        mask_mod=seen,
        seq_lengths=(tokens, tokens),
    )


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of key blocks per query block, [1, 1, n], and the key blocks, seen ones first, [1, 1, n, n]."""
    counts = blocks.sum(1, dtype=torch.int32)
    indices = torch.sort(blocks.int(), dim=1, descending=True, stable=True).indices.to(torch.int32)
    return counts[None, None], indices[None, None]


_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

# In place of a denominator's logarithm where a query is padding: its weights, and so its gradients, become 0.
_NO_WEIGHT = 1e30


def shared_attention(query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, scaling: float | None) -> Tensor:
    """Attend causally to the own segment and its ancestors, by one dense kernel call per group of segments.

    Shapes as in :func:`flex_tree_attention`.
    """
    return _apply(query, key, value, layout, scaling)


class _SharedAttention(torch.autograd.Function):
    """Softmax over several blocks of keys.

    With the denominator over all blocks, weights and gradients of each block are those of plain attention restricted to
    it: dS = P * (dP - sum(dO * O)) needs only O and the denominator of the other blocks.
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
        for start, end, below_end in shared:
            part, denominator = _forward(q[:, :, end:below_end], k[:, :, start:end], v[:, :, start:end], scale=scale)
            _merge(out[:, end:below_end], lse[:, end:below_end], part.transpose(1, 2), denominator.transpose(1, 2))
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.layout, ctx.scale = layout, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, out, lse = ctx.saved_tensors
        layout, scale = ctx.layout, ctx.scale
        upstream, out, lse = (x.transpose(1, 2) for x in (grad, out, lse))
        # Laid out with heads inside, as queries, keys and values are made.
        grads = [torch.empty_like(x.transpose(1, 2)).transpose(1, 2) for x in (q, k, v)]
        for bucket in layout.own_buckets:
            dense = [_dense(x, bucket) for x in (upstream, q, k, v, out, lse)]
            if bucket.pads.numel():
                _flat(dense[0]).index_fill_(0, bucket.pads, 0.0)
                _flat(dense[5]).index_fill_(0, bucket.pads, _NO_WEIGHT)
            for total, part in zip(grads, _backward(*dense, 0.0, True, scale=scale), strict=True):
                _put(total.transpose(1, 2), part.transpose(1, 2), bucket)
        for start, end, below_end in layout.shared:
            below, above = slice(end, below_end), slice(start, end)
            parts = _backward(
                upstream[:, :, below], q[:, :, below], k[:, :, above], v[:, :, above],
                out[:, :, below], lse[:, :, below], 0.0, False, scale=scale,
            )  # fmt: skip
            for total, part, where in zip(grads, parts, (below, above, above), strict=True):
                total[:, :, where] += part
        return grads[0], grads[1], grads[2], None, None


_apply: Callable[..., Tensor] = _SharedAttention.apply


def _flat(dense: Tensor) -> Tensor:
    """View the result of :func:`_dense`, [n, H, L, ...], as [n * L, H, ...]."""
    return dense.transpose(1, 2).flatten(0, 1)


def _dense(values: Tensor, bucket: OwnBucket) -> Tensor:
    """Gather [1, H, T, ...] to [n, H, L, ...]; a view for one segment."""
    count, length = bucket.shape
    if bucket.start >= 0:
        return values[:, :, bucket.start : bucket.start + length]
    packed = values[0].transpose(0, 1)
    return packed.index_select(0, bucket.gather).view(count, length, *packed.shape[1:]).transpose(1, 2)


def _put(packed: Tensor, dense: Tensor, bucket: OwnBucket) -> None:
    """Scatter [n, L, H, ...] to [1, T, H, ...], without padding."""
    if bucket.start >= 0:
        packed[:, bucket.start : bucket.start + bucket.shape[1]] = dense
        return
    flat = dense.flatten(0, 1)
    packed[0].index_copy_(0, bucket.packed, flat if bucket.valid is None else flat.index_select(0, bucket.valid))


def _merge(out: Tensor, lse: Tensor, part: Tensor, denominator: Tensor) -> None:
    """Merge a block's attention in place; out is [1, t, H, D], lse [1, t, H]."""
    total = torch.logaddexp(lse, denominator)
    out.mul_(torch.exp(lse - total)[..., None]).addcmul_(part.to(out.dtype), torch.exp(denominator - total)[..., None])
    lse.copy_(total)


ATTENTION = "turnwise_packed"
"""The name under which :func:`packed_attention` is registered with ``transformers.AttentionInterface``."""

LAYOUT_ARGUMENT = "turnwise_layout"
"""The keyword argument of the forward that holds the :class:`PackedLayout`."""


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
    """Attend causally within each segment and to its ancestors; an attention function for ``transformers``.

    Args:
        module: The attention layer (not read).
        query: Shape [1, H, T, D]; where ranks share the row, of the own slice of tokens, as all below.
        key: Shape [1, K, T, D], H a multiple of K.
        value: Shape [1, K, T, V].
        attention_mask: Must be None.
        dropout: Not applied: rollout and training must compute the same function.
        scaling: As in :class:`Scoring`, and the three below.
        sliding_window: The window.
        softcap: The softcap.
        s_aux: The sinks.
        **kwargs: Contains the layout.

    Returns:
        Shape [1, T, H, V], and None for the weights.

    Raises:
        TrainError: No layout, a mask or position bias, or the batch is not one packed row.
    """
    del module, dropout
    layout = _layout_of(query, attention_mask, kwargs)
    layout.windows.add(sliding_window)
    window = None if sliding_window is None or sliding_window >= layout.longest_path else sliding_window
    if torch.is_autocast_enabled(query.device.type):
        # What scaled_dot_product_attention would do; rotary embeddings leave queries and keys in float32.
        query, key, value = (x.to(torch.get_autocast_dtype(query.device.type)) for x in (query, key, value))
    if (sequence := layout.sequence) is None:
        return _attend(query, key, value, layout, Scoring(scaling, window, softcap, s_aux)), None
    query, key, value = sequence.to_heads(query, key, value, layout.tokens)
    scoring = Scoring(scaling, window, softcap, None if s_aux is None else sequence.own_heads(s_aux))
    return sequence.to_tokens(_attend(query, key, value, layout, scoring)), None


def _attend(query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, scoring: Scoring) -> Tensor:
    """Attend by the kernel for the device and the scoring; arguments as in :func:`flex_tree_attention`."""
    smooth = scoring.softcap is None and scoring.sinks is None
    plain = smooth and scoring.window is None
    if layout.exact:
        if not smooth or value.shape[-1] != query.shape[-1]:
            raise TrainError(
                "numerics are exact, but no kernel with one order of sums attends by a softcap or sinks, or to values "
                "of another size than keys"
            )
        return _by_paths(query, key, value, layout, scoring)
    if layout.varlen and smooth and not layout.is_tree and _fits_varlen(query, value):
        return varlen_attention(query, key, value, layout, scoring)
    if plain and on_cpu(query.device) and value.shape[-1] == query.shape[-1]:
        return shared_attention(query, key, value, layout, scoring.scaling)
    # scaled_dot_product_attention would store masks of windows, and sinks and softcaps, without a kernel, all scores.
    if compiles_attention(query.device) and (layout.is_tree or not plain):
        return flex_tree_attention(query, key, value, layout, scoring)
    return _by_paths(query, key, value, layout, scoring)


def _fits_varlen(query: Tensor, value: Tensor) -> bool:
    size = query.shape[-1]
    fits = size == value.shape[-1] and size <= _VARLEN_DIM and not size % _VARLEN_UNIT
    return fits and query.dtype == torch.bfloat16


def _layout_of(query: Tensor, attention_mask: Tensor | None, arguments: Mapping[str, Any]) -> PackedLayout:
    """Return the layout among the keyword arguments of an attention call; masks and position biases are rejected."""
    layout = arguments.get(LAYOUT_ARGUMENT)
    if not isinstance(layout, PackedLayout):
        raise TrainError(
            "the layout of the packed segments did not reach the attention layer: this model does not pass keyword "
            "arguments of its forward on to attention, so it cannot be trained packed"
        )
    if attention_mask is not None or arguments.get("position_bias") is not None:
        raise TrainError("this model gives its attention a mask or position bias, which packed training cannot follow")
    if query.shape[0] != 1:
        raise TrainError(f"packed attention takes one packed row, not a batch of {query.shape[0]}")
    return layout


def _by_paths(query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, scoring: Scoring) -> Tensor:
    """Attend by groups of similar segments, each over the keys of its whole path; any device and option.

    Keys of a shared ancestor are copied to each of its segments; their gradients add up in the backward pass.
    """
    # [1, H, T, D] -> [T, H, D]: heads stay together, so that one gather moves whole tokens.
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    outputs = []
    for bucket in layout.path_buckets:
        bq = q.index_select(0, bucket.queries).view(*bucket.shape, *q.shape[1:]).transpose(1, 2)
        count = bucket.shape[0]
        bk, bv = (x.index_select(0, bucket.keys).view(count, -1, *x.shape[1:]).transpose(1, 2) for x in (k, v))
        mask = _path_mask(bucket, scoring.window)
        if scoring.softcap is None and scoring.sinks is None:
            groups = bq.shape[1] // bk.shape[1]
            if groups > 1 and bq.dtype == torch.float32 and not on_cpu(bq.device):
                # In float32 no fused kernel shares key heads; without one, scores of T x T are stored.
                bk, bv, groups = bk.repeat_interleave(groups, 1), bv.repeat_interleave(groups, 1), 1
            attend = exact_attention if layout.exact else F.scaled_dot_product_attention
            if layout.exact and mask is not None:
                mask = torch.zeros(mask.shape, dtype=bq.dtype).masked_fill_(~mask, -torch.inf)
            out = attend(
                bq, bk, bv, attn_mask=mask, is_causal=mask is None, scale=scoring.scaling, enable_gqa=groups > 1
            )
        else:
            out = _explicit_attention(bq, bk, bv, mask, scoring)
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    dense = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
    # Padding is left out, and gets no gradient.
    return dense.index_select(0, layout.scatter)[None]


def _path_mask(bucket: Bucket, window: int | None) -> Tensor | None:
    """Return the attention mask [n, 1, L, S]; None where it is plainly causal."""
    if bucket.square and window is None:
        return None
    depth = torch.arange(bucket.keys.shape[0] // bucket.shape[0], device=bucket.keys.device)
    # The key at index j of a path has position j, so padding behind a path is seen by padding only.
    distance = bucket.depths.view(*bucket.shape)[:, :, None] - depth
    seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    return seen[:, None]


def _explicit_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scoring: Scoring) -> Tensor:
    """Attention without a fused kernel. Shapes as in ``scaled_dot_product_attention``."""
    groups, length = query.shape[1] // key.shape[1], query.shape[2]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scoring.scaling is None else scoring.scaling)
    if scoring.softcap is not None:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    if mask is None:
        mask = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
    scores = scores.float().masked_fill(~mask, -torch.inf)
    if scoring.sinks is not None:
        column = scoring.sinks.float().view(1, -1, 1, 1).expand(scores.shape[0], -1, length, 1)
        weights = torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return weights.to(value.dtype) @ value
