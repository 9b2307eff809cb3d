"""Sampling from a pretrained model: the built-in engine against transformers' ``generate`` and vLLM for CPUs.

As ``engine_vs_generate`` does it, with SmolLM2-135M-Instruct in float32 (``harness/smollm2.py``): a process per side
with one thread, the same requests in turn, log-probabilities of every sampled id, greedy completions compared first and
sampled ids scored by a plain forward pass afterwards. Requests have 128 tokens of prompt and 64 new ones; ``shared``
has 4 prompts of 256 tokens with 8 completions each.

``ratio_vs_vllm_1``, ``_8``, ``_32`` and ``_shared`` are our sampled tokens per CPU second over vLLM's, and
``ratio_vs_generate_1`` and so on over generate's (for ``shared`` with the cache repeated by hand, its fastest).
``--quick`` takes 1 and 8.
Without a Python that has vLLM (``--vllm-python``, by default ``.venv-vllm``) its ratios are null.
"""

from __future__ import annotations

import sys
from typing import Any

from engine_vs_generate import Bench, measure, tokens_per_cpu_second
from engines.workloads import REAL_WORKLOADS
from rich.console import Console
from rich.table import Table

from harness.measure import ROOT, Sample, machine, parse, parser, ratio, report, spread
from harness.smollm2 import add_arguments, base_model, without_end

VLLM_PYTHON = ROOT / ".venv-vllm" / "bin" / "python"


def main() -> None:
    made = parser(__doc__ or "", repeats=3, quick_repeats=1)
    add_arguments(made)
    made.add_argument("--vllm-python", default=str(VLLM_PYTHON) if VLLM_PYTHON.exists() else None, metavar="PATH")
    made.add_argument("--only", help="names of requests, separated by commas")
    arguments = parse(made)
    chosen = [each for each in REAL_WORKLOADS if each.quick or not arguments.quick]
    if arguments.only:
        chosen = [each for each in REAL_WORKLOADS if each.name in arguments.only.split(",")]
    model = without_end(base_model(arguments))
    bench = Bench("smollm2", arguments.vllm_python, model)
    found: dict[str, dict[str, list[Sample]]] = {}
    try:
        greedy = bench.check_greedy()
        for workload in chosen:
            found[workload.name] = measure(bench, workload, arguments.repeats, settings=False)
        checks = {"greedy": greedy, "logprob_gap": bench.check_sampled()}
        config = {side: worker.config for side, worker in bench.workers.items()}
    finally:
        bench.close()
    result = ratios(found)
    rates = {
        each.name: {side: tokens_per_cpu_second(each, taken) for side, taken in found[each.name].items()}
        for each in chosen
    }
    show(rates)
    report(
        {
            **result,
            "tokens_per_cpu_s": rates,
            "vllm_reason": None if arguments.vllm_python else "no Python with vLLM was given (--vllm-python PATH)",
            "checks": checks,
            "config": config,
            "machine": machine("turnwise-rl", "torch", "transformers", "numpy"),
            "samples": {name: spread(samples) for name, samples in found.items()},
        }
    )


def ratios(found: dict[str, dict[str, list[Sample]]]) -> dict[str, Any]:
    """Return our rate over each peer's, null for what was not measured."""
    result: dict[str, Any] = {}
    for peer in ("vllm", "generate"):
        for workload in REAL_WORKLOADS:
            samples = found.get(workload.name, {})
            side = "generate_shared" if peer == "generate" and workload.samples > 1 else peer
            known = side in samples
            result[f"ratio_vs_{peer}_{workload.name}"] = round(ratio(samples, side, "turnwise"), 3) if known else None
    return result


def show(rates: dict[str, dict[str, float]]) -> None:
    """Print a table for people."""
    table = Table("requests", "side", "tokens/CPU-s", "ours by it", title="real_engine")
    for name, sides in rates.items():
        for side, rate in sides.items():
            table.add_row(name, side, f"{rate:.1f}", f"{sides['turnwise'] / rate:.2f}")
    Console(file=sys.stderr).print(table)


if __name__ == "__main__":
    main()
