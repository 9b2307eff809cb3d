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

# Names that solutions use without importing them: the sites of such problems provide them.
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
        # What the row defines above (imports, helpers) stays; the answer redefines its unfinished function.
        return f"{complete_head(problem.opening)}\n\n{code}\n"
    return f"{problem.opening}{'' if problem.opening.endswith(chr(10)) else chr(10)}{_indented(code)}\n"


def defines(code: str, name: str) -> bool:
    """Whether code defines a function or a class at top level."""
    return re.search(rf"^(?:async )?(?:def|class) +{re.escape(name)}\b", code, re.MULTILINE) is not None


def complete_head(opening: str) -> str:
    """Return code that ends in a function head with a body added, so that it runs; empty where it cannot."""
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


def same_output(output: str, expected: str, tolerance: float = 0.0) -> bool:
    """Compare two program outputs.

    Trailing white space is ignored. Lines that differ are compared word by word, numbers by value.

    Args:
        output: Actual output.
        expected: Expected output.
        tolerance: Absolute or relative tolerance of numbers.
    """
    ours, theirs = _lines(output), _lines(expected)
    if len(ours) != len(theirs):
        return False
    return all(one == other or _same_words(one, other, tolerance) for one, other in zip(ours, theirs, strict=True))


def same_value(returned: Any, expected: Any, tolerance: float = 0.0) -> bool:
    """Compare a returned value with an expected one from JSON: tuples equal lists, numbers compare by value."""
    if isinstance(returned, bool) or isinstance(expected, bool):
        return returned is expected
    if isinstance(returned, (int, float)) and isinstance(expected, (int, float)):
        return returned == expected or _near(returned, expected, tolerance)
    if isinstance(returned, (list, tuple)) and isinstance(expected, (list, tuple)):
        pairs = zip(returned, expected, strict=False)
        return len(returned) == len(expected) and all(same_value(one, other, tolerance) for one, other in pairs)
    if isinstance(returned, dict) and isinstance(expected, dict):
        # JSON keys are strings.
        ours = {key if isinstance(key, str) else str(key): value for key, value in returned.items()}
        theirs = {str(key): value for key, value in expected.items()}
        return ours.keys() == theirs.keys() and all(same_value(ours[key], theirs[key], tolerance) for key in ours)
    return type(returned) is type(expected) and bool(returned == expected)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.replace("\r\n", "\n").rstrip().split("\n")]


def _same_words(one: str, other: str, tolerance: float) -> bool:
    ours, theirs = one.split(), other.split()
    return len(ours) == len(theirs) and all(
        word == counterpart or _same_number(word, counterpart, tolerance)
        for word, counterpart in zip(ours, theirs, strict=True)
    )


def _same_number(one: str, other: str, tolerance: float) -> bool:
    try:
        number, expected = Decimal(one), Decimal(other)
    except InvalidOperation:
        return False
    if not (number.is_finite() and expected.is_finite()):
        return False
    return number == expected or _near(float(number), float(expected), tolerance)


def _near(number: float, expected: float, tolerance: float) -> bool:
    if not tolerance:
        return False
    try:
        return math.isclose(number, expected, rel_tol=tolerance, abs_tol=tolerance)
    except OverflowError:
        return False
