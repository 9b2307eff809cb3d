"""From what a model writes to a program.

Owns: :func:`code_of` and :func:`program_of`. Refuses: mending code.
"""

from __future__ import annotations

import ast
import re
from typing import Final

from turnwise.envs.code.problems import Problem

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
