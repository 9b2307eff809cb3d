"""How much of what this machine's matrix product reaches a whole train step of ours makes use of.

A train step is ``update_policy``: packing, forward, backward, clipping and the optimizer, on rows as the job has them.
Its useful floating-point operations are counted by formula, divided by its CPU seconds, and held against what
``torch.mm`` reaches in float32 in the same process, in turn with the steps. One thread.

Useful is what a computation needs that reads a prefix once per group and scores trained tokens only. With U the
different prefixes of a group's rows that stand before a trained token (nodes of their tree), N the trained tokens, P
the elements of the layers' matrices, A heads of D elements in L layers, V the vocabulary and h the hidden size, a
forward pass is ``2 P U + 4 L A D sum(depth of each prefix) + 2 h V N``, and a step three times that (the backward pass
makes two products for each of the forward's). Everything else counts as nothing: norms, rotary embeddings, softmax, the
embedding, the loss, the optimizer, the packing, and whatever is computed twice or for padding.

Models: ``main``, that of the lookup job (0.9 M parameters, 16 groups of 8 short episodes, 2,048 tokens a
micro-batch), and ``m50`` (46 M, one group of 8 longer ones).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from harness.measure import machine, parse, parser, report


@dataclass(frozen=True, slots=True)
class Workload:
    """A model and the rows of its steps.

    Attributes:
        model: Settings of its configuration (Qwen3).
        groups: Groups of a step, of 8 rows each.
        prompt: Tokens that a group shares.
        turns: Per row: tokens sampled, then tokens of an answer that are not trained; the last turn has none.
        budget: Tokens of a micro-batch.
    """

    model: dict[str, Any]
    groups: int
    prompt: int
    turns: tuple[tuple[int, int], ...]
    budget: int


def _model(width: int, layers: int, vocabulary: int, heads: int) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "vocab_size": vocabulary,
        "intermediate_size": 3 * width,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": width // heads,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
    }


# What the lookup job's rows are like: a prompt of 20 tokens, calls of about 6, answers of 5.
WORKLOADS = {
    "main": Workload(_model(128, 4, 732, 4), 16, 20, ((6, 5), (6, 5), (4, 0)), 2048),
    "m50": Workload(_model(512, 12, 16_384, 8), 1, 96, ((48, 16), (48, 16), (32, 0)), 4096),
}
QUICK = {"main": 8, "m50": 1}
GEMM = (512, 1024)


def main() -> None:
    arguments = parse(_parser())
    import torch

    torch.set_num_threads(1)
    results = {}
    for name in arguments.only:
        repeats = QUICK[name] if arguments.quick else arguments.repeats * QUICK[name]
        results[name] = measure(name, WORKLOADS[name], repeats)
    show(results)
    report(
        {
            **{f"fraction_{name}": result["fraction"] for name, result in results.items()},
            "aim": 0.45,
            **results,
            "machine": machine("turnwise-rl", "torch", "transformers"),
        }
    )


def _parser() -> argparse.ArgumentParser:
    made = parser(__doc__ or "", repeats=5, quick_repeats=1)
    made.add_argument("--only", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    return made


def measure(name: str, workload: Workload, repeats: int) -> dict[str, Any]:
    """Time steps and matrix products in turn, then profile one more step."""
    step, parameters, flops = prepare(workload)
    products = {size: product(size) for size in GEMM}
    for warm in (step, *products.values()):
        warm()
    steps, rates = [], []
    for number in range(repeats):
        # Both at the same time of a machine whose speed drifts.
        rates.append(max(2e-9 * size**3 / clock(run) for size, run in products.items()))
        steps.append(clock(step))
        print(f"{name} {number + 1}/{repeats}: {steps[-1]:.3f} CPU-s, mm {rates[-1]:.1f} GFLOP/s", file=sys.stderr)
    reached = [flops["step"] / 1e9 / spent for spent in steps]
    return {
        "fraction": round(median(one / other for one, other in zip(reached, rates, strict=True)), 3),
        "gflop": round(flops["step"] / 1e9, 3),
        "cpu_s": round(median(steps), 4),
        "gflop_per_s": round(median(reached), 2),
        "mm_gflop_per_s": round(median(rates), 2),
        "parameters": parameters,
        "tokens": {key: flops[key] for key in ("rows", "useful", "trained")},
        "profile": profile(step),
        "config": {"model": workload.model, "groups": workload.groups, "prompt": workload.prompt}
        | {"turns": workload.turns, "max_tokens_per_micro_batch": workload.budget},
        "samples": {"cpu_s": [round(each, 4) for each in steps], "mm": [round(each, 2) for each in rates]},
    }


def clock(run: Callable[[], object]) -> float:
    """Return the CPU seconds of a call."""
    started = time.process_time()
    run()
    return time.process_time() - started


def product(size: int) -> Callable[[], object]:
    """Return a call that multiplies two square matrices."""
    import torch

    one, other = torch.randn(2, size, size)
    out = torch.empty(size, size)
    return lambda: torch.mm(one, other, out=out)


def prepare(workload: Workload) -> tuple[Callable[[], object], int, dict[str, int]]:
    """Return a call that takes one train step, the number of parameters, and what the step is worth."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from turnwise.trainer.algorithms.config import AlgorithmConfig
    from turnwise.trainer.config.policy import PolicyConfig
    from turnwise.trainer.config.train import BatchConfig
    from turnwise.trainer.learn.torch_learner import TorchLearner
    from turnwise.trainer.learn.update import update_policy
    from turnwise.trainer.model.policy import Policy

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**workload.model)).eval()
    # Nothing is read from or written to the model's directory here.
    policy = Policy(model, source=Path(tempfile.gettempdir()))
    policy.check()
    config = PolicyConfig.model_validate({"model": {"path": tempfile.gettempdir()}})
    learner = TorchLearner(policy, config, total_steps=10_000)
    rows = make_rows(workload)
    batch = BatchConfig(max_tokens_per_micro_batch=workload.budget)
    algorithm = AlgorithmConfig()
    parameters = sum(each.numel() for each in model.parameters())
    return lambda: update_policy(learner, rows, algorithm, batch, seed=0), parameters, useful_flops(workload, rows)


