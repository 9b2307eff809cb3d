r"""A model engine that trains the upper layers only: the embeddings and the first N layers stay as they are.

    turnwise train examples/lookup/train.yaml policies.main.engine=examples/extensions/model_engine.py:UpperLayers \
        policies.main.engine_options.frozen=2

Frozen weights have neither gradients nor optimizer state; a step computes backward as far as the lowest trained layer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field
from torch import nn

from turnwise import register_engine
from turnwise.errors import TrainError
from turnwise.trainer.config.policy import PolicyConfig
from turnwise.trainer.learn.torch_learner import TorchLearner
from turnwise.trainer.model.policy import Policy


def check_frozen(config: PolicyConfig, options: Mapping[str, Any]) -> None:
    """Check that a layer is left to train. Raises TrainError, before anything is loaded."""
    if config.model.lora is not None:
        raise TrainError(
            "policies.main.engine_options.frozen is for all weights, and policies.main.model.lora freezes the model "
            "already: leave one of them out"
        )
    file = Path(config.model.path) / "config.json"
    if not file.is_file():
        # Which model is missing says the engine that loads it.
        return
    settings = json.loads(file.read_text(encoding="utf-8"))
    layers = (settings.get("text_config") or settings).get("num_hidden_layers")
    frozen = options.get("frozen", 0)
    if layers is not None and frozen >= layers:
        raise TrainError(
            f"policies.main.engine_options.frozen is {frozen}, but the model in {config.model.path} has {layers} "
            f"layers: leave one to train, at most {layers - 1} can be frozen"
        )


@register_engine("upper_layers")
class UpperLayers(TorchLearner):
    """The built-in learner with the embeddings and the first layers frozen."""

    check = staticmethod(check_frozen)

    @classmethod
    def create(
        cls,
        config: PolicyConfig,
        total_steps: int,
        *,
        model_path: Path | None = None,
        frozen: Annotated[int, Field(ge=0)] = 0,
    ) -> Self:
        """Load the model, and freeze the embeddings and so many layers from below."""
        check_frozen(config, {"frozen": frozen})
        learner = super().create(config, total_steps, model_path=model_path)
        for parameter in frozen_parameters(learner.policy, frozen):
            parameter.requires_grad_(False)
        # Made anew: the optimizer holds what requires a gradient when it is made.
        return cls(learner.policy, config, total_steps)


def frozen_parameters(policy: Policy, frozen: int) -> Iterator[nn.Parameter]:
    """Yield the parameters of the input embeddings (and of the output matrix where it is tied) and of the first layers.

    Raises:
        TrainError: The model has no list of so many layers.
    """
    decoder = policy.model.get_decoder()
    layers = decoder.layers
    if not isinstance(layers, nn.ModuleList) or len(layers) <= frozen:
        raise TrainError(
            f"policies.main.engine_options.frozen is {frozen}: {type(decoder).__name__} has no such layers"
        )
    yield from decoder.get_input_embeddings().parameters()
    for layer in layers[:frozen]:
        yield from layer.parameters()
