"""The shape of a transformer: what its ``config.json`` says, and the parameters of a model of it without memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from torch import nn

from turnwise.chat.model_dir import model_settings
from turnwise.engine.lora import ends_with
from turnwise.errors import ConfigError, TrainError
from turnwise.trainer.model.lora import expert_matrices
from turnwise.trainer.model.policy import empty_model

_WINDOWED: Final = "sliding_attention"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder with grouped-query attention and gated feed-forward layers.

    Attributes:
        family: ``model_type``.
        layers: Transformer layers.
        hidden: Size of the residual stream.
        heads: Heads of queries.
        kv_heads: Heads of keys and values.
        head_dim: Numbers of a head.
        active_intermediate: Numbers of a token inside of a feed-forward layer: those of all experts that compute it.
        vocabulary: Rows of the embedding.
        parameters: All parameters, tied ones once.
        layer_matrices: Elements of the matrices of all layers.
        embeddings: Elements of the embedding, and of the output matrix where it is another.
        norms: Normalisation layers of a transformer layer, without those of queries and keys.
        normed_heads: Whether queries and keys are normalised.
        linear_sides: Rows and columns of all linear layers, the output matrix aside, added up by their last name.
        linear_sizes: Elements of their matrices, added up likewise.
        windowed: Layers whose attention reaches back ``window`` tokens only.
        window: That number of tokens; 0 without such layers.
        context: ``max_position_embeddings``; 0 if it does not say.
        expert_matrices: Elements of the matrices of all experts of all layers.
        expert_sides: Rows and columns of these, added up for each layer, by the parameter's name.
    """

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    active_intermediate: int
    vocabulary: int
    parameters: int
    layer_matrices: int
    embeddings: int
    norms: int
    normed_heads: bool
    linear_sides: Mapping[str, int]
    linear_sizes: Mapping[str, int]
    windowed: int = 0
    window: int = 0
    context: int = 0
    expert_matrices: int = 0
    expert_sides: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path, key: str) -> Self:
        """Read the shape of a model directory, whose weights need not be there; ``key`` names it in messages.

        Raises:
            ConfigError: It is no directory of a transformer with attention in every layer.
        """
        model_settings(path, key, weights=False)
        try:
            model = empty_model(path)
            return cls._of(model, model.config.to_dict())
        except (TrainError, AttributeError, KeyError) as error:
            raise ConfigError(f"{key} is {path}, whose memory cannot be counted: {error}") from error

    @classmethod
    def _of(cls, model: Any, settings: Mapping[str, Any]) -> Self:
        layers, output = model.get_decoder().layers, model.get_output_embeddings()
        embeddings = {model.get_input_embeddings().weight, output.weight}
        sides, sizes = Counter[str](), Counter[str]()
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear) and module is not output:
                sides[name.rpartition(".")[2]] += module.in_features + module.out_features
                sizes[name.rpartition(".")[2]] += module.weight.numel()
        parts, attention = (dict(module.named_children()) for module in (layers[0], layers[0].self_attn))
        windowed, heads = list(settings.get("layer_types") or ()).count(_WINDOWED), settings["num_attention_heads"]
        return cls(
            family=settings["model_type"],
            layers=len(layers),
            hidden=settings["hidden_size"],
            heads=heads,
            kv_heads=settings.get("num_key_value_heads") or heads,
            head_dim=settings.get("head_dim") or settings["hidden_size"] // heads,
            active_intermediate=_active_intermediate(settings),
            vocabulary=settings["vocab_size"],
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            layer_matrices=sum(parameter.numel() for parameter in layers.parameters() if parameter.ndim > 1),
            embeddings=sum(weight.numel() for weight in embeddings),
            norms=sum(name.endswith("norm") for name in parts),
            normed_heads="q_norm" in attention,
            linear_sides=sides,
            linear_sizes=sizes,
            windowed=windowed,
            window=settings["sliding_window"] if windowed else 0,
            context=settings.get("max_position_embeddings") or 0,
            # Those of one layer are one tensor.
            expert_matrices=sum(parameter.numel() for parameter in layers.parameters() if parameter.ndim > 2),
            expert_sides={
                name: len(parameter) * sum(parameter.shape[1:]) for name, parameter in expert_matrices(model).items()
            },
        )

    @property
    def queries(self) -> int:
        """Numbers of a token's queries in one layer."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Numbers of a token's keys in one layer; its values are as many."""
        return self.kv_heads * self.head_dim

    @property
    def layer(self) -> int:
        """Elements of the matrices of one layer, on average."""
        return -(-self.layer_matrices // self.layers)

    def adapter_parameters(self, rank: int, targets: list[str] | None) -> int:
        """Return the parameters of low-rank adapters: ``rank (rows + columns)`` for each adapted matrix.

        Source: Hu et al. 2021, "LoRA" (arXiv:2106.09685), section 4.1.
        """
        linear = (size for name, size in self.linear_sides.items() if targets is None or name in targets)
        experts = (size for name, size in self.expert_sides.items() if ends_with(name, targets or ()))
        return rank * (sum(linear) + sum(experts))

    def adapts_experts(self, targets: list[str] | None) -> bool:
        """Return whether adapters are on experts, so that servers are sent whole weights."""
        return any(ends_with(name, targets or ()) for name in self.expert_sides)

    def kv_elements(self, tokens: int) -> int:
        """Return the numbers that keys and values of one sequence take: ``2 layers kv_heads head_dim`` for each token.

        Source: Kwon et al. 2023, "PagedAttention" (arXiv:2309.06180), section 3. Windowed layers keep a window.
        """
        unwindowed = self.layers - self.windowed
        return 2 * self.keys * (unwindowed * tokens + self.windowed * min(tokens, self.window or tokens))


def _active_intermediate(settings: Mapping[str, Any]) -> int:
    inner: int = settings["intermediate_size"]
    if not (settings.get("num_experts") or settings.get("num_local_experts")):
        return inner
    of_expert = settings.get("moe_intermediate_size") or inner
    return int(settings["num_experts_per_tok"] * of_expert + (settings.get("shared_expert_intermediate_size") or 0))
