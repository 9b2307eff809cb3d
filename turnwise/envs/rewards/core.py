"""Rewards as functions: what they are given, how several make one score, and what happens when one fails."""

from __future__ import annotations

import asyncio
import functools
import graphlib
import inspect
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Final

from turnwise.envs.core import Env, in_thread
from turnwise.envs.results import ScoreParts, named_numbers
from turnwise.envs.rewards.registry import describe, load_function
from turnwise.errors import INTERRUPTS, ConfigError, EnvError, InferenceError, nearest, raised_text, shown
from turnwise.tasks.core import Task
from turnwise.tools.cancellation import cancel
from turnwise.tools.response import finite
from turnwise.types import Message, text_of

DEFAULT_TIMEOUT: Final = 60.0
GIVEN: Final = ("task", "final", "text", "messages", "data", "env")
"""What a reward function may name as a parameter. Any other name is an entry of ``task.data``."""


class RewardFunction:
    """Base of configurable reward functions: subclasses write ``__call__`` with the parameters that they need.

    Attributes:
        exclusive: Whether rewards of tools do not count beside it, unless the environment is told that they do.
        inline: Whether a plain ``__call__`` runs on the event loop: only where it takes microseconds.
        timeout: Default seconds for a call.
    """

    exclusive: ClassVar[bool] = False
    inline: ClassVar[bool] = False
    timeout: ClassVar[float | None] = None


@dataclass(frozen=True, slots=True)
class Part:
    """One function of a rubric.

    Attributes:
        function: A function, plain or async; in configurations a built-in name or ``pkg.module:function``.
        weight: Factor of its value; 0 only logs it.
        arguments: Keyword arguments: of the constructor where ``function`` names a class, else of every call.
        timeout: Seconds for a call; None is the rubric's, else the function's own, else 60.
        only_if: Names of other parts: unless all are above 0, this part is 0 and not called.
        multiply_by: Names of other parts whose unweighted values multiply its own.
        inline: Whether a plain function runs on the event loop instead of a thread; None is the function's own.
    """

    function: Callable[..., Any] | str
    weight: float = 1.0
    arguments: Mapping[str, Any] = field(default_factory=dict)
    timeout: float | None = None
    only_if: str | Sequence[str] = ()
    multiply_by: str | Sequence[str] = ()
    inline: bool | None = None


@dataclass(frozen=True, slots=True)
class ReadyPart:
    """A validated, loaded :class:`Part`.

    Attributes:
        parameters: Its function's parameters, each with whether it is required.
        label: Its name in messages.
    """

    name: str
    function: Callable[..., Any]
    parameters: Mapping[str, bool]
    label: str
    weight: float
    timeout: float
    only_if: tuple[str, ...]
    multiply_by: tuple[str, ...]
    inline: bool


def _as_part(name: str, definition: Any) -> Part:
    where = f"rubric part {name!r}"
    if isinstance(definition, Part):
        return definition
    if isinstance(definition, tuple):
        if len(definition) != 2:
            raise ConfigError(f"{where} is {shown(definition)}: a tuple is (function, weight)")
        return Part(definition[0], weight=definition[1])
    if not isinstance(definition, Mapping):
        return Part(definition)
    names = [part_field.name for part_field in fields(Part)]
    for key in definition:
        if key not in names:
            raise ConfigError(f"{where} has no field {key!r}{nearest(str(key), names)}; fields are {', '.join(names)}")
    if "function" not in definition:
        raise ConfigError(f"{where} has no function: write function: pkg.module:name, or the name of a shipped one")
    return Part(**definition)


def ready_part(name: str, definition: Any, timeout: float | None) -> ReadyPart:
    """Validate and load one part.

    Args:
        name: Its name.
        definition: Its value in the rubric.
        timeout: The rubric's, in seconds, or None.
    """
    where = f"rubric part {name!r}"
    part = _as_part(name, definition)
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{where}: its name must be a non-empty string")
    weight = _number(part.weight, f"{where}: weight")
    function = load_function(part.function, part.arguments, where)
    own_timeout = function.timeout if isinstance(function, RewardFunction) else None
    own_inline = isinstance(function, RewardFunction) and function.inline
    timeouts = [seconds for seconds in (part.timeout, timeout, own_timeout) if seconds is not None]
    limit = _number(timeouts[0] if timeouts else DEFAULT_TIMEOUT, f"{where}: timeout")
    if limit <= 0:
        raise ConfigError(f"{where}: timeout is {limit:g}: it must be above 0 seconds")
    parameters = _required_parameters(function, where)
    return ReadyPart(
        name=name,
        function=function,
        parameters=parameters,
        label=f"{name!r} ({describe(function)})",
        weight=weight,
        timeout=limit,
        only_if=_names(part.only_if, f"{where}: only_if"),
        multiply_by=_names(part.multiply_by, f"{where}: multiply_by"),
        inline=is_async(function) or (own_inline if part.inline is None else part.inline),
    )


