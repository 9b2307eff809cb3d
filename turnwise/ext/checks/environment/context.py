"""Shared state of the environment checks: report, worker thread, episodes under time limits."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal, TypeAlias, TypeVar

import orjson

from turnwise.envs.core import Env, StepResult, as_messages, close_env, reset_env, schemas, score_env, step_env
from turnwise.envs.registration import EnvSpec, make
from turnwise.errors import EnvError, TurnwiseError, shown, user_code
from turnwise.tasks.core import Task
from turnwise.tools.sample_arguments import example_arguments
from turnwise.tools.selection import Toolbox
from turnwise.types import Message, ToolCall, ToolSchema

T = TypeVar("T")
_GRACE_S: Final = 1.0


class StallTimeout(TurnwiseError):
    """An operation did not return in time."""


class Worker:
    """A daemon thread that runs an event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="turnwise-check-env", daemon=True)
        self._thread.start()

    async def run(self, work: Coroutine[Any, Any, T], timeout: float, what: str) -> T:
        """Run a coroutine on the thread's loop."""
        running = asyncio.run_coroutine_threadsafe(work, self._loop)
        waiting = asyncio.wrap_future(running)
        try:
            done, _ = await asyncio.wait([waiting], timeout=timeout)
        except asyncio.CancelledError:
            running.cancel()
            raise
        if not done:
            running.cancel()
            waiting.cancel()
            raise StallTimeout(f"{what} took longer than {timeout:g} s")
        return waiting.result()

    async def close(self) -> None:
        """Cancel the rest and end the thread; one blocked by plain code is abandoned."""
        self._loop.call_soon_threadsafe(lambda: self._loop.create_task(self._finish()))
        ending = asyncio.get_running_loop().run_in_executor(None, self._thread.join, 2 * _GRACE_S)
        await asyncio.shield(ending)

    async def _finish(self) -> None:
        rest = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in rest:
            task.cancel()
        if rest:
            await asyncio.wait(rest, timeout=_GRACE_S)
        await self._loop.shutdown_asyncgens()
        self._loop.stop()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()


@dataclass(frozen=True, slots=True)
class Finding:
    """A violation or a suspicion.

    Attributes:
        check: Name of the check.
        message: What is wrong.
        remedy: How to fix it.
        where: Task, seed and policy of the episode, or empty.
        severity: ``error`` breaks the contract; ``warning`` may be intended.
    """

    check: str
    message: str
    remedy: str = ""
    where: str = ""
    severity: Literal["error", "warning"] = "error"

    def __str__(self) -> str:
        where = f" ({self.where})" if self.where else ""
        return f"{self.check}: {self.message}{where}{f': {self.remedy}' if self.remedy else ''}"


