"""The main job with another algorithm: what is learned from the rewards differs, and nothing else.

    python examples/algorithms/main.py gspo --seed 0

Model, warm start and tasks are those of ``../lookup``; a file here says what differs from its ``train.yaml``. All of
them make four optimizer steps from a batch: with one, the ratio to the policy that sampled is 1, and most of them would
be the same. ``--smoke`` does all of it with next to no training, in seconds.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

HERE = Path(__file__).parent
LOOKUP = HERE.parent / "lookup"
SMOKE = [
    "steps=3", "batch.groups=2", "rollout.group_size=4", "eval.limit=4", "eval.samples=1", "checkpoint.every=1",
]  # fmt: skip


def main() -> int:
    sys.path[:0] = [str(LOOKUP), str(HERE.parent / "small_model")]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("algorithm", choices=sorted(file.stem for file in HERE.glob("*.yaml")))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", help="name of the run; its directory is runs/NAME (default: ALGORITHM-seedSEED)")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--warm", type=Path, help="a run whose warm start is taken; by default it is made")
    parser.add_argument("--smoke", action="store_true", help="next to no training")
    parser.add_argument("overrides", nargs="*", help="key=value over both files, such as steps=40")
    arguments = parser.parse_intermixed_args()

    from job import Job, warm_start
    from rich.console import Console
    from teacher import demonstrations

    from turnwise.config import load_config
    from turnwise.errors import TurnwiseError
    from turnwise.trainer.config import TrainConfig
    from turnwise.trainer.loggers.jsonl import read_metrics
    from turnwise.trainer.train import run_train

    console = Console(stderr=True)
    name = arguments.name or f"{arguments.algorithm}-seed{arguments.seed}"
    job = Job("lookup", LOOKUP, demonstrations, count=40 if arguments.smoke else 4480)
    warm = ["steps=5", "conversations=8"] if arguments.smoke else []
    files = [LOOKUP / "train.yaml", HERE / f"{arguments.algorithm}.yaml"]
    try:
        model = warm_start(job, arguments.warm or arguments.runs / name, arguments.seed, console, warm)
        given = [
            f"name={name}", f"runs={arguments.runs.absolute()}", f"seed={arguments.seed}",
            f"policies.main.model.path={model.absolute()}", *(SMOKE if arguments.smoke else []), *arguments.overrides,
        ]  # fmt: skip
        summary = run_train(load_config(TrainConfig, files, given), console=console)
    except TurnwiseError as error:
        console.print(f"[red]{error}[/red]", highlight=False)
        return 1
    print("\nheld-out tasks       before    after")
    for kind in ("sampled", "greedy"):
        found = [(part or {}).get(kind) for part in (summary.before, summary.after)]
        if all(found):
            print(f"success, {kind:<10}" + " ".join(f"{part['success']['mean']:8.3f}" for part in found if part))
    steps = read_metrics(summary.directory / "metrics.jsonl")
    clipped = [step["train/clip_fraction"] for step in steps if "train/clip_fraction" in step]
    print(
        f"clipped: {sum(clipped) / max(1, len(clipped)):.2%} of tokens, at most {max(clipped, default=0):.2%} in a step"
    )
    print(f"{summary.wall_s:.0f} s wall, {summary.cpu_s:.0f} CPU seconds; everything is in {summary.directory}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
