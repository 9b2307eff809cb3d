"""What the checks of one environment share."""

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

from turnwise.envs.core import Env, StepResult, as_messages, invoke, schemas
from turnwise.envs.registration import EnvSpec, make
from turnwise.errors import EnvError, TurnwiseError
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
        self._thread = threading.Thread(target=self._run, name="turnwise-doctor", daemon=True)
        self._thread.start()

    async def run(self, work: Coroutine[Any, Any, T], timeout: float, what: str) -> T:
        """Run a coroutine on the thread's loop.

        Args:
            work: The coroutine.
            timeout: Seconds after which it is given up.
            what: Its name, for the error.

        Raises:
            Stalled: It did not return in time.
        """
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
        """Cancel what still runs, and end the thread; one that plain code holds is left behind."""
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
    """Something that is wrong, or that somebody should look at.

    Attributes:
        check: Which check found it.
        message: What is wrong.
        remedy: What to do about it.
        where: In which episode: task, seed, policy; empty where it is no matter of an episode.
        severity: ``error`` breaks the contract; ``warning`` may be meant so.
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
    """What :func:`~turnwise.envs.checker.core.check_env` found.

    Attributes:
        env: Name of the environment.
        checks: The checks that ran to their end, in order.
        skipped: The others, and why.
        findings: What they found.
        figures: Measured numbers, by name: lengths, seconds, megabytes, scores of the policies.
        notes: What a reader should know to read the figures.
    """

    env: str
    checks: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def errors(self) -> list[Finding]:
        """The findings that break the contract."""
        return [each for each in self.findings if each.severity == "error"]

    @property
    def warnings(self) -> list[Finding]:
        """The findings that may be meant so."""
        return [each for each in self.findings if each.severity == "warning"]

    @property
    def ok(self) -> bool:
        """Whether nothing breaks the contract."""
        return not self.errors

    @property
    def summary(self) -> str:
        """One line: how much was checked and found."""
        words = f"{len(self.checks)} checks, {len(self.errors)} errors, {len(self.warnings)} warnings"
        return f"{self.env}: {words}{f', {len(self.skipped)} checks not run' if self.skipped else ''}"

    def raise_for_findings(self) -> None:
        """Raise EnvError with all findings, if there is an error among them."""
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
_LAST_S: Final = 2.0
ESTIMATE: Final = (
    "tokens are estimated as UTF-8 bytes / 4: name a model to count them, and to see whether its chat template shows "
    "the tools"
)


def estimated_tokens(text: str) -> int:
    """Return about how many tokens a text has: a quarter of its bytes, rounded up."""
    return -(-len(text.encode("utf-8", "replace")) // 4)


@dataclass(slots=True)
class Examined:
    """What is examined, and how.

    Attributes:
        source: What makes the environment.
        tasks: What it is reset with; None where it needs none.
        seeds: At least one.
        timeout: Seconds for any one call.
        context_length: Tokens of prompt and completion that the model takes, or None.
        count_tokens: Counts the tokens of a text.
        prompt: Makes ids of messages and tools, by a model's chat template.
        rows: Tasks that are looked at one by one, where the environment can say what is wrong with one.
        toolbox: Tools that a spec names, loaded where the environment runs; set by itself.
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
        """Close what the tools hold, where they were loaded, and that place with it."""
        if self.toolbox is not None:
            with suppress(TurnwiseError):
                await worker.run(self.toolbox.close(), self.timeout, "closing its tools")
        await worker.close()


@dataclass(slots=True)
class Played:
    """An environment whose episode runs, and what was seen of it.

    Attributes:
        env: The environment.
        where: Task and seed, in words.
        task: What it was reset with.
        messages: The conversation so far, without the assistant's own messages.
        info: What else reset returned.
        total: Sum of the rewards so far.
        seconds: What each step took.
    """

    env: Env
    where: str
    task: Task | None
    messages: list[Message]
    info: dict[str, Any]
    total: float = 0.0
    over: bool = False
    seconds: list[float] = field(default_factory=list)


