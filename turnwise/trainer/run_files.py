"""The files that a training run appends to.

Owns: :class:`RunFiles`, :func:`open_files` and :func:`at_exit`. Refuses: what is written to them, and those of the
servers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console

from turnwise.errors import CheckpointError, DiskError
from turnwise.rollout.batches import BatchWriter
from turnwise.rollout.journal import Journal
from turnwise.rollout.replay_setup import allowed_uses
from turnwise.trainer.config import TrainConfig
from turnwise.trainer.diagnostics.report import Diagnostics
from turnwise.trainer.loggers.core import LoggedRun
from turnwise.trainer.loggers.run_log import RunLog
from turnwise.trainer.run_directory import RunDirectory
from turnwise.trainer.run_start import Start
from turnwise.trainer.timeline import Timeline


@dataclass(frozen=True, slots=True)
class RunFiles:
    """What a run writes down, file by file.

    Attributes:
        journal: What episodes left, and which of it was trained.
        batches: What was trained.
        metrics: The log.
        diagnostics: What is found besides metrics.
        timeline: What ran when.
    """

    journal: Journal
    batches: BatchWriter
    metrics: RunLog
    diagnostics: Diagnostics
    timeline: Timeline


def open_files(
    config: TrainConfig, directory: Path, start: Start, part: int, console: Console, stack: contextlib.AsyncExitStack
) -> RunFiles:
    """Open the files of a run; ``stack`` closes them.

    Args:
        config: What was asked for.
        directory: The run directory.
        start: What the run begins or goes on with.
        part: Number of this process among those that work on the run.
        console: Where a logger that fails is told of, and what a killed process left that is not whole.
        stack: Closes them.
    """
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    cut, after = config.batch.max_tokens_per_row, start.state.step
    uses = allowed_uses(config.replay, config.replay_facts)
    logged = LoggedRun(
        config.name, RunDirectory(directory).read()["id"], directory, config.model_dump(mode="json"), after
    )
    files = RunFiles(
        Journal.open(directory, part=part, after_step=after, max_uses=uses, say=say),
        BatchWriter(directory / "batches.jsonl", part=part, after_step=after, max_tokens=cut),
        RunLog.open(logged, config.loggers, console, part=part),
        Diagnostics(directory, config, start.renderer),
        Timeline(directory / "timeline.jsonl", part=part, mode=config.mode),
    )
    for each in (files.journal, files.batches, files.metrics, files.diagnostics, files.timeline):
        stack.callback(each.close)
    return files


def at_exit(stack: contextlib.AsyncExitStack, act: Callable[[], object]) -> None:
    """Have something written on the way out. What a full disk says there is left out where it ended the run: the first
    error tells it. Another error that ended it is told with what cannot be written.
    """

    def leave(kind: object, error: BaseException | None, trace: object) -> None:
        del kind, trace
        try:
            act()
        except (CheckpointError, DiskError) as refused:
            if isinstance(error, (CheckpointError, DiskError)):
                return
            if isinstance(error, Exception):
                said = f"the run ended with {type(error).__name__}: {error}; besides, {refused}"
                raise type(refused)(said) from error
            raise

    stack.push(leave)
