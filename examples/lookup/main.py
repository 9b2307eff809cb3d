"""The main job: a model from nothing learns to use two tools, on a laptop's CPU in about two minutes.

1. Demonstrations are played in the environment by a teacher that is mostly wrong (``teacher.py``), and a tokenizer
   and a model of about a million parameters are made from them (``make_model.py``).
2. ``turnwise sft`` warms the model up on them (``sft.yaml``).
3. ``turnwise train`` trains it with GRPO against the built-in inference server (``train.yaml``), and evaluates it on
   held-out tables before and after.

Run it again after an interrupt and it goes on where it stopped.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import time
from pathlib import Path

from rich.console import Console

from turnwise.config import load_config
from turnwise.errors import TurnwiseError
from turnwise.trainer.config import SFTConfig, TrainConfig
from turnwise.trainer.run_directory import cpu_seconds
from turnwise.trainer.sft import run_sft
from turnwise.trainer.train import TrainSummary, run_train

HERE = Path(__file__).parent
DEMONSTRATIONS = 4480


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", help="name of the run; its directory is runs/NAME (default: lookup-seedSEED)")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--fresh", action="store_true", help="remove an earlier run of this name first")
    parser.add_argument("overrides", nargs="*", help="key=value for train.yaml, such as steps=60")
    arguments = parser.parse_args()
    started = time.monotonic()
    console = Console(stderr=True)
    name = arguments.name or f"lookup-seed{arguments.seed}"
    directory = arguments.runs / name
    if arguments.fresh and directory.exists():
        shutil.rmtree(directory)
    try:
        model = warm_start(directory, arguments.seed, console)
        config = load_config(
            TrainConfig,
            HERE / "train.yaml",
            [
                f"name={name}",
                f"runs={arguments.runs.absolute()}",
                f"seed={arguments.seed}",
                f"policies.main.model.path={model.absolute()}",
                *arguments.overrides,
            ],
        )
        summary = run_train(config, console=console)
    except TurnwiseError as error:
        console.print(f"[red]{error}[/red]", highlight=False)
        return 1
    except KeyboardInterrupt:
        # How far it got was printed; the same command goes on from there.
        return 130
    # The warm start is part of the job: its time counts.
    summary.wall_s, summary.cpu_s = time.monotonic() - started, cpu_seconds()
    summary.write()
    report(summary)
    return 0


def warm_start(directory: Path, seed: int, console: Console) -> Path:
    """Make demonstrations, tokenizer and model, and fine-tune; skipped where the result lies there already."""
    # torch and transformers are imported here, after the arguments were understood.
    sys.path.insert(0, str(HERE))
    from make_model import make_model
    from teacher import demonstrations

    warm = directory / "sft" / "model"
    if warm.exists():
        return warm
    rows = list(asyncio.run(demonstrations(DEMONSTRATIONS, seed)))
    data = directory / "demonstrations.jsonl"
    data.parent.mkdir(parents=True, exist_ok=True)
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    parameters = make_model(directory / "initial", rows, seed)
    console.print(f"{len(rows)} demonstrations, a model of {parameters:,} parameters", highlight=False)
    overrides = [
        "name=sft",
        f"runs={directory.absolute()}",
        f"seed={seed}",
        f"data={data.absolute()}",
        f"model.path={(directory / 'initial').absolute()}",
    ]
    return run_sft(load_config(SFTConfig, HERE / "sft.yaml", overrides), console=console).model


def report(summary: TrainSummary) -> None:
    """Print before and after, what it cost, and what to try next."""
    print("\nheld-out tables      before    after")
    for kind in ("sampled", "greedy"):
        before, after = ((part or {})[kind]["success"]["mean"] for part in (summary.before, summary.after))
        print(f"success, {kind:<10} {before:8.3f} {after:8.3f}")
    print(f"{summary.wall_s:.0f} s wall, {summary.cpu_s:.0f} CPU seconds over all processes")
    run = summary.directory
    last = max(path.name for path in (run / "checkpoints").iterdir())
    print(f"\neverything is in {run}. What to try next:")
    print(f"  turnwise view {run} -n 2              read what the model did, turn by turn")
    print(f"  turnwise audit {run}                  prove that every token was recorded and trained exactly")
    print(f"  turnwise eval lookup --model {run}/checkpoints/{last} --tasks 'turnwise.envs.lookup:tasks?split=test'")


if __name__ == "__main__":
    sys.exit(main())
