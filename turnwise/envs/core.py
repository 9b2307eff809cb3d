"""The contract of environments, Env, and the functions through which everything else calls one."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Generator, Mapping, Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any, ClassVar, Literal, ParamSpec, Self, TypeAlias, TypeVar, cast

from turnwise.envs.forking import (
    Memo,
    Script,
    check_answer,
    comparable_answer,
    copy_env,
    describe_action,
    equip,
    why_not_forkable,
)
from turnwise.envs.results import Observation as Observation
from turnwise.envs.results import ResetResult as ResetResult
from turnwise.envs.results import Score as Score
from turnwise.envs.results import ScoreParts as ScoreParts
from turnwise.envs.results import StepResult as StepResult
from turnwise.envs.results import as_messages as as_messages
from turnwise.envs.results import check_reset, check_score, check_step
from turnwise.envs.sandbox_owner import SandboxOwner
from turnwise.errors import INTERRUPTS, ConfigError, EnvError, ToolSchemaError, TurnwiseError, raised_text
from turnwise.tasks.core import Task
from turnwise.tools.core import BaseTool, FunctionTool, Tool, as_tool
from turnwise.tools.execute import ToolThreads, default_threads, guarded
from turnwise.tools.response import CountTokens, ToolResponse
from turnwise.tools.secrets import Secret, Secrets
from turnwise.types import Message, SamplingParams, ToolCall, ToolSchema

if TYPE_CHECKING:
    from turnwise.recorder.session import Session


def tool_methods(cls: type) -> dict[str, FunctionTool]:
    """Return the tools among the methods of a class and its bases, by name.

    Raises:
        ToolSchemaError: A method replaces a tool without being one, or two tools have one name.
    """
    by_attribute: dict[str, FunctionTool] = {}
    for base in reversed(cls.__mro__):
        for attribute, value in vars(base).items():
            function = value.__func__ if isinstance(value, staticmethod) else value
            if isinstance(function, FunctionTool):
                by_attribute[attribute] = function
            elif attribute in by_attribute and value is None:
                del by_attribute[attribute]
            elif attribute in by_attribute and attribute in vars(cls):
                raise ToolSchemaError(
                    f"{cls.__qualname__}.{attribute} replaces a tool of {base.__mro__[1].__qualname__} without being "
                    f"one: decorate it with @function_tool, or write {attribute} = None to take the tool away"
                )
    by_name: dict[str, FunctionTool] = {}
    for attribute, tool in by_attribute.items():
        if tool.name in by_name:
            raise ToolSchemaError(f"{cls.__qualname__}.{attribute}: another of its tools is called {tool.name!r} too")
        by_name[tool.name] = tool
    return by_name


T = TypeVar("T")
P = ParamSpec("P")
MaybeAwaitable: TypeAlias = T | Awaitable[T]
Solution: TypeAlias = Generator[Any, list[Message], None]
"""Moves of a reference solution; each ``yield`` returns what the environment answered to it."""
AsyncSolution: TypeAlias = AsyncGenerator[Any, list[Message]]


class Env(SandboxOwner):
    """An environment at the level of messages, with Gymnasium's names and meanings.

    Subclass it and write ``reset`` and ``step`` (or use ToolEnv and SingleTurnEnv, which write ``step``), each as
    ``def`` or ``async def``. One object is one episode at a time. Methods decorated with ``@function_tool`` are tools.

    Attributes:
        tools: Tools besides the decorated methods: functions, BaseTools, or names of registered tools.
        blocking: Whether plain (not async) methods may block: they then run in a thread.
        score_range: The least and the largest possible score, where known; for ``check_env``.
        floor: Most that a trivial policy may score, where above the least score.
        default_tasks: Default source of tasks for ``load_tasks``, such as ``pkg.module:function``.
        tasks_of: Returns the default source of a configuration, where it depends on one.
        secrets: Redacted from errors: names of environment variables, or values as ``pydantic.SecretStr``.
        executor: Source of threads, set by the runner.
        count_tokens: Counts the model's tokens of a text, set by the runner; None without a model.
        main_session: Returns the main session of the episode, None before its first request; set by the episode.
        open_judge: Opens a session of a frozen policy for one judgement; set by the episode, None without policies.
        lost_thread: Whether an abandoned tool or method still runs in its thread: the environment must not be reused.
        pending_score: A scoring in progress; kept here, since its waiter may be cancelled, and ``score`` runs once.
        conversation: The episode's messages that passed through :func:`step_env` and :func:`call_env`, for reward
            functions.
        forks: How :meth:`fork` works: ``copy`` by a deep copy of the attributes, ``replay`` by taking the episode's
            actions again in a new environment; None: it does not.
        fork_shares: Names of attributes that forks share: what no episode changes (a corpus, a table), or may not copy.
        varies: Regular expressions, by a name, of parts of messages that differ between episodes with equal seeds and
            actions (the clock, a temporary path); a replay compares the rest, and counts where they differed.
    """

    tools: Sequence[Any] = ()
    blocking: ClassVar[bool] = False
    score_range: ClassVar[tuple[float, float] | None] = None
    floor: ClassVar[float | None] = None
    default_tasks: ClassVar[str | None] = None
    tasks_of: ClassVar[Callable[[Mapping[str, Any]], str] | None] = None
    secrets: Sequence[Secret] = ()
    executor: Executor | None = None
    count_tokens: CountTokens | None = None
    main_session: Callable[[], Session | None] | None = None
    open_judge: Callable[[str, SamplingParams], Session] | None = None
    lost_thread: bool = False
    pending_score: asyncio.Future[ScoreParts] | None = None
    conversation: Sequence[Message] = ()
    forks: ClassVar[Literal["copy", "replay"] | None] = "copy"
    fork_shares: ClassVar[Collection[str]] = ()
    varies: ClassVar[Mapping[str, str]] = {}
    uncopied: ClassVar[frozenset[str]] = frozenset({"pending_score", "conversation", "_in_use", "_script"})
    tool_methods: ClassVar[dict[str, FunctionTool]] = {}

    _maker: Callable[[], Env] | None = None
    # Set by the functions below: whether an episode runs, whether a step ended it, and, where forks are replays, what
    # was done in it.
    _running: bool = False
    _ended_by_step: bool = False
    _script: Script | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.tool_methods = tool_methods(cls)

    @property
    def supports_fork(self) -> bool:
        """Whether :meth:`fork` works for this environment, as far as its class says."""
        return self.forks is not None

    def reset(self, task: Task | None = None, *, seed: int | None = None) -> MaybeAwaitable[ResetResult]:
        """Start an episode.

        Args:
            task: The dataset row, or None where the environment needs none.
            seed: Seed of all randomness: equal seeds (and tasks) give equal episodes.

        Returns:
            The head of the conversation (with the system prompt, if any, first), and an info dict.
        """
        raise NotImplementedError

    def step(self, action: Message) -> MaybeAwaitable[StepResult]:
        """Take an assistant message.

        Args:
            action: The message; its calls are in ``tool_calls``.
        """
        raise NotImplementedError

    def call(self, call: ToolCall) -> MaybeAwaitable[ToolResponse]:  # noqa: ARG002
        """Execute one tool call outside of a step; a ToolEnv does.

        Raises:
            EnvError: The environment takes whole messages only.
        """
        raise EnvError(f"{type(self).__qualname__} takes whole messages only: make it a ToolEnv to answer single calls")

    def score(self, final: Message | None) -> MaybeAwaitable[Score]:  # noqa: ARG002
        """Return the reward of the episode; called exactly once.

        Args:
            final: The message that ended it, or None (limits, black boxes).

        Returns:
            A number, or named parts whose sum counts.
        """
        return 0.0

    def solve(self) -> Solution | AsyncSolution | None:
        """Play the running episode with knowledge of its hidden state; optional, for ``check_env`` and demonstrations.

        A generator, plain or async, of moves: ``tool_call("name", argument=value)`` (of ``turnwise.envs``), a list of
        such calls, a text (a message without calls), or a whole message. Each ``yield`` returns the messages that
        answer it. It must reach the top of ``score_range``.
        """
        return None

    def check_task(self, task: Task) -> MaybeAwaitable[Sequence[str]]:  # noqa: ARG002
        """Return faults of a task, one sentence each; called by ``check_env`` for every task. A
        :class:`~turnwise.envs.results.Remark` is no fault: the task can be used, and it is shown as a warning.

        For tasks from external rows, which may be broken: a reference below the top score, or a task that is already
        solved. Called without ``reset``, on a separate environment.
        """
        return ()

    async def fork(self) -> Env:
        """Return an independent environment in the same state of its episode; call it through :func:`fork_env`.

        By default its attributes are copied deeply, except ``fork_shares``, the task, tools and what the runner set;
        references to the environment and to its sandboxes become those of the fork. A class that overrides it calls
        ``super().fork()`` and mends the result, or makes another one.

        Raises:
            EnvError: An attribute cannot be copied, a sandbox or a tool's instance cannot be forked, or the replay
                was answered otherwise.
        """
        if self.forks == "replay":
            return await replay(self)
        fork: Self = await copy_env(self, self.fork_shares, self._fork_state)
        return fork

    async def _fork_state(self, fork: Any, memo: Memo) -> None:
        """Give a fork what is no attribute to be copied. For base classes.

        Args:
            fork: The fork, with its attributes.
            memo: Copies by the id of the original, for ``copy.deepcopy``.
        """

    def close(self) -> MaybeAwaitable[None]:
        """Release resources. Must be idempotent."""

    def toolset(self) -> dict[str, Tool]:
        """Return the tools by name: the environment's methods, then ``tools``.

        Raises:
            ToolSchemaError: An entry of ``tools`` is not a tool, or two tools have one name.
        """
        tools: dict[str, Tool] = dict(self.tool_methods)
        for item in self.tools:
            tool = as_tool(item)
            if tools.get(tool.name, tool) is not tool:
                raise ToolSchemaError(
                    f"{type(self).__qualname__} has two tools called {tool.name!r}: rename one with "
                    '@function_tool("other_name")'
                )
            tools[tool.name] = tool
        return tools

    def add_tools(self, tools: Sequence[Tool]) -> None:
        """Add tools of the configuration.

        Raises:
            ConfigError: This environment answers no tool calls, or names collide.
        """
        raise ConfigError(
            f"{type(self).__qualname__} answers no tool calls, so it cannot offer "
            f"{', '.join(repr(tool.name) for tool in tools)}: make it a ToolEnv, or remove the tools"
        )

    async def extra_rewards(self) -> dict[str, float]:
        """Return rewards besides the score. For base classes; an environment writes ``score``."""
        return {}

    async def release(self) -> None:
        """Release what a base class holds, after ``close``, whatever that did. An environment writes ``close``."""


def schemas(env: Env) -> list[ToolSchema]:
    """Return the tool schemas of an environment, in order."""
    return [tool.schema for tool in env.toolset().values()]


async def reset_env(
    env: Env, task: Task | None = None, *, seed: int | None = None, executor: Executor | None = None
) -> tuple[list[Message], dict[str, Any]]:
    """Start an episode of an environment.

    Args:
        env: The environment.
        task: The dataset row, or None where the environment needs none.
        seed: Seed of the episode's randomness.
        executor: Runs plain methods of a ``blocking`` environment, and its tools.

    Returns:
        The head of the conversation, and the info.

    Raises:
        EnvError: The method raised, or broke its contract.
        TurnwiseError: The method raised it.
    """
    _use_executor(env, executor)
    drop_scoring(env)
    env._running = env._ended_by_step = False
    await env.close_sandboxes()
    messages, info = check_reset(await run_method(env, env.reset, task, seed=seed), env)
    env.conversation, env._running = list(messages), True
    if env.forks == "replay":
        env._script = Script(task, seed, list(messages))
    return messages, info


async def step_env(env: Env, action: Message, *, executor: Executor | None = None) -> StepResult:
    """Pass an assistant message to an environment; the observation of the result is a list of messages.

    Raises:
        EnvError: The method raised, or broke its contract; or the episode is over.
        TurnwiseError: The method raised it.
    """
    _use_executor(env, executor)
    if env._ended_by_step:
        raise EnvError(f"{type(env).__qualname__}: no episode runs: call reset() first")
    conversation = _conversation(env)
    conversation.append(action)
    result = check_step(await run_method(env, env.step, action), env)
    conversation += as_messages(result.observation)
    env._ended_by_step = result.terminated or result.truncated
    env._running = env._running and not env._ended_by_step
    if env._script is not None:
        env._script.steps.append((action, comparable_answer(result)))
    return result


async def call_env(env: Env, call: ToolCall, *, executor: Executor | None = None) -> ToolResponse:
    """Execute one tool call of an environment, outside of a step.

    Raises:
        EnvError: The environment takes no single calls, or the method raised or broke its contract.
        TurnwiseError: The method raised it.
    """
    _use_executor(env, executor)
    conversation = _conversation(env)
    response = await run_method(env, env.call, call)
    conversation += [{"role": "assistant", "content": "", "tool_calls": [call]}, response.message(call)]
    if env._script is not None:
        env._script.steps.append((call, comparable_answer(response)))
    return response


async def score_env(env: Env, final: Message | None, *, executor: Executor | None = None) -> ScoreParts:
    """Score an episode, or await a scoring that a time limit interrupted in a step.

    Returns:
        Named parts, ``{"score": x}`` for a number, with the rewards of BaseTools.

    Raises:
        EnvError: The method raised, or broke its contract.
        TurnwiseError: The method raised it.
    """
    _use_executor(env, executor)
    env._running = False
    if env.pending_score is None:
        env.pending_score = asyncio.ensure_future(_score(env, final))
    scoring = env.pending_score
    # Not awaited directly: cancelling the caller would cancel what has to run exactly once.
    await asyncio.wait([scoring])
    env.pending_score = None
    return scoring.result()


async def fork_env(env: Env, *, executor: Executor | None = None) -> Env:
    """Return an independent environment in the same state of its running episode.

    Raises:
        EnvError: The environment cannot be forked, or not now.
    """
    _use_executor(env, executor)
    if (why := why_not_forkable(env)) is not None:
        raise EnvError(f"{type(env).__qualname__} cannot fork: {why}")
    return await run_method(env, env.fork)


async def close_env(env: Env, *, executor: Executor | None = None) -> None:
    """Close an environment, and release its tools and sandboxes, also where ``close`` raises.

    Raises:
        EnvError: The method raised.
        TurnwiseError: The method raised it.
    """
    _use_executor(env, executor)
    scoring = drop_scoring(env)
    env._running, env._script = False, None
    try:
        try:
            if scoring is not None:
                await asyncio.wait([scoring])
        finally:
            await run_method(env, env.close)
    finally:
        try:
            await env.release()
        finally:
            await env.close_sandboxes(last=True)


def _use_executor(env: Env, executor: Executor | None) -> None:
    if executor is not None:
        env.executor = executor


def _conversation(env: Env) -> list[Message]:
    """Return the episode's messages, to be extended."""
    if not isinstance(env.conversation, list):
        env.conversation = []
    return cast("list[Message]", env.conversation)


