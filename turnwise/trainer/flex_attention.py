"""Attention over trees of segments on a GPU, by FlexAttention.

Owns: :func:`flex_tree_attention` and the block mask, which comes from intervals: in the order of a walk through a tree
the tokens that see a token are those from itself to the end of its segment's last descendant. Refuses: materialising
who sees whom token by token.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from turnwise.trainer.layout import PackedLayout

# Side of the blocks that are skipped, or computed without a mask, as a whole.
_BLOCK = 128


def flex_tree_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: PackedLayout,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attend to one's own segment up to oneself, and to its ancestors.

    Args:
        query: Shape [1, H, T, D].
        key: Shape [1, K, T, D], H a multiple of K.
        value: Shape [1, K, T, V].
        layout: The segments.
        scaling: Factor of the scores; None is ``D ** -0.5``.
        window: A token sees this many tokens of its path, itself included; None is all before it.
        softcap: Scores become ``softcap * tanh(scores / softcap)``; None leaves them.
        sinks: Shape [H], a score per head that takes part in the softmax and has no value.

    Returns:
        Shape [1, T, H, V].
    """
    attend: Any = _compiled() if query.device.type == "cuda" else flex_attention
    found: Any = attend(
        query,
        key,
        value,
        score_mod=None if softcap is None else _capped(softcap),
        block_mask=block_mask(layout, window),
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
        return_aux=None if sinks is None else AuxRequest(lse=True),
    )
    if sinks is None:
        plain: Tensor = found.transpose(1, 2)
        return plain
    out, aux = found
    # A sink multiplies the denominator by 1 + exp(sink - lse).
    kept = torch.sigmoid(aux.lse - sinks.float()[None, :, None])
    kept_out: Tensor = (out * kept[..., None].to(out.dtype)).transpose(1, 2)
    return kept_out


def _capped(softcap: float) -> Callable[..., Tensor]:
    def capped(score: Tensor, *_: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return capped


@cache
def _compiled() -> Callable[..., Any]:
    """FlexAttention is a fused kernel only when it is compiled; lengths differ from call to call."""
    return torch.compile(flex_attention, dynamic=True)


def block_mask(layout: PackedLayout, window: int | None) -> BlockMask:
    """Return which blocks of queries see which blocks of keys, made from intervals, [T / block] squared.

    Args:
        layout: The segments.
        window: See :func:`flex_tree_attention`.
    """
    made = layout.block_masks
    if window not in made:
        made[window] = _block_mask(layout, window)
    mask: BlockMask = made[window]
    return mask


def _block_mask(layout: PackedLayout, window: int | None) -> BlockMask:
    tokens, until, positions = layout.tokens, layout.until, layout.positions
    device = until.device

    def seen(batch: Tensor, head: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        del batch, head
        mine = (kv <= q) & (q < until[kv])
        return mine if window is None else mine & (positions[q] - positions[kv] < window)

    count = -(-tokens // _BLOCK)
    first = torch.arange(count, device=device) * _BLOCK
    last = (first + _BLOCK).clamp(max=tokens) - 1
    padded = torch.nn.functional.pad(until, (0, count * _BLOCK - tokens), value=int(until[-1])).view(count, _BLOCK)
    most, least = padded.amax(1), padded.amin(1)
    # [query block, key block]. A block that is counted as partly seen and is not costs time and changes nothing.
    some = (first[None, :] <= last[:, None]) & (first[:, None] < most[None, :])
    whole = (last[None, :] < first[:, None]) & (last[:, None] < least[None, :])
    if window is not None:
        whole = torch.zeros_like(whole)
    return BlockMask.from_kv_blocks(
        *_ordered(some & ~whole), *_ordered(whole), BLOCK_SIZE=_BLOCK, mask_mod=seen, seq_lengths=(tokens, tokens)
    )


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many key blocks each query block has, and their numbers first: [1, 1, n] and [1, 1, n, n]."""
    counts = blocks.sum(1, dtype=torch.int32)
    indices = torch.sort(blocks.int(), dim=1, descending=True, stable=True).indices.to(torch.int32)
    return counts[None, None], indices[None, None]
