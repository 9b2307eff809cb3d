"""Reward functions by name: the shipped ones, and references to yours.

An object that a configuration describes is made once per process and shared by all episodes, since every episode makes
its environment anew: so they share connections, caches and rate limits.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import orjson

from turnwise.errors import ConfigError, shown
from turnwise.plugins import load_object, place_of
from turnwise.tools.core import nearest

_HERE = "turnwise.envs.rewards"
SHIPPED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "exact_match": f"{_HERE}.matching:ExactMatch",
        "regex": f"{_HERE}.matching:Regex",
        "json_schema": f"{_HERE}.matching:JSONSchema",
        "numeric": f"{_HERE}.numeric:Numeric",
        "symbolic": f"{_HERE}.symbolic:Symbolic",
        "reward_model": f"{_HERE}.model:RewardModel",
        "judge": f"{_HERE}.judge:Judge",
        "verl": f"{_HERE}.verl:VerlScore",
        "rank_by": f"{_HERE}.groups:RankBy",
        "pairwise_judge": f"{_HERE}.groups:PairwiseJudge",
    }
)
"""The names that configurations may write instead of a reference."""


def load_function(given: Callable[..., Any] | str, arguments: Mapping[str, Any], where: str) -> Any:
    """Return a reward function that is ready to be called.

    Args:
        given: The function, the name of a shipped one, or a reference.
        arguments: For a class those of its constructor, for a function keyword arguments of every call.
        where: What it belongs to, for messages.

    Raises:
        ConfigError: It cannot be found, or does not take the arguments.
    """
    if not isinstance(arguments, Mapping) or not all(isinstance(key, str) for key in arguments):
        raise ConfigError(f"{where}: arguments is {shown(arguments)}: it must be a dict from names to values")
    if not isinstance(given, str):
        return _with(given, arguments)
    if given not in SHIPPED and not any(mark in given for mark in ":./"):
        raise ConfigError(
            f"{where}: there is no reward function {given!r}{nearest(given, SHIPPED)}; shipped are "
            f"{', '.join(SHIPPED)}; any other is pkg.module:function or path/to/file.py:function"
        )
    try:
        key = orjson.dumps(dict(arguments), option=orjson.OPT_SORT_KEYS)
    except TypeError as error:
        raise ConfigError(f"{where}: arguments is {shown(arguments)}, which is not JSON: {error}") from error
    try:
        return _shared(SHIPPED.get(given, given), key)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


@functools.lru_cache(maxsize=256)
def _shared(reference: str, arguments: bytes) -> Any:
    return _with(load_object(reference, "reward function"), orjson.loads(arguments))


def _with(function: Any, arguments: Mapping[str, Any]) -> Any:
    if isinstance(function, type):
        try:
            return function(**arguments)
        except TypeError as error:
            raise ConfigError(f"{function.__qualname__} does not take {dict(arguments)}: {error}") from error
    return functools.partial(function, **arguments) if arguments else function


def describe(function: Any) -> str:
    """Return how messages call a function: its module and name, or its class."""
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type)):
        return f"{place_of(function.__module__)}:{function.__qualname__}"
    return f"{place_of(type(function).__module__)}:{type(function).__qualname__}"