async def _score(env: Env, final: Message | None) -> ScoreParts:
    parts = check_score(await run_method(env, env.score, final), env)
    return ScoreParts({**parts, **await env.extra_rewards()}, parts.metrics, parts.agents, parts.notes)


def drop_scoring(env: Env) -> asyncio.Future[ScoreParts] | None:
    """Cancel a scoring that is no longer awaited, and return it where it still runs."""
    scoring, env.pending_score = env.pending_score, None
    if scoring is None:
        return None
    if scoring.done():
        # Retrieved here: an exception that is never retrieved is reported at garbage collection.
        _ = scoring.cancelled() or scoring.exception()
        return None
    scoring.cancel()
    return scoring


async def run_method(env: Env, method: Callable[P, MaybeAwaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a method of an environment, ``def`` or ``async def``; a ``blocking`` one in a thread.

    Args:
        env: The environment.
        method: The bound method.
        *args: Its arguments.
        **kwargs: Its arguments.

    Raises:
        EnvError: The method raised.
        TurnwiseError: The method raised it.
    """
    try:
        if env.blocking and not inspect.iscoroutinefunction(method):
            result = await in_thread(env, method, args, kwargs)
        else:
            result = method(*args, **kwargs)
        return cast("T", await result if inspect.isawaitable(result) else result)
    except TurnwiseError as error:
        _secrets(env).scrub(error)
        raise
    except NotImplementedError as error:
        raise EnvError(f"{type(env).__qualname__} defines no {method.__name__}(): {error}") from error
    except INTERRUPTS:
        raise
    except BaseException as error:  # noqa: BLE001 - an environment's code: what it raises is named as its own
        secrets = _secrets(env)
        text = f"{type(env).__qualname__}.{method.__name__} raised {raised_text(error)}"
        raise EnvError(secrets.redact(text)) from secrets.cause(error)


def _secrets(env: Env) -> Secrets:
    try:
        tools = list(env.toolset().values())
    except TurnwiseError:
        tools = []  # they are the error, and say so themselves
    declared = [*env.secrets, *(secret for tool in tools for secret in tool.secrets)]
    return Secrets(declared, [tool.config for tool in tools if isinstance(tool, BaseTool)])


async def replay(env: Env) -> Env:
    """Return a new environment that the same actions led to the state of ``env``.

    Raises:
        EnvError: It cannot be made again, or answers differently.
    """
    script, maker = env._script, env._maker
    if script is None or maker is None:
        raise EnvError(
            f"{type(env).__qualname__} cannot fork: it forks by replay, so it must be made by turnwise.make (or a run) "
            "and played by the runner, the functions of turnwise.envs (reset_env, step_env) or Gymnasium's step"
        )
    fork = maker()
    try:
        equip(env, fork)
        messages, _ = await reset_env(fork, script.task, seed=script.seed, executor=env.executor)
        check_answer(env, "reset", messages, script.first)
        for number, (action, recorded) in enumerate(script.steps, 1):
            if isinstance(action, ToolCall):
                answer = comparable_answer(await call_env(fork, action, executor=env.executor))
            else:
                answer = comparable_answer(await step_env(fork, action, executor=env.executor))
            check_answer(env, describe_action(number, action), answer, recorded)
    except BaseException:  # also a cancellation: what was made is closed
        await close_env(fork)
        raise
    return fork


async def in_thread(env: Env, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a plain function in one of an environment's threads; on cancellation the thread is abandoned."""
    executor = default_threads() if env.executor is None else env.executor
    context = contextvars.copy_context()
    future = executor.submit(lambda: guarded(context.run, (function, *args), kwargs))
    try:
        result, raised = await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        # A thread cannot be cancelled: what it runs may change the environment at any time from now on.
        if isinstance(executor, ToolThreads) and executor.abandon(future):
            env.lost_thread = True
        raise
    if raised is not None:
        raise raised
    return result
