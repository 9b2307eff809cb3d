"""One GRPO step of ours against one of TRL's GRPOTrainer with ``environment_factory``: CPU seconds per step.

Both sides are whole training runs from the same warm-started checkpoint on the same tasks: 16 groups of 8 episodes of
the lookup environment a step, up to 4 turns of at most 40 tokens. Ours is a training run as ``turnwise train`` makes
it: a trainer process and a server process that speak HTTP, with trajectories, ledger and metrics written to disk. Each
run stops at a gate before every step, and the steps of the two sides take turns; start-up and the first steps are not
counted. CPU seconds are those of all processes of a side, one thread each.

Measured twice: with a tokenizer that holds the fixed text of a prompt in few tokens (about 20 a prompt), and with a
smaller one (about 100). The ratio is TRL's CPU seconds per step over ours: higher is better for us.

Checked, and an error otherwise: the ids of every prompt are equal on both sides, both knew the same hidden tables,
every step had all its episodes and an update, and sampled tokens, turns and rewards are close.

What differs and could not be removed: the draws, so trajectories are alike but not equal; an answer to a call that
cannot be executed is worded differently; TRL limits the tokens of an episode besides those of a turn (at as many as
all turns may have); ours writes every token to disk, TRL nothing; ours checks each answer of its server against the
trainer's own log-probabilities, TRL samples with the trained module itself.
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
from harness.trl_checkpoint import checkpoint

SETTINGS: dict[str, Any] = {
    "game": "harness.trl_lookup",
    "groups": 16,
    "group_size": 8,
    "max_turns": 4,
    "max_tokens_per_turn": 40,
    # As the main job has them: with a smaller eps or larger norm a policy may collapse, and then sides do other work.
    "lr": 8.0e-4,
    "betas": [0.9, 0.95],
    "eps": 1.0e-5,
    "max_grad_norm": 0.2,
    "warmup_steps": 3,
    "clip_low": 0.2,
    "clip_high": 0.28,
    # The fastest on a CPU: tried were 512 to 8192 tokens, 16 to 128 episodes, and TRL's other way to generate without
    # vLLM, use_transformers_continuous_batching, which takes minutes of CPU time a step.
    "our_micro_batch_tokens": 4096,
    "trl_micro_batch": 16,
}
# Entries of the tokenizer, by how long prompts then are: about 20 and about 100 tokens.
CASES = {"short": 1024, "long": 554}
PROMPT_TOKENS = {"short": (16, 24), "long": (90, 110)}
# How far means over the measured steps may lie apart: draws differ, and so do the policies after the first step.
CLOSE = {"sampled": 0.15, "turns": 0.15}
CLOSE_REWARD = 0.15


def main() -> None:
    arguments = parse(_parser())
    if arguments.side:
        side, model, directory, steps, settings = arguments.side
        serve(side, Path(model), Path(directory), int(steps), json.loads(settings))
        return
    warm = 1 if arguments.quick else 2
    settings = {**SETTINGS, **json.loads(arguments.settings)}
    models = {case: checkpoint(CASES[case]) for case in arguments.cases}
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="turnwise-bench-") as scratch, contextlib.ExitStack() as stack:
        sides: dict[str, dict[str, Side]] = {}
        for case, model in models.items():
            # All start and warm up at once; nothing is measured before each stands at the gate of its first such step.
            sides[case] = start(case, model, Path(scratch), warm + arguments.repeats, settings, stack)
        for pair in sides.values():
            for side in pair.values():
                for _ in range(warm):
                    side.go()
        for pair in sides.values():
            for side in pair.values():
                for _ in range(1 + warm):
                    side.read()
        for case, pair in sides.items():
            results[case] = measure(case, pair, arguments.repeats, settings)
    show(results)
    report(
        {
            **{f"ratio_{case}": result["ratio"] for case, result in results.items()},
            **{f"steps_{case}": result for case, result in results.items()},
            "config": {
                "settings": settings,
                "warm_up_steps": warm,
                "measured_steps": arguments.repeats,
                **{case: result.pop("config") for case, result in results.items()},
            },
            "machine": machine("turnwise-rl", "trl", "torch", "transformers", "accelerate", "datasets", "tokenizers"),
            "samples": {case: result.pop("samples") for case, result in results.items()},
        }
    )


def _parser() -> argparse.ArgumentParser:
    made = parser(__doc__ or "", repeats=7, quick_repeats=1)
    made.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    made.add_argument("--settings", default="{}", help="JSON over the settings of both sides, to try others")
    made.add_argument("--side", nargs=5, help=argparse.SUPPRESS)
    return made


def serve(side: str, model: Path, directory: Path, steps: int, settings: dict[str, Any]) -> None:
    """Be one side, in a process of its own."""
    from harness.trl_gate import Gate

    gate = Gate()
    if side == "ours":
        from harness.trl_ours import run
    else:
        from harness.trl_peer import run
    run(gate, model, directory, steps, settings)


def start(
    case: str, model: Path, scratch: Path, steps: int, settings: dict[str, Any], stack: contextlib.ExitStack
) -> dict[str, Side]:
    """Start both sides of a case; the stack ends them."""
    pair = {}
    for name in ("ours", "trl"):
        pair[name] = Side(__file__, name, model, scratch / f"{case}-{name}", steps, settings)
        stack.callback(pair[name].stop)
    return pair


def measure(case: str, pair: dict[str, Side], steps: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Let the sides take steps in turn, and hold what they did against each other."""
    for number in range(steps):
        for name in sorted(pair, reverse=number % 2 == 1):
            pair[name].step()
        print(f"{case} {number + 1}/{steps}: {_line(pair)}", file=sys.stderr, flush=True)
    for side in pair.values():
        side.go()
    done = {name: side.end() for name, side in pair.items()}
    samples = {name: side.samples for name, side in pair.items()}
    check(case, samples, done, settings)
    return summary(samples, done)


