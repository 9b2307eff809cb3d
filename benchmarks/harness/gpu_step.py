"""A train step on one GPU, by option: each alone and all together, as shares of what ``torch.mm`` reaches there."""

from __future__ import annotations

import gc
import json
import resource
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from harness.measure import cached


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured, at full size or rehearsed.

    Attributes:
        device: A torch device.
        dtype: Of the engine, and of the trainer's matrix products.
        model: Settings of the random-weight model.
        product: Side of the square matrices of ``limits``.
        copied: Bytes of the copy of ``limits``.
        batches: Numbers of requests at once.
        prompt: Tokens of a prompt.
        new: Tokens that each request samples.
        groups: Groups of a train step, of 8 rows each.
        trained: Trained tokens of a row.
        budget: Tokens of a micro-batch.
        steps: Timed repeats.
    """

    device: str
    dtype: str
    model: dict[str, Any]
    product: int
    copied: int
    batches: tuple[int, ...]
    prompt: int
    new: int
    groups: int
    trained: int
    budget: int
    steps: int


def _model(width: int, layers: int, heads: int, keys: int, inner: int, vocabulary: int) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "intermediate_size": inner,
        "vocab_size": vocabulary,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    }


FULL = Sizes(
    "cuda", "bfloat16", _model(1536, 28, 12, 2, 8960, 151_936), 8192, 4 << 30, (1, 64, 256), 128, 256, 8, 512, 16_384, 3
)
REHEARSED = Sizes("cpu", "bfloat16", _model(64, 2, 4, 2, 128, 512), 256, 1 << 22, (1, 4, 8), 16, 8, 2, 16, 512, 1)


def figures(number: float) -> float:
    """Return a number with three significant digits."""
    return float(f"{number:.3g}")


class Clock:
    """Seconds of work on a device, and its peak memory; on a CPU the process's own."""

    def __init__(self, device: str) -> None:
        import torch

        self._cuda = torch.cuda if device.startswith("cuda") else None

    def seconds(self, work: Callable[[], object]) -> float:
        """Return the wall seconds of a call, whatever it left on the device included."""
        self._wait()
        started = time.perf_counter()
        work()
        self._wait()
        return time.perf_counter() - started

    def peak_mb(self) -> float:
        """Return the peak since the last call in megabytes."""
        if self._cuda is None:
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        peak = self._cuda.max_memory_allocated() / 2**20
        self._cuda.reset_peak_memory_stats()
        return float(peak)

    def _wait(self) -> None:
        if self._cuda is not None:
            self._cuda.synchronize()


def limits(sizes: Sizes) -> dict[str, Any]:
    """Measure matrix products and copies."""
    import torch

    clock = Clock(sizes.device)
    dtype = getattr(torch, sizes.dtype)
    one, other = torch.randn(2, sizes.product, sizes.product, device=sizes.device).to(dtype)
    out = torch.empty_like(one)
    source = torch.empty(sizes.copied, dtype=torch.uint8, device=sizes.device).fill_(1)
    target = torch.empty_like(source)
    times: dict[str, list[float]] = {"product": [], "copy": []}
    for repeat in range(10 + 2):
        spent = clock.seconds(lambda: torch.mm(one, other, out=out)), clock.seconds(lambda: target.copy_(source))
        if repeat >= 2:
            times["product"].append(spent[0])
            times["copy"].append(spent[1])
    name = torch.cuda.get_device_name() if sizes.device == "cuda" else "CPU"
    return {
        "device": name,
        "tflop_per_s": figures(2e-12 * sizes.product**3 / median(times["product"])),
        "gb_per_s": figures(2e-9 * sizes.copied / median(times["copy"])),
    }


def checkpoint(sizes: Sizes) -> Path:
    """Return the folder of the random-weight model, made once."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    def build(folder: Path) -> None:
        torch.manual_seed(0)
        with torch.device(sizes.device):
            model = Qwen2ForCausalLM(Qwen2Config(**sizes.model)).to(getattr(torch, sizes.dtype))
        model.save_pretrained(folder)

    return cached("gpu-model", {"model": sizes.model, "dtype": sizes.dtype}, build)


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to take the step.

    Attributes:
        name: Its name in the result.
        optimizations: Of ``model.optimizations``.
        checkpointing: ``model.gradient_checkpointing``.
        one_batch: Whether all tokens are one micro-batch.
        share: ``batch.share_prefixes``: rows of a group are a tree, which FlexAttention computes.
    """

    name: str
    optimizations: list[str] = field(default_factory=list)
    checkpointing: bool | str = True
    one_batch: bool = False
    share: bool = True


