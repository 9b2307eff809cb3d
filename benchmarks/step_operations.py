"""What a train step and a decoding step launch and move: operations that a GPU would start, casts, bytes.

A train step by optimization; a decoding step of one and of 64 sequences, sampling included, with layers as they are and
compiled. Counted on a CPU in bfloat16 on the rehearsal's model of ``gpu.py`` (two layers, 28 for decoding), so that a
change shows without a GPU.

An operation of torch counts once, and so does a kernel that the compiler made of several; views count as nothing. Bytes
are those that operations read (their inputs) and write (what they allocate or change in place), and of compiled kernels
those that the compiler counts. A cast is an operation that only changes a type: those that a compiled kernel contains
cost nothing. Writing to the KV cache and attending to it are one launch each, and move no bytes here.
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
    Variant("plain", checkpointing=False, one_batch=True),
    Variant("fused_loss", ["fused_loss"], checkpointing=False, one_batch=True),
    Variant("bfloat16_weights", ["bfloat16_weights"], checkpointing=False, one_batch=True),
    Variant("compile", ["compile"], checkpointing=False, one_batch=True),
    Variant("all", ALL, checkpointing=False, one_batch=True),
)
# More tokens and ids than in the rehearsal, so that the loss has several tiles.
SIZES = replace(REHEARSED, trained=64, model={**REHEARSED.model, "vocab_size": 32_768})
DECODING = (1, 64)
DEPTH = {**SIZES.model, "num_hidden_layers": 28}
"""Decoding is counted with all layers of the model of ``gpu.py``."""
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
    for count in DECODING:
        for compiled in (False, True):
            name = f"decode_{count}{'_compiled' if compiled else ''}"
            results[name] = decoded(count, graphs, compiled=compiled)
            print(f"{name}: {results[name]}", file=sys.stderr, flush=True)
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
        from torch._inductor.scheduler import NopKernelSchedulerNode

        compiled_graphs: list[tuple[int, int]] = []
        build = graph.GraphLowering._compile_to_module

        def counting_build(lowering: Any) -> Any:
            module = build(lowering)
            moved, nodes, _ = lowering.count_bytes()
            kernels = sum(not isinstance(node, NopKernelSchedulerNode) for node, _ in nodes)
            compiled_graphs.append((kernels, int(moved)))
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

    return _counts(step, graphs)


@dataclass(slots=True)
class CountedKernels:
    """Kernels of decoding that only count.

    Attributes:
        launches: Calls.
    """

    launches: int = 0

    def store(self, key: Any, value: Any, rows: Any, geometry: Any, layer: int) -> None:
        """Count a launch."""
        del key, value, rows, geometry, layer
        self.launches += 1

    def attend(self, query: Any, rows: Any, geometry: Any, layer: int, scale: float | None, window: int | None) -> Any:
        """Count a launch; return memory of the right shape."""
        del rows, layer, scale, window
        self.launches += 1
        return query.new_empty((*query.shape[:2], geometry.value_dim))


def decoded(count: int, graphs: GraphCounts, *, compiled: bool) -> dict[str, float]:
    """Return what a decoding step of so many sequences launches, casts and moves."""
    import numpy as np
    import torch

    from turnwise.engine.causal_lm import CausalLM
    from turnwise.engine.decoding.graphs import DecodeGraphs
    from turnwise.engine.engine import Engine
    from turnwise.engine.sampling import RowParams, sample

    model = CausalLM(checkpoint(replace(SIZES, model=DEPTH)), dtype=SIZES.dtype, device="cpu")
    kernels = CountedKernels()
    cache = Engine(model, lambda _: None, max_seqs=count)._cache
    steps = DecodeGraphs(model, cache, kernels, count, compiled=compiled)
    ones, none = np.ones(count, dtype=np.float32), np.zeros(count, dtype=np.int64)
    params = RowParams(temperature=ones, top_p=ones, top_k=none, min_p=0 * ones)

    def step() -> None:
        kernels.launches = 0
        steps._forward(count)
        sample(steps._outputs[:count], params, np.full(count, 0.5))

    with torch.inference_mode():
        counts = _counts(step, graphs)
    return {**counts, "launches": counts["launches"] + kernels.launches}


def _counts(step: Callable[[], None], graphs: GraphCounts) -> dict[str, float]:
    import torch

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
        if event.cpu_children or not event.name.startswith(("aten::", "torch_attn::", "mkldnn::")):
            continue
        parent = event.cpu_parent
        while parent is not None and parent.name != COMPILED:
            parent = parent.cpu_parent
        if parent is None:
            yield event


if __name__ == "__main__":
    main()
