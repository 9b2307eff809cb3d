"""A job on a small model: from demonstrations that are mostly wrong to a policy that uses its tools, on a laptop's CPU.

1. Demonstrations are played in the environment by a teacher that is mostly wrong, and a tokenizer and a model of about
   a million parameters are made from them (``make_model.py``).
2. ``turnwise sft`` warms the model up on them (``sft.yaml`` of the example).
3. ``turnwise train`` trains it with GRPO against the built-in inference server (its ``train.yaml``), and evaluates it
   on held-out tasks before and after.

Run it again after an interrupt and it goes on where it stopped.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from turnwise.config import load_config
from turnwise.errors import TurnwiseError
from turnwise.trainer.config import TrainConfig
from turnwise.trainer.offline.config import SFTConfig
from turnwise.trainer.offline.sft import run_sft
from turnwise.trainer.run_directory import cpu_seconds
from turnwise.trainer.train import TrainSummary, run_train


@dataclass(frozen=True, slots=True)
class Job:
    """What differs from example to example.

    Attributes:
        name: The environment's name, and the beginning of the run's.
        home: The folder of ``sft.yaml`` and ``train.yaml``.
        demonstrations: Makes so many conversations from a seed.
        count: How many the warm start sees.
        width: Of the model.
        layers: Of the model.
        warm: key=value for ``sft.yaml``.
        env: How ``turnwise eval`` finds the environment, and its tasks in the same file; by default by its name.
        words: A regular expression of what is data besides: the tokenizer merges nothing into it.
    """

    name: str
    home: Path
    demonstrations: Callable[[int, int], Awaitable[list[dict[str, Any]]]]
    count: int
    width: int = 128
    layers: int = 4
    warm: tuple[str, ...] = ()
    env: str | None = None
    words: str | None = None


def run(job: Job, description: str | None) -> int:
    """Do the job as the command line says; return the exit code."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", help=f"name of the run; its directory is runs/NAME (default: {job.name}-seedSEED)")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--fresh", action="store_true", help="remove an earlier run of this name first")
    parser.add_argument(
        "--also", action="append", default=[], metavar="FILE", help="a file over train.yaml, beside it or by its path"
    )
    parser.add_argument("overrides", nargs="*", help="key=value for train.yaml, such as steps=60")
    arguments = parser.parse_args()
    started = time.monotonic()
    console = Console(stderr=True)
    name = arguments.name or f"{job.name}-seed{arguments.seed}"
    directory = arguments.runs / name
    if arguments.fresh and directory.exists():
        shutil.rmtree(directory)
    try:
        model = warm_start(job, directory, arguments.seed, console, job.warm)
        files = [job.home / file for file in ("train.yaml", *arguments.also)]
        overrides = [
            f"name={name}",
            f"runs={arguments.runs.absolute()}",
            f"seed={arguments.seed}",
            f"policies.main.model.path={model.absolute()}",
            *arguments.overrides,
        ]
        summary = run_train(load_config(TrainConfig, files, overrides), console=console)
    except TurnwiseError as error:
        console.print(f"[red]{error}[/red]", highlight=False)
        return 1
    except KeyboardInterrupt:
        # How far it got was printed; the same command goes on from there.
        return 130
    # The warm start is part of the job: its time counts.
    summary.wall_s, summary.cpu_s = time.monotonic() - started, cpu_seconds()
    summary.write()
    report(job, summary)
    return 0


def warm_start(job: Job, directory: Path, seed: int, console: Console, given: Sequence[str] = ()) -> Path:
    """Make demonstrations, tokenizer and model, and fine-tune; skipped where the result lies there already.

    ``given`` are further overrides of ``sft.yaml``.
    """
    # torch and transformers are imported here, after the arguments were understood.
    from make_model import make_model

    warm = directory / "sft" / "model"
    if warm.exists():
        return warm

    async def rows_of() -> list[dict[str, Any]]:
        return await job.demonstrations(job.count, seed)

    rows = asyncio.run(rows_of())
    data = directory / "demonstrations.jsonl"
    data.parent.mkdir(parents=True, exist_ok=True)
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    parameters = make_model(directory / "initial", rows, seed, width=job.width, layers=job.layers, words=job.words)
    console.print(f"{len(rows)} demonstrations, a model of {parameters:,} parameters", highlight=False)
    overrides = [
        "name=sft",
        f"runs={directory.absolute()}",
        f"seed={seed}",
        f"data={data.absolute()}",
        f"model.path={(directory / 'initial').absolute()}",
        *given,
    ]
    return run_sft(load_config(SFTConfig, job.home / "sft.yaml", overrides), console=console).model


def report(job: Job, summary: TrainSummary) -> None:
    """Print before and after, what it cost, and what to try next."""
    print("\nheld-out tasks       before    after")
    for kind in ("sampled", "greedy"):
        before, after = ((part or {})[kind]["success"]["mean"] for part in (summary.before, summary.after))
        print(f"success, {kind:<10} {before:8.3f} {after:8.3f}")
    print(f"{summary.wall_s:.0f} s wall, {summary.cpu_s:.0f} CPU seconds over all processes")
    run_directory = summary.directory
    last = max(path.name for path in (run_directory / "checkpoints").iterdir())
    env = job.env or job.name
    tasks = f"{env.rpartition(':')[0] or f'turnwise.envs.{job.name}'}:tasks?split=test"
    print(f"\neverything is in {run_directory}. What to try next:")
    print(f"  turnwise view {run_directory} -n 2              read what the model did, turn by turn")
    print(f"  turnwise audit {run_directory}                  prove that every token was recorded and trained exactly")
    print(f"  turnwise eval {env} --model {run_directory}/checkpoints/{last} --tasks '{tasks}'")
