"""From what a model writes to a program."""

from __future__ import annotations

import ast
import math
import re
from decimal import Decimal, InvalidOperation
from typing import Any, Final

from turnwise.envs.library.code.problems import Problem

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
    """Return the code of an answer: its last fenced block of Python, or all of it where no block is fenced.

    A block whose end is missing (an answer that was cut off) counts to the end of the text.
    """
    blocks = [(match[2].lower(), match[3]) for match in _FENCE.finditer(text)]
    if not blocks:
        return text.strip("\n") if "```" not in text else ""
    python = [code for language, code in blocks if language in _PYTHON]
    return (python or [""])[-1].strip("\n")


def program_of(problem: Problem, code: str) -> str:
    """Return what is run for an answer's code; empty where there is none.

    A row that begins a function (as HumanEval's do) may be answered by the whole function, or by what goes on from its
    docstring.
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
    """Whether code defines a function or a class at its top level."""
    return re.search(rf"^(?:async )?(?:def|class) +{re.escape(name)}\b", code, re.MULTILINE) is not None


def finished(opening: str) -> str:
    """Return code that ends with the beginning of a function such that it can be run."""
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
