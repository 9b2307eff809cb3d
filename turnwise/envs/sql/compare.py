"""When two results are the same answer.

Owns: :func:`same_result`, :func:`is_ordered` and :func:`submitted`, the query in a message. Refuses: running queries.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, Final

from turnwise.envs.sql.database import Result

TOLERANCE: Final = 0.006
"""By how much a number may differ from one that is no integer: as much as rounding to two decimals does."""

_FENCE: Final = re.compile(r"```[^\n`]*\n(.*?)```", re.DOTALL)
_NESTED: Final = re.compile(r"\([^()]*\)")
_QUOTED: Final = re.compile(r"'(?:[^']|'')*'|\"[^\"]*\"|--[^\n]*")

Row = tuple[Any, ...]


def submitted(text: str) -> str:
    """Return the query in a message: its last fenced block, or all of it where there is none."""
    blocks: list[str] = _FENCE.findall(text)
    return (blocks[-1] if blocks else text).strip().rstrip(";").strip()


def is_ordered(sql: str) -> bool:
    """Return whether a query orders its result; what stands in parentheses orders something else."""
    text = _QUOTED.sub(" ", sql)
    while (shorter := _NESTED.sub(" ", text)) != text:
        text = shorter
    return re.search(r"\border\s+by\b", text, re.IGNORECASE) is not None


def same_result(found: Result, gold: Result, *, ordered: bool) -> bool:
    """Return whether a result is the gold one: the same columns in the same order, whatever their names, and the same
    rows, each as often.

    Args:
        found: What was submitted.
        gold: What is right.
        ordered: Whether the rows must come in the gold order.
    """
    if len(found.columns) != len(gold.columns) or len(found.rows) != len(gold.rows) or found.more != gold.more:
        return False
    if ordered:
        return all(_same_row(one, other) for one, other in zip(found.rows, gold.rows, strict=True))
    left = sorted(found.rows, key=_rank)
    for row in sorted(gold.rows, key=_rank):
        # Sorted, the counterpart is nearly always the first one that is left.
        match = next((index for index, each in enumerate(left) if _same_row(each, row)), None)
        if match is None:
            return False
        del left[match]
    return True


def _same_row(found: Row, gold: Row) -> bool:
    return all(_same_value(one, other) for one, other in zip(found, gold, strict=True))


def _same_value(found: Any, gold: Any) -> bool:
    if isinstance(gold, float) and isinstance(found, (int, float)):
        return math.isclose(found, gold, rel_tol=1e-6, abs_tol=TOLERANCE)
    return type(found) in _ALIKE.get(type(gold), (type(gold),)) and bool(found == gold)


# 3.0 is 3; a text is never a number.
_ALIKE: Final[dict[type, Sequence[type]]] = {int: (int, float)}


def _rank(row: Row) -> tuple[Any, ...]:
    return tuple((_KIND.get(type(value), 3), 0 if value is None else value) for value in row)


_KIND: Final[dict[type, int]] = {type(None): 0, int: 1, float: 1, str: 2}
