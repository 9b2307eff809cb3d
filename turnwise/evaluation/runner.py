"""The evaluation runner: rollouts of an environment's tasks, progress, and ``turnwise eval``."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from turnwise.agents.roles import role_of
from turnwise.append_file import write_private
from turnwise.config import dump_config
from turnwise.envs.core import Env
from turnwise.envs.registration import env_class
from turnwise.errors import ConfigError, InferenceError, TurnwiseError
from turnwise.evaluation.config import EvalConfig, EvalPlan
from turnwise.evaluation.directory import output_directory
from turnwise.evaluation.metrics import (
    EpisodeRow,
    EvalResult,
    Summary,
    by_episode,
    episode_rows,
    print_table,
    result_table,
    summarize,
    task_tags,
)
from turnwise.evaluation.spending import Spending
from turnwise.gateway.concurrency import AdaptiveLimit, follow_queues
from turnwise.gateway.config import base_url
from turnwise.gateway.frozen import load_renderers, open_frozen
from turnwise.gateway.proxy.client import HostedClient
from turnwise.gateway.proxy.endpoint import Endpoint
from turnwise.gateway.proxy.session import TextRenderer
from turnwise.inference.client import HTTPClient
from turnwise.inference.config import InferenceConfig
from turnwise.inference.replica_set import ReplicaSet, client_of
from turnwise.model.core import LLMClient, Renderer
from turnwise.recorder.ledger import LedgerClient, LedgerWriter
from turnwise.rollout.agent_table import AgentTable
from turnwise.rollout.branching.strategies import BranchingStrategy
from turnwise.rollout.config import RolloutConfig
from turnwise.rollout.core import OnGroup, RolloutParts, RolloutRequest
from turnwise.rollout.journal.finished import FinishedMembers
from turnwise.rollout.managers import Rollouts, check_manager, create_manager
from turnwise.rollout.preflight import format_lines, load_checked
from turnwise.tasks.core import Task
from turnwise.tasks.mix import LoadedTasks
from turnwise.trajectory import Trajectory, TrajectoryGroup
from turnwise.trajectory_file import TRAJECTORIES
from turnwise.types import StopReason


def eval_requests(plan: EvalPlan, tasks: Sequence[Task], label: str = "") -> list[RolloutRequest]:
    """Return the requests, sampled then greedy; ``label`` makes episode ids unique per evaluation (``step-20``)."""
    prefix = f"{label}-" if label else ""
    requests = []
    if plan.samples:
        requests += [RolloutRequest(task, 0, plan.samples, "val", None, f"{prefix}sampled") for task in tasks]
    if plan.greedy:
        requests += [RolloutRequest(task, 0, 1, "val", 0.0, f"{prefix}greedy") for task in tasks]
    return requests


async def evaluate(
    producer: Rollouts,
    plan: EvalPlan,
    *,
    tasks: Sequence[Task] | None = None,
    label: str = "",
    on_group: OnGroup | None = None,
) -> EvalResult:
    """Roll out tasks and return the metrics; ConfigError or TaskError if there are none, or ``plan.role`` is unknown.

    Args:
        producer: Rollout producer; its configuration names environment, agent, temperature and limits.
        plan: The evaluation plan.
        tasks: The tasks, if loaded already.
        label: Part of the episode ids, unique per evaluation of a run.
        on_group: Called with each finished group.
    """
    started = time.monotonic()
    if tasks is None:
        tasks = (await load_eval_tasks(plan, producer.config, producer.renderer)).tasks
    requests = eval_requests(plan, tasks, label)
    tags = task_tags(tasks, plan.by)
    groups = await producer.gather(requests, on_group)
    return eval_result(plan, tags, groups, time.monotonic() - started)


def eval_result(
    plan: EvalPlan, tags: Mapping[str, Sequence[str]], groups: Sequence[TrajectoryGroup], seconds: float
) -> EvalResult:
    """Return the metrics of groups in the order of :func:`eval_requests`; ``tags`` are those of their tasks by id."""
    split = len(groups) // (1 + plan.greedy) if plan.samples else 0
    return EvalResult(
        sampled=_summary(plan, tags, groups[:split], plan.pass_k) if plan.samples else None,
        greedy=_summary(plan, tags, groups[split:], ()) if plan.greedy else None,
        seconds=seconds,
    )


async def load_eval_tasks(plan: EvalPlan, rollout: RolloutConfig, renderer: Renderer) -> LoadedTasks:
    """Load the plan's tasks (by default the environment's), with a report of each source.

    ``renderer`` counts prompt tokens, for ``plan.max_prompt_tokens``. Raises ConfigError, RegistryError or TaskError.
    """
    return await load_checked(plan.tasks, rollout, renderer, limit=plan.limit, max_prompt_tokens=plan.max_prompt_tokens)


def _summary(
    plan: EvalPlan, tags: Mapping[str, Sequence[str]], groups: Sequence[TrajectoryGroup], pass_k: Sequence[int]
) -> Summary:
    if plan.role is not None:
        roles = {role_of(trajectory.agent) for group in groups for trajectory in group.trajectories}
        if roles and plan.role not in roles:
            raise ConfigError(
                f"role is {plan.role!r}, but no episode has that role; roles are {', '.join(sorted(roles))}"
            )
    return summarize(
        groups, success_reward=plan.success_reward, pass_k=pass_k, role=plan.role, answer=plan.answer, tags=tags
    )


LINE_EVERY_S = 30.0
"""Seconds between two lines where the output is no terminal."""
_HOPELESS = 32
"""Failed episodes, each after its retries, after which an evaluation without any other ends."""


class EvalProgress:
    """Progress of an evaluation: counts, display, and metrics of finished episodes."""

    def __init__(
        self,
        plan: EvalPlan,
        requests: Sequence[RolloutRequest],
        *,
        restored: int = 0,
        limit: AdaptiveLimit | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin with ``restored`` episodes that earlier processes finished; ``limit`` is shown."""
        self._restored = restored
        self._limit = limit
        self.total = sum(request.group_size for request in requests)
        self._plan = plan
        self._requests = list(requests)
        self._tags = task_tags((request.task for request in requests), plan.by)
        self._by_key = {request.key: number for number, request in enumerate(requests)}
        self._groups: dict[int, TrajectoryGroup] = {}
        # What episodes wrote of groups that are not whole yet, by the number of their request.
        self._open: defaultdict[int, list[Trajectory]] = defaultdict(list)
        self._scores: dict[str, tuple[bool, float]] = {}
        self._failed = 0
        self._clock = clock
        self._started = clock()
        self._show: Callable[[], None] = lambda: None
        self.give_up: Callable[[], object] = lambda: None
        """Called when so many episodes have failed, and none has not, that the others would, too."""

    @property
    def ended(self) -> int:
        """Number of finished episodes, including those that failed their last attempt."""
        return min(self.total, len(self._scores) + self._failed)

    @property
    def time_left(self) -> float | None:
        """Estimated remaining seconds by the rate of this process; None before its first episode."""
        ended_here = self.ended - self._restored
        if ended_here <= 0:
            return None
        return (self._clock() - self._started) / ended_here * (self.total - self.ended)

    def wrote(self, trajectory: Trajectory) -> None:
        """Count the episode of a written trajectory."""
        number = self._by_key.get(trajectory.group_id.partition("-")[2])
        if number is None or number in self._groups:
            return
        self._open[number].append(trajectory)
        self._count(self._finished_of(number))

    def arrived(self, group: TrajectoryGroup) -> None:
        """Count a finished group."""
        number = self._by_key.get(group.id.partition("-")[2])
        if number is None:
            # A user's rollout manager may name its groups as it likes: it answers the samples first.
            numbered = enumerate(self._requests)
            unanswered = (n for n, request in numbered if request.task.id == group.task_id and n not in self._groups)
            number = next(unanswered, None)
        if number is None:
            return
        self._groups[number] = group
        self._open.pop(number, None)
        self._failed += group.failed
        self._count(group.trajectories)
        if self._failed >= _HOPELESS and not self._scores:
            self.give_up()

    def partial(self) -> EvalResult:
        """Return the metrics of finished episodes, with the number of unfinished ones."""
        groups: list[TrajectoryGroup] = []
        for number, request in enumerate(self._requests):
            group = self._groups.get(number)
            if group is None:
                finished, task = self._finished_of(number), request.task
                group = TrajectoryGroup(request.key, task.id, finished, request.partition, source=task.source)
            groups.append(group)
        result = eval_result(self._plan, self._tags, groups, self._clock() - self._started)
        return replace(result, unfinished=self.total - self.ended)

    def tell(self, say: Callable[[str], object], every_s: float = LINE_EVERY_S) -> None:
        """Call ``say`` with the progress as episodes end, at most every so many seconds."""
        last_at = self._started

        def say_when_due() -> None:
            nonlocal last_at
            if self._clock() - last_at >= every_s:
                last_at = self._clock()
                say(str(self))

        self._show = say_when_due

    @contextlib.contextmanager
    def shown(self, console: Console) -> Iterator[None]:
        """Show progress: a live line on a terminal, else a new line every half minute."""
        if not console.is_terminal:
            self.tell(lambda text: console.print(f"evaluating: {text}", highlight=False, soft_wrap=True))
            yield
            return
        with console.status("evaluating") as line:
            self.tell(lambda text: line.update(Text(f"evaluating: {text}")), 0.0)
            yield

    def __str__(self) -> str:
        elapsed = _clock_time(self._clock() - self._started)
        time_left = self.time_left
        rest = "" if time_left is None else f", about {_clock_time(time_left)} left"
        at_a_time = "" if self._limit is None else f", {self._limit}"
        progress = f"{self.ended} of {self.total} episodes, success {self._share}{at_a_time}"
        return f"{progress}, {elapsed} elapsed{rest}"

    @property
    def _share(self) -> str:
        count, failed = len(self._scores), f" ({self._failed} failed)" if self._failed else ""
        if not count:
            return f"-{failed}"
        successes, rewards = (math.fsum(values) / count for values in zip(*self._scores.values(), strict=True))
        return f"{successes:.2f}{failed}, reward {rewards:.2f}"

    def _finished_of(self, number: int) -> list[Trajectory]:
        """Return the trajectories of finished episodes of a group, without failed attempts."""
        episodes = by_episode(self._open[number])
        return [trajectory for members in episodes if self._rows(members)[0].counts for trajectory in members]

    def _rows(self, trajectories: Sequence[Trajectory]) -> list[EpisodeRow]:
        return episode_rows(trajectories, success_reward=self._plan.success_reward, role=self._plan.role)

    def _count(self, finished: Sequence[Trajectory]) -> None:
        self._scores |= {row.episode_id: (row.success, row.reward) for row in self._rows(finished)}
        self._show()


