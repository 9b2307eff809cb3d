"""``turnwise sft``: supervised fine-tuning on demonstrations, or on recorded trajectories (rejection sampling)."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson
from rich.console import Console

from turnwise.append_file import drafted_directory, lock_directory
from turnwise.chat.renderer import save_format
from turnwise.config import differences
from turnwise.errors import TrainError, shown
from turnwise.model.core import Renderer
from turnwise.trainer.algorithms.losses.core import weigh
from turnwise.trainer.batch.packing import pack
from turnwise.trainer.config.offline import SFTConfig
from turnwise.trainer.config.policy import MACHINE_OF_MODEL
from turnwise.trainer.core import MicroBatch, TrainRow
from turnwise.trainer.learn.learner import Learner, open_learner
from turnwise.trainer.learn.objectives import CrossEntropyObjective
from turnwise.trainer.learn.update import update_metrics
from turnwise.trainer.observe.loggers import LoggedRun
from turnwise.trainer.observe.metrics import finite_metrics
from turnwise.trainer.observe.run_log import LiveDisplay, RunLog, check_loggers
from turnwise.trainer.offline.demonstrations import demonstration_rows, load_demonstrations
from turnwise.trainer.offline.recorded import filter_trajectories, read_recorded
from turnwise.trainer.run.machine import check_machine
from turnwise.trajectory import to_samples

SAVE_S = 600.0
"""Seconds between two checkpoints."""

_RESUMES_WITH_ANOTHER: Final[dict[str, Any]] = {
    **dict.fromkeys(("name", "runs", "overwrite", "loggers", "max_tokens_per_micro_batch"), True),
    "model": set(MACHINE_OF_MODEL),
}
_COLUMNS = {
    "loss": "train/nll",
    "held out": "held_out/nll",
    "grad": "train/grad_norm",
    "trained tokens": "train/tokens",
    "tok/s": "time/tokens_per_s",
}


@dataclass(frozen=True, slots=True)
class SFTResult:
    """The result of a run.

    Attributes:
        model: Directory of the trained model, in Hugging Face format.
        steps: Optimizer steps.
        metrics: Of the last step.
    """

    model: Path
    steps: int
    metrics: dict[str, float]


def run_sft(config: SFTConfig, *, console: Console | None = None) -> SFTResult:
    """Fine-tune a model and save it to ``runs/name/model``.

    Raises:
        TaskError: The data cannot be read or rendered in the model's chat format, or has nothing to learn from.
        TrainError: The model cannot be loaded or trained, or a model of this name exists.
    """
    with _locked_directory(config, console):
        renderer = config.renderer.load(config.model.path)
        rows, cut = _rows(config, renderer, console)
        rows = [group for group in rows if group]
        if not rows:
            raise TrainError("no conversation of the data has an assistant token within max_tokens_per_row")
        if cut:
            _print_notice(console, f"max_tokens_per_row {config.max_tokens_per_row} cuts {cut} assistant tokens off")
        learner = open_learner(config.policy, config.steps_over(len(rows)))
        evaluate = None if config.held_out is None else _held_out_loss(config, renderer, learner)
        metrics = _train(config, learner, rows, console or Console(stderr=True), evaluate)
        model = _model_directory(config)
        with drafted_directory(model) as draft:
            learner.save_model(draft)
            save_format(renderer, draft)
        shutil.rmtree(_checkpoint_directory(config), ignore_errors=True)
        return SFTResult(model, learner.total_steps, metrics)


@contextlib.contextmanager
def _locked_directory(config: SFTConfig, console: Console | None) -> Iterator[None]:
    """Check what a run needs, and lock its directory for the block; warnings are printed.

    Raises:
        TrainError: The future model exists already, or another process trains it.
        ConfigError: There is no initial model, or it does not fit into memory.
        MissingExtraError: A logger's package is not installed.
    """
    check_loggers(config.loggers)
    for warning in check_machine(config.policy):
        _print_notice(console, f"warning: {warning}")
    model = _model_directory(config)
    with lock_directory(model.parent, TrainError, "the run"):
        if model.exists() and not config.overwrite:
            raise TrainError(f"{model} exists; choose another name, remove it, or set overwrite: true")
        yield


def _model_directory(config: SFTConfig) -> Path:
    return config.runs / config.name / "model"


def _checkpoint_directory(config: SFTConfig) -> Path:
    return config.runs / config.name / "checkpoint"


def _print_notice(console: Console | None, text: str) -> None:
    (console or Console(stderr=True)).print(text, highlight=False, markup=False, soft_wrap=True)


def _rows(config: SFTConfig, renderer: Renderer, console: Console | None) -> tuple[list[list[TrainRow]], int]:
    if config.trajectories is None:
        assert config.data is not None, "a configuration has data or trajectories"
        demonstrations = load_demonstrations(config.data, config.limit)
        return asyncio.run(demonstration_rows(demonstrations, renderer, config.max_tokens_per_row))
    recorded = read_recorded(config.trajectories, renderer)
    selected = filter_trajectories(recorded, config.trajectories)[: config.limit]
    tasks = len({trajectory.task_id for trajectory in selected})
    _print_notice(console, f"trajectories: {len(selected)} of {len(recorded)} are trained, of {tasks} tasks")
    samples = [to_samples(trajectory, max_tokens=config.max_tokens_per_row) for trajectory in selected]
    unowned_tokens = sum(sample.unowned_tokens for sample in samples)
    return [[TrainRow(row) for row in sample.rows] for sample in samples], unowned_tokens


def _held_out_loss(config: SFTConfig, renderer: Renderer, learner: Learner) -> Callable[[], dict[str, float]]:
    """Return what computes the mean negative log-likelihood of held-out assistant tokens."""
    assert config.held_out is not None, "read where it is given"
    demonstrations = load_demonstrations(config.held_out)
    groups, _ = asyncio.run(demonstration_rows(demonstrations, renderer, config.max_tokens_per_row))
    rows = [row for group in groups for row in group]
    if not rows:
        raise TrainError(f"held_out is {config.held_out}: no conversation has an assistant token to predict")
    micro = pack(rows, config.max_tokens_per_micro_batch, share_prefixes=config.share_prefixes)
    tokens = sum(batch.trained_tokens for batch in micro)
    return lambda: {"held_out/nll": -sum(float(logprobs.sum()) for logprobs in learner.logprobs(micro)) / tokens}


def _train(
    config: SFTConfig,
    learner: Learner,
    rows: Sequence[Sequence[TrainRow]],
    console: Console,
    evaluate: Callable[[], dict[str, float]] | None,
) -> dict[str, float]:
    """Take the learner's optimizer steps, log and show them; return the metrics of the last one.

    An interrupted run resumes from its ``checkpoint/``, written every :data:`SAVE_S` seconds. ``evaluate`` returns
    metrics of held-out data; it is called after every tenth of the steps.

    Raises:
        TrainError: The checkpoint is one of another configuration.
    """
    steps = learner.total_steps
    directory, checkpoint = config.runs / config.name, _checkpoint_directory(config)
    record = {**config.model_dump(mode="json", exclude=_RESUMES_WITH_ANOTHER), "steps": steps}
    if begun := _restore(learner, checkpoint, record):
        _print_notice(console, f"resuming {directory} after step {begun} of {steps}")
    logged = LoggedRun(config.name, uuid.uuid4().hex[:12], directory, config.model_dump(mode="json"), begun)
    logger = RunLog.open(logged, config.loggers, console)
    metrics: dict[str, float] = {}
    try:
        with LiveDisplay(
            f"sft {config.name}", steps, _COLUMNS, console=console, done=begun, share_at_start=begun / steps
        ) as display:
            saved_at = time.monotonic()
            orders = itertools.islice(shuffled(len(rows), config.conversations, config.seed), begun, None)
            for step, indices in zip(range(begun + 1, steps + 1), orders, strict=False):
                started = time.perf_counter()
                weighed, normalizer = weigh(
                    [row for index in indices for row in rows[index]], config.loss_aggregation, scale=config.loss_scale
                )
                micro = pack(weighed, config.max_tokens_per_micro_batch, share_prefixes=config.share_prefixes)
                metrics = take_step(learner, micro, normalizer)
                seconds = time.perf_counter() - started
                metrics["time/step_s"] = seconds
                metrics["time/tokens_per_s"] = sum(batch.tokens for batch in micro) / seconds
                if evaluate is not None and (step % max(1, steps // 10) == 0 or step == steps):
                    metrics |= evaluate()
                logger.log({"kind": "train", "step": step, **finite_metrics({**metrics, **logger.counts()})})
                display.step(step, metrics)
                if time.monotonic() - saved_at >= SAVE_S:
                    with drafted_directory(checkpoint) as draft:
                        learner.save(draft)
                        (draft / "run.json").write_bytes(orjson.dumps(record))
                    saved_at = time.monotonic()
    finally:
        logger.close()
    return metrics


def _restore(learner: Learner, checkpoint: Path, record: Mapping[str, Any]) -> int:
    """Restore the learner of an interrupted run; return the steps that it took, 0 without a checkpoint."""
    if not checkpoint.is_dir():
        return 0
    saved = orjson.loads((checkpoint / "run.json").read_bytes())
    if changes := [f"{key} was {shown(old)} and is {shown(new)}" for key, old, new in differences("", saved, record)]:
        raise TrainError(
            f"{checkpoint} is of an interrupted run with another configuration: {', '.join(changes[:4])}; resume it "
            "with that one, choose another name, or remove it"
        )
    learner.load(checkpoint)
    return learner.steps


def take_step(learner: Learner, micro: Sequence[MicroBatch], normalizer: float) -> dict[str, float]:
    """Take one optimizer step; return its metrics."""
    stats = learner.forward_backward(micro, CrossEntropyObjective(), normalizer)
    return update_metrics([(stats, learner.optim_step())])


def shuffled(count: int, size: int, seed: int) -> Iterator[list[int]]:
    """Yield batches of indices forever, reshuffled each epoch; an epoch's last batch may be smaller."""
    epoch = 0
    while True:
        order = np.random.default_rng([seed, epoch]).permutation(count).tolist()
        for start in range(0, count, size):
            yield order[start : start + size]
        epoch += 1
