"""Decoding steps as recorded graphs: one launch instead of the several hundred kernels of a forward pass.

A decoding step of a small batch takes a GPU less time than the CPU needs to launch its kernels. A graph repeats the
launches of one forward pass without the CPU, with inputs and outputs at fixed addresses. Rows of the KV cache are among
the inputs, by address, so that one graph per batch size serves all states of the cache; batch sizes are rounded up.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, Self, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from turnwise.engine.accelerator import GraphMemory, has_kernels, recorded
from turnwise.engine.attention import IMPLEMENTATION, attention
from turnwise.engine.batching.kv_cache import Geometry, KVCache
from turnwise.engine.batching.scheduler import ModelInput
from turnwise.engine.causal_lm import CausalLM

_log = logging.getLogger(__name__)

_ALIGNED = 16
"""Bytes to which the keys of a token have to be aligned."""


class DecodeKernels(Protocol):
    """Writes and attention of decoding, over rows given by address; ``decoding.kernels`` describes the arguments."""

    def store(self, key: Tensor, value: Tensor, rows: Tensor, geometry: Geometry, layer: int) -> None:
        """Write each sequence's new key and value."""

    def attend(
        self, query: Tensor, rows: Tensor, geometry: Geometry, layer: int, scale: float | None, window: int | None
    ) -> Tensor:
        """Attend to the keys of each row up to its position."""


@dataclass(frozen=True, slots=True)
class RowPlan:
    """The attention plan of decoding sequences by their rows; ``rows`` as the kernels take them, [4, T]."""

    kernels: DecodeKernels
    rows: Tensor
    geometry: Geometry

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None
    ) -> Tensor:
        """Write the new keys and values, then attend: [tokens, heads, dim] in and out."""
        self.kernels.store(key, value, self.rows, self.geometry, layer)
        return self.kernels.attend(query, self.rows, self.geometry, layer, scale, window)


class CompiledLayers:
    """Layers that compute compiled while :meth:`applied`; a kind that cannot be compiled computes as it is.

    Decoding launches some thirty kernels a layer, and a GPU takes longer to start most of them than to compute them:
    norms, rotary embeddings and activations become few.
    """

    def __init__(self, layers: Sequence[torch.nn.Module]) -> None:
        """Take the layers; those of a class have one function, of one and of several tokens."""
        # What compiles takes time and memory to import, and is used on GPUs alone.
        from turnwise.engine.numerics.compilation import CompiledFunction

        self._layers = layers
        kinds: set[Any] = {type(layer) for layer in layers}
        self._functions = {kind: CompiledFunction(kind.forward, dynamic=True) for kind in kinds}
        # It depends on the number of the layer, and would be compiled for each.
        self._attention: Any = torch.compiler.disable(attention)  # type: ignore[no-untyped-call]

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Have the layers compute compiled within."""
        from transformers import AttentionInterface

        AttentionInterface.register(IMPLEMENTATION, self._attention)
        for layer in self._layers:
            layer.forward = partial(self._functions[type(layer)], layer)
        try:
            yield
        finally:
            for layer in self._layers:
                del layer.forward
            AttentionInterface.register(IMPLEMENTATION, attention)


def rounded(count: int) -> int:
    """Return the next of 1, 2, 3, 4, 6, 8, 12, 16, 24, ...: at most half as many again."""
    power = 1 << max(0, (count - 1).bit_length() - 1)
    return count if count <= 2 else power + power // 2 if count <= power + power // 2 else 2 * power


class DecodeGraphs:
    """The recorded graphs of a model over a KV cache."""

    def __init__(
        self, model: CausalLM, cache: KVCache, kernels: DecodeKernels, max_seqs: int, *, compiled: bool = False
    ) -> None:
        """Create an empty set, for steps of up to ``max_seqs`` sequences; with ``compiled`` of compiled layers."""
        self._model = model
        self._cache = cache
        self._kernels = kernels
        self._graphs: dict[int, Callable[[], None]] = {}
        self._memory = GraphMemory(model.device)
        self._layers: CompiledLayers | None = None
        if compiled:
            self._layers = CompiledLayers(model.layers)
        size = rounded(max_seqs)
        # Ids, and the four lines of RowPlan.
        self._inputs = torch.zeros(5 * size, dtype=torch.int64, device=model.device)
        self._outputs = torch.zeros((size, model.vocabulary), dtype=model.dtype, device=model.device)

    @classmethod
    def of(cls, model: CausalLM, cache: KVCache, max_seqs: int, kernels: DecodeKernels | None = None) -> Self | None:
        """Return the graphs of a model, if the device has kernels, or some are given.

        None where it takes images, or keeps routes, of which a recorded graph tells nothing. Layers are compiled where
        the device has kernels, but for experts, whose rows depend on the routers.
        """
        geometry = model.geometry
        aligned = max(geometry.key_dim, geometry.value_dim) * model.dtype.itemsize % _ALIGNED == 0
        if kernels is None and has_kernels(model.device) and aligned:
            kernels = cast("DecodeKernels", importlib.import_module("turnwise.engine.decoding.kernels"))
        if kernels is None or model.vision is not None or model.keeps_routes:
            return None
        compiled = has_kernels(model.device) and model.routers is None
        return cls(model, cache, kernels, max_seqs, compiled=compiled)

    @property
    def count(self) -> int:
        """Recorded graphs."""
        return len(self._graphs)

    def forget(self) -> None:
        """Drop the recorded graphs, whose weights get other addresses."""
        self._graphs.clear()
        self._memory = GraphMemory(self._model.device)

    def logits(self, step: ModelInput) -> Tensor | None:
        """Return the logits of ``step.keep``, valid until the next call; None for a step with prompts."""
        count = len(step.slots)
        if len(step.token_ids) != count:
            return None
        size = rounded(count)
        self._inputs[: 5 * size].copy_(torch.from_numpy(self._input_lines(step, size).reshape(-1)))
        if size not in self._graphs:
            self._graphs[size] = recorded(lambda: self._forward(size), self._memory)
            _log.debug("recorded the decoding step of %d sequences", size)
        self._graphs[size]()
        if len(step.keep) == count:
            return self._outputs[:count]
        return self._outputs.index_select(0, torch.from_numpy(step.keep).to(self._outputs.device))

    def _input_lines(self, step: ModelInput, size: int) -> npt.NDArray[np.int64]:
        """Return ids, positions, addresses, layer sizes and capacities, [5, size]; position -1 for none."""
        lines = np.zeros((5, size), dtype=np.int64)
        lines[1] = -1
        lines[0, : len(step.slots)] = step.token_ids
        lines[1, : len(step.slots)] = step.positions
        for part in step.plan.parts:
            tokens = slice(part.start, part.stop)
            lines[2, tokens], lines[3, tokens] = part.pool.addresses(self._cache.row_of[step.slots[tokens]])
            lines[4, tokens] = part.pool.capacity
        return lines

    def _forward(self, size: int) -> None:
        """Compute the logits of the inputs into the outputs, without the CPU reading any of them."""
        lines = self._inputs[: 5 * size].view(5, size)
        plan = RowPlan(self._kernels, lines[1:], self._model.geometry)
        with nullcontext() if self._layers is None else self._layers.applied():
            self._outputs[:size].copy_(self._model.logits(lines[0], lines[1].clamp(min=0), plan, None))
