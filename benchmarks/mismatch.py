"""What it costs to train on another distribution than the one that was sampled from: curves of the main job.

All sides train ``lookup`` (``examples/lookup``, a model from nothing) from one warm start a seed, with four optimizer
steps a batch, and differ in a few keys. Each reports its mean reward of training over the last ten steps (``reward``),
held-out success, sampled, and largest ``gap/mean``.

- ``--task masks``: sampling under top-p .9 and top-k 20 with an entropy bonus. ``keep`` trains under the kept ids,
  ``full`` under the whole vocabulary (``rollout.sampling_mask``). ``entropy`` is the mean of the last ten steps, of the
  distribution that is trained.
- ``--task numerics``: sampling by servers in bfloat16, training in float32: without correction, with truncated
  importance weights of tokens (``token``), with weights of sequences that are masked outside of their bounds
  (``sequence``), against servers in float32 and exact numerics.

``--picture FILE`` draws the curves of ``masks``. ``--quick`` runs each side for two steps behind the example's
``--smoke``, which learns nothing.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

from harness.measure import ROOT, Sample, clean_environment, machine, parse, parser, report, run_process, spread

LOOKUP = ROOT / "examples" / "lookup"
LAST = 10
COMMON = (
    "steps=40", "batch.groups=8", "algorithm.minibatches=4", "policies.main.optim.lr=5e-4",
    "policies.main.schedule.warmup_steps=8", "eval.limit=100", "eval.samples=2", "checkpoint.every=1000",
)  # fmt: skip
QUICK = ("steps=2", "batch.groups=2", "eval.limit=2", "eval.samples=1", "eval.greedy=false")
_TRUNCATED = ("rollout.top_p=0.9", "rollout.top_k=20", "algorithm.entropy_coef=0.02")
_BFLOAT16 = ("inference.dtype=bfloat16",)
_CORRECTED = (*_BFLOAT16, "algorithm.old_logprobs=recompute")
TASKS: dict[str, dict[str, tuple[str, ...]]] = {
    "masks": {"keep": (*_TRUNCATED, "rollout.sampling_mask=keep"), "full": (*_TRUNCATED, "rollout.sampling_mask=full")},
    "numerics": {
        "exact": ("inference.engine=exact",),
        "float32": (),
        "bfloat16": _BFLOAT16,
        "token": (*_CORRECTED, "algorithm.correction={weights: truncate, level: token, high: 2.0}"),
        "sequence": (*_CORRECTED, "algorithm.correction={weights: mask, level: sequence, high: 2.0}"),
    },
}


def train(side: str, keys: tuple[str, ...], seed: int, runs: Path, first: str, *, quick: bool) -> Sample:
    """Train one side from the warm start of a seed, which the first side makes."""
    warm = [] if side == first else ["--warm", str(runs / f"{first}-{seed}")]
    command = [
        sys.executable, str(LOOKUP / "main.py"), "--runs", str(runs), "--name", f"{side}-{seed}", "--seed", str(seed),
        *warm, *(["--smoke"] if quick else []), *COMMON, *keys, *(QUICK if quick else ()),
    ]  # fmt: skip
    return run_process(command, environment=clean_environment({"PYTHONPATH": str(ROOT)}), timeout=3600)


def figures_of(run: Path) -> dict[str, Any]:
    """Return what a run reached, and its curves."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "train"]
    reward = [round(step["reward/mean"], 3) for step in steps]
    # Steps whose advantages are all 0 have no loss, and no entropy.
    entropy = [round(step.get("train/entropy", math.nan), 4) for step in steps]
    defined = [value for value in entropy[-LAST:] if not math.isnan(value)]
    return {
        "reward": round(mean(reward[-LAST:]), 3),
        "success": json.loads((run / "summary.json").read_text())["after"]["sampled"]["success"]["mean"],
        "gap": max((step["gap/mean"] for step in steps if "gap/mean" in step), default=None),
        "entropy": round(mean(defined), 3) if defined else None,
        "curve": reward,
    }


def main() -> int:
    options = parser(__doc__, repeats=3, quick_repeats=1)
    options.add_argument("--task", choices=TASKS, default="masks")
    options.add_argument("--picture", type=Path, metavar="FILE", help="where to draw the curves, as SVG")
    arguments = parse(options)
    if arguments.picture is not None and arguments.task != "masks":
        options.error(f"--picture draws the two sides of masks, not {arguments.task}")
    task = TASKS[arguments.task]
    samples: dict[str, list[Sample]] = {side: [] for side in task}
    figures: dict[str, list[dict[str, Any]]] = {side: [] for side in task}
    runs = Path(tempfile.mkdtemp(prefix="mismatch-"))
    try:
        for seed in range(arguments.repeats):
            for side, keys in task.items():
                samples[side].append(train(side, keys, seed, runs, next(iter(task)), quick=arguments.quick))
                figures[side].append(figures_of(runs / f"{side}-{seed}"))
                print(f"{side}, seed {seed}: {figures[side][-1]}", file=sys.stderr, flush=True)
    finally:
        shutil.rmtree(runs, ignore_errors=True)
    if arguments.picture is not None:
        draw(arguments.picture, figures)
    result = {
        "benchmark": "mismatch",
        "task": arguments.task,
        "reward": {side: [seed["reward"] for seed in seeds] for side, seeds in figures.items()},
        "config": {"common": COMMON, **task},
        "seeds": figures,
        "machine": machine("torch", "transformers"),
    }
    report(result | {"samples": spread(samples)})
    return 0


def draw(file: Path, figures: dict[str, list[dict[str, Any]]]) -> None:
    """Draw the rewards of training of each side."""
    sys.path.insert(0, str(ROOT / "examples" / "published"))
    from plot import picture

    curves = {side: [seed["curve"] for seed in seeds] for side, seeds in figures.items()}
    file.write_text(picture("Entropy bonus under truncation", curves))


if __name__ == "__main__":
    sys.exit(main())
