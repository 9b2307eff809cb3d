"""Sampled tokens to the same success: self-distillation at turns against GRPO, each from the same warm start.

``lookup`` with ``sibling``: a turn at which another attempt of the group parted and earned more is taught by the policy
that read that attempt's continuation. A model from nothing cannot read, so the warm start of both sides also shows what
a continuation at a prompt's end is (``harness/reading_lookup.py``). ``code_repair`` with ``error``: a turn whose call
failed is taught by the policy that read the tool's answer; its warm start is the example's.

Held-out tasks are evaluated after every step. ``ratio_lookup`` and ``ratio_code_repair`` are medians over seeds:
the tokens that self-distillation sampled until it first reached the task's main level, over those of GRPO. Bar: at most
0.7 on one of the two. ``--quick`` runs lookup with the example's ``--smoke``, whose warm start is too short to learn
from, and compares nothing.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.learning_curve import curve, first_at_least
from harness.measure import ROOT, Sample, clean_environment, machine, parse, parser, report, run_process, spread

BAR = 0.7
SIDES = ("grpo", "self_distill")
EVERY = 1
QUICK_STEPS = 2


@dataclass(frozen=True)
class Comparison:
    """One task, trained by both sides.

    Attributes:
        script: Trains it from a warm start, or makes one.
        self_distill: ``key=value`` of self-distillation.
        steps: As many as GRPO needs to stop rising.
        levels: Success on held-out tasks; ``main`` is the one of the ratio.
        evaluation: ``key=value`` of what is evaluated after every step.
    """

    script: Path
    self_distill: tuple[str, ...]
    steps: int
    levels: tuple[float, ...]
    main: float
    evaluation: tuple[str, ...]


TASKS = {
    "lookup": Comparison(
        ROOT / "benchmarks" / "harness" / "reading_lookup.py",
        ("algorithm.self_distill.contexts=[sibling]", "algorithm.self_distill.weight=0.5"),
        steps=30,
        levels=(0.5, 0.8, 0.9),
        main=0.8,
        evaluation=("eval.limit=100", "eval.samples=2"),
    ),
    "code_repair": Comparison(
        ROOT / "examples" / "code_repair" / "main.py",
        ("algorithm.self_distill.contexts=[error]", "algorithm.self_distill.weight=0.5"),
        steps=24,
        levels=(0.5, 0.6, 0.7, 0.8),
        main=0.7,
        evaluation=("eval.limit=100", "eval.samples=1"),
    ),
}


def train(name: str, side: str, seed: int, runs: Path, *, quick: bool) -> Sample:
    """Train one side from the warm start of a seed, which GRPO's side makes."""
    task = TASKS[name]
    warm = ["--warm", str(runs / f"{name}-{SIDES[0]}-{seed}")] if side != SIDES[0] else []
    command = [
        sys.executable, str(task.script), "--runs", str(runs), "--name", f"{name}-{side}-{seed}", "--seed", str(seed),
        *warm, f"steps={QUICK_STEPS if quick else task.steps}", f"eval.every={EVERY}", "eval.greedy=false",
        "checkpoint.every=100", *(task.self_distill if side == "self_distill" else ()), *task.evaluation,
        *(("--smoke",) if quick else ()),
    ]  # fmt: skip
    modules = os.pathsep.join((str(ROOT / "benchmarks"), str(ROOT)))
    return run_process(command, environment=clean_environment({"PYTHONPATH": modules}), timeout=7200)


def compare(task: Comparison, curves: dict[str, list[tuple[float, float]]]) -> dict[str, Any]:
    """Return the tokens of both sides to each level, and their ratio at the main one."""
    tokens = {
        str(level): {side: first_at_least(points, level) for side, points in curves.items()} for level in task.levels
    }
    theirs, ours = (tokens[str(task.main)][side] for side in SIDES)
    return {
        "ratio": None if ours is None or not theirs else ours / theirs,
        "tokens": tokens,
        "best": {side: max(reached for reached, _ in points) for side, points in curves.items()},
        "curves": curves,
    }


def main() -> int:
    options = parser(__doc__, repeats=3, quick_repeats=1)
    options.add_argument("--task", choices=TASKS, action="append", help="may be repeated (default: both)")
    options.add_argument("--first-seed", type=int, default=0)
    arguments = parse(options)
    names = arguments.task or (["lookup"] if arguments.quick else list(TASKS))
    samples: dict[str, list[Sample]] = {side: [] for side in SIDES}
    seeds: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    runs = Path(tempfile.mkdtemp(prefix="self-distill-"))
    try:
        for seed in range(arguments.first_seed, arguments.first_seed + arguments.repeats):
            for name in names:
                for side in SIDES:
                    samples[side].append(train(name, side, seed, runs, quick=arguments.quick))
                curves = {side: curve(runs / f"{name}-{side}-{seed}", "success") for side in SIDES}
                comparison = compare(TASKS[name], curves)
                print(
                    f"{name}, seed {seed}: { ({key: comparison[key] for key in ('ratio', 'tokens', 'best')}) }",
                    flush=True,
                )
                seeds[name].append(comparison)
    finally:
        shutil.rmtree(runs, ignore_errors=True)
    ratios = {name: [comparison["ratio"] for comparison in seeds[name]] for name in names}
    result = {
        "benchmark": "self_distill",
        # A task of which a side never gets there in one seed has no ratio.
        **{f"ratio_{name}": None if None in of else statistics.median(of) for name, of in ratios.items()},
        "bars": {"ratio_lookup or ratio_code_repair": BAR},
        "steps": {name: QUICK_STEPS if arguments.quick else TASKS[name].steps for name in names},
        "config": {
            name: {
                "grpo": (ROOT / "examples" / name / "train.yaml").read_text(),
                "self_distill": TASKS[name].self_distill,
            }
            for name in names
        },
        "seeds": seeds,
        "machine": machine("torch", "transformers"),
    }
    report(result | {"samples": spread(samples)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
