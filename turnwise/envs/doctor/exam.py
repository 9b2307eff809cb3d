"""What the checks of one environment share.

Owns: :class:`Exam`: making environments, calling them within a time limit, and noting what is found. Refuses: knowing
what is to be checked.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

import orjson

from turnwise.envs.core import Env, StepResult, as_messages, invoke, schemas
from turnwise.envs.doctor.report import CheckReport, Finding
from turnwise.envs.doctor.worker import Stalled, Worker
from turnwise.envs.registration import EnvSpec, make
from turnwise.errors import EnvError, TurnwiseError
from turnwise.tasks import Task
from turnwise.tools.example import example_arguments
from turnwise.tools.loading import Toolbox
from turnwise.types import Message, ToolCall, ToolSchema

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


class Exam:
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
        except Stalled:
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