def make_rows(workload: Workload) -> list[Any]:
    """Return the rows of a step; ids are random, so rows of a group share their prompt and nothing else."""
    import numpy as np

    from harness.random_rows import random_rows

    mask = np.concatenate(
        [np.zeros(workload.prompt, np.bool_)]
        + [np.repeat([True, False], [sampled, answer]) for sampled, answer in workload.turns]
    )
    return random_rows(workload.groups, workload.model["vocab_size"], workload.prompt, mask)


def useful_flops(workload: Workload, rows: list[Any]) -> dict[str, int]:
    """Return the useful operations of a step, and the tokens they were counted from."""
    nodes: dict[tuple[str, bytes], int] = {}
    trained = 0
    for row in rows:
        ids, mask = row.sample.input_ids, row.sample.loss_mask
        trained += int(mask.sum())
        # The last trained token is scored, never read.
        for depth in range(1, int(mask.nonzero()[0][-1]) + 1):
            nodes[row.sample.group_id, ids[:depth].tobytes()] = depth
    model = workload.model
    width, layers, heads, size = (
        model[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim")
    )
    attention = width * size * (2 * heads + 2 * model["num_key_value_heads"])
    matrices = layers * (attention + 3 * width * model["intermediate_size"])
    forward = 2 * matrices * len(nodes) + 4 * layers * heads * size * sum(nodes.values())
    forward += 2 * width * model["vocab_size"] * trained
    total = sum(len(row.sample.input_ids) for row in rows)
    return {"step": 3 * forward, "rows": total, "useful": len(nodes), "trained": trained}


# Kinds of operation by a part of their name; the first that fits.
KINDS = {
    "matrices": ("mm", "linear"),
    "attention": ("attention", "softmax"),
    "optimizer": ("adam", "foreach", "norm"),
    "gather and copies": ("index", "cat", "copy", "gather", "scatter", "embedding", "fill", "zero", "clone"),
}


def profile(step: Callable[[], object]) -> dict[str, float]:
    """Return the shares of the time inside torch's operations by kind; Python between them is not counted."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        step()
    spent = dict.fromkeys([*KINDS, "elementwise"], 0.0)
    for event in found.key_averages():
        kind = next((kind for kind, parts in KINDS.items() if any(part in event.key.lower() for part in parts)), None)
        spent[kind or "elementwise"] += event.self_cpu_time_total
    return {kind: round(each / sum(spent.values()), 3) for kind, each in spent.items()}


def show(results: dict[str, Any]) -> None:
    """Print the results for a person."""
    table = Table("model", "useful GFLOP", "CPU-s/step", "GFLOP/s", "torch.mm", "fraction", "profile")
    for name, one in results.items():
        shares = ", ".join(f"{kind} {share:.0%}" for kind, share in one["profile"].items())
        table.add_row(
            f"{name} ({one['parameters'] / 1e6:.1f} M)",
            f"{one['gflop']:.2f}",
            f"{one['cpu_s']:.3f}",
            f"{one['gflop_per_s']:.1f}",
            f"{one['mm_gflop_per_s']:.1f}",
            f"{one['fraction']:.3f}",
            shares,
        )
    Console(stderr=True, width=150).print(table)


if __name__ == "__main__":
    main()
