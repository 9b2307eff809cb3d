"""torch's attention over rows of any length on a CPU, which has no kernel for it: the same operator, written out.

The operator is that of ``torch.nn.attention.varlen``, and so are its shapes, window and shared key heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import varlen

from turnwise.trainer.model.attention import varlen_obstacle


def _segments(bounds: Tensor) -> Iterator[slice]:
    yield from (slice(start, end) for start, end in pairwise(bounds.tolist()))


def _weights(query: Tensor, key: Tensor, scale: float, left: int) -> tuple[Tensor, Tensor]:
    """Return the softmax over the keys that each query sees, and its denominators' logarithms."""
    places = torch.arange(query.shape[1])
    distance = places[:, None] - places
    seen = (distance >= 0) if left < 0 else (distance >= 0) & (distance <= left)
    scores = (query @ key.transpose(1, 2) * scale).masked_fill(~seen, -torch.inf)
    return scores.softmax(-1), scores.logsumexp(-1)


def _heads(tensor: Tensor, segment: slice, groups: int = 1) -> Tensor:
    """Return [H, L, D] in float32 of a packed [T, K, D]; each key head ``groups`` times."""
    return tensor[segment].float().transpose(0, 1).repeat_interleave(groups, 0)


def _forward(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    scale, (left, right), groups = rest[4] or q.shape[-1] ** -0.5, rest[5], q.shape[1] // k.shape[1]
    assert right == 0
    outputs, denominators = [], []
    for segment in _segments(bounds):
        weights, logarithms = _weights(_heads(q, segment), _heads(k, segment, groups), scale, left)
        outputs.append((weights @ _heads(v, segment, groups)).transpose(0, 1))
        denominators.append(logarithms)
    return torch.cat(outputs).to(q.dtype), torch.cat(denominators, dim=1), torch.zeros(2, dtype=torch.uint64)


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bounds: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    del lse
    scale, (left, _), groups = rest[5] or q.shape[-1] ** -0.5, rest[6], q.shape[1] // k.shape[1]
    parts: list[list[Tensor]] = [[], [], []]
    for segment in _segments(bounds):
        query, key, value = _heads(q, segment), _heads(k, segment, groups), _heads(v, segment, groups)
        upstream, attended = _heads(grad, segment), _heads(out, segment)
        weights, _ = _weights(query, key, scale, left)
        slopes = weights * (upstream @ value.transpose(1, 2) - (upstream * attended).sum(-1, keepdim=True)) * scale
        gradients = slopes @ key, slopes.transpose(1, 2) @ query, weights.transpose(1, 2) @ upstream
        for collected, gradient, like in zip(parts, gradients, (q, k, v), strict=True):
            # Heads that share a key head are neighbours.
            collected.append(gradient.unflatten(0, (like.shape[1], -1)).sum(1).transpose(0, 1))
    query, key, value = (torch.cat(part).to(q.dtype) for part in parts)
    return query, key, value


@contextmanager
def varlen_kernel() -> Iterator[None]:
    """Have the CPU compute the operator inside the context."""
    operators = (varlen._varlen_attn, _forward), (varlen._varlen_attn_backward, _backward)
    for operator, kernel in operators:
        operator.register_kernel("cpu")(kernel)
        operator._disabled_kernel.discard("cpu")
    varlen_obstacle.cache_clear()
    try:
        yield
    finally:
        for operator, _ in operators:
            operator._disabled_kernel.add("cpu")
        varlen_obstacle.cache_clear()
