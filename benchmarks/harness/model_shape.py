"""The shape of a simulated transformer: matrices, and keys and values, by formula."""

from __future__ import annotations

from dataclasses import dataclass


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
        layers: Transformer layers.
        hidden: Size of the residual stream.
        heads: Heads of queries.
        kv_heads: Heads of keys and values.
        head_dim: Numbers of a head.
        intermediate: Inner size of a dense feed-forward layer.
        vocabulary: Rows of the embedding.
        experts: The experts, or None for a dense model.
        windowed: Layers whose attention reaches back ``window`` tokens only.
        window: That number of tokens; 0 without such layers.
        dtype: Type of the weights.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    experts: Experts | None = None
    windowed: int = 0
    window: int = 0
    dtype: str = "float32"

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

    def kv_elements(self, tokens: int) -> int:
        """Return the numbers that keys and values of one sequence take: ``2 layers kv_heads head_dim`` for each token.

        Source: Kwon et al. 2023, "PagedAttention" (arXiv:2309.06180), section 3. Windowed layers keep a window.
        """
        unwindowed = self.layers - self.windowed
        return 2 * self.keys * (unwindowed * tokens + self.windowed * min(tokens, self.window or tokens))
