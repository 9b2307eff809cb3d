"""A train step on groups that share their prompts: ours against our own padded step and against TRL's GRPOTrainer.

All sides take the same samples (random ids: groups of 8 completions of 96 to 160 tokens behind a prompt of 384, so
3:1), the same random Qwen3 (hidden 256, 4 layers), the same loss (PPO clip at ratio 1, mean over tokens), optimizer and
learning rate, and go from ids and rewards to changed weights. Nobody generates: TRL is handed the completions by its
``rollout_func``. Ours is ``update_policy`` with ``batch.share_prefixes``; ``padded`` is the same learner over rows
padded behind (causal attention without a mask, rows of similar length together, logits of trained tokens only).

Each side is a process with one thread that stops at a gate before every step; steps of the sides take turns. Start-up
and the first step, which all take at once, are not counted. Figures are medians of CPU seconds: ``ratio`` is padded
over ours, ``ratio_vs_trl`` TRL over ours. Checked, and an error otherwise: the gradient norms of all sides agree within
1 % in every step.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from harness.gated_side import Side
from harness.measure import machine, parse, parser, report

SETTINGS: dict[str, Any] = {
    "groups": 4,
    "group_size": 8,
    "prompt_tokens": 384,
    "completion_tokens": [96, 160],
    "vocabulary": 4096,
    "model": {
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "lr": 1.0e-5,
    "betas": [0.9, 0.95],
    "max_grad_norm": 1.0,
    "clip_low": 0.2,
    "clip_high": 0.28,
    "share_prefixes": True,
    # The fastest on a CPU: tried were 1024 to 8192 tokens, and 1, 2, 4, 8 and 16 rows of both other sides.
    "our_micro_batch_tokens": 2048,
    "padded_micro_batch": 16,
    "trl_micro_batch": 1,
}
SIDES = ("ours", "padded", "trl")


def main() -> None:
    arguments = parse(_parser())
    if arguments.side:
        side, model, directory, steps, settings = arguments.side
        serve(side, Path(model), Path(directory), int(steps), json.loads(settings))
        return
    from harness.prefix_samples import model as built

    settings = {**SETTINGS, **({"groups": 2} if arguments.quick else {}), **json.loads(arguments.settings)}
    model = built(settings)
    with tempfile.TemporaryDirectory(prefix="turnwise-bench-") as scratch, contextlib.ExitStack() as stack:
        sides = {}
        for name in arguments.sides:
            sides[name] = Side(__file__, name, model, Path(scratch) / name, 1 + arguments.repeats, settings)
            stack.callback(sides[name].stop)
        for side in sides.values():
            side.read()
        for side in sides.values():
            side.go()
        for side in sides.values():
            side.keep()
        for number in range(1, 1 + arguments.repeats):
            for name in sorted(sides, reverse=number % 2 == 1):
                sides[name].step()
            line = ", ".join(f"{name} {side.samples[-1]['cpu_s']:.3f}" for name, side in sides.items())
            print(f"step {number}: CPU-s {line}", file=sys.stderr, flush=True)
        for side in sides.values():
            side.go()
        done = {name: side.end() for name, side in sides.items()}
    samples = {name: side.samples for name, side in sides.items()}
    check(samples)
    tell({name: taken[1:] for name, taken in samples.items()}, done, settings)


def _parser() -> argparse.ArgumentParser:
    made = parser(__doc__ or "", repeats=7, quick_repeats=1)
    made.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    made.add_argument("--settings", default="{}", help="JSON over the settings, to try others")
    made.add_argument("--side", nargs=5, help=argparse.SUPPRESS)
    return made


def serve(side: str, model: Path, directory: Path, steps: int, settings: dict[str, Any]) -> None:
    """Be one side, in a process of its own."""
    from harness import prefix_sides
    from harness.trl_gate import Gate

    gate = Gate()
    if side == "ours":
        prefix_sides.ours(gate, model, steps, settings)
    elif side == "padded":
        prefix_sides.padded(gate, model, steps, settings)
    else:
        prefix_sides.trl(gate, model, steps, settings, directory)


def check(samples: dict[str, list[Any]]) -> None:
    """Refuse to compare sides that did not compute the same gradients."""
    for number, steps in enumerate(zip(*samples.values(), strict=True)):
        norms = {name: step["grad_norm"] for name, step in zip(samples, steps, strict=True)}
        if max(norms.values()) > 1.01 * min(norms.values()):
            raise SystemExit(f"step {number}: gradient norms differ, so the sides did not compute the same: {norms}")


def tell(samples: dict[str, list[Any]], done: dict[str, Any], settings: dict[str, Any]) -> None:
    """Print the results, as a table and as JSON."""
    medians = {
        name: {figure: round(median(step[figure] for step in steps), 4) for figure in ("cpu_s", "wall_s")}
        for name, steps in samples.items()
    }
    table = Table("side", "CPU-s/step", "wall s", "tokens computed", "peak MB", "over ours")
    for name, figures in medians.items():
        tokens = samples[name][-1].get("tokens")
        over = figures["cpu_s"] / medians["ours"]["cpu_s"] if "ours" in medians else float("nan")
        row = (f"{figures['cpu_s']:.3f}", f"{figures['wall_s']:.3f}", f"{tokens:.0f}" if tokens else "")
        table.add_row(name, *row, str(done[name]["peak_mb"][0]), f"{over:.2f}")
    Console(stderr=True, width=100).print(table)
    ratios = {}
    for name, figure in (("padded", "ratio"), ("trl", "ratio_vs_trl")):
        if name in medians and "ours" in medians:
            ratios[figure] = round(medians[name]["cpu_s"] / medians["ours"]["cpu_s"], 3)
            ratios[f"{figure}_wall"] = round(medians[name]["wall_s"] / medians["ours"]["wall_s"], 3)
    report(
        {
            **ratios,
            "medians": medians,
            "config": {"settings": settings, **{name: each.get("config") for name, each in done.items()}},
            "machine": machine("turnwise-rl", "trl", "torch", "transformers", "accelerate"),
            "samples": {
                name: {key: [round(step[key], 4) for step in steps] for key in ("cpu_s", "wall_s", "grad_norm")}
                for name, steps in samples.items()
            },
        }
    )


if __name__ == "__main__":
    main()
