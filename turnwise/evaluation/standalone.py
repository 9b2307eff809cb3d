"""``turnwise eval``: from a checkpoint or a server's address to a summary on disk.

Owns: :func:`run_eval`, which assembles what :func:`~turnwise.evaluation.runner.evaluate` needs, and takes it apart.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.text import Text

from turnwise.config import dump_config
from turnwise.errors import ConfigError, InferenceError
from turnwise.evaluation.config import EvalConfig
from turnwise.evaluation.progress import EvalProgress
from turnwise.evaluation.result import EvalResult, result_table
from turnwise.evaluation.runner import eval_requests, evaluate, load_eval_tasks
from turnwise.inference.client import HTTPClient
from turnwise.inference.core import LLMClient
from turnwise.inference.fleet import Fleet
from turnwise.inference.frozen import load_renderers, open_frozen
from turnwise.inference.gateway.hosted_client import HostedClient
from turnwise.inference.gateway.hosted_config import base_url
from turnwise.inference.gateway.hosted_endpoint import Endpoint
from turnwise.inference.gateway.hosted_renderer import TextRenderer
from turnwise.inference.ledger import Book, LedgerClient
from turnwise.rollout.core import RolloutParts
from turnwise.rollout.managers import Rollouts, check_manager, create_manager
from turnwise.rollout.writer import TrajectoryWriter
from turnwise.tasks import Task
from turnwise.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class _Model:
    """Who samples, and what to do when it fails."""

    client: LLMClient
    recover: Callable[[InferenceError], Awaitable[None]] | None = None


def run_eval(config: EvalConfig, *, console: Console | None = None) -> EvalResult:
    """Evaluate a model on an environment, print the figures and write everything down.

    The directory of the evaluation then holds ``config.yaml``, ``trajectories.jsonl``, ``ledger.jsonl`` (so that it
    can be viewed and audited), ``episodes.jsonl`` and ``summary.json``. An interrupt (Ctrl-C) keeps and summarises what
    has ended by then.

    Args:
        config: What is evaluated, by whom and with what.
        console: Where to print; by default the terminal.

    Raises:
        ConfigError: Something of the configuration cannot be used; nothing was started.
        TurnwiseError: What went wrong; also where no episode at all ended without an error.
        KeyboardInterrupt: The evaluation was interrupted; the summary says how many episodes it lacks.
    """
    console = console or Console()
    folder = _folder(config)
    errors: list[str] = []
    result = asyncio.run(_evaluate(config, folder, console, errors))
    ended = any(summary.success.episodes for summary in result.parts.values())
    if result.unfinished and not ended:
        console.print(f"interrupted before an episode had ended; its records are in {folder}", soft_wrap=True)
        raise KeyboardInterrupt
    if not ended:
        raise InferenceError(f"every episode ended in an error, so there are no figures; the last one: {errors[-1]}")
    console.print(result_table(result, f"{config.rollout.env.name}: {config.url or config.model}"))
    console.print(Text(f"{result.seconds:.1f} s; written to {folder}", style="dim"), soft_wrap=True)
    if result.unfinished:
        console.print(
            f"interrupted: {result.unfinished} episodes had not ended and are in no figure. Short episodes end first: "
            "figures of a part may differ from those of the whole",
            soft_wrap=True,
        )
        raise KeyboardInterrupt
    return result


def _folder(config: EvalConfig) -> Path:
    """Return the directory to write to. It holds no evaluation yet: two in one file could not be told apart."""
    if config.out is None:
        name = "".join(letter if letter.isalnum() else "-" for letter in config.rollout.env.name).strip("-")
        folder = Path.cwd() / "runs" / f"eval-{name}-{datetime.now():%Y%m%d-%H%M%S}"
        number = 2
        while folder.exists():
            folder, number = folder.with_name(f"{folder.name.partition('.')[0]}.{number}"), number + 1
    else:
        folder = config.out
    taken = [name for name in ("trajectories.jsonl", "ledger.jsonl", "summary.json") if (folder / name).exists()]
    if taken:
        raise ConfigError(f"out is {folder}, which holds {', '.join(taken)} already: name another directory")
    return folder


async def _evaluate(config: EvalConfig, folder: Path, console: Console, errors: list[str]) -> EvalResult:
    """Evaluate and return the figures; ``errors`` gets what ended episodes."""
    check_manager(config.rollout, config.custom)
    renderer = TextRenderer() if config.hosted is not None else config.renderer.load(config.directory)
    described = renderer.describe()
    console.print(Text(f"chat format: {described['format']} ({described['proof']})", style="dim"), soft_wrap=True)
    renderers = load_renderers(config.rollout.frozen, config.model, config.renderer)
    loaded = await load_eval_tasks(config, config.rollout, renderer)
    for report in loaded.reports:
        console.print(Text(f"tasks: {report}", style="dim"), soft_wrap=True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(dump_config(config), encoding="utf-8")
    async with AsyncExitStack() as stack:
        model = await _model(config, folder, stack)
        # The ledger closes the client with it, and marks its own end: nothing is in flight any more. Of text there are
        # no tokens to write down.
        policies = config.rollout.frozen
        tells = config.hosted is None or any(each.hosted is None for each in policies.values())
        book = Book(folder / "ledger.jsonl") if tells else None
        if book is not None:
            stack.push(book.leave)
        client = LedgerClient(model.client, book) if book is not None and config.hosted is None else model.client
        stack.push_async_callback(client.close)
        frozen = await open_frozen(policies, renderers, stack, start=config.model, logs=folder / "logs", book=book)

        async def recover(error: InferenceError) -> None:
            if model.recover is not None:
                await model.recover(error)
            await frozen.recover(error)

        writer = TrajectoryWriter(folder / "trajectories.jsonl")
        stack.callback(writer.close)
        progress = EvalProgress(config, eval_requests(config, loaded.tasks))

        def write(trajectory: Trajectory) -> None:
            writer.write(trajectory)
            progress.wrote(trajectory)
            if trajectory.error is not None:
                errors.append(trajectory.error)

        parts = RolloutParts(
            renderer,
            write=write,
            recover=recover,
            frozen=frozen.policies,
            custom=config.custom,
            notify=console.print,
        )
        producer = await create_manager(config.rollout, client, None, parts)
        stack.push_async_callback(producer.close)
        result = await _watched(producer, config, loaded.tasks, progress, console)
        result = replace(result, left_out=sum(report.dropped.total() for report in loaded.reports))
        # Before anything is closed: a second interrupt does not lose it.
        result.write(folder)
        return result


async def _watched(
    producer: Rollouts, config: EvalConfig, tasks: list[Task], progress: EvalProgress, console: Console
) -> EvalResult:
    """Evaluate, and return the figures; where that is interrupted, those of the episodes that have ended."""
    with progress.shown(console):
        try:
            result = await evaluate(producer, config, tasks=tasks, on_group=progress.arrived)
        except asyncio.CancelledError:
            # Ctrl-C cancels this task. What is closed from here on is awaited as usual.
            if (task := asyncio.current_task()) is not None:
                task.uncancel()
            result = progress.partial()
    return replace(result, max_tokens_per_turn=config.rollout.max_tokens_per_turn)


async def _model(config: EvalConfig, folder: Path, stack: AsyncExitStack) -> _Model:
    if config.hosted is not None:
        endpoint = Endpoint(base_url(config.url), config.hosted, config.hosted.key())
        return _Model(HostedClient(endpoint, model=config.hosted.model))
    if config.urls:
        settings = config.inference
        return _Model(HTTPClient(config.urls, retries=settings.retries, retry_wait=settings.retry_wait))
    fleet = Fleet(config.inference, config.directory, logs=folder / "logs")
    stack.push_async_callback(fleet.close)
    await fleet.launch()
    return _Model(fleet.client, fleet.recover)