def check(case: str, samples: dict[str, list[Any]], done: dict[str, Any], settings: dict[str, Any]) -> None:
    """Refuse to compare sides that did not do the same work."""
    ours, peer = done["ours"], done["trl"]
    wrong = [
        task for task in ours["prompts"] | peer["prompts"] if ours["prompts"].get(task) != peer["prompts"].get(task)
    ]
    if wrong:
        task = min(wrong)
        raise SystemExit(
            f"{case}: {len(wrong)} of {len(ours['prompts'])} prompts have other ids; task {task}:\n"
            f"ours {ours['prompts'].get(task)}\ntrl  {peer['prompts'].get(task)}"
        )
    low, high = PROMPT_TOKENS[case]
    lengths = [len(ids) for ids in ours["prompts"].values()]
    if not low <= min(lengths) <= max(lengths) <= high:
        raise SystemExit(f"{case}: prompts have {min(lengths)} to {max(lengths)} tokens, expected {low} to {high}")
    both = {(task, call) for task, calls in ours["answers"].items() for call in calls} & {
        (task, call) for task, calls in peer["answers"].items() for call in calls
    }
    for task, call in sorted(both):
        if ours["answers"][task][call] != peer["answers"][task][call]:
            raise SystemExit(f"{case}: task {task}, {call} was answered differently: the hidden tables differ")
    if len({task for task, _ in both}) < len(lengths) / 2:
        raise SystemExit(f"{case}: too few calls were made on both sides to compare the tables of most tasks")
    for name, steps in samples.items():
        for number, step in enumerate(steps):
            if step["episodes"] != settings["groups"] * settings["group_size"] or step["updates"] != 1:
                raise SystemExit(f"{case}: measured step {number + 1} of {name} is not whole: {step}")
    for figure, limit in CLOSE.items():
        one, other = (mean(step[figure] for step in samples[name]) for name in ("ours", "trl"))
        if abs(one / other - 1) > limit:
            raise SystemExit(f"{case}: {figure} per step are {one:.0f} of ours and {other:.0f} of TRL: no equal work")
    one, other = (mean(step["reward"] for step in samples[name]) for name in ("ours", "trl"))
    if abs(one - other) > CLOSE_REWARD:
        raise SystemExit(f"{case}: mean rewards are {one:.3f} of ours and {other:.3f} of TRL: no equal policies")


def summary(samples: dict[str, list[Any]], done: dict[str, Any]) -> dict[str, Any]:
    """Return what is told of one case."""
    figures: dict[str, Any] = {
        name: {
            "cpu_s": round(median(step["cpu_s"] for step in steps), 4),
            "wall_s": round(median(step["wall_s"] for step in steps), 4),
            "sampled_tokens": round(mean(step["sampled"] for step in steps), 1),
            "turns": round(mean(step["turns"] for step in steps), 1),
            "reward": round(mean(step["reward"] for step in steps), 4),
            "peak_mb": done[name]["peak_mb"],
        }
        for name, steps in samples.items()
    }
    return {
        "ratio": round(figures["trl"]["cpu_s"] / figures["ours"]["cpu_s"], 3),
        "prompt_tokens": round(mean(len(ids) for ids in done["ours"]["prompts"].values()), 1),
        "prompts_compared": len(done["ours"]["prompts"]),
        **figures,
        "config": {name: each["config"] for name, each in done.items()},
        "samples": {
            name: {key: [round(step[key], 4) for step in steps] for key in ("cpu_s", "wall_s", "sampled", "reward")}
            for name, steps in samples.items()
        },
    }


def show(results: dict[str, Any]) -> None:
    """Print the results for a person."""
    table = Table("prompts", "side", "CPU-s/step", "wall s", "sampled", "turns", "reward", "peak MB", "TRL / ours")
    for case, result in results.items():
        for name in ("ours", "trl"):
            one = result[name]
            table.add_row(
                f"{case} ({result['prompt_tokens']:.0f} tokens)" if name == "ours" else "",
                name,
                f"{one['cpu_s']:.3f}",
                f"{one['wall_s']:.3f}",
                f"{one['sampled_tokens']:.0f}",
                f"{one['turns']:.0f}",
                f"{one['reward']:.3f}",
                " + ".join(str(peak) for peak in one["peak_mb"] if peak),
                f"{result['ratio']:.2f}" if name == "ours" else "",
            )
    Console(stderr=True, width=110).print(table)


def _line(pair: dict[str, Side]) -> str:
    parts = []
    for name, side in pair.items():
        last = side.samples[-1]
        parts.append(f"{name} {last['cpu_s']:.3f} CPU-s, {last['sampled']} tokens, reward {last['reward']:.2f}")
    return "; ".join(parts)


if __name__ == "__main__":
    main()
