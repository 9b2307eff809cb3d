"""A GRPO step of SmolLM2-135M driven by the SDK of Tinker against one of ``turnwise train``: CPU seconds per step.

Both sides train LoRA adapters on the model of the ``real_*`` benchmarks (without its warm start) in float32, on the
same batches: 4 groups of 8 episodes of one turn, whose prompts have equal ids and ask for a story that most completions
have not ended after their 48 tokens. In a group every other episode is rewarded, so all rows have advantages;
optimizer, clipping and rank are equal, and each side holds the whole batch in one micro-batch. One side is a run as
``turnwise train`` makes it; the other is a loop as the cookbook's ``rl_loop``, in a process that has the SDK
(``--sdk``, where ``make bench`` installs it), on a server of ``turnwise tinker``. Both write what they sample and
train, and sample from new weights in each step.

Each side is one long run that stops at a gate before every step, and the steps take turns; CPU seconds are those of all
processes of a side, client and servers, one thread each. ``ratio`` is the SDK's over ours: lower is better.

Checked, and an error otherwise: the ids of every prompt, and the episodes and rewards of every step are equal; a step
samples at least nine tenths of the most tokens that it may, and the sides' sums differ by at most a twentieth. What
differs: the draws; advantages are divided by a group's deviation in ``turnwise train`` alone.
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
from harness.measure import ROOT, machine, parse, parser, report
from harness.smollm2 import add_arguments, base_model

RANK = 8
SETTINGS: dict[str, Any] = {
    "game": "harness.tinker_game",
    "groups": 4,
    "group_size": 8,
    "max_turns": 1,
    "max_tokens_per_turn": 48,
    "rank": RANK,
    "lr": 1.0e-5,
    "betas": [0.9, 0.95],
    "eps": 1.0e-8,
    "max_grad_norm": 1.0,
    "warmup_steps": 0,
    "clip_low": 0.2,
    "clip_high": 0.28,
    "our_micro_batch_tokens": 8192,
    "ours": {
        "policies": {"main": {"model": {"lora": {"rank": RANK, "alpha": 32.0}}}},
        "inference": {"max_context": 512, "kv_tokens": 65536},
        "rollout": {"context_length": 512},
    },
}
QUICK = {"groups": 1, "max_tokens_per_turn": 24}


def main() -> None:
    options = parser(__doc__ or "", repeats=5, quick_repeats=1)
    add_arguments(options)
    options.add_argument("--sdk", type=Path, default=ROOT / ".cache" / "tinker", help="folder that the SDK is in")
    options.add_argument("--settings", default="{}", help="JSON over the settings of both sides, to try others")
    options.add_argument("--side", nargs=5, help=argparse.SUPPRESS)
    arguments = parse(options)
    if arguments.side:
        side, model, directory, steps, settings = arguments.side
        serve(side, Path(model), Path(directory), int(steps), json.loads(settings))
        return
    if not (arguments.sdk / "tinker").is_dir():
        raise SystemExit(f"--sdk is {arguments.sdk}, where no tinker is: make .cache/tinker/.turnwise-installed")
    settings = {**SETTINGS, **(QUICK if arguments.quick else {}), "sdk": str(arguments.sdk.resolve())}
    settings |= json.loads(arguments.settings)
    samples, done = measure(base_model(arguments), settings, 1, arguments.repeats)
    check(samples, done, settings)
    figures = {name: _figures(samples[name], done[name]) for name in samples}
    show(figures)
    sys.path.append(str(arguments.sdk))
    report(
        {
            "ratio": round(figures["tinker"]["cpu_s"] / figures["ours"]["cpu_s"], 3),
            **figures,
            "config": {"settings": settings, **{name: values["config"] for name, values in done.items()}},
            "machine": machine("turnwise-rl", "tinker", "torch", "transformers", "aiohttp", "protobuf"),
            "samples": samples,
        }
    )


def serve(side: str, model: Path, directory: Path, steps: int, settings: dict[str, Any]) -> None:
    """Be one side, in a separate process."""
    from harness.trl_gate import Gate

    gate = Gate()
    if side == "ours":
        from harness.trl_ours import run
    else:
        from harness.tinker_client import run
    run(gate, model, directory, steps, settings)


def measure(
    model: Path, settings: dict[str, Any], warm: int, steps: int
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, Any]]:
    """Let the sides take steps in turn; return what each step cost, and what the sides say in the end."""
    with tempfile.TemporaryDirectory(prefix="turnwise-bench-") as scratch, contextlib.ExitStack() as stack:
        pair = {}
        for name in ("ours", "tinker"):
            pair[name] = Side(__file__, name, model, Path(scratch) / name, warm + steps, settings)
            stack.callback(pair[name].stop)
        for side in pair.values():
            side.read()
        for _ in range(warm):
            for side in pair.values():
                side.go()
                side.read()
        for number in range(steps):
            for name in sorted(pair, reverse=number % 2 == 1):
                pair[name].step()
            line = "; ".join(f"{name} {side.samples[-1]['cpu_s']:.2f} CPU-s" for name, side in pair.items())
            print(f"{number + 1}/{steps}: {line}", file=sys.stderr, flush=True)
        for side in pair.values():
            side.go()
        done = {name: side.end() for name, side in pair.items()}
        return {name: side.samples for name, side in pair.items()}, done


def check(samples: dict[str, list[dict[str, Any]]], done: dict[str, Any], settings: dict[str, Any]) -> None:
    """Refuse to compare sides that did not do the same work."""
    ours, sdk = done["ours"]["prompts"], done["tinker"]["prompts"]
    wrong = sorted(task for task in ours | sdk if ours.get(task) != sdk.get(task))
    if wrong or not ours:
        task = wrong[0] if wrong else ""
        raise SystemExit(f"{len(wrong)} prompts differ; {task}:\nours {ours.get(task)}\nSDK  {sdk.get(task)}")
    episodes = settings["groups"] * settings["group_size"]
    limit = episodes * settings["max_tokens_per_turn"]
    equal = {"episodes": episodes, "reward": 0.5, "updates": 1}
    for name, steps in samples.items():
        for number, step in enumerate(steps):
            if any(step[figure] != value for figure, value in equal.items()) or step["sampled"] < 0.9 * limit:
                raise SystemExit(f"step {number + 1} of {name} is {step}, but should have {equal} and sample {limit}")
    one, other = (sum(step["sampled"] for step in steps) for steps in samples.values())
    if abs(one / other - 1) > 0.05:
        raise SystemExit(f"sampled tokens are {one} of ours and {other} of the SDK: no equal work")


def _figures(steps: list[dict[str, Any]], done: dict[str, Any]) -> dict[str, Any]:
    return {
        **{name: round(median(step[name] for step in steps), 3) for name in ("cpu_s", "wall_s", "sampled")},
        "peak_mb": done["peak_mb"],
    }


def show(figures: dict[str, Any]) -> None:
    """Print the results for a person."""
    table = Table("side", "CPU-s/step", "wall s", "sampled", "peak MB")
    for name, one in figures.items():
        peaks = " + ".join(str(peak) for peak in one["peak_mb"] if peak)
        table.add_row(name, *(f"{one[figure]:g}" for figure in ("cpu_s", "wall_s", "sampled")), peaks)
    Console(stderr=True, width=100).print(table)


if __name__ == "__main__":
    main()
