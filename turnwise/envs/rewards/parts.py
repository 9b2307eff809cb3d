"""The parts of a rubric: what may stand in one, checked and loaded before any episode runs.

Owns: :class:`Part`, :class:`RewardFunction`, :func:`ready_part`, :func:`in_order` and :func:`is_async`. Refuses:
calling functions.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Final

from turnwise.envs.rewards.loading import describe, load_function
from turnwise.errors import ConfigError, shown
from turnwise.tools.registry import nearest

DEFAULT_TIMEOUT: Final = 60.0
GIVEN: Final = ("task", "final", "text", "messages", "data", "env")
"""What a reward function may name as a parameter. Any other name is an entry of ``task.data``."""


class RewardFunction:
    """Base of reward functions that have settings: subclasses write ``__call__`` with the parameters that they want.

    Attributes:
        inline: Whether a plain ``__call__`` runs on the event loop: only where it takes microseconds.
        timeout: Seconds that a call may take where neither its part nor the rubric says otherwise.
    """

    inline: ClassVar[bool] = False
    timeout: ClassVar[float | None] = None


@dataclass(frozen=True, slots=True)
class Part:
    """One function of a rubric.

    Attributes:
        function: A function, plain or async; in configurations the name of a shipped one or ``pkg.module:function``.
        weight: Its value is multiplied by this; 0 only logs it.
        arguments: Keyword arguments: of the constructor where ``function`` names a class, else of every call.
        timeout: Seconds that a call may take; None is the rubric's, or else the function's own, or else 60.
        only_if: Names of other parts: where one of them is not above 0, this function is not called and is worth 0.
        multiply_by: Names of other parts whose unweighted values its own is multiplied by.
        inline: Whether a plain function runs on the event loop instead of a thread; None is what the function says.
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
    """A part, checked and loaded: see :class:`Part`; ``wanted`` are its parameters, ``label`` what messages call it."""

    name: str
    function: Callable[..., Any]
    wanted: Mapping[str, bool]
    label: str
    weight: float
    timeout: float
    only_if: tuple[str, ...]
    multiply_by: tuple[str, ...]
    inline: bool


def _as_part(name: str, given: Any) -> Part:
    where = f"rubric part {name!r}"
    if isinstance(given, Part):
        return given
    if isinstance(given, tuple):
        if len(given) != 2:
            raise ConfigError(f"{where} is {shown(given)}: a tuple is (function, weight)")
        return Part(given[0], weight=given[1])
    if not isinstance(given, Mapping):
        return Part(given)
    known = [each.name for each in fields(Part)]
    for key in given:
        if key not in known:
            raise ConfigError(f"{where} has no field {key!r}{nearest(str(key), known)}; fields are {', '.join(known)}")
    if "function" not in given:
        raise ConfigError(f"{where} names no function: write function: pkg.module:name, or the name of a shipped one")
    return Part(**given)


def ready_part(name: str, given: Any, timeout: float | None) -> ReadyPart:
    """Check and load one part.

    Args:
        name: Its name.
        given: What the rubric was given for it.
        timeout: The rubric's, in seconds, or None.

    Raises:
        ConfigError: It cannot be used.
    """
    where = f"rubric part {name!r}"
    part = _as_part(name, given)
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{where}: its name must be a text that is not empty")
    weight = _number(part.weight, f"{where}: weight")
    function = load_function(part.function, part.arguments, where)
    own = function.timeout if isinstance(function, RewardFunction) else None
    own_inline = isinstance(function, RewardFunction) and function.inline
    chosen = next((each for each in (part.timeout, timeout, own) if each is not None), DEFAULT_TIMEOUT)
    limit = _number(chosen, f"{where}: timeout")
    if limit <= 0:
        raise ConfigError(f"{where}: timeout is {limit:g}: it must be above 0 seconds")
    wanted = _wanted(function, where)
    return ReadyPart(
        name=name,
        function=function,
        wanted=wanted,
        label=f"{name!r} ({describe(function)})",
        weight=weight,
        timeout=limit,
        only_if=_names(part.only_if, f"{where}: only_if"),
        multiply_by=_names(part.multiply_by, f"{where}: multiply_by"),
        inline=is_async(function) or (own_inline if part.inline is None else part.inline),
    )


def is_async(function: Callable[..., Any]) -> bool:
    """Return whether a function, or what an object's ``__call__`` is, is ``async def``."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _wanted(function: Callable[..., Any], where: str) -> dict[str, bool]:
    """Return the names of the parameters that a function is called with, each with whether it has no default."""
    label = describe(function)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}: {label} cannot be called as a reward function: {error}") from error
    fixed = function.keywords if isinstance(function, functools.partial) else {}
    wanted: dict[str, bool] = {}
    for each in parameters:
        if each.kind in (each.VAR_POSITIONAL, each.POSITIONAL_ONLY):
            star = "*" if each.kind is each.VAR_POSITIONAL else ""
            raise ConfigError(
                f"{where}: {label} takes {star}{each.name} by position, but reward functions are called by name: name "
                f"any of {', '.join(GIVEN)}, or entries of task.data"
            )
        if each.kind is each.VAR_KEYWORD:
            wanted.update(dict.fromkeys(GIVEN, True))
        elif each.name not in fixed:
            wanted[each.name] = each.default is each.empty
    return wanted


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
    """Return the parts such that each stands behind those that it depends on."""
    ordered: dict[str, ReadyPart] = {}

    def add(name: str, path: tuple[str, ...]) -> None:
        if name in path:
            circle = " -> ".join([*path[path.index(name) :], name])
            raise ConfigError(
                f"rubric parts depend on each other in a circle: {circle}: take one only_if or multiply_by out"
            )
        if name in ordered:
            return
        for other in (*parts[name].only_if, *parts[name].multiply_by):
            if other not in parts:
                raise ConfigError(
                    f"rubric part {name!r} depends on {other!r}, which is no part{nearest(other, parts)}; "
                    f"parts are {', '.join(parts)}"
                )
            add(other, (*path, name))
        ordered[name] = parts[name]

    for name in parts:
        add(name, ())
    return tuple(ordered.values())
