"""One GRPO step of a pretrained model against TRL's GRPOTrainer: CPU seconds and peak memory.

The model is SmolLM2-135M-Instruct after a short warm start (``harness/smollm2.py``): it writes tool calls, and some of
its episodes on problems of three operations succeed and some fail. Both sides train from it in float32 on the same
tasks: 6 groups of 8 episodes of the calculator a step, up to 5 turns of at most 64 tokens. As in ``train_step_vs_trl``,
each side is one long run that stops at a gate before every step, the steps take turns, and what is checked and what
differs is the same. ``--quick`` takes one step of 1 group of 4 episodes, and does not compare how much was sampled.

``ratio_cpu`` is TRL's CPU seconds per step over ours (higher is better); ``ratio_memory`` is our peak of resident
memory over TRL's (lower is better). Ours is the sum of the peaks of trainer and server, whether they coincide or not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from pathlib import Path
from statistics import mean, median
from typing import Any

from rich.console import Console
from rich.table import Table

from harness.gated_side import Side
from harness.measure import machine, parse, parser, report
from harness.smollm2 import add_arguments, warm_started

SETTINGS: dict[str, Any] = {
    "game": "harness.trl_calculator",
    "groups": 6,
    "group_size": 8,
    "max_turns": 5,
    "max_tokens_per_turn": 64,
    "lr": 2.0e-5,
    "betas": [0.9, 0.95],
    "eps": 1.0e-8,
    "max_grad_norm": 1.0,
    "warmup_steps": 1,
    "clip_low": 0.2,
    "clip_high": 0.28,
    "our_micro_batch_tokens": 2048,
    "ours": {"inference": {"max_context": 512, "kv_tokens": 65536}, "rollout": {"context_length": 512}},
    "trl_micro_batch": 4,
    "calls_like": "qwen3_template",
}
QUICK = {"groups": 1, "group_size": 4}
CLOSE = {"sampled": 0.25, "turns": 0.25}
CLOSE_REWARD = 0.25


def main() -> None:
    made = parser(__doc__ or "", repeats=3, quick_repeats=1)
    add_arguments(made)
    made.add_argument("--settings", default="{}", help="JSON over the settings of both sides, to try others")
    made.add_argument("--side", nargs=5, help=argparse.SUPPRESS)
    arguments = parse(made)
    if arguments.side:
        side, model, directory, steps, settings = arguments.side
        serve(side, Path(model), Path(directory), int(steps), json.loads(settings))
        return
    settings = {**SETTINGS, **(QUICK if arguments.quick else {}), **json.loads(arguments.settings)}
    model = warm_started(arguments)
    warm = 0 if arguments.quick else 1
    with tempfile.TemporaryDirectory(prefix="turnwise-bench-") as scratch, contextlib.ExitStack() as stack:
        pair = {}
        for name in ("ours", "trl"):
            pair[name] = Side(__file__, name, model, Path(scratch) / name, warm + arguments.repeats, settings)
            stack.callback(pair[name].stop)
        for side in pair.values():
            side.read()
        for _ in range(warm):
            for side in pair.values():
                side.go()
                side.read()
        for number in range(arguments.repeats):
            for name in sorted(pair, reverse=number % 2 == 1):
                pair[name].step()
            print(f"{number + 1}/{arguments.repeats}: {_line(pair)}", file=sys.stderr, flush=True)
        for side in pair.values():
            side.go()
        done = {name: side.end() for name, side in pair.items()}
        samples = {name: side.samples for name, side in pair.items()}
    check(samples, done, settings, alike=not arguments.quick)
    figures = {name: _figures(samples[name], done[name]) for name in pair}
    show(figures)
    report(
        {
            "ratio_cpu": round(figures["trl"]["cpu_s"] / figures["ours"]["cpu_s"], 3),
            "ratio_memory": round(figures["ours"]["peak_gb"] / figures["trl"]["peak_gb"], 3),
            **figures,
            "config": {"settings": settings, "warm_up_steps": warm, **{n: each["config"] for n, each in done.items()}},
            "machine": machine("turnwise-rl", "trl", "torch", "transformers", "accelerate", "datasets"),
            "samples": samples,
        }
    )


def serve(side: str, model: Path, directory: Path, steps: int, settings: dict[str, Any]) -> None:
    """Be one side, in a process of its own."""
    from harness.trl_gate import Gate

    gate = Gate()
    if side == "ours":
        from harness.trl_ours import run
    else:
        from harness.trl_peer import run
    run(gate, model, directory, steps, settings)


def check(samples: dict[str, list[Any]], done: dict[str, Any], settings: dict[str, Any], *, alike: bool) -> None:
    """Refuse to compare sides that did not do the same work."""
    ours, peer = done["ours"]["prompts"], done["trl"]["prompts"]
    wrong = [task for task in ours if ours[task] != peer.get(task)]
    if wrong or not ours:
        task = min(wrong, default="")
        raise SystemExit(f"{len(wrong)} prompts differ; {task}:\nours {ours.get(task)}\ntrl  {peer.get(task)}")
    for task, calls in done["ours"]["answers"].items():
        for call, answer in calls.items():
            if done["trl"]["answers"].get(task, {}).get(call, answer) != answer:
                raise SystemExit(f"task {task}: {call} was answered differently")
    for name, steps in samples.items():
        for number, step in enumerate(steps):
            if step["episodes"] != settings["groups"] * settings["group_size"] or step["updates"] > 1:
                raise SystemExit(f"measured step {number + 1} of {name} is not whole: {step}")
    if not alike:
        return
    for figure, limit in CLOSE.items():
        one, other = (mean(step[figure] for step in samples[name]) for name in ("ours", "trl"))
        if abs(one / other - 1) > limit:
            raise SystemExit(f"{figure} per step are {one:.0f} of ours and {other:.0f} of TRL: no equal work")
    one, other = (mean(step["reward"] for step in samples[name]) for name in ("ours", "trl"))
    if abs(one - other) > CLOSE_REWARD:
        raise SystemExit(f"mean rewards are {one:.3f} of ours and {other:.3f} of TRL: no equal policies")


def _figures(steps: list[dict[str, Any]], done: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {
        name: round(median(step[name] for step in steps), 3)
        for name in ("cpu_s", "wall_s", "sampled", "turns", "reward")
    }
    return {**found, "peak_gb": round(sum(done["peak_mb"]) * 2**20 / 1e9, 3), "peak_mb": done["peak_mb"]}


def show(figures: dict[str, Any]) -> None:
    """Print the results for a person."""
    table = Table("side", "CPU-s/step", "wall s", "sampled", "turns", "reward", "peak MB")
    for name, one in figures.items():
        peaks = " + ".join(str(peak) for peak in one["peak_mb"] if peak)
        told = (one["cpu_s"], one["wall_s"], one["sampled"], one["turns"], one["reward"])
        table.add_row(name, *(f"{each:g}" for each in told), peaks)
    Console(stderr=True, width=100).print(table)


def _line(pair: dict[str, Side]) -> str:
    return "; ".join(
        f"{name} {side.samples[-1]['cpu_s']:.2f} CPU-s, {side.samples[-1]['sampled']} tokens, reward "
        f"{side.samples[-1]['reward']:.2f}"
        for name, side in pair.items()
    )


if __name__ == "__main__":
    main()