ALL = ["varlen", "compile", "fused_loss", "bfloat16_weights"]
VARIANTS = (
    Variant("plain"),
    Variant("all", ALL, "matmuls", one_batch=True),
    Variant("one_micro_batch", one_batch=True),
    Variant("matmuls", checkpointing="matmuls"),
    Variant("no_checkpointing", checkpointing=False),
    Variant("fused_loss", ["fused_loss"]),
    Variant("bfloat16_weights", ["bfloat16_weights"]),
    Variant("compile", ["compile"]),
    Variant("unshared", share=False),
    Variant("unshared_varlen", ["varlen"], share=False),
    Variant("unshared_all", ALL, "matmuls", one_batch=True, share=False),
)
"""In order of worth: what is measured last may not be measured at all."""


def measure_steps(sizes: Sizes, skip: Collection[str] = ()) -> None:
    """Measure the variants that are not named in ``skip``; print each result as a line as soon as it is there."""
    folder, rate = checkpoint(sizes), limits(sizes)["tflop_per_s"]
    for variant in VARIANTS:
        # In a rehearsal layers are compiled once.
        rehearsed = sizes.device == "cpu" and "compile" in variant.optimizations and variant.name != "all"
        if rehearsed or variant.name in skip:
            continue
        try:
            result = measure_step(sizes, folder, variant, rate)
        except RuntimeError as error:
            # Mostly too little memory, which is a result too.
            result = {"error": str(error).splitlines()[0][:300]}
        print(json.dumps({"name": variant.name, **result}), flush=True)


def measure_step(sizes: Sizes, folder: Path, variant: Variant, rate: float) -> dict[str, Any]:
    """Train on synthetic rows, groups of 8 with a shared prompt; ``rate`` is that of ``torch.mm`` in TFLOP/s."""
    import torch

    from turnwise.trainer.algorithms.config import AlgorithmConfig
    from turnwise.trainer.config.policy import PolicyConfig
    from turnwise.trainer.config.train import BatchConfig
    from turnwise.trainer.learn.torch_learner import TorchLearner
    from turnwise.trainer.learn.update import update_policy

    gc.collect()
    if sizes.device == "cuda":
        torch.cuda.empty_cache()
    clock = Clock(sizes.device)
    model = {
        "path": str(folder),
        "device": sizes.device,
        "compute_dtype": sizes.dtype,
        "gradient_checkpointing": variant.checkpointing,
        "optimizations": variant.optimizations,
    }
    started = time.perf_counter()
    learner = TorchLearner.create(PolicyConfig.model_validate({"model": model}), total_steps=1000)
    shape = learner.policy.model.config
    rows = step_rows(sizes, int(shape.vocab_size))
    most = sum(len(row.sample.input_ids) for row in rows)
    batch = BatchConfig(
        max_tokens_per_micro_batch=most if variant.one_batch else sizes.budget, share_prefixes=variant.share
    )
    algorithm = AlgorithmConfig()
    load_peak = clock.peak_mb()
    update_policy(learner, rows, algorithm, batch, seed=0)
    first = time.perf_counter() - started
    spent = median(
        clock.seconds(lambda: update_policy(learner, rows, algorithm, batch, seed=1)) for _ in range(sizes.steps)
    )
    # Without shared prefixes more is computed, and nothing more is useful.
    operations = step_operations(sizes, shape)
    tokens = sizes.groups * (sizes.prompt + 8 * sizes.trained)
    return {
        "seconds": figures(spent),
        "tokens_per_s": figures(tokens / spent),
        "tflop_per_s": figures(operations / spent / 1e12),
        "utilisation": figures(operations / spent / 1e12 / rate),
        "peak_mb": round(clock.peak_mb()),
        "load_peak_mb": round(load_peak),
        "to_second_step_s": figures(first),
        "used": sorted(learner.policy.optimizations),
    }


def step_rows(sizes: Sizes, vocabulary: int) -> list[Any]:
    import numpy as np

    from harness.random_rows import random_rows

    return random_rows(sizes.groups, vocabulary, sizes.prompt, np.arange(sizes.prompt + sizes.trained) >= sizes.prompt)


def step_operations(sizes: Sizes, shape: Any) -> float:
    """Return the floating-point operations of a step as ``step_vs_limit`` counts them: three forward passes."""
    width, layers, heads = shape.hidden_size, shape.num_hidden_layers, shape.num_attention_heads
    size = getattr(shape, "head_dim", None) or width // heads
    matrices = layers * (
        width * size * (2 * heads + 2 * shape.num_key_value_heads) + 3 * width * shape.intermediate_size
    )
    tokens = sizes.groups * (sizes.prompt + 8 * sizes.trained)
    depths = sizes.groups * (
        sizes.prompt * (sizes.prompt + 1) / 2 + 8 * sizes.trained * (2 * sizes.prompt + sizes.trained + 1) / 2
    )
    forward = 2 * matrices * tokens + 4 * layers * heads * size * depths
    forward += 2 * width * shape.vocab_size * sizes.groups * 8 * sizes.trained
    return float(3 * forward)
