"""Routers of mixture models of transformers: what they choose is recorded, or replaced by what was recorded.

Families differ in the scores by which they rank experts and in the weights that they give to the chosen ones, but all
choose by the top-k of a matrix [tokens, experts]. That one call is watched and replaced. All around it stays the
family's own code: weights are computed from the router's own scores of the replayed experts, and gradients reach it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from turnwise.types import Routes, RouteShape

_TOP_K: Any = (torch.topk, Tensor.topk)
_MASKED: Any = (torch.masked_fill, Tensor.masked_fill)


def _selects(shape: RouteShape, scores: Tensor, values: Tensor) -> bool:
    """Return whether a top-k of scores is a router's; groups of experts are chosen from other matrices."""
    return scores.ndim == 2 and (scores.shape[-1], values.shape[-1]) == (shape.experts, shape.chosen)


_NUMBER = re.compile(r"\.(\d+)\.")


class _Search(TorchFunctionMode):
    """Notes which modules choose experts.

    Attributes:
        routers: Those modules, in the order in which they compute.
    """

    def __init__(self, shape: RouteShape, model: nn.Module) -> None:
        super().__init__()
        self.routers: list[nn.Module] = []
        self._shape = shape
        self._computing: list[nn.Module] = []
        self._hooks: list[Any] = []
        for module in model.modules():
            self._hooks.append(module.register_forward_pre_hook(self._begin))
            self._hooks.append(module.register_forward_hook(self._end, always_call=True))

    def _begin(self, module: nn.Module, *_: Any) -> None:
        self._computing.append(module)

    def _end(self, *_: Any) -> None:
        self._computing.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _TOP_K and _selects(self._shape, args[0], result[0]) and self._computing[-1] not in self.routers:
            self.routers.append(self._computing[-1])
        return result

    def __exit__(self, *exc_info: Any) -> None:
        super().__exit__(*exc_info)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()


class _Selection(TorchFunctionMode):
    """The selection of one router while it computes.

    Attributes:
        chosen: int64 of shape [tokens, k], the experts that compute each token.
        rerouted: float32 of shape [tokens], the share of replayed experts that it does not choose.
        shortfall: float32 of shape [tokens], by how much the worst replayed expert ranks below the last of its own.
    """

    chosen: Tensor
    rerouted: Tensor
    shortfall: Tensor

    def __init__(self, shape: RouteShape, replayed: Tensor | None) -> None:
        super().__init__()
        self._shape = shape
        self._replayed = replayed
        # What was masked last, and its scores before.
        self._masked: tuple[Tensor, Tensor] | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _MASKED:
            self._masked = result, args[0]
        if func in _TOP_K and _selects(self._shape, args[0], result[0]):
            if self._replayed is not None:
                return self._replay(args[0], result[0], result[1], self._replayed.long())
            self.chosen = result[1]
        return result

    def _replay(self, scores: Tensor, best: Tensor, own: Tensor, replayed: Tensor) -> Any:
        known = replayed[:, :1] >= 0
        indices = torch.where(known, replayed, own)
        # An expert of a group that this router would not choose has its score all the same.
        unmasked = self._masked[1] if self._masked is not None and self._masked[0] is scores else scores
        self._masked = None
        self.chosen = indices
        with torch.no_grad():
            self.rerouted = ((indices[:, :, None] != own[:, None, :]).all(-1)).float().mean(-1)
            self.shortfall = (best.amin(-1) - scores.gather(-1, indices).amin(-1)).float()
        return torch.return_types.topk((unmasked.gather(-1, indices), indices))


class _Router:
    """A router's module, whose forward pass can be watched.

    Attributes:
        layer: Its decoder layer.
        watched: Whether its selections are kept.
        replayed: int16 of shape [tokens, k], what it chooses; -1 where it is free, None where it is everywhere.
        selection: Its last selection.
    """

    selection: _Selection

    def __init__(self, module: nn.Module, layer: int, shape: RouteShape) -> None:
        self.layer = layer
        self.watched = False
        self.replayed: Tensor | None = None
        self._shape = shape
        self._forward = module.forward
        module.forward = self._run

    def _run(self, *inputs: Any, **options: Any) -> Any:
        if self.replayed is None and not self.watched:
            return self._forward(*inputs, **options)
        with _Selection(self._shape, self.replayed) as self.selection:
            return self._forward(*inputs, **options)


class Routers:
    """The routers of a model.

    Attributes:
        shape: Layers and experts.
    """

    def __init__(self, shape: RouteShape, routers: Sequence[_Router]) -> None:
        self.shape = shape
        self._routers = routers

    @classmethod
    @contextmanager
    def search(cls, model: nn.Module, settings: dict[str, Any]) -> Iterator[list[Routers]]:
        """Find the routers of a model, which computes some tokens in this context; its list is filled at the end.

        It stays empty for a model without experts, and for one that chooses them in another way.
        """
        shape, found = RouteShape.of(settings), list[Routers]()
        if shape is None:
            yield found
            return
        search = _Search(shape, model)
        with search:
            yield found
        layers = {module: int(match[1]) for name, module in model.named_modules() if (match := _NUMBER.search(name))}
        routers = [_Router(module, layers[module], shape) for module in search.routers if module in layers]
        if routers:
            found.append(cls(shape, routers))

    def replay(self, routes: Tensor | None) -> None:
        """Have the next forward pass, and its recomputation for gradients, choose the experts of its tokens.

        ``routes`` is int16 of shape [tokens, layers, k] on the model's device, -1 for tokens that are routed freely.
        """
        for router in self._routers:
            router.replayed = None if routes is None else routes[:, router.layer]

    @property
    def rerouted(self) -> Tensor:
        """float32 of shape [tokens]: share of the experts replayed last that the routers would not choose."""
        return torch.stack([router.selection.rerouted for router in self._routers]).mean(0)

    @property
    def shortfall(self) -> Tensor:
        """float32 of shape [tokens]: by how much the worst expert replayed last ranks below the router's own."""
        return torch.stack([router.selection.shortfall for router in self._routers]).amax(0)

    def loads(self, tokens: int) -> Tensor:
        """Return how many of the first tokens of the last pass each expert computed, once watched.

        float32 of shape [layers with experts, experts].
        """
        chosen = torch.stack([router.selection.chosen[:tokens].flatten() for router in self._routers])
        loads = chosen.new_zeros((len(chosen), self.shape.experts), dtype=torch.float32)
        return loads.scatter_add_(1, chosen, torch.ones_like(chosen, dtype=torch.float32))

    def watch(self) -> None:
        """Keep what is chosen from now on, for :meth:`take` and :meth:`loads`."""
        for router in self._routers:
            router.watched = True

    def take(self) -> Routes:
        """Return the experts that the last forward pass chose, by token in its order."""
        chosen = torch.stack([router.selection.chosen for router in self._routers], 1).cpu().numpy()
        routes: Routes = np.zeros((len(chosen), self.shape.layers, self.shape.chosen), self.shape.dtype)
        routes[:, [router.layer for router in self._routers]] = chosen
        return routes
