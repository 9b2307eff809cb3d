"""The self-check of exact numerics: which operation depends on the batch, and what all of them depend on besides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from turnwise.engine.numerics.exact import KEY_BLOCK, ExactActivation, exact_attention, multiply, pack_weight

CHUNKS = (1, 2, 9, 33, 19)
"""Tokens of the parts in which a sequence is read: of all classes that products and attention have."""


class _VectorTails(TorchFunctionMode):
    """Notes functions that torch computes by other instructions for the elements that fill no vector.

    Attributes:
        names: Those that were called.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := getattr(func, "__name__", "")) in _WITH_TAILS:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


_WITH_TAILS = {"sigmoid", "silu", "gelu", "softplus", "mish", "elu", "celu", "selu", "logsigmoid", "hardswish", "erf"}


@dataclass(frozen=True, slots=True)
class Part:
    """A forward pass with some tokens of a sequence.

    Attributes:
        run: Computes it; returns the logits of all of its tokens, [T, vocabulary].
        tokens: Which of those are the sequence's.
        positions: Their positions in it.
    """

    run: Callable[[], Tensor]
    tokens: slice
    positions: slice


def first_variant(model: nn.Module, run_alone: Callable[[], Tensor], parts: Sequence[Part]) -> str | None:
    """Return the first operation whose result for a token depends on what is computed beside it.

    Args:
        model: The model that the passes call.
        run_alone: The pass of a sequence alone; returns its logits.
        parts: Others, in order: they may read what those before them left.

    Returns:
        The module and its operation in words; None where all logits are equal, bit for bit.
    """
    with _VectorTails() as tails:
        expected = run_alone()
    if tails.names:
        return f"the function {tails.names[0]}"
    if all(torch.equal(part.run()[part.tokens], expected[part.positions]) for part in parts):
        return None
    names = {module: name for name, module in model.named_modules()}
    reference = _traced(model, run_alone)
    variants: list[tuple[int, str]] = []
    for part in parts:
        traced = _traced(model, part.run)
        for number, (module, (inputs, outputs)) in enumerate(reference.items()):
            if module not in traced:
                continue
            what = f"{names[module]} ({type(module).__name__})"
            if not torch.equal(traced[module][0][part.tokens], inputs[part.positions]):
                variants.append((number, f"what is computed before {what}"))
                break
            if not torch.equal(traced[module][1][part.tokens], outputs[part.positions]):
                variants.append((number, what))
                break
    return min(variants, default=(0, "the logits"))[1]


def _traced(model: nn.Module, run: Callable[[], Tensor]) -> dict[nn.Module, tuple[Tensor, Tensor]]:
    """Return input and output by token of each module that computes all of a pass's tokens, in their order."""
    values: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def note(module: nn.Module, inputs: Any, output: Any) -> None:
        if inputs and isinstance(inputs[0], Tensor) and isinstance(output, Tensor):
            values[module] = _by_token(inputs[0]), _by_token(output)

    leaves = [module for module in model.modules() if not list(module.children())]
    hooks = [module.register_forward_hook(note) for module in leaves]
    try:
        count = len(run())
    finally:
        for hook in hooks:
            hook.remove()
    return {module: both for module, both in values.items() if all(len(value) == count for value in both)}


def _by_token(values: Tensor) -> Tensor:
    return (values[0] if values.ndim > 1 and len(values) == 1 else values).clone()


@cache
def capability() -> str:
    """Return what the bits of the operations here depend on besides the weights.

    The version of torch, the processor's vector instructions, and a digest of each operation's results.
    """
    count = torch.arange(64 * 2048)
    numbers = (count * 7919 % 1009).float() / 1009 - 0.5
    rows, weight = numbers[: 16 * 2048].view(16, 2048), numbers.view(64, 2048)
    heads = numbers[: 64 * KEY_BLOCK].view(1, 1, KEY_BLOCK, 64)
    results = (
        multiply(rows, pack_weight(weight)),
        exact_attention(heads, heads, heads, is_causal=True),
        rows.log_softmax(-1),
        ExactActivation()(rows),
        ExactActivation("tanh")(rows),
    )
    digest = blake2b(b"".join(result.detach().numpy().tobytes() for result in results), digest_size=8).hexdigest()
    return f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {digest}"
