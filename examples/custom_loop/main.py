"""The main job (``../lookup``) with an agent loop of one's own (``loop.py``) in the place of ReAct.

Model, warm start, tasks and training are those of ``../lookup``; one line of the configuration is another one:
``rollout.agent.name``. ``--smoke`` does it with a model that was just made and one train step, in seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from rich.console import Console

HERE = Path(__file__).parent
LOOKUP = HERE.parent / "lookup"
SMOKE = [
    "steps=1", "batch.groups=2", "rollout.group_size=2", "eval.limit=4", "eval.samples=1", "checkpoint.every=1",
]  # fmt: skip


def main() -> int:
    sys.path[:0] = [str(LOOKUP), str(HERE.parent / "small_model")]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", help="name of the run; its directory is runs/NAME (default: custom-loop-seedSEED)")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--smoke", action="store_true", help="next to no training, in seconds")
    parser.add_argument("overrides", nargs="*", help="key=value for train.yaml, such as steps=60")
    arguments = parser.parse_args()

    from job import Job, report, warm_start
    from make_model import make_model
    from teacher import demonstrations

    from turnwise.config import load_config
    from turnwise.errors import TurnwiseError
    from turnwise.trainer.config import TrainConfig
    from turnwise.trainer.train import run_train

    console = Console(stderr=True)
    name = arguments.name or f"custom-loop-seed{arguments.seed}"
    directory = arguments.runs / name
    job = Job("lookup", LOOKUP, demonstrations, count=4480)
    try:
        if arguments.smoke:
            model = directory / "initial"
            make_model(model, asyncio.run(demonstrations(50, arguments.seed)), arguments.seed)
        else:
            model = warm_start(job, directory, arguments.seed, console)
        given = [
            f"name={name}", f"runs={arguments.runs.absolute()}", f"seed={arguments.seed}",
            f"policies.main.model.path={model.absolute()}", f"rollout.agent.name={HERE / 'loop.py'}:LookupLoop",
            *(SMOKE if arguments.smoke else []), *arguments.overrides,
        ]  # fmt: skip
        summary = run_train(load_config(TrainConfig, LOOKUP / "train.yaml", given), console=console)
    except TurnwiseError as error:
        console.print(f"[red]{error}[/red]", highlight=False)
        return 1
    report(job, summary)
    return 0


if __name__ == "__main__":
    sys.exit(main())
