"""The registry of reward functions: by the names of configurations, or by reference.

An object that a configuration describes is made once per process and shared by all episodes, since every episode makes
its environment anew: so they share connections, caches and rate limits.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import orjson

from turnwise.errors import ConfigError, nearest, shown
from turnwise.plugins import load_object, module_label, references, registering

_HERE = "turnwise.envs.rewards"
REWARDS: dict[str, Callable[..., Any] | str] = {
    "exact_match": f"{_HERE}.matching:ExactMatch",
    "regex": f"{_HERE}.matching:Regex",
    "numeric": f"{_HERE}.matching:Numeric",
    "reward_model": f"{_HERE}.model:RewardModel",
    "judge": f"{_HERE}.judge:Judge",
    "rank_by": f"{_HERE}.groups:RankBy",
    "pairwise_judge": f"{_HERE}.groups:PairwiseJudge",
    **references("rewards"),
}
"""Reward functions by the name that configurations use: functions and classes, or references to them."""

F = TypeVar("F", bound=Callable[..., Any])


def register_reward(name: str) -> Callable[[F], F]:
    """Register a reward function, or a class of them, for scorers and rubrics. Raises RegistryError."""
    return registering(name, REWARDS, "reward function")


def load_function(function: Callable[..., Any] | str, arguments: Mapping[str, Any], where: str) -> Any:
    """Load a reward function.

    Args:
        function: The function, a built-in name, or a reference.
        arguments: Of a class's constructor, or keyword arguments of every call of a function.
        where: Its owner, for messages.

    Raises:
        ConfigError: It cannot be found, or does not take the arguments.
    """
    if not isinstance(arguments, Mapping) or not all(isinstance(key, str) for key in arguments):
        raise ConfigError(f"{where}: arguments is {shown(arguments)}: it must be a dict from names to values")
    if not isinstance(function, str):
        return _with(function, arguments)
    if function not in REWARDS and not any(mark in function for mark in ":./"):
        raise ConfigError(
            f"{where}: there is no reward function {function!r}{nearest(function, REWARDS)}; known are "
            f"{', '.join(REWARDS)}; any other is pkg.module:function or path/to/file.py:function"
        )
    try:
        key = orjson.dumps(dict(arguments), option=orjson.OPT_SORT_KEYS)
    except TypeError as error:
        raise ConfigError(f"{where}: arguments is {shown(arguments)}, which is not JSON: {error}") from error
    try:
        return _shared(REWARDS.get(function, function), key)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


@functools.lru_cache(maxsize=256)
def _shared(function: Callable[..., Any] | str, arguments: bytes) -> Any:
    loaded = load_object(function, "reward function") if isinstance(function, str) else function
    return _with(loaded, orjson.loads(arguments))


def _with(function: Any, arguments: Mapping[str, Any]) -> Any:
    if isinstance(function, type):
        try:
            return function(**arguments)
        except TypeError as error:
            raise ConfigError(f"{function.__qualname__} does not take {dict(arguments)}: {error}") from error
    return functools.partial(function, **arguments) if arguments else function


def describe(function: Any) -> str:
    """Return a function's name for messages."""
    while isinstance(function, functools.partial):
        function = function.func
    has_name = isinstance(function, (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type))
    named = function if has_name else type(function)
    return f"{module_label(named.__module__)}:{named.__qualname__}"
