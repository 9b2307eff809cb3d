"""What an environment is, and the one way in which others call it.

Owns: :class:`Env`, :class:`StepResult`, and :func:`invoke`, which awaits or threads a method, holds its result to the
contract and turns what it raises into EnvError. Refuses: running tools (``tool_env.py``) and deciding when an episode
ends (``rollout/runner.py``).
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any, ClassVar, NamedTuple, TypeAlias, TypeVar, cast, get_args

from turnwise.errors import EnvError, ToolSchemaError, TurnwiseError, shown
from turnwise.tasks import Task
from turnwise.tools.core import FunctionTool, Tool, as_tool
from turnwise.tools.threads import ToolThreads, default_threads
from turnwise.types import Message, Role, StopReason, ToolSchema

T = TypeVar("T")
MaybeAwaitable: TypeAlias = T | Awaitable[T]
Observation: TypeAlias = str | list[Message]
"""Messages to append to the conversation; a text is one user message."""
ResetResult: TypeAlias = tuple[Observation, dict[str, Any]]
Score: TypeAlias = float | dict[str, float]

_ROLES = frozenset(get_args(Role))


class StepResult(NamedTuple):
    """What a step did. Unpacks as Gymnasium's five values.

    Attributes:
        observation: Messages to append.
        reward: Reward of this step. Where ``info["rewards"]`` is given, the sum of it.
        terminated: The message ended the episode. It was scored: the reward holds the score.
        truncated: The episode ends for another reason. It was not scored by the step.
        info: Read are ``rewards`` (named parts of the reward: ``dict[str, float]``), ``metrics`` (numbers to log:
            ``dict[str, float]``) and ``stop_reason`` (a StopReason, where truncated for another reason than
            ``env_truncated``). Further keys are yours.
    """

    observation: Observation
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]


class Env:
    """A world that an agent acts in, at the level of messages. Gymnasium's names and meanings.

    Subclass it and write ``reset`` and ``step`` (or use ToolEnv and SingleTurnEnv, which write ``step``), each as
    ``def`` or ``async def``. One object is one episode at a time. Methods decorated with ``@function_tool`` are tools.

    Attributes:
        tools: What the model may call besides the environment's own decorated methods: functions, BaseTools, or
            names of registered tools.
        blocking: Whether plain (not async) methods may take long: they then run in a thread.
        score_range: The least and the largest score that is possible, where they are known; ``check_env`` asks.
        executor: Where threads come from; the runner sets it.
        lost_thread: Whether a tool or a method that was given up still runs in its thread: the environment must not
            be used any further.
        pending_score: A scoring that began and whose result nobody has taken; kept here, since who waits for it may
            be cancelled, and ``score`` runs once.
    """

    tools: Sequence[Any] = ()
    blocking: ClassVar[bool] = False
    score_range: ClassVar[tuple[float, float] | None] = None
    executor: Executor | None = None
    lost_thread: bool = False
    pending_score: asyncio.Future[dict[str, float]] | None = None
    tool_methods: ClassVar[dict[str, FunctionTool]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.tool_methods = _tool_methods(cls)

    def reset(self, task: Task | None = None, *, seed: int | None = None) -> MaybeAwaitable[ResetResult]:
        """Start an episode.

        Args:
            task: The dataset row, or None where the environment needs none.
            seed: Decides everything that is random: equal seeds (and tasks) give equal episodes.

        Returns:
            The beginning of the conversation (the system prompt, if any, is its first message), and anything else.
        """
        raise NotImplementedError

    def step(self, action: Message) -> MaybeAwaitable[StepResult]:
        """Take an assistant message.

        Args:
            action: The message; its calls are in ``tool_calls``.
        """
        raise NotImplementedError

    def score(self, final: Message | None) -> MaybeAwaitable[Score]:  # noqa: ARG002
        """Return what the episode is worth; runs exactly once per episode.

        Args:
            final: The message that ended it, or None where there is none (limits, black boxes).

        Returns:
            A number, or named parts whose sum counts.
        """
        return 0.0

    def close(self) -> MaybeAwaitable[None]:
        """Free what the environment holds. Closing twice is no error."""

    def toolset(self) -> dict[str, Tool]:
        """Return the tools by name: the environment's methods, then ``tools``.

        Raises:
            ToolSchemaError: Something in ``tools`` is no tool, or two tools have one name.
        """
        found: dict[str, Tool] = dict(self.tool_methods)
        for item in self.tools:
            tool = as_tool(item)
            if found.get(tool.name, tool) is not tool:
                raise ToolSchemaError(
                    f"{type(self).__qualname__} has two tools called {tool.name!r}: rename one with "
                    '@function_tool("other_name")'
                )
            found[tool.name] = tool
        return found

    async def extra_rewards(self) -> dict[str, float]:
        """Return rewards that go with the score. For base classes; an environment writes ``score``."""
        return {}

    async def release(self) -> None:
        """Free what a base class holds. Runs after ``close``, whatever that did; an environment writes ``close``."""


def _tool_methods(cls: type[Env]) -> dict[str, FunctionTool]:
    found: dict[str, FunctionTool] = {}
    for base in reversed(cls.__mro__):
        for attribute, value in vars(base).items():
            inner = value.__func__ if isinstance(value, staticmethod) else value
            if isinstance(inner, FunctionTool):
                found[attribute] = inner
            elif attribute in found and value is None:
                del found[attribute]
            elif attribute in found and attribute in vars(cls):
                raise ToolSchemaError(
                    f"{cls.__qualname__}.{attribute} replaces a tool of {base.__mro__[1].__qualname__} without being "
                    f"one: decorate it with @function_tool, or write {attribute} = None to take the tool away"
                )
    by_name: dict[str, FunctionTool] = {}
    for attribute, tool in found.items():
        if tool.name in by_name:
            raise ToolSchemaError(f"{cls.__qualname__}.{attribute}: another tool of it is called {tool.name!r} too")
        by_name[tool.name] = tool
    return by_name


def schemas(env: Env) -> list[ToolSchema]:
    """Return what the model may call in an environment, in order."""
    return [tool.schema for tool in env.toolset().values()]


def as_messages(observation: Any) -> list[Message]:
    """Return an observation as a new list of messages.

    Raises:
        EnvError: It is neither a text, nor a message, nor a list of messages.
    """
    if isinstance(observation, str):
        return [{"role": "user", "content": observation}]
    if isinstance(observation, Mapping):
        observation = [observation]
    if not isinstance(observation, (list, tuple)):
        raise EnvError(f"an observation is a text or a list of messages, not {shown(observation)}")
    for index, message in enumerate(observation):
        if not isinstance(message, Mapping) or message.get("role") not in _ROLES:
            raise EnvError(
                f"observation[{index}] is {shown(message)}: a message is a dict whose 'role' is one of "
                f"{', '.join(sorted(_ROLES))}"
            )
        content = message.get("content")
        if content is not None and not isinstance(content, (str, list)):
            raise EnvError(f"observation[{index}]['content'] is {shown(content)}: it must be a text or a list of parts")
    return cast("list[Message]", list(observation))


async def invoke(env: Env, method: str, *args: Any, executor: Executor | None = None, **kwargs: Any) -> Any:
    """Call a method of an environment, be it ``def`` or ``async def``, and hold its result to the contract.

    Args:
        env: The environment.
        method: ``reset``, ``step``, ``score``, ``close``, or another one.
        *args: Its arguments.
        executor: Where plain methods of a ``blocking`` environment run, and its tools.
        **kwargs: Its arguments.

    Returns:
        ``reset``: (messages, info). ``step``: a StepResult. ``score``: named parts, ``{"score": x}`` for a number,
        with the rewards of BaseTools. Else: what the method returned.

    Raises:
        EnvError: The method raised, or returned something else than its contract says.
        TurnwiseError: The method raised it.
    """
    if executor is not None:
        env.executor = executor
    if method == "close":
        return await _close(env, args, kwargs)
    if method == "score":
        return await _score_once(env, args, kwargs)
    if method == "reset":
        drop_scoring(env)
        return check_reset(await _call(env, method, args, kwargs), env)
    result = await _call(env, method, args, kwargs)
    return check_step(result, env) if method == "step" else result


async def _close(env: Env, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given_up = drop_scoring(env)
    try:
        try:
            if given_up is not None:
                await asyncio.wait([given_up])
        finally:
            result = await _call(env, "close", args, kwargs)
        return result
    finally:
        await env.release()


async def _score_once(env: Env, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, float]:
    """Score, or wait for the scoring that a time limit interrupted in a step: it goes on, and what it says counts."""
    if env.pending_score is None:
        env.pending_score = asyncio.ensure_future(_score(env, args, kwargs))
    scoring = env.pending_score
    # Not awaited itself: cancelling who waits would cancel what is to run exactly once.
    await asyncio.wait([scoring])
    env.pending_score = None
    return scoring.result()


async def _score(env: Env, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, float]:
    result = await _call(env, "score", args, kwargs)
    return {**check_score(result, env), **await env.extra_rewards()}


def drop_scoring(env: Env) -> asyncio.Future[dict[str, float]] | None:
    """Cancel a scoring that nobody waits for any more, and return it where it still runs."""
    scoring, env.pending_score = env.pending_score, None
    if scoring is None:
        return None
    if scoring.done():
        # Taken notice of: an error that nobody asked for would be reported when it is collected.
        _ = scoring.cancelled() or scoring.exception()
        return None
    scoring.cancel()
    return scoring


async def _call(env: Env, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    function: Callable[..., Any] = getattr(env, method)
    try:
        if env.blocking and not inspect.iscoroutinefunction(function):
            result = await _in_thread(env, function, args, kwargs)
        else:
            result = function(*args, **kwargs)
        return await result if inspect.isawaitable(result) else result
    except TurnwiseError:
        raise
    except NotImplementedError as error:
        raise EnvError(f"{type(env).__qualname__} defines no {method}(): {error}") from error
    except (Exception, SystemExit) as error:  # an environment's code: what it raises is named as its own
        raise EnvError(f"{type(env).__qualname__}.{method} raised {type(error).__name__}: {error}") from error


async def _in_thread(env: Env, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    executor = default_threads() if env.executor is None else env.executor
    context = contextvars.copy_context()
    future = executor.submit(lambda: _guarded(context.run, function, args, kwargs))
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


def _guarded(
    run: Callable[..., Any], function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, BaseException | None]:
    # A future refuses some exceptions (StopIteration), so they travel as values.
    try:
        return run(function, *args, **kwargs), None
    except BaseException as error:  # noqa: BLE001 - raised again on the loop
        return None, error


def check_reset(result: Any, env: Env) -> tuple[list[Message], dict[str, Any]]:
    """Return what ``reset`` returned, with its observation as messages. Raises EnvError where it broke its contract."""
    name = type(env).__qualname__
    if not isinstance(result, tuple) or len(result) != 2:
        raise EnvError(f"{name}.reset returned {shown(result)}: it must return (observation, info)")
    observation, info = result
    if not isinstance(info, dict):
        raise EnvError(f"{name}.reset returned the info {shown(info)}: it must be a dict")
    return _named_messages(observation, f"{name}.reset"), info


def check_step(result: Any, env: Env) -> StepResult:
    """Return what ``step`` returned as a StepResult of messages. Raises EnvError where it broke its contract."""
    where = f"{type(env).__qualname__}.step"
    if not isinstance(result, tuple) or len(result) != 5:
        raise EnvError(
            f"{where} returned {shown(result)}: it must return StepResult(observation, reward, terminated, truncated, "
            "info)"
        )
    observation, reward, terminated, truncated, info = result
    for name, flag in (("terminated", terminated), ("truncated", truncated)):
        # numpy's bools are fine, 0.0 in the place of a flag is a result in the wrong order.
        if isinstance(flag, (int, float, str)) and not isinstance(flag, bool):
            raise EnvError(f"{where} returned {name}={flag!r}: it must be True or False")
    if not isinstance(info, dict):
        raise EnvError(f"{where} returned the info {shown(info)}: it must be a dict")
    value = _finite(reward, f"{where} returned the reward")
    for key in ("rewards", "metrics"):
        for name, part in _parts(info.get(key), f"{where}: info[{key!r}]").items():
            _finite(part, f"{where}: info[{key!r}][{name!r}]")
    reason = info.get("stop_reason")
    if reason is not None and reason not in tuple(StopReason):
        raise EnvError(f"{where}: info['stop_reason'] is {reason!r}: allowed are {', '.join(StopReason)}")
    messages = _named_messages(observation, where)
    return StepResult(messages, value, bool(terminated), bool(truncated), info)


def check_score(result: Any, env: Env) -> dict[str, float]:
    """Return what ``score`` returned as named parts. Raises EnvError where it broke its contract."""
    where = f"{type(env).__qualname__}.score returned"
    if isinstance(result, Mapping):
        return {name: _finite(part, f"{where} {name!r}:") for name, part in _parts(result, where).items()}
    return {"score": _finite(result, where)}


def _parts(value: Any, where: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise EnvError(f"{where} is {shown(value)}: it must be a dict from names to numbers")
    return value


def _named_messages(observation: Any, where: str) -> list[Message]:
    try:
        return as_messages(observation)
    except EnvError as error:
        raise EnvError(f"{where}: {error}") from error


def _finite(value: Any, where: str) -> float:
    try:
        number = math.nan if isinstance(value, (str, bytes)) or value is None else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise EnvError(f"{where} {shown(value)}: it must be a finite number")
    return number
