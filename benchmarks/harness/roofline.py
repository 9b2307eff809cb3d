"""Seconds of decoding, prefill and training on data-sheet figures: the rooflines of the simulation.

The shares of arithmetic and bandwidth that software reaches are assumptions, which no cluster confirmed: that is why
they belong to a benchmark and not to ``turnwise plan``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from harness.model_shape import ModelShape


@dataclass(frozen=True, slots=True)
class Accelerators:
    """The devices of a simulated cluster; by default H100s (NVIDIA's data sheet, SXM).

    Attributes:
        tflops: Dense bfloat16 products, in 10^12 operations a second.
        bandwidth_gb_s: Bandwidth of a device's memory.
        mfu: Share of ``tflops`` that training and prefill reach (model FLOP utilisation).
        bandwidth_use: Share of ``bandwidth_gb_s`` that decoding reaches (model bandwidth utilisation).
        step_overhead_ms: Time of a decoding step besides reading and computing: launches, scheduling, communication.
    """

    tflops: float = 989.0
    bandwidth_gb_s: float = 3350.0
    mfu: float = 0.35
    bandwidth_use: float = 0.6
    step_overhead_ms: float = 3.0

    @property
    def operations(self) -> float:
        """Operations a second of one device."""
        return self.mfu * 1e12 * self.tflops

    @property
    def bandwidth(self) -> float:
        """Bytes a second that one device reads."""
        return self.bandwidth_use * 1e9 * self.bandwidth_gb_s


def active_matrices(shape: ModelShape) -> int:
    """Return the elements of the matrices that one token is multiplied with, the output matrix included."""
    total = shape.layers * shape.attention_matrices + shape.hidden * shape.vocabulary
    if shape.experts is None:
        return total + shape.layers * 3 * shape.hidden * shape.intermediate
    experts = shape.experts
    routed = experts.active * 3 * experts.intermediate + experts.count
    of_layer = routed + 3 * experts.shared + bool(experts.shared)
    dense = (shape.layers - experts.layers) * 3 * shape.intermediate
    return total + shape.hidden * (experts.layers * of_layer + dense)


def forward_operations(shape: ModelShape, tokens: float, context: float) -> float:
    """Return the floating point operations of a forward pass over ``tokens``, each of which sees ``context``.

    ``2 N`` for each token with the N elements of :func:`active_matrices`, and ``4 layers queries context`` for scores
    and weighted values. Source: Chowdhery et al. 2022, "PaLM" (arXiv:2204.02311), appendix B, whose ``6 N + 12 L H Q
    T`` is the forward pass (a third) with the backward pass. Of a causal sequence of T tokens the mean context is T /
    2.
    """
    full = shape.layers - shape.windowed
    seen = full * context + shape.windowed * min(context, shape.window or context)
    return tokens * (2.0 * active_matrices(shape) + 4.0 * shape.queries * seen)


def weights_read(shape: ModelShape, sequences: float) -> float:
    """Return the elements of weights that a decoding step of so many sequences reads.

    All of them, but of the experts those that at least one sequence chose: ``count (1 - (1 - active / count) ^
    sequences)`` where choices are independent and alike. The embedding is read a row at a time.
    """
    output = shape.hidden * shape.vocabulary
    if shape.experts is None:
        return float(shape.layer_matrices + output)
    experts = shape.experts
    routed = experts.layers * experts.count * 3 * experts.intermediate * shape.hidden
    share = 1.0 - math.pow(1.0 - experts.active / experts.count, max(1.0, sequences))
    return float(shape.layer_matrices - routed + output) + share * routed
