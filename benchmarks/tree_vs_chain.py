"""Sampled tokens to the same success: episodes that fork (trees) against episodes that do not (chains).

Both sides train the mailroom of ``examples/credit`` (24 turns, one outcome) from one warm start, with the files of
``examples/tree_rollouts``; a step of either samples about as many tokens. Held-out piles are filed after every second
step. ``ratio_tokens`` is the median over seeds of the tokens that trees sampled until they first filed 0.9 of the
letters right, over the tokens that chains sampled until then; other levels stand beside it. Bar: 0.6.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness.measure import Sample, clean_environment, machine, parse, parser, report, run_process, spread

EXAMPLE = Path(__file__).parents[1] / "examples" / "tree_rollouts"
BAR = 0.6
LEVELS = (0.75, 0.9, 0.95)
MAIN = 0.9
SIDES: dict[str, list[str]] = {"chains": ["--also", "chains.yaml"], "trees": []}
# As many steps as the chains need to stop rising, and what is measured after every second of them.
FULL = {"chains": 60, "trees": 60}
QUICK = {"chains": 4, "trees": 4}
EVAL = ["eval.every=2", "eval.limit=20", "eval.samples=2", "eval.greedy=false", "checkpoint.every=100"]


def train(side: str, seed: int, runs: Path, steps: int, warm: Path | None, more: list[str]) -> Sample:
    """Train one side from the warm start of a seed."""
    command = [
        sys.executable, str(EXAMPLE / "main.py"), "--runs", str(runs), "--name", f"{side}-{seed}", "--seed", str(seed),
        *([] if warm is None else ["--warm", str(warm)]), *SIDES[side], f"steps={steps}", *EVAL, *more,
    ]  # fmt: skip
    return run_process(command, environment=clean_environment(), timeout=7200)


def curve(run: Path) -> list[tuple[float, float]]:
    """Return what a run filed right of held-out piles, and the tokens that it had sampled by then."""
    found: list[tuple[float, float]] = []
    tokens = 0.0
    for line in (run / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["kind"] == "train":
            tokens += record["rollout/sampled_tokens"] * record["batch/trajectories"]
        elif record["kind"] == "eval":
            found.append((record["sampled"]["reward"]["mean"], tokens))
    return found


def first_at_least(points: list[tuple[float, float]], reward: float) -> float | None:
    """Return the tokens at which a curve first reaches a reward."""
    return next((tokens for reached, tokens in points if reached >= reward), None)


def compare(chains: list[tuple[float, float]], trees: list[tuple[float, float]]) -> dict[str, Any]:
    """Return the tokens of both sides to each level, and their ratio at the main one."""
    needed = {level: (first_at_least(chains, level), first_at_least(trees, level)) for level in LEVELS}
    theirs, ours = needed[MAIN]
    return {
        "ratio": None if ours is None or not theirs else ours / theirs,
        "tokens": {str(level): {"chains": each[0], "trees": each[1]} for level, each in needed.items()},
        "best": {"chains": max(reached for reached, _ in chains), "trees": max(reached for reached, _ in trees)},
        "chains": chains,
        "trees": trees,
    }


def main() -> int:
    arguments = parse(parser(__doc__, repeats=3, quick_repeats=1))
    steps = QUICK if arguments.quick else FULL
    more = ["eval.limit=4", "eval.samples=1"] if arguments.quick else []
    samples: dict[str, list[Sample]] = {side: [] for side in SIDES}
    seeds: list[dict[str, Any]] = []
    runs = Path(tempfile.mkdtemp(prefix="tree-vs-chain-"))
    try:
        for seed in range(arguments.repeats):
            for side in SIDES:
                warm = None if side == "chains" else runs / f"chains-{seed}"
                samples[side].append(train(side, seed, runs, steps[side], warm, more))
            found = compare(curve(runs / f"chains-{seed}"), curve(runs / f"trees-{seed}"))
            print(f"seed {seed}: { ({name: value for name, value in found.items() if name not in SIDES}) }", flush=True)
            seeds.append(found)
    finally:
        shutil.rmtree(runs, ignore_errors=True)
    ratios = [each["ratio"] for each in seeds if each["ratio"] is not None]
    result = {
        "benchmark": "tree_vs_chain",
        # A seed whose trees never get there has no ratio: then there is none at all.
        "ratio_tokens": statistics.median(ratios) if len(ratios) == len(seeds) else None,
        "bars": {"ratio_tokens": BAR},
        "steps": steps,
        "config": {"trees": (EXAMPLE / "train.yaml").read_text(), "chains": (EXAMPLE / "chains.yaml").read_text()},
        "seeds": seeds,
        "machine": machine("torch", "transformers"),
    }
    report(result | {"samples": spread(samples)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