def _clock_time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Client of a model, and what brings servers of ours back after a failure."""

    client: LLMClient
    recover: Callable[[InferenceError], Awaitable[None]] | None = None


def run_eval(config: EvalConfig, *, console: Console | None = None) -> EvalResult:
    """Evaluate a model on an environment, print the metrics and write the results.

    A directory of an interrupted or killed evaluation is continued: what is finished in it is not rolled out again. It
    then holds ``config.yaml``, ``trajectories.twz`` and ``ledger.jsonl`` (for ``view`` and ``audit``),
    ``episodes.jsonl`` and ``summary.json``. On Ctrl-C finished episodes are still summarised.

    Args:
        config: The evaluation's configuration.
        console: Output; by default the terminal.

    Raises:
        ConfigError: The configuration is unusable; nothing was started.
        TurnwiseError: The evaluation failed, or no episode ended without an error.
        KeyboardInterrupt: It was interrupted; the summary counts the unfinished episodes.
    """
    console = console or Console()
    if config.search is not None:
        # A scorer that cannot be loaded is an error before a model is served.
        BranchingStrategy(config.search)
    check_hosted(config)
    errors: list[str] = []
    with output_directory(config) as folder:
        result = asyncio.run(_evaluate(config, folder, console, errors))
    has_episodes = any(summary.success.episodes for summary in result.parts.values())
    if result.ended_by is not None and not has_episodes:
        raise ConfigError(
            f"budget.{result.ended_by} is {getattr(config.budget, result.ended_by):g}, which was spent before any "
            f"episode finished: raise it; the same command with -o {folder} continues"
        )
    failed = sum(summary.failed for summary in result.parts.values())
    if not has_episodes and failed >= _HOPELESS and result.unfinished:
        raise TurnwiseError(
            f"the first {failed} episodes all ended in an error, and {result.unfinished} were not played; the last "
            f"one: {errors[-1]}; the same command with -o {folder} resumes"
        )
    if result.unfinished and not has_episodes:
        console.print(f"interrupted before any episode finished; its records are in {folder}", soft_wrap=True)
        raise KeyboardInterrupt
    if not has_episodes:
        raise TurnwiseError(f"every episode ended in an error, so there are no results; the last one: {errors[-1]}")
    print_table(console, result_table(result, f"{config.rollout.env.name}: {config.url or config.model}"))
    console.print(Text(f"{result.seconds:.1f} s; written to {folder}", style="dim"), soft_wrap=True)
    console.print(Text(f"turnwise report {folder} --open shows tasks and trajectories", style="dim"), soft_wrap=True)
    print_notes(config, folder, result, errors, console)
    if result.unfinished and result.ended_by is None:
        raise KeyboardInterrupt
    return result


def print_notes(config: EvalConfig, folder: Path, result: EvalResult, errors: Sequence[str], console: Console) -> None:
    """Print what the figures leave out, and why."""

    def say(text: str, style: str | None = None) -> None:
        console.print(text, style=style, markup=False, soft_wrap=True)

    env = config.rollout.env.name
    rewards = (value for summary in result.parts.values() for row in summary.rows for value in row.rewards.values())
    if env_class(env).score is Env.score and not any(rewards):
        say(
            f"nothing was rewarded, and {env} defines no score, so each episode counts as 0: define "
            "score(self, final) (turnwise check-env says more)",
            "yellow",
        )
    searched = [row.search for summary in result.parts.values() for row in summary.rows if row.search is not None]
    if reasons := [search.unforked for search in searched if search.unforked]:
        alone = f"{len(reasons)} of {len(searched)} searched episodes have one way only, which was chosen"
        say(f"{alone}: {reasons[-1]}", "yellow")
    if timeouts := sum(summary.stop_reasons.get(StopReason.TIMEOUT, 0) for summary in result.parts.values()):
        say(
            f"{timeouts} episodes were cut off by a time-out and count as they then stood: for a slow model, "
            f"raise rollout.episode_timeout ({config.rollout.episode_timeout} s) or lower rollout.concurrency",
            "yellow",
        )
    if failed := sum(summary.failed for summary in result.parts.values()):
        why = f", the last error: {errors[-1]}" if errors else ""
        say(
            f"{failed} episodes failed and are not counted{why}. The same command with -o {folder} plays them again",
            "red",
        )
    if result.ended_by is not None:
        say(
            f"budget.{result.ended_by} is spent: {result.unfinished} episodes were unfinished and are not counted. "
            f"The same command with a larger budget and -o {folder} finishes it"
        )
    elif result.unfinished:
        say(
            f"interrupted: {result.unfinished} episodes were unfinished and are not counted. Short episodes finish "
            "first, so these results may differ from those of the full evaluation. The same command with "
            f"-o {folder} finishes it"
        )


def check_hosted(config: EvalConfig) -> None:
    """Check what can be known of a hosted endpoint without asking it.

    Raises:
        ConfigError: The variable of its key is not set, or no model is named and the agent names none.
    """
    if config.hosted is None:
        return
    config.hosted.key()
    if config.hosted.model is None and AgentTable(config.rollout).default().asks_by_chat:
        raise ConfigError(
            f"hosted.model is missing: agent {config.rollout.agent.name!r} does not name the model to request: add "
            f"hosted.model=NAME, one that {base_url(config.url)}/models lists"
        )


async def _evaluate(config: EvalConfig, folder: Path, console: Console, errors: list[str]) -> EvalResult:
    check_manager(config.rollout, config.custom)
    renderer = TextRenderer() if config.hosted is not None else config.renderer.load(config.directory)
    for line in format_lines(renderer):
        console.print(Text(line, style="dim"), soft_wrap=True)
    renderers = load_renderers(config.rollout.frozen, config.model, config.renderer)
    loaded = await load_eval_tasks(config, config.rollout, renderer)
    for report in loaded.reports:
        console.print(Text(report.line, style="dim"), soft_wrap=True)
    task_tags(loaded.tasks, config.by)
    write_private(folder / "config.yaml", dump_config(config))
    finished = FinishedMembers(folder)
    if finished.restored:
        console.print(f"{folder}: {finished.restored} episodes are finished; the others are rolled out", soft_wrap=True)
    async with AsyncExitStack() as stack:
        stack.callback(finished.close)
        limit = AdaptiveLimit(config.rollout.concurrency) if config.concurrency == "auto" else None
        model = await _model(config, folder, stack, limit, console)
        # The ledger closes the client too, and marks its end: nothing is in flight any more. Hosted endpoints return
        # text, so there are no tokens to record.
        policies = config.rollout.frozen
        tells = config.hosted is None or any(policy.hosted is None for policy in policies.values())
        ledger = LedgerWriter(folder / "ledger.jsonl") if tells else None
        if ledger is not None:
            stack.push(ledger.leave)
        client = LedgerClient(model.client, ledger) if ledger is not None and config.hosted is None else model.client
        stack.push_async_callback(client.close)
        frozen = await open_frozen(policies, renderers, stack, start=config.model, logs=folder / "logs", ledger=ledger)

        async def recover(error: InferenceError) -> None:
            if model.recover is not None:
                await model.recover(error)
            await frozen.recover(error)

        spending = Spending(config.budget, config.prices)
        if finished.restored:
            spending.add_file(folder / TRAJECTORIES)
        progress = EvalProgress(config, eval_requests(config, loaded.tasks), restored=finished.restored, limit=limit)

        def write(trajectory: Trajectory) -> None:
            finished.write(trajectory)
            progress.wrote(trajectory)
            spending.add(trajectory)
            if trajectory.error is not None:
                errors.append(trajectory.error)

        parts = RolloutParts(
            renderer, run_part=str(finished.part), write=write, finished=finished, recover=recover,
            policies=frozen.policies, search=config.search, custom=config.custom, notify=console.print,
            slots=None if limit is None else limit.episodes,
        )  # fmt: skip
        producer = await create_manager(config.rollout, client, None, parts)
        stack.push_async_callback(producer.close)
        result = await _watched(producer, config, loaded.tasks, progress, spending, console)
        result = replace(
            result, spent=spending.figures, left_out=sum(report.dropped.total() for report in loaded.reports)
        )
        # Before anything is closed: a second interrupt does not lose it.
        result.write(folder)
        return result


def _follow(limit: AdaptiveLimit | None, client: LLMClient, console: Console, stack: AsyncExitStack) -> None:
    """Adapt a limit to the queues of servers until the stack closes, which then prints it."""

    def say(text: str) -> None:
        console.print(Text(text, style="dim"), soft_wrap=True)

    if limit is None:
        return
    stack.callback(lambda: say(f"concurrency: {limit}"))
    if isinstance(client, HTTPClient):
        following = asyncio.ensure_future(follow_queues(limit, lambda: client.urls, say))
        stack.callback(following.cancel)


async def _watched(
    producer: Rollouts,
    config: EvalConfig,
    tasks: list[Task],
    progress: EvalProgress,
    spending: Spending,
    console: Console,
) -> EvalResult:
    """Evaluate with progress; on an interrupt or a spent budget return the metrics of finished episodes."""
    running = asyncio.ensure_future(evaluate(producer, config, tasks=tasks, on_group=progress.arrived))
    progress.give_up = running.cancel
    with progress.shown(console):
        try:
            with spending.watching(running.cancel):
                result = await running
        except asyncio.CancelledError:
            # Ctrl-C cancels this task. What is closed from here on is awaited as usual.
            if (task := asyncio.current_task()) is not None:
                task.uncancel()
            result = progress.partial()
            result = replace(result, ended_by=spending.over if result.unfinished else None)
    return replace(result, max_tokens_per_turn=config.rollout.max_tokens_per_turn)


async def _model(
    config: EvalConfig, folder: Path, stack: AsyncExitStack, limit: AdaptiveLimit | None, console: Console
) -> ServedModel:
    if config.hosted is not None:
        endpoint = Endpoint(base_url(config.url), config.hosted, config.hosted.key(), limit)
        model = ServedModel(HostedClient(endpoint, model=config.hosted.model))
    else:
        model = await open_model(config.inference, config.directory, config.urls, folder / "logs", stack)
    _follow(limit, model.client, console, stack)
    return model


async def open_model(
    settings: InferenceConfig, directory: Path, urls: Sequence[str], logs: Path, stack: AsyncExitStack
) -> ServedModel:
    """Return a client of running servers, or serve a model until the stack closes.

    Args:
        settings: How the model is served.
        directory: The model; with ``urls`` only its processor is read.
        urls: Running servers; none serves it here.
        logs: Folder for logs of servers.
        stack: Closes what was started.

    Raises:
        InferenceError: A server did not start.
    """
    if urls:
        return ServedModel(client_of(urls, settings, directory))
    fleet = ReplicaSet(settings, directory, logs=logs)
    stack.push_async_callback(fleet.close)
    await fleet.launch()
    return ServedModel(fleet.client, fleet.recover)
