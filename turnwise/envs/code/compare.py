"""Whether what came out is what was wanted.

Owns: :func:`same_output` and :func:`same_value`. Both compare plain values of this process.
"""

from __future__ import annotations

import math
from decimal import Decimal, InvalidOperation
from typing import Any


def same_output(found: str, wanted: str, tolerance: float = 0.0) -> bool:
    """Whether two outputs of a program are the same.

    White space at the ends of lines and at the end of the output does not count. Otherwise lines that differ are
    compared word by word, and words that are both numbers by their values.

    Args:
        found: What came out.
        wanted: What was wanted.
        tolerance: How far numbers may be apart, absolutely or relative to the one that was wanted.
    """
    ours, theirs = _lines(found), _lines(wanted)
    if len(ours) != len(theirs):
        return False
    return all(one == other or _same_words(one, other, tolerance) for one, other in zip(ours, theirs, strict=True))


def same_value(found: Any, wanted: Any, tolerance: float = 0.0) -> bool:
    """Whether a returned value is the one that was wanted, which JSON wrote: tuples are lists, numbers are numbers."""
    if isinstance(found, bool) or isinstance(wanted, bool):
        return found is wanted
    if isinstance(found, (int, float)) and isinstance(wanted, (int, float)):
        return found == wanted or _near(found, wanted, tolerance)
    if isinstance(found, (list, tuple)) and isinstance(wanted, (list, tuple)):
        pairs = zip(found, wanted, strict=False)
        return len(found) == len(wanted) and all(same_value(one, other, tolerance) for one, other in pairs)
    if isinstance(found, dict) and isinstance(wanted, dict):
        # JSON's keys are texts.
        ours = {key if isinstance(key, str) else str(key): value for key, value in found.items()}
        theirs = {str(key): value for key, value in wanted.items()}
        return ours.keys() == theirs.keys() and all(same_value(ours[key], theirs[key], tolerance) for key in ours)
    return type(found) is type(wanted) and bool(found == wanted)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.replace("\r\n", "\n").rstrip().split("\n")]


def _same_words(one: str, other: str, tolerance: float) -> bool:
    ours, theirs = one.split(), other.split()
    return len(ours) == len(theirs) and all(
        mine == theirs or _same_number(mine, theirs, tolerance) for mine, theirs in zip(ours, theirs, strict=True)
    )


def _same_number(one: str, other: str, tolerance: float) -> bool:
    try:
        found, wanted = Decimal(one), Decimal(other)
    except InvalidOperation:
        return False
    if not (found.is_finite() and wanted.is_finite()):
        return False
    return found == wanted or _near(float(found), float(wanted), tolerance)


def _near(found: float, wanted: float, tolerance: float) -> bool:
    if not tolerance:
        return False
    try:
        return math.isclose(found, wanted, rel_tol=tolerance, abs_tol=tolerance)
    except OverflowError:
        return False
