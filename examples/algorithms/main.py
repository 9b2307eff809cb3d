"""The main job with another algorithm: what is learned from the rewards differs, and nothing else.

    python examples/algorithms/main.py gspo --seed 0

Model, warm start and tasks are those of ``../lookup``; a file here says what differs from its ``train.yaml``. All of
them make four optimizer steps from a batch: with one, the ratio to the policy that sampled is 1, and most of them would
be the same. ``--smoke`` does all of it with next to no training, in seconds.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from turnwise.trainer.train import TrainSummary

HERE = Path(__file__).parent
LOOKUP = HERE.parent / "lookup"


def main() -> int:
    sys.path[:0] = [str(LOOKUP), str(HERE.parent / "small_model")]
    from job import Job, command_line, new_parser, train
    from teacher import demonstrations

    job = Job("lookup", LOOKUP, demonstrations, count=4480, run_name="ALGORITHM", report=report)
    parser = new_parser(__doc__)
    parser.add_argument("algorithm", choices=sorted(file.stem for file in HERE.glob("*.yaml")))
    arguments = command_line(job, parser).parse_intermixed_args()
    arguments.also.insert(0, HERE / f"{arguments.algorithm}.yaml")
    return train(replace(job, run_name=arguments.algorithm, smoke=("steps=3", *job.smoke[1:])), arguments)


def report(summary: TrainSummary) -> None:
    """Print success before and after, and how many tokens were clipped."""
    from job import print_before_after, print_cost

    from turnwise.trainer.observe.metrics import read_metrics

    print_before_after(summary, "success", "held-out tasks")
    steps = read_metrics(summary.directory / "metrics.jsonl")
    clipped = [step["train/clip_fraction"] for step in steps if "train/clip_fraction" in step]
    print(
        f"clipped: {sum(clipped) / max(1, len(clipped)):.2%} of tokens, at most {max(clipped, default=0):.2%} in a step"
    )
    print_cost(summary)


if __name__ == "__main__":
    sys.exit(main())
