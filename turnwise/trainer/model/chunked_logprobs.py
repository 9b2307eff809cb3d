"""Log-probabilities and entropies of chosen ids from last hidden states, in tiles of the vocabulary.

The full logits are never in memory. Forward is an online softmax (arXiv:1805.02867, section 3), extended by the
expectation that entropy needs; hidden states, ids and one normaliser per token are saved. Backward recomputes each
tile's logits, so that the gradient of a part of the output matrix is one product over all tokens. A vocabulary that
fits one tile keeps its log-probabilities instead.

Of a token that was sampled under truncation, the logits of the ids that it excluded become :data:`EXCLUDED_LOGIT`: its
log-probability, entropy and gradient are those of the distribution over the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Self

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody reads
from torch import Tensor, nn

from turnwise.engine.accelerator import on_cpu
from turnwise.engine.numerics.compilation import CompiledFunction
from turnwise.engine.numerics.exact import ExactLinear, multiply
from turnwise.trainer.kept_sets import KeptSets
from turnwise.types import EXCLUDED_LOGIT

HELD_BYTES = 1 << 26
"""Logits up to this size, in float32, are computed once and kept for the backward pass."""

# Where they are larger: on a CPU the passes over a tile have to find it in the cache, elsewhere few calls are better.
_TILE_BYTES = 1 << 22
_TILE_BYTES_ELSEWHERE = 1 << 28
_ALIGNED = 64


@dataclass(frozen=True, slots=True)
class LogitTransform:
    """Logit post-processing: ``factor * softcap * tanh(logits / softcap) / divisor``; None omits a part.

    The keys of model configurations are ``logit_scale``, ``final_logit_softcapping`` and ``logits_scaling``.
    """

    softcap: float | None = None
    divisor: float | None = None
    factor: float | None = None

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """Return the transform of a model configuration."""
        return cls(config.get("final_logit_softcapping"), config.get("logits_scaling"), config.get("logit_scale"))

    def __call__(self, logits: Tensor) -> Tensor:
        """Return the transformed logits, of the same shape."""
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        if self.divisor is not None:
            logits = logits / self.divisor
        if self.factor is not None:
            logits = logits * self.factor
        return logits

    def backward_(self, grad: Tensor, raw: Tensor | None) -> Tensor:
        """Turn the gradient of the transformed logits into that of the ``raw`` ones, in place."""
        if self.factor is not None:
            grad.mul_(self.factor)
        if self.divisor is not None:
            grad.div_(self.divisor)
        if self.softcap is not None and raw is not None:
            grad.mul_(1 - torch.tanh(raw.to(grad.dtype) / self.softcap).square_())
        return grad


def score_states(
    head: nn.Linear,
    states: Tensor,
    ids: Tensor,
    temperatures: Tensor,
    transform: LogitTransform,
    *,
    entropy: bool,
    tile_bytes: int | None = None,
    fused: bool = False,
    sets: KeptSets | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the log-probability of each id under the state that predicts it, and the entropy there.

    With z the transformed logits divided by the temperature: ``logprob = z[id] - log(sum(exp(z)))`` and
    ``entropy = log(sum(exp(z))) - sum(softmax(z) * z)``. Both are differentiable in the states and the head's
    parameters. Under autocast, products are computed in its type and everything after them in float32.

    Args:
        head: The output layer, whose hooks are not called. Of an exact one (``engine/numerics/exact.py``) the forward
            pass reads whole rows of the vocabulary.
        states: Shape [N, hidden].
        ids: int64 of shape [N].
        temperatures: Shape [N], above 0, on any device; constants.
        transform: Logit post-processing.
        entropy: Whether entropies are returned.
        tile_bytes: Maximum bytes of a tile's float32 logits; two to three of these are allocated. By default
            :data:`HELD_BYTES` if all logits fit, else a size for the device.
        fused: Compile what is computed between the products of tiles; their logits are then stored in the type of the
            products only.
        sets: The ids that tokens were sampled from, on the states' device; None for all of them.

    Returns:
        Two tensors of shape [N], in float32 (float64 for float64 states); the second is None without ``entropy``.
    """
    divide = None if bool((temperatures == 1).all()) else temperatures.to(states.device)[:, None]
    if tile_bytes is None:
        all_bytes = 4 * states.shape[0] * head.out_features
        tile_bytes = _TILE_BYTES if on_cpu(states.device) else _TILE_BYTES_ELSEWHERE
        tile_bytes = HELD_BYTES if all_bytes <= HELD_BYTES else tile_bytes
    columns = tile_columns(states.shape[0], head.out_features, tile_bytes)
    tiles = _Tiles(transform, entropy, columns, fused, head if isinstance(head, ExactLinear) else None)
    logprobs, entropies = _scores(states, head.weight, head.bias, ids, divide, tiles, sets)
    return logprobs, entropies if entropy else None