@dataclass(slots=True)
class CheckReport:
    """Result of :func:`~turnwise.ext.checks.environment.core.check_env`.

    Attributes:
        env: Name of the environment.
        checks: Completed checks, in order.
        skipped: The others, and why.
        findings: All findings.
        figures: Measurements by name: lengths, seconds, megabytes, policy scores.
        notes: Remarks on the figures.
    """

    env: str
    checks: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def errors(self) -> list[Finding]:
        """Findings of severity ``error``."""
        return [finding for finding in self.findings if finding.severity == "error"]

    @property
    def warnings(self) -> list[Finding]:
        """Findings of severity ``warning``."""
        return [finding for finding in self.findings if finding.severity == "warning"]

    @property
    def ok(self) -> bool:
        """Whether there are no errors."""
        return not self.errors

    @property
    def summary(self) -> str:
        """One line: numbers of checks and findings."""
        words = f"{len(self.checks)} checks, {len(self.errors)} errors, {len(self.warnings)} warnings"
        return f"{self.env}: {words}{f', {len(self.skipped)} checks not run' if self.skipped else ''}"

    def raise_for_findings(self) -> None:
        """Raise EnvError with all findings, if there are errors."""
        if not self.ok:
            raise EnvError(str(self))

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values, with ``ok``."""
        return {"ok": self.ok, **asdict(self)}

    def __str__(self) -> str:
        lines = [f"  {finding.severity} {finding}" for finding in (*self.errors, *self.warnings)]
        return "\n".join([self.summary, *lines])


EnvSource: TypeAlias = "str | EnvSpec | Env | Callable[[], Env]"
TokenCounter: TypeAlias = Callable[[str], int]
PromptIds: TypeAlias = Callable[[Sequence[Message], Sequence[ToolSchema]], Sequence[int]]
_CLOSE_S: Final = 2.0
ESTIMATE: Final = (
    "tokens are estimated as UTF-8 bytes / 4: name a model to count them, and to see whether its chat template shows "
    "the tools"
)


def estimated_tokens(text: str) -> int:
    """Estimate the tokens of a text: a quarter of its bytes, rounded up."""
    return -(-len(text.encode("utf-8", "replace")) // 4)


@dataclass(slots=True)
class Subject:
    """The environment that is checked, and the settings.

    Attributes:
        tasks: Tasks for resets; None where it needs none.
        seeds: At least one.
        context_length: Tokens of prompt and completion, or None.
        count_tokens: Counts the tokens of a text.
        prompt: Renders messages and tools to ids.
        rows: Tasks for ``check_task``.
        toolbox: Tools of a spec, loaded on the worker.
    """

    source: EnvSource
    tasks: tuple[Task | None, ...]
    seeds: tuple[int, ...]
    timeout: float
    context_length: int | None = None
    count_tokens: TokenCounter = estimated_tokens
    prompt: PromptIds | None = None
    rows: tuple[Task, ...] = ()
    toolbox: Toolbox | None = field(init=False)

    def __post_init__(self) -> None:
        self.toolbox = self.source.toolbox() if isinstance(self.source, EnvSpec) else None

    async def close(self, worker: Worker) -> None:
        """Close the loaded tools and the worker."""
        if self.toolbox is not None:
            with suppress(TurnwiseError):
                await worker.run(self.toolbox.close(), self.timeout, "closing its tools")
        await worker.close()


@dataclass(slots=True)
class CheckEpisode:
    """A running episode and its observations."""

    env: Env
    where: str
    task: Task | None
    messages: list[Message]
    info: dict[str, Any]
    total: float = 0.0
    is_over: bool = False
    seconds: list[float] = field(default_factory=list)


class CheckContext:
    """One run of the checker over an environment."""

    def __init__(self, subject: Subject, first: Env, worker: Worker) -> None:
        self.subject = subject
        self.first = first
        self.report = CheckReport(type(first).__qualname__)
        self._worker = worker

    @property
    def single(self) -> bool:
        """Whether no second object can be made."""
        return isinstance(self.subject.source, Env)

    @property
    def episodes(self) -> list[tuple[Task | None, int]]:
        """Every task with every seed, the first task with all seeds first."""
        return [(task, seed) for task in self.subject.tasks for seed in self.subject.seeds]

    def add_finding(
        self,
        check: str,
        message: str,
        remedy: str = "",
        *,
        where: str = "",
        severity: Literal["error", "warning"] = "error",
    ) -> None:
        """Add a finding, once for all episodes."""
        reported = {(finding.check, finding.message) for finding in self.report.findings}
        if (check, message) not in reported:
            self.report.findings.append(Finding(check, message, remedy, where, severity))

    async def make(self) -> Env:
        """Make a new environment; the same object if no second can be made."""
        return await self._worker.run(
            make_env(self.subject.source, self.subject.toolbox), self.subject.timeout, "making the environment"
        )

    async def run(self, work: Coroutine[Any, Any, T], what: str) -> T:
        """Run a coroutine on the environment's loop within the time limit.

        Raises:
            EnvError: A method raised or broke its contract.
            StallTimeout: It did not return in time.
        """
        return await self._worker.run(work, self.subject.timeout, what)

    @asynccontextmanager
    async def new_episode(self, task: Task | None, seed: int) -> AsyncIterator[CheckEpisode]:
        """Make and reset an environment; close it on exit."""
        env = await self.make()
        try:
            yield await self.reset(env, task, seed)
        except StallTimeout:
            # A blocked loop blocks close as well; the first stall is the one to report.
            with contextlib.suppress(TurnwiseError):
                await self._worker.run(close_env(env), min(self.subject.timeout, _CLOSE_S), "close")
            raise
        except BaseException:  # also a cancellation: the environment is closed
            await self._close(env)
            raise
        await self._close(env)

    async def _close(self, env: Env) -> None:
        if not self.single:
            await self.run(close_env(env), "close")

    async def reset(self, env: Env, task: Task | None, seed: int) -> CheckEpisode:
        """Reset an environment."""
        messages, info = await self.run(reset_env(env, task, seed=seed), "reset")
        return CheckEpisode(env, episode_name(task, seed), task, list(messages), info)

    async def step(self, episode: CheckEpisode, action: Message) -> StepResult:
        """Pass a message to the environment and record the result."""
        started = time.perf_counter()
        result = await self.run(step_env(episode.env, action), "step")
        episode.seconds.append(time.perf_counter() - started)
        episode.messages += as_messages(result.observation)
        episode.total += result.reward
        episode.is_over = result.terminated or result.truncated
        if result.truncated and not result.terminated:
            episode.total += sum((await self.run(score_env(episode.env, None), "score")).values())
        return result

    async def finish(self, episode: CheckEpisode, final: Message | None) -> float:
        """Return the episode's total, scoring it unless a step did."""
        if not episode.is_over:
            episode.is_over = True
            episode.total += sum((await self.run(score_env(episode.env, final), "score")).values())
        return episode.total

    def json_safe(self, what: str, value: Any, where: str) -> None:
        """Add a finding where a value is not JSON."""
        try:
            orjson.dumps(value)
        except (TypeError, orjson.JSONEncodeError) as error:
            remedy = "use strings, numbers, lists and dicts with string keys; no objects, no lone surrogates"
            self.add_finding("json", f"{what} is not JSON: {error}", remedy, where=where)

    def check_messages(self, what: str, messages: Sequence[Message], where: str) -> None:
        """Add a finding for each message that is not JSON."""
        for index, message in enumerate(messages):
            plain = {key: value for key, value in message.items() if key != "tool_calls"}
            self.json_safe(f"{what}: message {index} ({message['role']})", plain, where)

    def check_range(self, value: float, where: str) -> None:
        """Add a finding where a score lies outside the declared range."""
        bounds = self.first.score_range
        if bounds is not None and not bounds[0] - 1e-9 <= value <= bounds[1] + 1e-9:
            self.add_finding(
                "score",
                f"a score of {value:g} lies outside score_range {bounds}",
                "fix score() or declare the actual range",
                where=where,
            )


