"""Sampled tokens to the same success: episodes that fork (trees) against episodes that do not (chains).

Both sides train one task from one warm start; a step of either samples about as many tokens. ``--task mailroom`` is
that of ``examples/credit`` (24 turns, one outcome; the files of ``examples/tree_rollouts``), ``--task code_repair``
that example, whose sandboxes are forked. Held-out tasks are evaluated after every second step. ``ratio_tokens`` is
the median over seeds of the tokens that trees sampled until they first reached the task's main level (0.9 of the
letters filed right; 0.7 of the functions repaired), over the tokens that chains sampled until then; other levels stand
beside it. Bar: 0.6. ``--quick`` runs both sides with the example's
``--smoke``, whose warm start is too short to learn from, and compares nothing.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.learning_curve import curve, first_at_least
from harness.measure import Sample, clean_environment, machine, parse, parser, report, run_process, spread

EXAMPLES = Path(__file__).parents[1] / "examples"
BAR = 0.6
SIDES = ("chains", "trees")
EVERY = 2


@dataclass(frozen=True)
class Comparison:
    """One task, trained by both sides.

    Attributes:
        example: Its folder in ``examples/``.
        also: What each side puts over the example's ``train.yaml``.
        steps: As many as the chains need to stop rising.
        metric: What is evaluated: ``reward`` or ``success``.
        levels: Of the metric; ``main`` is the one of the ratio.
        evaluation: ``key=value`` of what is evaluated after every second step.
        quick: ``key=value`` over these with ``--quick``.
    """

    example: str
    also: dict[str, tuple[str, ...]]
    steps: int
    metric: str
    levels: tuple[float, ...]
    main: float
    evaluation: tuple[str, ...]
    quick: tuple[str, ...]

    def files(self, side: str) -> dict[str, str]:
        """Return the configuration of a side, by file."""
        folder = EXAMPLES / self.example
        return {name: (folder / name).read_text() for name in ("train.yaml", *self.also[side])}


TASKS = {
    "mailroom": Comparison(
        "tree_rollouts",
        {"chains": ("chains.yaml",), "trees": ()},
        steps=60,
        metric="reward",
        levels=(0.75, 0.9, 0.95),
        main=0.9,
        evaluation=("eval.limit=20", "eval.samples=2"),
        quick=("eval.limit=4", "eval.samples=1"),
    ),
    "code_repair": Comparison(
        "code_repair",
        {"chains": (), "trees": ("trees.yaml",)},
        steps=24,
        metric="success",
        levels=(0.5, 0.6, 0.7, 0.8),
        main=0.7,
        evaluation=("eval.limit=100", "eval.samples=1"),
        quick=("eval.limit=8", "batch.groups=2"),
    ),
}
QUICK_STEPS = 2
"""Over the warm start's file: too short to learn the task, which two steps do not either."""


def train(task: Comparison, side: str, seed: int, runs: Path, *, quick: bool) -> Sample:
    """Train one side from the warm start of a seed, which the chains make."""
    also = [part for name in task.also[side] for part in ("--also", name)]
    warm = ["--warm", str(runs / f"{SIDES[0]}-{seed}")] if side != SIDES[0] else []
    command = [
        sys.executable, str(EXAMPLES / task.example / "main.py"), "--runs", str(runs), "--name", f"{side}-{seed}",
        "--seed", str(seed), *warm, *also, f"steps={QUICK_STEPS if quick else task.steps}", f"eval.every={EVERY}",
        "eval.greedy=false", "checkpoint.every=100", *task.evaluation, *(("--smoke", *task.quick) if quick else ()),
    ]  # fmt: skip
    return run_process(command, environment=clean_environment(), timeout=7200)


def compare(task: Comparison, chains: list[tuple[float, float]], trees: list[tuple[float, float]]) -> dict[str, Any]:
    """Return the tokens of both sides to each level, and their ratio at the main one."""
    needed = {level: (first_at_least(chains, level), first_at_least(trees, level)) for level in task.levels}
    theirs, ours = needed[task.main]
    return {
        "ratio": None if ours is None or not theirs else ours / theirs,
        "tokens": {str(level): {"chains": each[0], "trees": each[1]} for level, each in needed.items()},
        "best": {"chains": max(reached for reached, _ in chains), "trees": max(reached for reached, _ in trees)},
        "chains": chains,
        "trees": trees,
    }


def main() -> int:
    options = parser(__doc__, repeats=3, quick_repeats=1)
    options.add_argument("--task", choices=TASKS, default="mailroom")
    options.add_argument("--first-seed", type=int, default=0)
    arguments = parse(options)
    task = TASKS[arguments.task]
    samples: dict[str, list[Sample]] = {side: [] for side in SIDES}
    seeds: list[dict[str, Any]] = []
    runs = Path(tempfile.mkdtemp(prefix="tree-vs-chain-"))
    try:
        for seed in range(arguments.first_seed, arguments.first_seed + arguments.repeats):
            for side in SIDES:
                samples[side].append(train(task, side, seed, runs, quick=arguments.quick))
            found = compare(task, *(curve(runs / f"{side}-{seed}", task.metric) for side in SIDES))
            print(f"seed {seed}: { ({name: value for name, value in found.items() if name not in SIDES}) }", flush=True)
            seeds.append(found)
    finally:
        shutil.rmtree(runs, ignore_errors=True)
    ratios = [each["ratio"] for each in seeds if each["ratio"] is not None]
    result = {
        "benchmark": "tree_vs_chain",
        "task": arguments.task,
        # A seed whose trees never get there has no ratio: then there is none at all.
        "ratio_tokens": statistics.median(ratios) if len(ratios) == len(seeds) else None,
        "bars": {"ratio_tokens": BAR},
        "steps": QUICK_STEPS if arguments.quick else task.steps,
        "config": {side: task.files(side) for side in SIDES},
        "warm_start": "the example's" + (" with --smoke" if arguments.quick else ""),
        "seeds": seeds,
        "machine": machine("torch", "transformers"),
    }
    report(result | {"samples": spread(samples)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
