"""What training on data that is there consists of: batches in a shuffled order, optimizer steps, one model at the end.

Owns: :func:`prepare`, :func:`fit` and :func:`save_model`. Refuses: where rows come from and what is minimised (each
objective's own file), and resuming: a run is short, and its model appears whole or not at all.
"""

from __future__ import annotations

import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import orjson
from rich.console import Console

from turnwise.errors import TaskError, TrainError
from turnwise.inference.core import Renderer
from turnwise.inference.renderer import save_format
from turnwise.trainer.algorithms.objectives import Objective
from turnwise.trainer.learner import Learner
from turnwise.trainer.loggers.console import LiveDisplay
from turnwise.trainer.loggers.core import LoggedRun
from turnwise.trainer.loggers.run_log import RunLog, check_loggers
from turnwise.trainer.metrics import checked, update_metrics
from turnwise.trainer.offline.config import OfflineConfig
from turnwise.trainer.packing import MicroBatch


@dataclass(frozen=True, slots=True)
class OfflineResult:
    """What a run left.

    Attributes:
        model: Directory of the trained model, in Hugging Face format.
        steps: Optimizer steps.
        metrics: Of the last step.
        cut_tokens: Trained tokens that ``max_tokens_per_row`` cut off.
    """

    model: Path
    steps: int
    metrics: dict[str, float]
    cut_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Batch:
    """What one optimizer step trains.

    Attributes:
        micro: Its micro-batches.
        objective: What is minimised.
        normalizer: What sums are divided by.
        pairs: How many pairs it holds, where the objective is one of pairs: its sums are then over them, not tokens.
    """

    micro: list[MicroBatch]
    objective: Objective
    normalizer: float
    pairs: int | None = None


@dataclass(frozen=True, slots=True)
class Shown:
    """What a person sees of a run: its title, the columns of its display, and the metric drawn as a curve."""

    title: str
    columns: Mapping[str, str]
    curve: str


def shown_of_pairs(title: str) -> Shown:
    """Return what a person sees of a run on preferences."""
    columns = {
        "loss": "train/loss",
        "accuracy": "preference/accuracy",
        "margin": "preference/margin",
        "grad": "train/grad_norm",
        "tok/s": "time/tokens_per_s",
    }
    return Shown(title, columns, "preference/accuracy")


def prepare(config: OfflineConfig) -> Path:
    """Return where the model will be; nothing is written before.

    Raises:
        TrainError: One is there already.
        MissingExtraError: A logger's package is not installed.
    """
    check_loggers(config.loggers)
    target = config.runs / config.name / "model"
    if target.exists() and not config.overwrite:
        raise TrainError(f"{target} exists; choose another name, remove it, or set overwrite: true")
    return target


def told(console: Console | None, text: str) -> None:
    """Tell a person something that is no error."""
    (console or Console(stderr=True)).print(text, highlight=False, markup=False, soft_wrap=True)


def fit(
    config: OfflineConfig,
    learner: Learner,
    steps: int,
    order: Iterator[list[int]],
    make: Callable[[list[int]], Batch],
    shown: Shown,
    console: Console | None,
) -> dict[str, float]:
    """Take optimizer steps, log and show them; returns the metrics of the last one.

    Args:
        config: Names the run.
        learner: Whose weights change.
        steps: How many.
        order: Yields what each step is made of.
        make: Makes a step of that.
        shown: What a person sees.
        console: Where; by default standard error.
    """
    console = console or Console(stderr=True)
    directory = config.runs / config.name
    logged = LoggedRun(config.name, uuid.uuid4().hex[:12], directory, config.model_dump(mode="json"), 0)
    logger = RunLog.open(logged, config.loggers, console)
    metrics: dict[str, float] = {}
    try:
        title = f"{shown.title} {config.name}"
        with LiveDisplay(title, steps, shown.columns, curve=shown.curve, console=console) as display:
            for step in range(1, steps + 1):
                started = time.perf_counter()
                batch = make(next(order))
                metrics = take_step(learner, batch)
                seconds = time.perf_counter() - started
                metrics["time/step_s"] = seconds
                metrics["time/tokens_per_s"] = sum(micro.tokens for micro in batch.micro) / seconds
                logger.log({"kind": "train", "step": step, **checked({**metrics, **logger.counts()})})
                display.step(step, metrics)
    finally:
        logger.close()
    return metrics


def take_step(learner: Learner, batch: Batch) -> dict[str, float]:
    """Update the weights once; returns what is logged of it."""
    stats = learner.forward_backward(batch.micro, batch.objective, batch.normalizer)
    result = learner.optim_step()
    if batch.pairs is None:
        return update_metrics([(stats, result)])
    told_of = {f"preference/{name}": mean * stats.tokens / batch.pairs for name, mean in stats.means.items()}
    return update_metrics([(replace(stats, means={}), result)]) | told_of


def shuffled(count: int, size: int, seed: int) -> Iterator[list[int]]:
    """Yield indices without end: each epoch shuffled anew, its last batch as small as what is left."""
    epoch = 0
    while True:
        order = np.random.default_rng([seed, epoch]).permutation(count).tolist()
        for start in range(0, count, size):
            yield order[start : start + size]
        epoch += 1


def save_model(learner: Learner, renderer: Renderer | None, target: Path) -> None:
    """Write the model beside its place and give it its name at the end; ``renderer`` notes its chat format with it."""
    draft = target.parent / f".draft-{target.name}-{os.getpid()}"
    replaced = target.parent / f".replaced-{target.name}-{os.getpid()}"
    extra = None if renderer is None else lambda directory: save_format(renderer, directory)
    try:
        learner.save_model(draft, extra=extra)
        if target.exists():
            target.rename(replaced)
        draft.rename(target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        shutil.rmtree(replaced, ignore_errors=True)


def json_lines(path: Path, limit: int | None = None) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield ``file:line`` and the object of each line of a jsonl file, at most ``limit`` of them.

    Raises:
        TaskError: The file cannot be read, or a line is no JSON object.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TaskError(f"data is {path}, which cannot be read: {error}") from error
    count = 0
    # Not splitlines(): a message may hold other characters that count as line ends.
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        if limit is not None and count >= limit:
            return
        count += 1
        where = f"{path}:{number}"
        try:
            record = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise TaskError(f"{where}: not JSON: {error}") from error
        yield where, record
