"""A job on a small model: from demonstrations that are mostly wrong to a policy that uses its tools, on a laptop's CPU.

1. Demonstrations are played in the environment by a teacher that is mostly wrong, and a tokenizer and a model of about
   a million parameters are made from them (``make_model.py``).
2. ``turnwise sft`` warms the model up on them (``sft.yaml`` of the example).
3. ``turnwise train`` trains it with GRPO against the built-in inference server (its ``train.yaml``), and evaluates it
   on held-out tasks before and after.

The same command resumes after an interrupt.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from turnwise.config import load_config
from turnwise.envs.registration import env_class
from turnwise.errors import TurnwiseError
from turnwise.placement.usage import return_freed_memory
from turnwise.trainer.config.offline import SFTConfig
from turnwise.trainer.config.train import TrainConfig
from turnwise.trainer.offline.sft import run_sft
from turnwise.trainer.run.directory import cpu_seconds
from turnwise.trainer.train import TrainSummary, run_train

if TYPE_CHECKING:
    from small_vision import VisionFamily

SMOKE_DEMONSTRATIONS = 40


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
        run_name: The beginning of the run's name; by default the environment's.
        config: Name of the training's file.
        warm_config: Name of the warm start's file.
        overrides: key=value for ``config``, below those of the command line.
        env: How ``turnwise eval`` finds the environment, and its tasks in the same file; by default by its name.
        words: A regular expression of what is data besides: the tokenizer merges nothing into it.
        smoke: key=value for ``train.yaml`` under ``--smoke``.
        smoke_warm: key=value for ``sft.yaml`` under ``--smoke``.
        report: Prints what a finished run reached; by default :func:`report_success`, of which the warm start's time
            is part.
        pretrained: Returns the model to warm up, by the command line; by default a small one is made of the
            demonstrations.
        tasks: The held-out tasks that ``turnwise eval`` is to name; by default the environment's.
        details: Prints more between the figures and what to try next.
        policies: The trained policies, which all begin with the warm start.
        vision: Whether the model sees images; its family is then that of the command line.
    """

    name: str
    home: Path
    demonstrations: Callable[[int, int], Awaitable[list[dict[str, Any]]]]
    count: int
    width: int = 128
    layers: int = 4
    run_name: str | None = None
    config: str = "train.yaml"
    warm_config: str = "sft.yaml"
    overrides: tuple[str, ...] = ()
    env: str | None = None
    words: str | None = None
    smoke: tuple[str, ...] = (
        "steps=1", "batch.groups=2", "rollout.group_size=4", "eval.limit=4", "eval.samples=1", "checkpoint.every=1",
    )  # fmt: skip
    smoke_warm: tuple[str, ...] = ("steps=5", "conversations=8")
    report: Callable[[TrainSummary], None] | None = None
    pretrained: Callable[[argparse.Namespace], Path] | None = None
    tasks: str | None = None
    details: Callable[[TrainSummary], None] | None = None
    policies: tuple[str, ...] = ("main",)
    vision: bool = False


def run(job: Job, description: str | None) -> int:
    """Run the job with the command line's settings; return the exit code."""
    return train(job, command_line(job, new_parser(description)).parse_intermixed_args())


def new_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser that shows the description as it is."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def command_line(job: Job, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the options that every job has, and return the parser; an example may have added arguments before."""
    default = f"{job.run_name or job.name}-seedSEED"
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", help=f"name of the run; its directory is runs/NAME (default: {default})")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--warm", type=Path, help="a run whose warm start is taken; by default it is made")
    parser.add_argument("--fresh", action="store_true", help="remove an earlier run of this name first")
    parser.add_argument("--smoke", action="store_true", help="next to no training, in seconds")
    parser.add_argument(
        "--also", action="append", default=[], metavar="FILE", help="a file over train.yaml, beside it or by its path"
    )
    parser.add_argument(
        "--sft", action="append", default=[], metavar="KEY=VALUE", help="for sft.yaml, of the warm start: steps=20"
    )
    parser.add_argument("overrides", nargs="*", help="key=value for train.yaml, such as steps=60")
    return parser


def train(job: Job, arguments: argparse.Namespace) -> int:
    """Warm the model up, train it and report; return the exit code."""
    started = time.monotonic()
    console = Console(stderr=True)
    name = arguments.name or f"{job.run_name or job.name}-seed{arguments.seed}"
    directory = arguments.runs / name
    if arguments.fresh and directory.exists():
        shutil.rmtree(directory)
    try:
        initial = None if job.pretrained is None else partial(job.pretrained, arguments)
        family = arguments.family if job.vision else None
        warm = arguments.warm or directory
        model = warm_start(
            job,
            warm,
            arguments.seed,
            console,
            smoke=arguments.smoke,
            overrides=arguments.sft,
            pretrained=initial,
            family=family,
        )
        files = [job.home / file for file in (job.config, *arguments.also)]
        overrides = [
            f"name={name}",
            f"runs={arguments.runs.absolute()}",
            f"seed={arguments.seed}",
            *(f"policies.{name}.model.path={model.absolute()}" for name in job.policies),
            *job.overrides,
            *(job.smoke if arguments.smoke else ()),
            *arguments.overrides,
        ]
        summary = run_train(load_config(TrainConfig, files, overrides), console=console)
    except TurnwiseError as error:
        console.print(f"[red]{error}[/red]", highlight=False)
        return 1
    except KeyboardInterrupt:
        # How far it got was printed; the same command resumes from there.
        return 130
    if job.report is not None:
        job.report(summary)
        return 0
    # The warm start is part of the job: its time counts.
    summary.wall_s, summary.cpu_s = time.monotonic() - started, cpu_seconds()
    summary.write()
    report_success(job, summary)
    return 0


