"""Comparison of tool calls with the answers that a row of BFCL allows.

The rules are those of the leaderboard's check of syntax trees (Patil et al. 2024): calls in any order, values out of
lists of allowed ones, texts without regard to case, spaces and some punctuation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from turnwise.types import ToolCall

Allowed = Mapping[str, Sequence[Any]]
"""Allowed values by argument; ``""`` among them says that it may be left out."""
_UNSAID: Final = re.compile(r"[ ,./\-_*^]")
OMITTED: Final = ""


def same_calls(calls: Sequence[ToolCall], allowed_calls: Sequence[tuple[str, Allowed]]) -> bool:
    """Whether the calls are the wanted ones: as many, each matched by another one, in any order."""
    if len(calls) != len(allowed_calls):
        return False
    # A bipartite matching by augmenting paths: a call may match several of the wanted ones.
    call_of_allowed: dict[int, int] = {}
    return all(_place(number, calls, allowed_calls, call_of_allowed, set()) for number in range(len(calls)))


def _place(
    number: int,
    calls: Sequence[ToolCall],
    allowed_calls: Sequence[tuple[str, Allowed]],
    call_of_allowed: dict[int, int],
    tried: set[int],
) -> bool:
    for at, (name, allowed) in enumerate(allowed_calls):
        if at in tried or not same_call(calls[number], name, allowed):
            continue
        tried.add(at)
        if at not in call_of_allowed or _place(call_of_allowed[at], calls, allowed_calls, call_of_allowed, tried):
            call_of_allowed[at] = number
            return True
    return False


def same_call(call: ToolCall, name: str, allowed: Allowed) -> bool:
    """Whether a call is one of those that are allowed."""
    if call.error is not None or call.name != name:
        return False
    if any(argument not in allowed for argument in call.arguments):
        return False
    return all(
        _among(call.arguments[argument], values) if argument in call.arguments else OMITTED in values
        for argument, values in allowed.items()
    )


def _among(value: Any, allowed: Sequence[Any]) -> bool:
    return any(_same(value, candidate) for candidate in allowed)


def _same(value: Any, allowed: Any) -> bool:
    """Compare a value with an allowed one, of which each entry of an object is a list of allowed ones again."""
    if isinstance(allowed, bool) or isinstance(value, bool):
        return value is allowed
    if isinstance(allowed, str) and isinstance(value, str):
        return _said(value) == _said(allowed)
    if isinstance(allowed, (int, float)) and isinstance(value, (int, float)):
        return value == allowed
    if isinstance(allowed, Mapping) and isinstance(value, Mapping):
        if any(key not in allowed for key in value):
            return False
        return all(
            _among(value[key], _listed(values)) if key in value else OMITTED in _listed(values)
            for key, values in allowed.items()
        )
    if isinstance(allowed, (list, tuple)) and isinstance(value, (list, tuple)):
        return len(value) == len(allowed) and all(map(_same, value, allowed))
    return value is None and allowed is None


def _listed(values: Any) -> Sequence[Any]:
    return values if isinstance(values, (list, tuple)) else [values]


def _said(text: str) -> str:
    return _UNSAID.sub("", text).lower().replace("'", '"')
