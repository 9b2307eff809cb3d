"""Offline training: reading recorded data, shuffled batches, optimizer steps, and saving one model at the end."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import time
import uuid
from collections import defaultdict
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
from turnwise.errors import FormatError, TaskError, TrainError, shown
from turnwise.images import texts_of
from turnwise.model.core import Renderer
from turnwise.recorder.branches import branch_trajectories
from turnwise.trainer.config.offline import FilterConfig, OfflineConfig, RecordedConfig
from turnwise.trainer.config.policy import MACHINE_OF_MODEL
from turnwise.trainer.core import MicroBatch
from turnwise.trainer.learn.learner import Learner, Objective
from turnwise.trainer.learn.update import update_metrics
from turnwise.trainer.observe.loggers import LoggedRun
from turnwise.trainer.observe.metrics import finite_metrics
from turnwise.trainer.observe.run_log import LiveDisplay, RunLog, check_loggers
from turnwise.trainer.run.machine import check_machine
from turnwise.trajectory import Trajectory
from turnwise.trajectory_file import TRAJECTORIES, effective_trajectories


@dataclass(frozen=True, slots=True)
class OfflineResult:
    """The result of a run.

    Attributes:
        model: Directory of the trained model, in Hugging Face format.
        steps: Optimizer steps.
        metrics: Of the last step.
    """

    model: Path
    steps: int
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class Batch:
    """The data of one optimizer step.

    Attributes:
        micro: Its micro-batches.
        objective: The objective.
        normalizer: The divisor of sums.
    """

    micro: list[MicroBatch]
    objective: Objective
    normalizer: float


@contextlib.contextmanager
def locked_directory(config: OfflineConfig, console: Console | None = None) -> Iterator[None]:
    """Check what a run needs, and lock its directory for the block; warnings are printed.

    Raises:
        TrainError: The future model exists already, or another process trains it.
        ConfigError: There is no initial model, or it does not fit into memory.
        MissingExtraError: A logger's package is not installed.
    """
    check_loggers(config.loggers)
    for warning in check_machine(config.policy):
        print_notice(console, f"warning: {warning}")
    model = _model_directory(config)
    with lock_directory(model.parent, TrainError, "the run"):
        if model.exists() and not config.overwrite:
            raise TrainError(f"{model} exists; choose another name, remove it, or set overwrite: true")
        yield


def _model_directory(config: OfflineConfig) -> Path:
    return config.runs / config.name / "model"


def print_notice(console: Console | None, text: str) -> None:
    """Print a notice."""
    (console or Console(stderr=True)).print(text, highlight=False, markup=False, soft_wrap=True)


_RESUMES_WITH_ANOTHER: Final[dict[str, Any]] = {
    **dict.fromkeys(("name", "runs", "overwrite", "loggers", "max_tokens_per_micro_batch"), True),
    "model": set(MACHINE_OF_MODEL),
}


def train_offline(
    config: OfflineConfig,
    learner: Learner,
    batches: Iterator[Batch],
    title: str,
    columns: Mapping[str, str],
    console: Console | None,
    renderer: Renderer | None,
    evaluate: Callable[[], dict[str, float]] | None = None,
) -> OfflineResult:
    """Take the learner's optimizer steps, log and show them, and save the model with the renderer's chat format.

    An interrupted run resumes from its ``checkpoint/``, written every :data:`SAVE_S` seconds. ``evaluate`` returns
    metrics of held-out data; it is called after every tenth of the steps.

    Raises:
        TrainError: The checkpoint is one of another configuration.
    """
    console = console or Console(stderr=True)
    steps = learner.total_steps
    directory = config.runs / config.name
    checkpoint = directory / "checkpoint"
    record = {**config.model_dump(mode="json", exclude=_RESUMES_WITH_ANOTHER), "steps": steps}
    if begun := _restore(learner, checkpoint, record):
        print_notice(console, f"resuming {directory} after step {begun} of {steps}")
    logged = LoggedRun(config.name, uuid.uuid4().hex[:12], directory, config.model_dump(mode="json"), begun)
    logger = RunLog.open(logged, config.loggers, console)
    metrics: dict[str, float] = {}
    try:
        with LiveDisplay(
            f"{title} {config.name}", steps, columns, console=console, done=begun, share_at_start=begun / steps
        ) as display:
            batches, saved_at = itertools.islice(batches, begun, None), time.monotonic()
            for step in range(begun + 1, steps + 1):
                started = time.perf_counter()
                batch = next(batches)
                metrics = take_step(learner, batch)
                seconds = time.perf_counter() - started
                metrics["time/step_s"] = seconds
                metrics["time/tokens_per_s"] = sum(micro.tokens for micro in batch.micro) / seconds
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
    _save_model(learner, renderer, _model_directory(config))
    shutil.rmtree(checkpoint, ignore_errors=True)
    return OfflineResult(_model_directory(config), steps, metrics)


SAVE_S = 600.0
"""Seconds between two checkpoints."""


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


def take_step(learner: Learner, batch: Batch) -> dict[str, float]:
    """Take one optimizer step; return its metrics."""
    stats = learner.forward_backward(batch.micro, batch.objective, batch.normalizer)
    return update_metrics([(stats, learner.optim_step())])


def shuffled(count: int, size: int, seed: int) -> Iterator[list[int]]:
    """Yield batches of indices forever, reshuffled each epoch; an epoch's last batch may be smaller."""
    epoch = 0
    while True:
        order = np.random.default_rng([seed, epoch]).permutation(count).tolist()
        for start in range(0, count, size):
            yield order[start : start + size]
        epoch += 1


