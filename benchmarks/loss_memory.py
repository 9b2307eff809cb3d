"""Peak memory of a loss over a large vocabulary: ours, in tiles, as a fraction of holding all logits.

Both sides are given the last hidden states of 8,192 trained tokens and an output matrix of 151,936 rows (Qwen's), and
compute the negative log-likelihood of the tokens, the entropy where ours reports it, and the gradients of states and
matrix. ``materialised`` is what a training script writes: ``F.cross_entropy(states @ matrix.T, ids)`` and
``backward()``; nothing but autograd holds on to the logits, and it computes no entropy. ``ours`` is
``turnwise.trainer.model.chunked_logprobs.score_states``, entropies included, as a train step calls it.

The figure is ours over materialised, of the peak of resident memory above what the process held before the loss
(states, matrix, ids, the libraries). Gradients are counted on both sides. Each side is a process of its own, one
thread, float32; with ``--quick`` both run at once. Beside it stand the same peak over the bytes of the logits alone,
and the ratio of the CPU seconds.

Checked, and an error otherwise: losses and gradients of the two sides are equal.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from harness.measure import interleave, machine, median, parse, parser, ratio, report, run_process

SETTINGS: dict[str, Any] = {"tokens": 8192, "vocabulary": 151_936, "hidden": 1024}
# Only the hidden size is smaller: it decides the time of the products, and of the memory no more than the gradients'.
QUICK = {"hidden": 16}
# Torch asks for large pages where the system has them: clearing 15 GB in pages of 4 KiB may take a minute.
# The peak is the same.
ENVIRONMENT = {"materialised": {"THP_MEM_ALLOC_ENABLE": "1"}, "ours": {}}
CLOSE = 1e-4
BAR = 0.25


def main() -> None:
    made = parser(__doc__ or "", repeats=2, quick_repeats=1)
    made.add_argument("--side", nargs=2, help=argparse.SUPPRESS)
    made.add_argument("--settings", default="{}", help="JSON over the settings of both sides, to try others")
    arguments = parse(made)
    if arguments.side:
        measure(arguments.side[0], json.loads(arguments.side[1]))
        return
    settings = {**SETTINGS, **(QUICK if arguments.quick else {}), **json.loads(arguments.settings)}
    logits = 4 * settings["tokens"] * settings["vocabulary"]
    require(3.2 * logits)
    sides = {
        name: lambda name=name: run_process(
            [sys.executable, __file__, "--side", name, json.dumps(settings)], environment=ENVIRONMENT[name]
        )
        for name in ("materialised", "ours")
    }
    if arguments.quick:
        # Side by side: memory is that of each process.
        with ThreadPoolExecutor() as pool:
            running = {name: pool.submit(side) for name, side in sides.items()}
            samples = {name: [each.result()] for name, each in running.items()}
    else:
        samples = interleave(sides, arguments.repeats)
    for one, other in zip(samples["ours"], samples["materialised"], strict=True):
        for figure in ("loss", "states_grad", "matrix_grad"):
            if abs(one.values[figure] / other.values[figure] - 1) > CLOSE:
                raise SystemExit(f"{figure} is {one.values[figure]} of ours and {other.values[figure]} materialised")
    fraction = 1 / ratio(samples, "materialised", "ours", "peak_mb")
    time_ratio = median(samples["ours"], "loss_cpu_s") / median(samples["materialised"], "loss_cpu_s")
    show(samples, fraction, logits)
    report(
        {
            "fraction": round(fraction, 4),
            "bar": BAR,
            "fraction_of_logits": round(median(samples["ours"], "peak_mb") * 2**20 / logits, 4),
            "time_ratio": round(time_ratio, 3),
            "config": {**settings, "dtype": "float32", "threads": 1, "logits_mb": round(logits / 2**20)},
            "machine": machine("turnwise-rl", "torch"),
            "samples": {name: [sample.values for sample in taken] for name, taken in samples.items()},
        }
    )


def require(wanted: float) -> None:
    """Refuse to start what this machine has no memory for: the materialising side holds three times the logits."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) * 1024
    if free < wanted:
        raise SystemExit(
            f"{free / 2**30:.1f} GiB of memory are free and holding all logits takes {wanted / 2**30:.1f}: "
            "a smaller workload is --settings '{\"tokens\": 2048}'"
        )


def measure(side: str, settings: dict[str, Any]) -> None:
    """Be one side, in a process of its own."""
    import torch
    from torch import nn

    from turnwise.trainer.model.chunked_logprobs import LogitTransform, score_states

    torch.manual_seed(0)
    hidden = settings["hidden"]
    head = nn.Linear(hidden, settings["vocabulary"], bias=False)
    nn.init.normal_(head.weight, std=hidden**-0.5)
    states = torch.randn(settings["tokens"], hidden, requires_grad=True)
    ids = torch.randint(0, settings["vocabulary"], (settings["tokens"],))
    ones = torch.ones(settings["tokens"])

    def loss(count: int) -> torch.Tensor:
        if side == "materialised":
            return nn.functional.cross_entropy(head(states[:count]), ids[:count], reduction="sum")
        own = LogitTransform()
        return -score_states(head, states[:count], ids[:count], ones[:count], own, entropy=True)[0].sum()

    # What a first call of each operation allocates is not the loss's.
    loss(8).backward()
    head.weight.grad = states.grad = None
    # Linux forgets the peak so far.
    Path("/proc/self/clear_refs").write_text("5")
    before, started = status("VmRSS"), time.process_time()
    value = loss(settings["tokens"])
    value.backward()
    spent = time.process_time() - started
    peak = status("VmHWM") - before
    assert states.grad is not None
    assert head.weight.grad is not None
    result = {"peak_mb": round(peak / 1024, 1), "loss_cpu_s": round(spent, 3), "loss": float(value)}
    result |= {"states_grad": float(states.grad.norm()), "matrix_grad": float(head.weight.grad.norm())}
    print(json.dumps(result))


def status(name: str) -> int:
    """Return a figure of /proc/self/status in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def show(samples: dict[str, list[Any]], fraction: float, logits: int) -> None:
    """Print the results for a person."""
    table = Table("side", "peak MB", "of the logits", "CPU s", "ours / materialised")
    for name, taken in samples.items():
        peak = median(taken, "peak_mb")
        share = f"{peak * 2**20 / logits:.2f}"
        last = f"{fraction:.3f} (bar {BAR})" if name == "ours" else ""
        table.add_row(name, f"{peak:.0f}", share, f"{median(taken, 'loss_cpu_s'):.1f}", last)
    Console(stderr=True, width=110).print(table)


if __name__ == "__main__":
    main()
