"""``turnwise train``: a run from its configuration to its summary."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import orjson
from rich.console import Console

from turnwise.append_file import write_private, writing
from turnwise.errors import RankDied, TrainError
from turnwise.evaluation.metrics import print_table, result_table, success_and_reward
from turnwise.trainer.config.train import TrainConfig
from turnwise.trainer.loops.modes import train_as_configured
from turnwise.trainer.observe.metrics import METRICS_FILE, read_metrics
from turnwise.trainer.run.checkpoint import CheckpointStore
from turnwise.trainer.run.directory import CHECKPOINTS, RunDirectory
from turnwise.trainer.run.run import TrainRun, open_run

RANK_RESTARTS = 3
"""Times that a run resumes from its last checkpoint by itself after the death of a rank on a cluster."""

Loop: TypeAlias = Callable[[TrainRun], Awaitable[None]]
"""Trains an opened run, until it should end."""


@dataclass(slots=True)
class TrainSummary:
    """The summary of a run, as in ``summary.json``.

    Attributes:
        directory: The run directory.
        steps: Train steps done.
        before: Figures of the first evaluation: ``{"sampled": {...}, "greedy": {...}}``.
        after: Figures of the last one.
        wall_s: Seconds, over all processes of the run.
        cpu_s: CPU seconds of all its processes.
        memory_gb: Largest ``memory/peak`` of its steps, in GB; 0 without one.
        ended_by: The limit that ended it (``steps``, ``trained_tokens``, ``sampled_tokens``, ``wall_time``), ``hook``
            where a hook stopped it, or ``algorithm`` where a custom algorithm returned earlier.
        spent: Amounts spent, with and without a limit.
    """

    directory: Path
    steps: int
    before: dict[str, Any] | None
    after: dict[str, Any] | None
    wall_s: float
    cpu_s: float
    memory_gb: float
    ended_by: str
    spent: dict[str, float]

    def write(self) -> None:
        """Write ``summary.json``."""
        record = {key: figure for key, figure in asdict(self).items() if key != "directory"}
        file = self.directory / "summary.json"
        with writing(file):
            write_private(file, orjson.dumps(record, option=orjson.OPT_INDENT_2) + b"\n")


def run_train(
    config: TrainConfig,
    *,
    fresh: bool = False,
    resume_step: int | None = None,
    console: Console | None = None,
    loop: Loop = train_as_configured,
) -> TrainSummary:
    """Train, from the beginning or from the last checkpoint of the run directory.

    Ctrl-C (or SIGTERM, or SIGHUP without nohup) ends the run in order, with a checkpoint of the last finished step; the
    same command resumes it.

    Args:
        config: The run's configuration.
        fresh: Remove an earlier run of this name, once this one is known to start.
        resume_step: Resume from the checkpoint of this step, and remove later ones; None is the newest.
        console: Console of the display; by default standard error.
        loop: The training loop.

    Raises:
        TurnwiseError: Configuration, data, model or run directory are invalid, or training cannot continue.
        KeyboardInterrupt: The run was interrupted; it can be resumed.
    """
    console = console or Console(stderr=True)
    try:
        return asyncio.run(train(config, fresh=fresh, resume_step=resume_step, console=console, loop=loop))
    except (KeyboardInterrupt, asyncio.CancelledError):
        # Of other signals asyncio says that the task was cancelled; to a caller it is an interrupt like Ctrl-C.
        steps = CheckpointStore(config.runs / config.name / CHECKPOINTS).steps()
        outcome = f"the same command resumes after step {steps[-1]}" if steps else "no step was finished"
        console.print(f"interrupted: {outcome}", highlight=False)
        raise KeyboardInterrupt from None


async def train(
    config: TrainConfig,
    *,
    fresh: bool = False,
    resume_step: int | None = None,
    console: Console | None = None,
    loop: Loop = train_as_configured,
) -> TrainSummary:
    """Train as :func:`run_train` does, in the running event loop; cancelling the task ends the run in order."""
    console = console or Console(stderr=True)
    restarts = RANK_RESTARTS if config.placement == "ray" else 0
    while True:
        try:
            return await _train_once(config, fresh, resume_step, console, loop)
        except RankDied as error:
            if not restarts:
                raise
            # The other ranks cannot continue without it; finished groups are in the journal.
            restarts, fresh, resume_step = restarts - 1, False, None
            console.print(f"{config.name}: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
            console.print(f"{config.name}: starting again from the last checkpoint", highlight=False)


async def _train_once(
    config: TrainConfig, fresh: bool, resume_step: int | None, console: Console, loop: Loop
) -> TrainSummary:
    directory = config.runs / config.name
    with _signals_cancel():
        async with open_run(config, directory, console, fresh=fresh, resume_step=resume_step) as run:
            await run.hooks.call("on_init_end")
            _hint(console, f"turnwise report {directory} --follow --open shows the run in a browser while it trains")
            if run.state.step == 0 and not run.resume_first_eval():
                await run.evaluate("step-0")
            async with run.hooks.training():
                await loop(run)
                limit = run.ended
                # What is on its way would be trained by no step, and the evaluation wait for its turn behind it. A
                # resumed run requests it again.
                await run.manager.cancel(set(run.scheduler.outstanding))
                result = await run.evaluate(f"step-{run.state.step}-final")
    used = RunDirectory(directory).read()
    summary = TrainSummary(
        directory,
        run.state.step,
        run.first_eval,
        run.last_eval,
        used["wall_s"],
        used["cpu_s"],
        max((record.get("memory/peak", 0.0) for record in read_metrics(directory / METRICS_FILE)), default=0.0),
        limit or "algorithm",
        dict(run.budget.spent),
    )
    summary.write()
    if result is not None:
        print_table(console, result_table(result, f"{config.name} after {run.state.step} steps"))
    if run.hooks.stopped:
        console.print(f"{config.name}: {run.hooks.stopped}", highlight=False, markup=False)
    elif run.budget.limits.keys() - {"steps"}:
        console.print(f"{config.name}: {run.budget.why(limit)}", highlight=False, soft_wrap=True)
    if summary.before is not None and summary.before != summary.after:
        console.print(f"at the first evaluation: {success_and_reward(summary.before)}", highlight=False, soft_wrap=True)
    if (model := _newest_model(directory)) is not None:
        env, tasks = config.rollout.env.name, None if config.eval is None else config.eval.tasks
        held_out = f" --tasks '{tasks}'" if isinstance(tasks, str) else ""
        _hint(console, f"{model} is the trained model: turnwise eval {env} --model {model}{held_out} evaluates it")
    _hint(console, f"turnwise report {directory} --open shows curves and trajectories")
    return summary


def _newest_model(run: Path) -> Path | None:
    """Return the newest checkpoint that is a model's folder; those of several policies hold a folder for each."""
    configs = sorted((run / "checkpoints").glob("step_*/config.json"))
    return configs[-1].parent if configs else None


def _hint(console: Console, text: str) -> None:
    console.print(text, style="dim", highlight=False, markup=False, soft_wrap=True)


@contextlib.contextmanager
def _signals_cancel() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the run as Ctrl-C does; no effect outside of the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    if task is None:
        raise TrainError("a run needs an asyncio task")
    # SIGHUP is ignored under nohup.
    numbers = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN]

    def cancel() -> None:
        # Once: another one must not cut off the checkpoint and the end of the servers that the first began.
        for number in numbers:
            loop.add_signal_handler(number, lambda: None)
        task.cancel()

    for number in numbers:
        loop.add_signal_handler(number, cancel)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