def tile_columns(tokens: int, vocabulary: int, tile_bytes: int) -> int:
    """Return the ids per tile of the vocabulary: as few and as equal tiles as possible."""
    columns_at_most = max(1, tile_bytes // (4 * max(1, tokens)))
    # Matrix kernels of a GPU take odd widths at a third of their speed.
    unit = _ALIGNED if columns_at_most >= 8 * _ALIGNED else 1
    columns_at_most -= columns_at_most % unit
    tiles = -(-vocabulary // columns_at_most)
    columns = -(-vocabulary // tiles)
    return min(-(-columns // unit) * unit, vocabulary)


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Tiling of the vocabulary: logit transform, entropy flag, ids per tile, whether kernels are fused, exact head."""

    transform: LogitTransform
    entropy: bool
    columns: int
    fused: bool
    exact: ExactLinear | None

    def spans(self, vocabulary: int) -> list[tuple[int, int]]:
        return [(start, min(start + self.columns, vocabulary)) for start in range(0, vocabulary, self.columns)]


def _scale(raw: Tensor, transform: LogitTransform, divide: Tensor | None, excluded: Tensor | None) -> Tensor:
    scaled = transform(raw if raw.dtype == torch.float64 else raw.float())
    scaled = scaled if divide is None else scaled / divide
    # In place: the logits are new memory, and with a soft cap, whose gradient reads them, these are others.
    return scaled if excluded is None else scaled.masked_fill_(excluded, EXCLUDED_LOGIT)


def _excluded(sets: KeptSets | None, start: int, end: int) -> Tensor | None:
    return None if sets is None else sets.excluded(start, end)


def _dot(one: Tensor, other: Tensor) -> Tensor:
    return (one * other).sum(-1)


class _Scores(torch.autograd.Function):
    """(states, weight, bias) to (log-probabilities, entropies).

    Saves the inputs and one normaliser and entropy per token; with a single tile also its log-probabilities.
    """

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, divide: Tensor | None,
        tiles: _Tiles, sets: KeptSets | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        ctx.set_materialize_grads(False)
        kind = states.device.type
        ctx.tiles, ctx.sets = tiles, sets
        ctx.compute = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else states.dtype
        with torch.autocast(kind, enabled=False):
            matrix = _Matrix(states.to(ctx.compute), weight, bias, ctx.compute)
            if tiles.columns >= weight.shape[0]:
                raw = matrix.logits(0, weight.shape[0]) if tiles.exact is None else tiles.exact(states)
                excluded = _excluded(sets, 0, weight.shape[0])
                logs = F.log_softmax(_scale(raw, tiles.transform, divide, excluded), dim=-1)
                logprobs = logs.gather(1, ids[:, None])[:, 0]
                entropies = -_dot(logs.exp(), logs) if tiles.entropy else logprobs.new_zeros(0)
                saved: tuple[Tensor | None, ...] = (None, logs, raw if tiles.transform.softcap is not None else None)
            else:
                read = _online if tiles.exact is None else partial(_by_rows, tiles.exact.packed)
                logprobs, entropies, normalizer = read(matrix, ids, divide, tiles, sets)
                saved = (normalizer, None, None)
        ctx.save_for_backward(states, weight, bias, ids, divide, entropies, *saved)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad, grad_entropy = grads
        states, weight, bias, ids, divide, entropies, normalizer, logs, raw = ctx.saved_tensors
        if grad is None and grad_entropy is None:
            return (None,) * 7
        tiles: _Tiles = ctx.tiles
        with torch.autocast(states.device.type, enabled=False):
            matrix = _Matrix(states.to(ctx.compute), weight, bias, ctx.compute)
            sums = _GradientSums(matrix, ctx.needs_input_grad)
            gradient = _fused(_tile_gradient) if tiles.fused and logs is None else _tile_gradient
            for start, end in tiles.spans(weight.shape[0]):
                raw = matrix.logits(start, end) if logs is None else raw
                upstream = grad, grad_entropy, entropies
                excluded = _excluded(ctx.sets, start, end) if logs is None else None
                sums.add(start, end, gradient(raw, logs, normalizer, ids - start, divide, excluded, upstream, tiles))
        return *sums.result(states.dtype), None, None, None, None


@dataclass(frozen=True, slots=True)
class _Matrix:
    """States and output matrix, multiplied in type ``compute`` for a slice of the vocabulary."""

    states: Tensor
    weight: Tensor
    bias: Tensor | None
    compute: torch.dtype

    def part(self, start: int, end: int) -> Tensor:
        return self.weight[start:end].to(self.compute)

    def logits(self, start: int, end: int) -> Tensor:
        bias = None if self.bias is None else self.bias[start:end].to(self.compute)
        return F.linear(self.states, self.part(start, end), bias)


def _online(
    matrix: _Matrix, ids: Tensor, divide: Tensor | None, tiles: _Tiles, sets: KeptSets | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (log-probabilities, entropies, normalisers), reading the vocabulary tile by tile.

    Per token, over the logits z seen so far: their maximum m, ``total = sum(exp(z - m))`` and
    ``mean = sum(exp(z - m) * (z - m))``. A new maximum m + d turns them into ``total * exp(-d)`` and
    ``exp(-d) * (mean - d * total)``. Finally ``log(sum(exp(z))) = m + log(total)`` and the entropy is
    ``log(total) - mean / total``.
    """
    kind = _sum_dtype(matrix.states)
    targets, total, mean = torch.zeros(3, len(ids), dtype=kind, device=ids.device).unbind()
    # Not -inf: differences to it have to be numbers.
    largest = torch.full_like(targets, torch.finfo(kind).min)
    add = _fused(_add_tile) if tiles.fused else _add_tile
    for start, end in tiles.spans(matrix.weight.shape[0]):
        excluded = _excluded(sets, start, end)
        targets, largest, total, mean = add(
            matrix.logits(start, end), ids - start, divide, excluded, (targets, largest, total, mean), tiles
        )
    logarithm = total.log()
    normalizer = largest + logarithm
    entropies = logarithm - mean / total if tiles.entropy else targets.new_zeros(0)
    return targets - normalizer, entropies, normalizer


def _by_rows(
    packed: Tensor, matrix: _Matrix, ids: Tensor, divide: Tensor | None, tiles: _Tiles, sets: KeptSets | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what :func:`_online` does, reading as many whole rows of the vocabulary at a time as tiles have room."""
    parts = []
    count = max(1, len(ids) * tiles.columns // matrix.weight.shape[0])
    for rows in torch.split(torch.arange(len(ids)), count):
        raw = multiply(matrix.states[rows], packed, matrix.bias)
        excluded = None if sets is None else sets.select(rows).excluded(0, raw.shape[1])
        scaled = _scale(raw, tiles.transform, None if divide is None else divide[rows], excluded)
        logs = F.log_softmax(scaled, dim=-1)
        logprobs, targets = (values.gather(1, ids[rows, None])[:, 0] for values in (logs, scaled))
        entropies = -_dot(logs.exp(), logs) if tiles.entropy else logprobs[:0]
        parts.append((logprobs, entropies, targets - logprobs))
    logprobs, entropies, normalizer = (torch.cat(values) for values in zip(*parts, strict=True))
    return logprobs, entropies, normalizer


def _sum_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


@cache
def _fused(function: Callable[..., Any]) -> CompiledFunction:
    return CompiledFunction(function, dynamic=True)


def _add_tile(
    raw: Tensor, local: Tensor, divide: Tensor | None, excluded: Tensor | None,
    sums: tuple[Tensor, Tensor, Tensor, Tensor], tiles: _Tiles,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the sums of :func:`_online` with one more tile; ``local`` are the ids relative to it."""
    targets, largest, total, mean = sums
    scaled = _scale(raw, tiles.transform, divide, excluded)
    in_tile = (local >= 0) & (local < raw.shape[1])
    targets = torch.where(in_tile, scaled.gather(1, local.clamp(0, raw.shape[1] - 1)[:, None])[:, 0], targets)
    top = torch.maximum(largest, scaled.amax(-1))
    shifted = scaled.sub_(top[:, None])
    powers = shifted.exp()
    fall = largest - top
    factor = fall.exp()
    if tiles.entropy:
        mean = factor * (mean + fall * total) + _dot(powers, shifted)
    return targets, top, factor * total + powers.sum(-1), mean


_Upstream = tuple[Tensor | None, Tensor | None, Tensor]
"""Gradients of log-probabilities and entropies, and the entropies, each of shape [N]."""


def _tile_gradient(
    raw: Tensor, logs: Tensor | None, normalizer: Tensor | None, local: Tensor, divide: Tensor | None,
    excluded: Tensor | None, upstream: _Upstream, tiles: _Tiles,
) -> Tensor:  # fmt: skip
    """Return the gradient of a tile's raw logits, given its log-probabilities or the normaliser, as new memory.

    With p the probabilities, H the entropy and e the indicator of the chosen id, that of the scaled logits is ``grad *
    (e - p) - grad_entropy * p * (log p + H)``. ``local`` are the ids relative to the tile, e being 0 outside of it. For
    the whole vocabulary torch's own kernel does it in one pass; a fused tile compares for e, which a compiler joins
    with the rest.
    """
    grad, grad_entropy, entropies = upstream
    if normalizer is not None:
        # The result is new memory wherever the raw logits are needed once more.
        logs = _scale(raw, tiles.transform, divide, excluded).sub_(normalizer[:, None])
    assert logs is not None, "one of both"
    change: Tensor
    if normalizer is None and grad_entropy is None and grad is not None:
        target_grads = torch.zeros_like(logs).scatter_(1, local[:, None], grad[:, None])
        change = torch.ops.aten._log_softmax_backward_data(target_grads, logs, 1, logs.dtype)
    else:
        change = logs.exp()
        if grad_entropy is not None:
            slope = (logs + entropies[:, None]).mul_(-grad_entropy[:, None])
            change.mul_(slope if grad is None else slope.sub_(grad[:, None]))
        elif grad is not None:
            change.mul_(-grad[:, None])
        if grad is not None and tiles.fused:
            chosen = torch.arange(logs.shape[1], device=logs.device) == local[:, None]
            change = torch.where(chosen, change + grad[:, None], change)
        elif grad is not None:
            in_tile = (local >= 0) & (local < logs.shape[1])
            chosen = local.clamp(0, logs.shape[1] - 1)[:, None]
            change.scatter_add_(1, chosen, torch.where(in_tile, grad, 0)[:, None])
    if divide is not None:
        change.div_(divide)
    change = tiles.transform.backward_(change, raw)
    return change.to(raw.dtype) if tiles.fused and normalizer is not None else change


class _GradientSums:
    """Required gradients of states, weight and bias, summed in float32 over tiles."""

    def __init__(self, matrix: _Matrix, needs_grad: Sequence[bool]) -> None:
        def room(like: Tensor | None, want: bool) -> Tensor | None:
            # Every element of weight and bias is in one tile, so nothing has to be cleared first.
            return torch.empty_like(like) if want and like is not None else None

        self._matrix = matrix
        self._want_states = needs_grad[0]
        self._states: Tensor | None = None
        self._weight, self._bias = room(matrix.weight, needs_grad[1]), room(matrix.bias, needs_grad[2])

    def add(self, start: int, end: int, change: Tensor) -> None:
        """Add a tile's contribution, given the gradient of its logits."""
        low, kind = change.to(self._matrix.compute), _sum_dtype(change)
        if self._want_states:
            part = self._matrix.part(start, end)
            if self._states is None:
                self._states = (low @ part).to(kind)
            elif low.dtype == kind:
                self._states.addmm_(low, part)
            else:
                self._states.add_(low @ part)
        if self._weight is not None:
            target = self._weight[start:end]
            if target.dtype == low.dtype:
                torch.mm(low.T, self._matrix.states, out=target)
            else:
                target.copy_(low.T @ self._matrix.states)
        if self._bias is not None:
            self._bias[start:end] = change.sum(0, dtype=kind)

    def result(self, kind: torch.dtype) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients of states, weight and bias, None where not required."""
        return None if self._states is None else self._states.to(kind), self._weight, self._bias


_scores: Callable[..., tuple[Tensor, Tensor]] = _Scores.apply
