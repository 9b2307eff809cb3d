"""Gradients that are never there together: each parameter is updated within the backward pass, as soon as it has one.

Their norm, which clips them and tells whether they are finite, is known after a pass only: a first one measures it, a
second one updates.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch
from torch.compiler import config as compiler

from turnwise.errors import TrainError
from turnwise.trainer.config.policy import PolicyConfig
from turnwise.trainer.learn.optim import OptimizerSet

_KEY = "policies.main.model.optimizations has release_gradients"
_TAG = " retained"

_log = logging.getLogger(__name__)


def check_release(config: PolicyConfig, options: Mapping[str, Any] | None = None) -> None:
    """Check that gradients can be released, where that is configured.

    Raises:
        TrainError: Optimizer, critic or another optimization needs them all.
    """
    del options
    names = config.model.optimizations or ()
    if "release_gradients" not in names:
        return
    if config.optim.name == "muon":
        raise TrainError(f"{_KEY}, but optim.name is muon, which updates matrices together: choose adamw_int8 or adamw")
    if "bfloat16_weights" in names:
        raise TrainError(f"{_KEY} and bfloat16_weights, which adds up gradients in float32: remove one of them")
    if config.critic is not None and config.critic.kind == "shared":
        raise TrainError(f"{_KEY}, but critic.kind is shared, with gradients of two optimizers: choose own")


def _retain_compiled_graphs() -> None:
    """Have graphs that are compiled from now on leave what a second backward pass needs.

    By default they write over it. torch's caches do not tell such graphs from others (torch 2.13), and would give wrong
    gradients: those in memory are dropped, and those on disk have a tag.
    """
    functorch.donated_buffer = False
    if _TAG not in compiler.cache_key_tag:
        torch.compiler.reset()
        compiler.cache_key_tag += _TAG


class GradientRelease:
    """The updates of a module whose gradients are released.

    Attributes:
        loss: The loss of the only micro-batch of an update, whose backward pass waits for :meth:`step`.
    """

    def __init__(self, trained: nn.Module, optimizers: OptimizerSet) -> None:
        """Watch the gradients of a module's parameters."""
        _retain_compiled_graphs()
        self.loss: Tensor | None = None
        self._parameters = [parameter for parameter in trained.parameters() if parameter.requires_grad]
        self._optimizers = optimizers
        self._use: Callable[[Tensor], None] | None = None
        self._warned = False
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._use_gradient)  # type: ignore[no-untyped-call]

    def holds(self, loss: Tensor, *, alone: bool) -> bool:
        """Return whether a loss waits for :meth:`step`; where there are several, their gradients are added up."""
        waiting, self.loss = self.loss, None
        if alone and waiting is None and all(parameter.grad is None for parameter in self._parameters):
            self.loss = loss
            return True
        if waiting is not None:
            waiting.backward()  # type: ignore[no-untyped-call]
        if not self._warned:
            self._warned = True
            _log.warning(
                "model.optimizations: release_gradients is left out of updates with several micro-batches: gradients "
                "until the step instead; raise batch.max_tokens_per_micro_batch to have one"
            )
        return False

    def step(self, factor: float, limit: float) -> tuple[float, float]:
        """Update by learning rates times ``factor``; return the gradients' norm and the update ratio.

        Gradients are clipped to ``limit``. With a norm that is not finite nothing is updated.
        """
        loss, self.loss = self.loss, None
        assert loss is not None, "an update was computed"
        norms: list[Tensor] = []
        self._backward(loss, lambda parameter: norms.append(torch.linalg.vector_norm(parameter.grad)), again=True)
        norm = float(torch.linalg.vector_norm(torch.stack(norms)))
        if not math.isfinite(norm):
            return norm, 0.0
        scale = min(1.0, limit / (norm + 1e-6))

        def update(parameter: Tensor) -> None:
            assert parameter.grad is not None, "it was just accumulated"
            parameter.grad.mul_(scale)
            self._optimizers.update(parameter)

        return norm, self._optimizers.step(factor, lambda: self._backward(loss, update, again=False))

    def _backward(self, loss: Tensor, use: Callable[[Tensor], None], *, again: bool) -> None:
        """Run a backward pass that uses each gradient and drops it."""
        self._use = use
        try:
            loss.backward(retain_graph=again)  # type: ignore[no-untyped-call]
        finally:
            self._use = None

    def _use_gradient(self, parameter: Tensor) -> None:
        if self._use is not None:
            self._use(parameter)
            parameter.grad = None