def is_async(function: Callable[..., Any]) -> bool:
    """Return whether a function, or an object's ``__call__``, is ``async def``."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _required_parameters(function: Callable[..., Any], where: str) -> dict[str, bool]:
    """Return a function's parameters, each with whether it is required."""
    label = describe(function)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}: {label} cannot be called as a reward function: {error}") from error
    fixed = function.keywords if isinstance(function, functools.partial) else {}
    required: dict[str, bool] = {}
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY):
            star = "*" if parameter.kind is parameter.VAR_POSITIONAL else ""
            raise ConfigError(
                f"{where}: {label} takes {star}{parameter.name} by position, but reward functions are called by name: "
                f"name any of {', '.join(GIVEN)}, or entries of task.data"
            )
        if parameter.kind is parameter.VAR_KEYWORD:
            required.update(dict.fromkeys(GIVEN, True))
        elif parameter.name not in fixed:
            required[parameter.name] = parameter.default is parameter.empty
    return required


def _names(value: str | Sequence[str], where: str) -> tuple[str, ...]:
    names = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Sequence) else None
    if names is None or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{where} is {shown(value)}: it must be the name of a part, or a list of names")
    return names


def _number(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ConfigError(f"{where} is {shown(value)}: it must be a finite number")
    return float(value)


def in_order(parts: Mapping[str, ReadyPart]) -> tuple[ReadyPart, ...]:
    """Sort parts topologically by their dependencies."""
    needs = {name: (*part.only_if, *part.multiply_by) for name, part in parts.items()}
    for name, others in needs.items():
        for other in others:
            if other not in parts:
                raise ConfigError(
                    f"rubric part {name!r} depends on {other!r}, which is not a part{nearest(other, parts)}; "
                    f"parts are {', '.join(parts)}"
                )
    try:
        return tuple(parts[name] for name in graphlib.TopologicalSorter(needs).static_order())
    except graphlib.CycleError as error:
        circle = " -> ".join(reversed(error.args[1]))
        raise ConfigError(
            f"rubric parts depend on each other in a circle: {circle}: remove one only_if or multiply_by"
        ) from None


@dataclass(frozen=True, slots=True)
class Attempt:
    """Inputs of reward functions: the entries of :data:`GIVEN`, and ``more`` by their names."""

    task: Task | None
    final: Message | None
    text: str
    messages: list[Message]
    data: Mapping[str, Any]
    env: Env
    more: Mapping[str, Any] = field(default_factory=dict)

    def arguments(self, parameters: Mapping[str, bool], function: str) -> dict[str, Any]:
        """Return the arguments of a function by name.

        Args:
            parameters: Name to whether it is required.
            function: Its name in messages.
        """
        arguments: dict[str, Any] = {name: getattr(self, name) for name in parameters if name in GIVEN}
        for name, required in parameters.items():
            if name in arguments:
                continue
            if name in self.more:
                arguments[name] = self.more[name]
            elif name in self.data:
                arguments[name] = self.data[name]
            elif required:
                row = "there is no task" if self.task is None else f"the data of task {self.task.id!r} has "
                columns = "" if self.task is None else ", ".join(map(repr, self.data)) or "no entries"
                raise EnvError(
                    f"reward function {function} takes {name!r}, which is neither one of {', '.join(GIVEN)} nor in "
                    f"task.data ({row}{columns}{nearest(name, [*GIVEN, *self.data])})"
                )
        return arguments


@dataclass(frozen=True, slots=True)
class _Value:
    """Value of a part: ``named`` where the function named parts, else ``total`` alone."""

    total: float
    named: Mapping[str, float] | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


class Rubric:
    """Named reward functions with weights, which together make a score.

    Functions declare their parameters: ``task``, ``final`` (the last message, or None), ``text`` (its text),
    ``messages`` (the whole conversation), ``data`` (the task's), ``env``, or any entry of ``task.data``. They return a
    number, ``(number, metrics)``, or a dict of named numbers whose sum counts. All run concurrently: async ones on the
    event loop, plain ones in the environment's threads.

    The reward of a part is its weighted value; the unweighted one is the metric ``rubric/<name>``.
    """

    def __init__(
        self,
        parts: Mapping[str, Part | Callable[..., Any] | str | tuple[Any, float] | Mapping[str, Any]],
        *,
        timeout: float | None = None,
    ) -> None:
        """Compose functions.

        Args:
            parts: Name to a function, ``(function, weight)``, a :class:`Part`, or the fields of one as a dict.
            timeout: Default seconds for each call; None is the function's own, else 60.

        Raises:
            ConfigError: A part cannot be used; the message names it, its field and the remedy.
        """
        if not parts:
            raise ConfigError("a rubric needs at least one reward function")
        ready = [ready_part(name, definition, timeout) for name, definition in parts.items()]
        self._parts = in_order({part.name: part for part in ready})
        self._lone = False

    @classmethod
    def lone(cls, function: Callable[..., Any] | str) -> Rubric:
        """Return the rubric of one function: a number is the reward ``score``, named numbers are rewards themselves."""
        rubric = cls({"score": Part(function)})
        rubric._lone = True
        return rubric

    @property
    def exclusive(self) -> bool:
        """Whether a part is a reward function beside which rewards of tools do not count."""
        functions: list[object] = [part.function for part in self._parts]
        return any(isinstance(function, RewardFunction) and function.exclusive for function in functions)

    async def score(self, env: Env, task: Task | None, final: Message | None) -> ScoreParts:
        """Return the weighted parts, with their values as metrics.

        Args:
            env: The environment: its conversation and its threads.
            task: The dataset row.
            final: The message that ended the episode, or None.

        Raises:
            EnvError: A function raised, timed out, or returned no finite numbers.
        """
        attempt = _attempt(env, task, final)
        started = time.monotonic()
        running: dict[str, asyncio.Future[_Value | EnvError | InferenceError]] = {}
        for part in self._parts:
            running[part.name] = asyncio.ensure_future(_evaluate(part, attempt, running))
        # All are waited for: a thread abandoned because another function failed would be lost needlessly.
        values = dict(zip(running, await asyncio.gather(*running.values()), strict=True))
        scores = {name: value for name, value in values.items() if isinstance(value, _Value)}
        errors = {str(value): value for value in values.values() if not isinstance(value, _Value)}
        for error in errors.values():
            if isinstance(error, InferenceError):
                raise error
        if errors:
            raise EnvError("; ".join(errors))
        return self._gather(scores, time.monotonic() - started)

    def _gather(self, values: Mapping[str, _Value], seconds: float) -> ScoreParts:
        if self._lone:
            value = values["score"]
            return ScoreParts({"score": value.total} if value.named is None else value.named, value.metrics)
        score = ScoreParts(metrics={"rubric/seconds": seconds})
        for part in self._parts:
            value = values[part.name]
            score.metrics[f"rubric/{part.name}"] = value.total
            score.metrics.update({f"rubric/{part.name}/{key}": number for key, number in value.metrics.items()})
            parts = {"": value.total} if value.named is None else value.named
            if part.weight:
                keys = {key: f"{part.name}/{key}" if key else part.name for key in parts}
                score.update({keys[key]: part.weight * number for key, number in parts.items()})
        return score


def as_rubric(scorer: Any) -> Rubric:
    """Return any form of scorer as a rubric.

    Args:
        scorer: A :class:`Rubric`; a dict from names to parts; one function; or in configurations a built-in name or
            ``pkg.module:function`` (which may also name a Rubric).

    Raises:
        ConfigError: It cannot be loaded or used.
    """
    if isinstance(scorer, str):
        loaded = load_function(scorer, {}, "scorer")
        return loaded if isinstance(loaded, Rubric) else Rubric.lone(loaded)
    if isinstance(scorer, Rubric):
        return scorer
    if isinstance(scorer, Mapping):
        return Rubric(scorer)
    return Rubric.lone(scorer)


def _attempt(env: Env, task: Task | None, final: Message | None) -> Attempt:
    messages = list(env.conversation) or ([] if task is None else task.messages())
    if final is not None and not any(message is final for message in messages[-1:]):
        messages.append(final)
    data = {} if task is None else task.data
    return Attempt(task, final, "" if final is None else text_of(final), messages, data, env)


async def grade(part: ReadyPart, attempt: Attempt) -> float:
    """Return the value of one function, its weight left out; of one that returns named numbers, their sum.

    Raises:
        EnvError: It raised, timed out, or returned no finite numbers.
        InferenceError: It raised that.
    """
    value = await _evaluate(part, attempt, {})
    if not isinstance(value, _Value):
        raise value
    return value.total


async def _evaluate(
    part: ReadyPart, attempt: Attempt, running: Mapping[str, asyncio.Future[_Value | EnvError | InferenceError]]
) -> _Value | EnvError | InferenceError:
    """Return a part's value or error; raises only on cancellation."""
    values: dict[str, _Value] = {}
    for name in (*part.only_if, *part.multiply_by):
        value = await running[name]
        if not isinstance(value, _Value):
            return value
        values[name] = value
    if any(values[name].total <= 0 for name in part.only_if):
        return _Value(0.0)
    try:
        result = await call_function(
            part.function,
            (),
            attempt.arguments(part.parameters, part.label),
            env=attempt.env,
            what=f"reward function {part.label}",
            timeout=part.timeout,
            inline=part.inline,
        )
        value = _read(result, part.label)
    except (EnvError, InferenceError) as error:
        return error
    for name in part.multiply_by:
        factor = values[name].total
        parts = None if value.named is None else {key: factor * number for key, number in value.named.items()}
        value = _Value(factor * value.total, parts, value.metrics)
    return value


async def call_function(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    env: Env,
    what: str,
    timeout: float,
    inline: bool,
) -> Any:
    """Call a user's function and wrap its errors.

    Args:
        function: Plain or async.
        args: Its arguments.
        kwargs: Its arguments.
        env: Provides the thread of a plain function, and is marked where that thread is lost.
        what: Its name in messages, such as ``reward function 'correct' (pkg.module:correct)``.
        timeout: Seconds for the call.
        inline: Whether it runs on the event loop.

    Raises:
        EnvError: It raised, or timed out.
        InferenceError: It raised that: a server of the run failed, and may be started again.
    """
    # A separate task: one that ignores its cancellation is abandoned and delays nothing.
    task = asyncio.ensure_future(_settled(function, args, kwargs, env, inline))
    try:
        await asyncio.wait({task}, timeout=timeout)
    finally:
        late = not task.done()
        if late:
            await cancel(task)
    if late:
        raise EnvError(f"{what} took longer than {timeout:g} s (timeout)")
    if task.cancelled():
        raise EnvError(f"{what} raised CancelledError without having been cancelled")
    result, raised = task.result()
    if isinstance(raised, InferenceError):
        raise raised
    if raised is not None:
        raise EnvError(f"{what} raised {raised_text(raised)}") from raised
    return result


async def _settled(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], env: Env, inline: bool
) -> tuple[Any, BaseException | None]:
    """Return a function's result or exception: some exceptions would end the event loop."""
    try:
        result = function(*args, **kwargs) if inline else await in_thread(env, function, args, kwargs)
        return (await result if inspect.isawaitable(result) else result), None
    except INTERRUPTS:
        raise
    except BaseException as error:  # noqa: BLE001 - a reward function's code: it is named as its own
        return None, error


def _read(result: Any, label: str) -> _Value:
    where = f"reward function {label} returned"
    metrics: Mapping[str, float] = {}
    if isinstance(result, tuple):
        if len(result) != 2:
            raise EnvError(f"{where} {shown(result)}: a tuple is (number, metrics)")
        result, numbers = result
        metrics = {
            key: finite(value, f"{where} the metric {key!r}:") for key, value in named_numbers(numbers, where).items()
        }
    if not isinstance(result, Mapping):
        return _Value(finite(result, where), None, metrics)
    parts = {key: finite(value, f"{where} {key!r}:") for key, value in named_numbers(result, where).items()}
    return _Value(sum(parts.values()), parts, metrics)