def _save_model(learner: Learner, renderer: Renderer | None, target: Path) -> None:
    """Write the model to a temporary directory and rename it."""
    with drafted_directory(target) as draft:
        learner.save_model(draft)
        if renderer is not None:
            save_format(renderer, draft)


def read_recorded(config: RecordedConfig, renderer: Renderer) -> list[Trajectory]:
    """Return the recorded trajectories without errors and with known tokens; of forked ones each branch.

    Raises:
        TaskError: There is no such file, a line cannot be read, nothing is left, or they were recorded with another
            tokenizer than the renderer's.
    """
    file = config.path / TRAJECTORIES if config.path.is_dir() else config.path
    if not file.is_file():
        raise TaskError(
            f"trajectories.path is {config.path}: no such file: {file}: give the directory of a run or an "
            f"evaluation, which holds {TRAJECTORIES}, or such a file"
        )
    try:
        recorded = [trajectory for _, trajectory in effective_trajectories(file)]
    except FormatError as error:
        raise TaskError(f"trajectories.path: {error}") from error
    usable = [
        trajectory
        for trajectory in recorded
        if (trajectory.policy == config.policy and config.partition in (None, trajectory.partition))
        and (trajectory.error is None and trajectory.recorded == "tokens" and trajectory.sampled_tokens)
    ]
    if not usable:
        partition = f" and partition {config.partition}" if config.partition else ""
        policies = ", ".join(sorted({trajectory.policy for trajectory in recorded})) or "none"
        raise TaskError(
            f"{file} holds {len(recorded)} trajectories (policies: {policies}), but none of policy "
            f"{config.policy}{partition} that ended without an error and was recorded with token ids"
        )
    for trajectory in usable:
        _check_tokenizer(trajectory, renderer, file)
    return [branch for trajectory in usable for branch in branch_trajectories(trajectory)]


def filter_trajectories(trajectories: Sequence[Trajectory], config: FilterConfig) -> list[Trajectory]:
    """Filter trajectories, keeping their order.

    Raises:
        TaskError: None passes.
    """
    tasks: dict[str, list[tuple[int, Trajectory]]] = defaultdict(list)
    for index, trajectory in enumerate(trajectories):
        if config.min_reward is None or trajectory.reward >= config.min_reward:
            tasks[trajectory.task_id].append((index, trajectory))
    selected: list[tuple[int, Trajectory]] = []
    for members in tasks.values():
        seen: set[bytes] = set()
        unique: list[tuple[int, Trajectory]] = []
        for index, trajectory in members:
            tokens = _tokens(trajectory)
            if not (config.dedupe and tokens in seen):
                unique.append((index, trajectory))
            seen.add(tokens)
        if config.best_per_task is not None:
            unique = sorted(unique, key=lambda item: (-item[1].reward, item[1].sampled_tokens, item[0]))
        selected += unique[: config.best_per_task]
    if not selected:
        best = max(trajectory.reward for trajectory in trajectories)
        raise TaskError(
            f"trajectories.min_reward is {config.min_reward}, but the best of {len(trajectories)} has reward {best:g}"
        )
    return [trajectory for _, trajectory in sorted(selected, key=lambda item: item[0])]


def _tokens(trajectory: Trajectory) -> bytes:
    return orjson.dumps(
        [[segment.token_ids.tolist(), [media.digest for media in segment.media]] for segment in trajectory.segments]
    )


def _check_tokenizer(trajectory: Trajectory, renderer: Renderer, file: object) -> None:
    """Check that the ids were recorded with this tokenizer."""
    for segment in trajectory.segments:
        if segment.parent >= 0 or segment.sampled:
            continue
        texts = [text.strip() for message in segment.messages for text in texts_of(message) if text.strip()]
        if not texts:
            continue
        try:
            text = renderer.decode(segment.token_ids)
        except (IndexError, KeyError, OverflowError, ValueError):
            text = ""
        if not any(quote in text for quote in texts):
            raise TaskError(
                f"{file}: trajectory {trajectory.id}: its ids do not encode its messages with the tokenizer of "
                "model.path: it was recorded with another tokenizer; train a model that has that one"
            )
