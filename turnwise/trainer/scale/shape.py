"""The shape of a transformer by its ``config.json``: parameters, and keys and values, by formula."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from turnwise.chat.model_dir import model_settings
from turnwise.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Family:
    """What ``config.json`` of a family does not say.

    Attributes:
        qkv_bias: Biases of queries, keys and values; None where ``attention_bias`` decides, for the output too.
        norms: Normalisation layers of a transformer layer, without those of queries and keys.
        qk_norm: Scales of the normalisation of queries and keys: ``head``, one for each number of a head; ``all``, one
            for each number of all heads; empty for none.
        tied: Whether input and output embeddings are tied where ``tie_word_embeddings`` is not given.
    """

    qkv_bias: bool | None = None
    norms: int = 2
    qk_norm: str = ""
    tied: bool = False


FAMILIES: Final[Mapping[str, Family]] = {
    "llama": Family(),
    "mistral": Family(qkv_bias=False),
    "mixtral": Family(qkv_bias=False),
    "granite": Family(),
    "smollm3": Family(tied=True),
    "phi3": Family(qkv_bias=False),
    "olmo2": Family(qk_norm="all"),
    "gemma2": Family(norms=4, tied=True),
    "gemma3_text": Family(norms=4, qk_norm="head", tied=True),
    "qwen2": Family(qkv_bias=True),
    "qwen2_moe": Family(qkv_bias=True),
    "qwen3": Family(qk_norm="head"),
    "qwen3_moe": Family(qk_norm="head"),
}
"""The families of models that are counted by formula, by ``model_type``."""

_WINDOWED: Final = "sliding_attention"


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of a mixture-of-experts layer.

    Attributes:
        count: Experts of a layer.
        active: Experts that compute a token.
        intermediate: Inner size of an expert.
        shared: Inner size of the expert that computes every token; 0 without one.
        layers: Layers with experts; the others are dense.
    """

    count: int
    active: int
    intermediate: int
    shared: int
    layers: int


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
        intermediate: Inner size of a dense feed-forward layer.
        vocabulary: Rows of the embedding.
        tied: Whether the output matrix is the embedding.
        attention_bias: Biases of the attention's matrices: 0, those of queries, keys and values, or these and the
            output's.
        mlp_bias: Whether the feed-forward matrices have biases.
        experts: The experts, or None for a dense model.
        windowed: Layers whose attention reaches back ``window`` tokens only.
        window: That number of tokens; 0 without such layers.
        dtype: Type of the checkpoint's weights, ``float32`` if it does not say.
        context: ``max_position_embeddings``; 0 if it does not say.
    """

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied: bool
    attention_bias: int = 0
    mlp_bias: bool = False
    experts: Experts | None = None
    windowed: int = 0
    window: int = 0
    dtype: str = "float32"
    context: int = 0

    @classmethod
    def load(cls, path: Path, key: str) -> Self:
        """Read the shape of a model directory, whose weights need not be there; ``key`` names it in messages.

        Raises:
            ConfigError: It is no model directory, or not of a known family.
        """
        return cls.of(model_settings(path, key, weights=False), f"{key} is {path}")

    @classmethod
    def of(cls, settings: Mapping[str, Any], what: str = "config.json") -> Self:
        """Return the shape that ``config.json`` describes; ``what`` names it in messages.

        Raises:
            ConfigError: It is not of a known family, or a size is missing.
        """
        settings = settings.get("text_config") or settings
        family = str(settings.get("model_type"))
        if family not in FAMILIES:
            raise ConfigError(
                f"{what}, whose model_type is {family!r}: its parameters cannot be counted by formula; known: "
                f"{', '.join(FAMILIES)}"
            )
        family_facts = FAMILIES[family]
        try:
            layers, hidden, heads = (
                int(settings[name]) for name in ("num_hidden_layers", "hidden_size", "num_attention_heads")
            )
            own_bias = bool(settings.get("attention_bias"))
            kinds = settings.get("layer_types") or ()
            return cls(
                family=family,
                layers=layers,
                hidden=hidden,
                heads=heads,
                kv_heads=int(settings.get("num_key_value_heads") or heads),
                head_dim=int(settings.get("head_dim") or hidden // heads),
                intermediate=int(settings["intermediate_size"]),
                vocabulary=int(settings["vocab_size"]),
                tied=bool(settings.get("tie_word_embeddings", family_facts.tied)),
                attention_bias=(2 if own_bias else 0) if family_facts.qkv_bias is None else int(family_facts.qkv_bias),
                mlp_bias=bool(settings.get("mlp_bias")),
                experts=_experts(settings, layers),
                windowed=sum(kind == _WINDOWED for kind in kinds),
                window=int(settings.get("sliding_window") or 0) if _WINDOWED in kinds else 0,
                dtype=str(settings.get("dtype") or settings.get("torch_dtype") or "float32"),
                context=int(settings.get("max_position_embeddings") or 0),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{what}: config.json lacks a size, or it is no number ({error})") from error

    @property
    def queries(self) -> int:
        """Numbers of a token's queries in one layer."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Numbers of a token's keys in one layer; its values are as many."""
        return self.kv_heads * self.head_dim

    @property
    def attention_matrices(self) -> int:
        """Elements of a layer's four attention matrices: ``2 hidden queries + 2 hidden keys``."""
        return 2 * self.hidden * (self.queries + self.keys)

    @property
    def layer_matrices(self) -> int:
        """Elements of the matrices of all layers. A gated feed-forward layer has ``3 hidden intermediate``."""
        total = self.layers * self.attention_matrices
        if self.experts is None:
            return total + self.layers * 3 * self.hidden * self.intermediate
        experts = self.experts
        of_layer = experts.count * (3 * experts.intermediate + 1) + 3 * experts.shared + bool(experts.shared)
        dense = (self.layers - experts.layers) * 3 * self.intermediate
        return total + self.hidden * (experts.layers * of_layer + dense)

    @property
    def embeddings(self) -> int:
        """Elements of the embedding, and of the output matrix where it is another."""
        return (1 if self.tied else 2) * self.hidden * self.vocabulary

    @property
    def parameters(self) -> int:
        """All parameters, tied ones once: matrices, embeddings, and the vectors of norms and biases."""
        normed = FAMILIES[self.family].qk_norm
        vectors = self.norms * self.hidden
        vectors += {"": 0, "head": 2 * self.head_dim, "all": self.queries + self.keys}[normed]
        vectors += (self.queries + 2 * self.keys) * bool(self.attention_bias)
        vectors += self.hidden * (self.attention_bias == 2)
        vectors += (2 * self.intermediate + self.hidden) * self.mlp_bias
        return self.layer_matrices + self.embeddings + self.layers * vectors + self.hidden

    @property
    def layer(self) -> int:
        """Elements of the matrices of one layer, on average."""
        return -(-self.layer_matrices // self.layers)

    @property
    def norms(self) -> int:
        """Normalisation layers of a transformer layer, without those of queries and keys."""
        return FAMILIES[self.family].norms

    @property
    def normed_heads(self) -> bool:
        """Whether queries and keys are normalised."""
        return bool(FAMILIES[self.family].qk_norm)

    @property
    def active_intermediate(self) -> int:
        """Numbers of a token inside of a feed-forward layer: those of all experts that compute it."""
        if self.experts is None:
            return self.intermediate
        return self.experts.active * self.experts.intermediate + self.experts.shared

    def adapter_parameters(self, rank: int, targets: list[str] | None) -> int:
        """Return the parameters of low-rank adapters: ``rank (rows + columns)`` for each adapted matrix.

        Source: Hu et al. 2021, "LoRA" (arXiv:2106.09685), section 4.1. Experts are not adapted.
        """
        inner, dense = self.intermediate, self.layers if self.experts is None else self.layers - self.experts.layers
        sizes = {
            "q_proj": (self.hidden + self.queries, self.layers),
            "k_proj": (self.hidden + self.keys, self.layers),
            "v_proj": (self.hidden + self.keys, self.layers),
            "o_proj": (self.queries + self.hidden, self.layers),
            "gate_proj": (self.hidden + inner, dense),
            "up_proj": (self.hidden + inner, dense),
            "down_proj": (inner + self.hidden, dense),
        }
        adapted = sizes if targets is None else {name: size for name, size in sizes.items() if name in targets}
        return rank * sum(size * count for size, count in adapted.values())

    def kv_elements(self, tokens: int) -> int:
        """Return the numbers that keys and values of one sequence take: ``2 layers kv_heads head_dim`` for each token.

        Source: Kwon et al. 2023, "PagedAttention" (arXiv:2309.06180), section 3. Windowed layers keep a window.
        """
        unwindowed = self.layers - self.windowed
        return 2 * self.keys * (unwindowed * tokens + self.windowed * min(tokens, self.window or tokens))


def _experts(settings: Mapping[str, Any], layers: int) -> Experts | None:
    count = int(settings.get("num_experts") or settings.get("num_local_experts") or 0)
    if not count:
        return None
    step = int(settings.get("decoder_sparse_step") or 1)
    dense = set(settings.get("mlp_only_layers") or ())
    return Experts(
        count,
        int(settings.get("num_experts_per_tok") or 2),
        int(settings.get("moe_intermediate_size") or settings["intermediate_size"]),
        int(settings.get("shared_expert_intermediate_size") or 0),
        sum((index + 1) % step == 0 and index not in dense for index in range(layers)),
    )