def warm_start(
    job: Job,
    directory: Path,
    seed: int,
    console: Console,
    *,
    smoke: bool = False,
    overrides: Sequence[str] = (),
    pretrained: Callable[[], Path] | None = None,
    family: VisionFamily | None = None,
) -> Path:
    """Make demonstrations, and tokenizer and model or those given, and fine-tune; skipped where the result exists."""
    warm = directory / "sft" / "model"
    if warm.exists():
        return warm

    async def rows_of() -> list[dict[str, Any]]:
        return await job.demonstrations(SMOKE_DEMONSTRATIONS if smoke else job.count, seed)

    rows = asyncio.run(rows_of())
    data = directory / "demonstrations.jsonl"
    data.parent.mkdir(parents=True, exist_ok=True)
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if pretrained is not None:
        initial = pretrained()
        console.print(f"{len(rows)} demonstrations for {initial}", highlight=False)
    else:
        initial = directory / "initial"
        parameters = new_model(job, initial, rows, seed, family)
        console.print(f"{len(rows)} demonstrations, a model of {parameters:,} parameters", highlight=False)
    given = [
        "name=sft",
        f"runs={directory.absolute()}",
        f"seed={seed}",
        f"data={data.absolute()}",
        f"model.path={initial.absolute()}",
        *(job.smoke_warm if smoke else ()),
        *overrides,
    ]
    model = run_sft(load_config(SFTConfig, job.home / job.warm_config, given), console=console).model
    return_freed_memory()
    return model


def new_model(
    job: Job, initial: Path, rows: list[dict[str, Any]], seed: int, family: VisionFamily | None = None
) -> int:
    """Make tokenizer and model, of a vision family where one is named; return the number of parameters."""
    # torch and transformers are imported here, after the arguments were understood.
    from small_vision import make_vision_model

    from turnwise.trainer.offline.small_model import make_model

    size = {"width": job.width, "layers": job.layers, "words": job.words}
    if family is None:
        return make_model(initial, rows, seed, **size)
    return make_vision_model(initial, rows, seed, family=family, **size)


def report_success(job: Job, summary: TrainSummary) -> None:
    """Print before and after, what it cost, and what to try next."""
    print_before_after(summary, "success", "held-out tasks")
    print(f"{summary.wall_s:.0f} s wall, {summary.cpu_s:.0f} CPU seconds over all processes")
    if job.details is not None:
        job.details(summary)
    run_directory = summary.directory
    newest = max(path.name for path in (run_directory / "checkpoints").iterdir())
    env = job.env or job.name
    home = env.rpartition(":")[0] or env_class(env).__module__
    tasks = job.tasks or f"{home}:tasks?split=test"
    print(f"\neverything is in {run_directory}. Next steps:")
    print(f"  turnwise view {run_directory} -n 2              read what the model did, turn by turn")
    print(f"  turnwise report {run_directory} --open          curves, tasks, trajectories and tokens on one HTML page")
    print(f"  turnwise audit {run_directory}                  prove that every token was recorded and trained exactly")
    print(f"  turnwise eval {env} --model {run_directory}/checkpoints/{newest} --tasks '{tasks}'")


def print_before_after(summary: TrainSummary, figure: str, title: str, label: str | None = None) -> None:
    """Print the mean of a figure (``success``, ``reward``) before and after, sampled and greedy."""
    print(f"\n{title:<18}   before    after")
    for kind in ("sampled", "greedy"):
        figures = [(part or {}).get(kind) for part in (summary.before, summary.after)]
        if all(figures):
            means = " ".join(f"{part[figure]['mean']:8.3f}" for part in figures if part)
            print(f"{f'{label or figure}, {kind}':<20}{means}")


def print_by_role(roles: Sequence[str], summary: TrainSummary) -> None:
    """Print the mean reward of each role, before and after, and what the training cost."""
    print("\nmean reward      before    after")
    for role in roles:
        parts = [part["sampled"].get("by_role", {}).get(role) for part in (summary.before, summary.after)]
        figures = [part["reward"]["mean"] if part else float("nan") for part in parts]
        print(f"{role:<12} {figures[0]:10.3f} {figures[1]:8.3f}")
    print_cost(summary)


def print_cost(summary: TrainSummary) -> None:
    """Print what the training cost, without the warm start, and where its files are."""
    print(f"{summary.wall_s:.0f} s wall, {summary.cpu_s:.0f} CPU seconds; everything is in {summary.directory}")
