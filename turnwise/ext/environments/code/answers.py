"""Extraction of programs from answers, and comparison of outputs."""

from __future__ import annotations

import ast
import math
import re
from decimal import Decimal, InvalidOperation
from typing import Any, Final

from turnwise.ext.environments.code.problems import Problem

_FENCE: Final = re.compile(
    r"^ {0,3}(`{3,}|~{3,})[ \t]*([\w+#.-]*)[^\n`]*\n(.*?)(?:^ {0,3}\1[`~]*[ \t]*$|\Z)", re.M | re.S
)
_PYTHON: Final = ("", "python", "python3", "py", "py3")

# What solutions of such problems take for granted, as the sites that they come from do.
PRELUDE: Final = """\
import bisect, collections, copy, functools, heapq, itertools, math, operator, random, re, string, sys
from bisect import bisect_left, bisect_right, insort
from collections import Counter, OrderedDict, defaultdict, deque
from functools import cache, cmp_to_key, lru_cache, reduce
from heapq import heapify, heappop, heappush, nlargest, nsmallest
from itertools import accumulate, chain, combinations, count, cycle, groupby, permutations, product
from math import ceil, comb, factorial, floor, gcd, inf, sqrt
from typing import *
"""


def code_of(text: str) -> str:
    """Return the code of an answer: its last fenced Python block, unterminated ones included, or all of it."""
    blocks = [(match[2].lower(), match[3]) for match in _FENCE.finditer(text)]
    if not blocks:
        return text.strip("\n") if "```" not in text else ""
    python = [code for language, code in blocks if language in _PYTHON]
    return (python or [""])[-1].strip("\n")


def program_of(problem: Problem, code: str) -> str:
    """Return the program of an answer's code; empty where there is none.

    A row with a function head (HumanEval) may be answered by the whole function or by its body.
    """
    if not code.strip():
        return ""
    if problem.kind == "calls":
        return f"{PRELUDE}\n{code}\n"
    if not problem.opening or problem.kind == "programs":
        return f"{code}\n"
    if defines(code, problem.entry):
        # What the row defines above (imports, helpers) stays; its unfinished function is defined anew.
        return f"{finished(problem.opening)}\n\n{code}\n"
    return f"{problem.opening}{'' if problem.opening.endswith(chr(10)) else chr(10)}{_indented(code)}\n"


def defines(code: str, name: str) -> bool:
    """Whether code defines a function or a class at top level."""
    return re.search(rf"^(?:async )?(?:def|class) +{re.escape(name)}\b", code, re.MULTILINE) is not None


def finished(opening: str) -> str:
    """Complete code that ends in a function head, such that it runs."""
    for end in ("", "\n    pass\n"):
        try:
            ast.parse(opening + end)
        except (SyntaxError, ValueError):
            continue
        return opening + end
    return ""


def _indented(body: str) -> str:
    first = next((line for line in body.split("\n") if line.strip()), "")
    if first[:1] in (" ", "\t"):
        return body
    return "\n".join(f"    {line}" if line.strip() else line for line in body.split("\n"))


def same_output(found: str, wanted: str, tolerance: float = 0.0) -> bool:
    """Compare two program outputs.

    Trailing white space is ignored. Lines that differ are compared word by word, numbers by value.

    Args:
        found: Actual output.
        wanted: Expected output.
        tolerance: Absolute or relative tolerance of numbers.
    """
    ours, theirs = _lines(found), _lines(wanted)
    if len(ours) != len(theirs):
        return False
    return all(one == other or _same_words(one, other, tolerance) for one, other in zip(ours, theirs, strict=True))


def same_value(found: Any, wanted: Any, tolerance: float = 0.0) -> bool:
    """Compare a returned value with an expected one from JSON: tuples equal lists, numbers compare by value."""
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
