"""``turnwise train``: a run from its configuration to its summary."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import orjson
from rich.console import Console

from turnwise.append_file import writing
from turnwise.errors import TrainError
from turnwise.evaluation.metrics import result_table
from turnwise.trainer.config.train import TrainConfig
from turnwise.trainer.loops.modes import train_as_configured
from turnwise.trainer.run.checkpoint import CheckpointStore
from turnwise.trainer.run.directory import CHECKPOINTS, RunDirectory
from turnwise.trainer.run.run import TrainRun, open_run

Loop: TypeAlias = Callable[[TrainRun], Awaitable[None]]
"""Trains an opened run, until it should end."""


@dataclass(slots=True)
class TrainSummary:
    """What a run leaves, as ``summary.json`` holds it.

    Attributes:
        directory: The run directory.
        steps: Train steps done.
        before: Figures of the first evaluation: ``{"sampled": {...}, "greedy": {...}}``.
        after: Figures of the last one.
        wall_s: Seconds, all parts of the run together.
        cpu_s: CPU seconds of all its processes.
        ended_by: The limit that ended it (``steps``, ``trained_tokens``, ``sampled_tokens``, ``wall_time``),
            ``hook`` where a hook stopped it, or ``algorithm`` where an algorithm of the user's returned before.
        spent: What was spent of each limit, and of those that were not set.
    """

    directory: Path
    steps: int
    before: dict[str, Any] | None
    after: dict[str, Any] | None
    wall_s: float
    cpu_s: float
    ended_by: str
    spent: dict[str, float]

    def write(self) -> None:
        """Write ``summary.json``."""
        record = {
            "steps": self.steps,
            "before": self.before,
            "after": self.after,
            "wall_s": self.wall_s,
            "cpu_s": self.cpu_s,
            "ended_by": self.ended_by,
            "spent": self.spent,
        }
        file = self.directory / "summary.json"
        with writing(file):
            file.write_bytes(orjson.dumps(record, option=orjson.OPT_INDENT_2) + b"\n")


def run_train(
    config: TrainConfig,
    *,
    fresh: bool = False,
    resume_step: int | None = None,
    console: Console | None = None,
    loop: Loop = train_as_configured,
) -> TrainSummary:
    """Train, from the beginning or from the last checkpoint of the run directory.

    Ctrl-C (or SIGTERM) ends the run in order: a checkpoint of the last finished step is written, and no process is
    left behind. The same command goes on from there.

    Args:
        config: What to do.
        fresh: Remove an earlier run of this name first, once it is known that this one can start.
        resume_step: Go on from the checkpoint of this step, and remove later ones; None goes on from the newest.
        console: Where the display goes; by default standard error.
        loop: What trains.

    Raises:
        TurnwiseError: What is wrong with the configuration, the data, the model or the run directory, before any
            work starts; or why training cannot go on.
        KeyboardInterrupt: The run was interrupted; it can be resumed.
    """
    console = console or Console(stderr=True)
    try:
        return asyncio.run(train(config, fresh=fresh, resume_step=resume_step, console=console, loop=loop))
    except (KeyboardInterrupt, asyncio.CancelledError):
        # Of SIGTERM asyncio says that the task was cancelled; to a caller it is an interrupt like Ctrl-C.
        steps = CheckpointStore(config.runs / config.name / CHECKPOINTS).steps()
        found = f"the same command goes on after step {steps[-1]}" if steps else "no step was finished"
        console.print(f"interrupted: {found}", highlight=False)
        raise KeyboardInterrupt from None


async def train(
    config: TrainConfig,
    *,
    fresh: bool = False,
    resume_step: int | None = None,
    console: Console | None = None,
    loop: Loop = train_as_configured,
) -> TrainSummary:
    """Train as :func:`run_train` does, in the event loop that runs; a task that is cancelled ends the run in order."""
    console = console or Console(stderr=True)
    directory = config.runs / config.name
    with _sigterm_cancels():
        async with open_run(config, directory, console, fresh=fresh, resume_step=resume_step) as run:
            await run.hooks.init_end()
            if run.state.step == 0:
                await run.evaluate("step-0")
            async with run.hooks.training():
                await loop(run)
                ended = run.ended
                # What is on its way would be trained by no step, and the evaluation wait for its turn behind it.
                await run.feed.end()
                result = await run.evaluate(f"step-{run.state.step}-final")
    used = RunDirectory(directory).read()
    summary = TrainSummary(
        directory,
        run.state.step,
        run.first_eval,
        run.last_eval,
        used["wall_s"],
        used["cpu_s"],
        ended or "algorithm",
        dict(run.budget.spent),
    )
    summary.write()
    if result is not None:
        console.print(result_table(result, f"{config.name} after {run.state.step} steps"))
    if run.hooks.stopped:
        console.print(f"{config.name}: {run.hooks.stopped}", highlight=False, markup=False)
    elif run.budget.limits.keys() - {"steps"}:
        console.print(f"{config.name}: {run.budget.why(ended)}", highlight=False)
    return summary


@contextlib.contextmanager
def _sigterm_cancels() -> Iterator[None]:
    """Let SIGTERM end the run as Ctrl-C does. Signals are the main thread's: elsewhere this changes nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    if task is None:
        raise TrainError("a run needs an asyncio task")

    def cancel() -> None:
        # Once: another one must not cut off the checkpoint and the end of the servers that the first began.
        loop.add_signal_handler(signal.SIGTERM, lambda: None)
        task.cancel()

    loop.add_signal_handler(signal.SIGTERM, cancel)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
