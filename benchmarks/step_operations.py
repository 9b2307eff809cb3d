"""What a train step launches and moves, by optimization: operations that a GPU would start, casts, bytes.

Counted on a CPU in bfloat16 on the rehearsal's model of ``gpu.py`` (two layers), so that a change shows without a GPU.
An operation of torch counts once, and so does a kernel that the compiler made of several; views count as nothing. Bytes
are those that operations read (their inputs) and write (what they allocate or change in place), and of compiled kernels
those that the compiler counts. A cast is an operation that only changes a type: those that a compiled kernel contains
cost nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from harness.gpu_step import ALL, REHEARSED, Variant, checkpoint, step_rows
from harness.measure import machine, parse, parser, report

VARIANTS = (
    Variant("plain", checkpointing=False, whole=True),
    Variant("fused_loss", ["fused_loss"], checkpointing=False, whole=True),
    Variant("bfloat16_weights", ["bfloat16_weights"], checkpointing=False, whole=True),
    Variant("compile", ["compile"], checkpointing=False, whole=True),
    Variant("all", ALL, checkpointing=False, whole=True),
)
# More tokens and ids than in the rehearsal, so that the loss has several tiles.
SIZES = replace(REHEARSED, trained=64, model={**REHEARSED.model, "vocab_size": 32_768})
COMPILED = "compiled graph"
_VIEWS = (
    "view", "view_as", "_unsafe_view", "_reshape_alias", "reshape", "transpose", "t", "numpy_T", "mT", "expand",
    "expand_as", "slice", "select", "narrow", "split", "split_with_sizes", "chunk", "unbind", "permute", "unsqueeze",
    "unsqueeze_", "squeeze", "flatten", "unflatten", "as_strided", "detach", "detach_", "alias", "contiguous", "to",
    "empty", "empty_like", "empty_strided", "new_empty", "resize_", "set_", "lift_fresh", "resolve_conj", "resolve_neg",
    "result_type", "item", "is_nonzero", "_local_scalar_dense", "_has_compatible_shallow_copy_type",
)  # fmt: skip
_BYTES = {"float": 4, "c10::BFloat16": 2, "double": 8, "long int": 8, "int": 4, "bool": 1, "unsigned char": 1}


def main() -> None:
    arguments = parse(parser(__doc__ or "", repeats=1, quick_repeats=1))
    variants = VARIANTS[:1] + VARIANTS[-1:] if arguments.quick else VARIANTS
    graphs = GraphCounts()
    graphs.install()
    results = {}
    for variant in variants:
        results[variant.name] = counted(variant, graphs)
        print(f"{variant.name}: {results[variant.name]}", file=sys.stderr, flush=True)
    report({**results, "sizes": SIZES.model, "machine": machine("turnwise-rl", "torch", "transformers")})


@dataclass(slots=True)
class GraphCounts:
    """Launches and bytes of compiled graphs, of those that ran.

    Attributes:
        launches: Kernels and products.
        moved: Bytes.
    """

    launches: int = 0
    moved: int = 0

    def install(self) -> None:
        """Have torch compile with graphs that count themselves."""
        import torch
        from torch._inductor import compile_fx, graph

        compiled_graphs: list[tuple[int, int]] = []
        build = graph.GraphLowering._compile_to_module

        def counting_build(lowering: Any) -> Any:
            module = build(lowering)
            moved, nodes, _ = lowering.count_bytes()
            compiled_graphs.append((len(nodes), int(moved)))
            return module

        def inner(module: Any, inputs: Any, **keywords: Any) -> Any:
            compiled = compile_fx.compile_fx_inner(module, inputs, **keywords)
            launches, moved = compiled_graphs[-1]

            def run(values: list[Any]) -> Any:
                self.launches += launches
                self.moved += moved
                with torch.profiler.record_function(COMPILED):
                    return compiled(values)

            run._boxed_call = True  # type: ignore[attr-defined]
            return run

        def backend(module: Any, inputs: Any) -> Any:
            return compile_fx.compile_fx(module, inputs, inner_compile=inner)

        graph.GraphLowering._compile_to_module = counting_build
        torch._inductor.config.force_disable_caches = True
        plain: Callable[..., Any] = torch.compile
        torch.compile = lambda function, **options: plain(function, backend=backend, **options)


def counted(variant: Variant, graphs: GraphCounts) -> dict[str, float]:
    """Return what one step of a variant launches, casts and moves."""
    import torch

    from turnwise.trainer.algorithms.config import AlgorithmConfig
    from turnwise.trainer.config.policy import PolicyConfig
    from turnwise.trainer.config.train import BatchConfig
    from turnwise.trainer.learn.torch_learner import TorchLearner
    from turnwise.trainer.learn.update import update_policy
    from turnwise.trainer.model import chunked_logprobs

    chunked_logprobs.HELD_BYTES = 0
    chunked_logprobs._TILE_BYTES = 1 << 26
    model = {"path": str(checkpoint(SIZES)), "device": "cpu", "compute_dtype": SIZES.dtype}
    model["optimizations"] = variant.optimizations
    learner = TorchLearner.create(PolicyConfig.model_validate({"model": model}), total_steps=10)
    rows = step_rows(SIZES, SIZES.model["vocab_size"])
    batch = BatchConfig(max_tokens_per_micro_batch=1 << 20, share_prefixes=variant.share)

    def step() -> None:
        update_policy(learner, rows, AlgorithmConfig(), batch, seed=0)

    step()
    graphs.launches = graphs.moved = 0
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True, profile_memory=True
    ) as profile:
        step()
    launches = casts = moved = 0
    for event in _operations(profile.events()):
        allocated = max(0, event.self_cpu_memory_usage)
        if event.name.removeprefix("aten::") in _VIEWS:
            moved += allocated
            continue
        inputs = [
            prod(shape) * _BYTES.get(dtype, 0)
            for shape, dtype in zip(event.input_shapes, event.input_dtypes, strict=False)
            if shape and dtype
        ]
        launches += 1
        casts += event.name == "aten::copy_" and len({*event.input_dtypes[:2]}) == 2
        moved += sum(inputs) + allocated
    return {
        "launches": launches + graphs.launches,
        "of_compiled": graphs.launches,
        "casts": casts,
        "megabytes": round((moved + graphs.moved) / 1e6, 1),
    }


def _operations(events: Any) -> Iterator[Any]:
    """Yield the operations that contain no other, outside of compiled graphs."""
    for event in events:
        if event.cpu_children or not event.name.startswith(("aten::", "torch_attn::")):
            continue
        parent = event.cpu_parent
        while parent is not None and parent.name != COMPILED:
            parent = parent.cpu_parent
        if parent is None:
            yield event


if __name__ == "__main__":
    main()