async def make_env(source: EnvSource, toolbox: Toolbox | None = None) -> Env:
    """Make an environment from its source."""
    if isinstance(source, Env):
        return source
    with user_code(EnvError, "the constructor raised"):
        if isinstance(source, str):
            return make(source)
        if isinstance(source, EnvSpec):
            return source.make(() if toolbox is None else await toolbox.tools())
        env: Any = source()
    if not isinstance(env, Env):
        raise EnvError(f"{brief(source)} made {brief(env)}: it must make an environment (a turnwise.Env)")
    return env


def episode_name(task: Task | None, seed: int) -> str:
    """Describe an episode by task and seed."""
    return f"seed {seed}" if task is None else f"task {task.id!r}, seed {seed}"


def some_calls(env: Env) -> list[ToolCall]:
    """Return calls of an unknown tool, and of each tool with unparsable, invalid and random arguments."""
    calls = [
        ToolCall("call_unknown", "no_such_tool", {"a": 1}),
        ToolCall("call_nameless", "", {}, raw="{}", error="the call has no name"),
    ]
    for number, schema in enumerate(schemas(env)):
        calls.append(ToolCall(f"call_{number}_json", schema.name, {}, raw="{", error="the arguments are not JSON"))
        calls.append(ToolCall(f"call_{number}_extra", schema.name, {"no such parameter": [None]}))
        arguments = example_arguments(schema)
        if arguments is not None:
            calls.append(ToolCall(f"call_{number}", schema.name, arguments))
            calls.append(ToolCall(f"call_{number}_again", schema.name, arguments))
    return calls


def usable_calls(env: Env) -> list[ToolCall]:
    """Return one call of each tool, with random arguments that its schema allows."""
    arguments_by_name = {schema.name: example_arguments(schema) for schema in schemas(env)}
    return [
        ToolCall(f"call_{name}", name, arguments)
        for name, arguments in arguments_by_name.items()
        if arguments is not None
    ]


def brief(value: Any, limit: int = 160) -> str:
    """Shorten a value for a finding."""
    return shown(value, limit)