class CheckContext:
    """One examination.

    Attributes:
        of: What is examined.
        report: What was found so far.
        first: The environment that was made first, or was given.
    """

    def __init__(self, of: Examined, first: Env, worker: Worker) -> None:
        self.of = of
        self.first = first
        self.report = CheckReport(type(first).__qualname__)
        self._worker = worker

    @property
    def single(self) -> bool:
        """Whether there is one object only, since no second one can be made."""
        return isinstance(self.of.source, Env)

    @property
    def episodes(self) -> list[tuple[Task | None, int]]:
        """Every task with every seed, the first task with all seeds first."""
        return [(task, seed) for task in self.of.tasks for seed in self.of.seeds]

    def find(
        self,
        check: str,
        message: str,
        remedy: str = "",
        *,
        where: str = "",
        severity: Literal["error", "warning"] = "error",
    ) -> None:
        """Note a finding; the same one in another episode is not noted again."""
        known = {(each.check, each.message) for each in self.report.findings}
        if (check, message) not in known:
            self.report.findings.append(Finding(check, message, remedy, where, severity))

    async def make(self) -> Env:
        """Make the environment anew; the given one where no second one can be made."""
        return await self._worker.run(made(self.of.source, self.of.toolbox), self.of.timeout, "making the environment")

    async def call(self, env: Env, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of an environment within the time limit.

        Raises:
            EnvError: It raised or broke its contract.
            Stalled: It did not return in time.
        """
        return await self._worker.run(invoke(env, method, *args, **kwargs), self.of.timeout, method)

    async def run(self, work: Any, what: str) -> Any:
        """Run a coroutine where the environment runs, within the time limit. Raises Stalled."""
        return await self._worker.run(work, self.of.timeout, what)

    @asynccontextmanager
    async def episode(self, task: Task | None, seed: int) -> AsyncIterator[Played]:
        """Make an environment, reset it, and close it in the end."""
        env = await self.make()
        try:
            yield await self.begin(env, task, seed)
        except StallTimeout:
            # What holds the loop holds close as well; that it hung before is what is to be told.
            with contextlib.suppress(TurnwiseError):
                await self._worker.run(invoke(env, "close"), min(self.of.timeout, _LAST_S), "close")
            raise
        except BaseException:  # also a cancellation: the environment is closed
            await self._close(env)
            raise
        await self._close(env)

    async def _close(self, env: Env) -> None:
        if not self.single:
            await self.call(env, "close")

    async def begin(self, env: Env, task: Task | None, seed: int) -> Played:
        """Reset an environment."""
        messages, info = await self.call(env, "reset", task, seed=seed)
        return Played(env, place(task, seed), task, list(messages), info)

    async def step(self, played: Played, action: Message) -> StepResult:
        """Hand a message to the environment, and note what came of it."""
        started = time.perf_counter()
        result: StepResult = await self.call(played.env, "step", action)
        played.seconds.append(time.perf_counter() - started)
        played.messages += as_messages(result.observation)
        played.total += result.reward
        played.over = result.terminated or result.truncated
        if result.truncated and not result.terminated:
            played.total += sum((await self.call(played.env, "score", None)).values())
        return result

    async def finish(self, played: Played, last: Message | None) -> float:
        """Return what the episode was worth; it is scored where no step did."""
        if not played.over:
            played.over = True
            played.total += sum((await self.call(played.env, "score", last)).values())
        return played.total

    def json_safe(self, what: str, value: Any, where: str) -> None:
        """Note a finding where a value is not JSON."""
        try:
            orjson.dumps(value)
        except (TypeError, orjson.JSONEncodeError) as error:
            remedy = "use texts, numbers, lists and dicts with text keys; no objects, no half surrogate pairs"
            self.find("json", f"{what} is not JSON: {error}", remedy, where=where)

    def check_messages(self, what: str, messages: Sequence[Message], where: str) -> None:
        """Note a finding for each message that is not JSON."""
        for index, message in enumerate(messages):
            plain = {key: value for key, value in message.items() if key != "tool_calls"}
            self.json_safe(f"{what}: message {index} ({message['role']})", plain, where)

    def check_range(self, value: float, where: str) -> None:
        """Note a finding where a score lies outside what the environment declares."""
        bounds = self.first.score_range
        if bounds is not None and not bounds[0] - 1e-9 <= value <= bounds[1] + 1e-9:
            self.find(
                "score",
                f"a score of {value:g} lies outside score_range {bounds}",
                "mend score() or declare the range that is possible",
                where=where,
            )


async def made(source: EnvSource, toolbox: Toolbox | None = None) -> Env:
    """Return an environment of a source.

    Raises:
        RegistryError: There is no such environment, or it does not take its configuration.
        ConfigError: Something that the configuration names cannot be loaded.
        EnvError: Its constructor raised.
    """
    if isinstance(source, Env):
        return source
    try:
        if isinstance(source, str):
            return make(source)
        if isinstance(source, EnvSpec):
            return source.make(() if toolbox is None else await toolbox.tools())
        found: Any = source()
    except TurnwiseError:
        raise
    except (Exception, SystemExit) as error:  # an environment's code: what it raises is named as its own
        raise EnvError(f"the constructor raised {type(error).__name__}: {error}") from error
    if not isinstance(found, Env):
        raise EnvError(f"{brief(source)} made {brief(found)}: it must make an environment (a turnwise.Env)")
    return found


def place(task: Task | None, seed: int) -> str:
    """Return in words which episode it is."""
    return f"seed {seed}" if task is None else f"task {task.id!r}, seed {seed}"


def some_calls(env: Env) -> list[ToolCall]:
    """Return calls of every kind: of no tool, of each tool with unusable, wrong and made-up arguments."""
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
    """Return one call of each tool, with made-up arguments that its schema allows."""
    made = {schema.name: example_arguments(schema) for schema in schemas(env)}
    return [ToolCall(f"call_{name}", name, arguments) for name, arguments in made.items() if arguments is not None]


def brief(value: Any) -> str:
    """Return a value as a finding quotes it."""
    text = repr(value)
    return text if len(text) <= 160 else f"{text[:120]}...{text[-37:]}"
