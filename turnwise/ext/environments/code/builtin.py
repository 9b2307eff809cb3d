"""Built-in programming problems, each as a row of four formats."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from turnwise.errors import TaskError, shown
from turnwise.ext.environments.code.formats import row
from turnwise.tasks import Task

FORMATS: Final = ("humaneval", "mbpp", "functional", "stdin")


@dataclass(frozen=True, slots=True)
class BuiltinProblem:
    """A problem with its reference body and its test cases."""

    name: str
    parameters: str
    text: str
    body: str
    cases: tuple[tuple[tuple[Any, ...], Any], ...]
    top: str = ""


BUILTIN_PROBLEMS: Final = (
    BuiltinProblem(
        "merge_runs",
        "text: str",
        "Shorten every run of one letter in a text to the letter and the length of the run, where that is at least 3.",
        "out = []\nfor letter, run in groupby(text):\n    size = len(list(run))\n"
        "    out.append(letter + str(size) if size > 2 else letter * size)\nreturn ''.join(out)",
        ((("aaabb",), "a3bb"), (("",), ""), (("abc",), "abc"), (("zzzzzzzzzzzz",), "z12"), (("aabbbaa",), "aab3aa")),
        "from itertools import groupby",
    ),
    BuiltinProblem(
        "first_gap",
        "numbers: list",
        "Return the smallest positive integer that is not in a list.",
        "held = set(numbers)\nfound = 1\nwhile found in held:\n    found += 1\nreturn found",
        ((([1, 2, 4],), 3), (([],), 1), (([3, 2, 1],), 4), (([-5, 0, 2],), 1), (([1, 1, 1],), 2)),
    ),
    BuiltinProblem(
        "rotate_rows",
        "grid: list, steps: int",
        "Return a grid whose every row is shifted right by a number of steps; what leaves it comes in on the left.",
        "if not grid or not grid[0]:\n    return grid\nsteps %= len(grid[0])\n"
        "return [row[-steps:] + row[:-steps] if steps else list(row) for row in grid]",
        (
            (([[1, 2, 3], [4, 5, 6]], 1), [[3, 1, 2], [6, 4, 5]]),
            (([[1, 2]], 2), [[1, 2]]),
            (([], 3), []),
            (([[1, 2, 3]], -1), [[2, 3, 1]]),
            (([[7], [8]], 5), [[7], [8]]),
        ),
    ),
    BuiltinProblem(
        "balanced",
        "text: str",
        "Say whether the round, square and curly brackets of a text open and close each other in order.",
        "waiting = []\nfor letter in text:\n    if letter in PAIRS.values():\n        waiting.append(letter)\n"
        "    elif letter in PAIRS and (not waiting or waiting.pop() != PAIRS[letter]):\n        return False\n"
        "return not waiting",
        (
            (("(a[b]{c})",), True),
            (("(]",), False),
            (("",), True),
            (("((",), False),
            (("}{",), False),
            (("[()]x",), True),
        ),
        "PAIRS = {')': '(', ']': '[', '}': '{'}",
    ),
    BuiltinProblem(
        "digit_sum_until",
        "number: int",
        "Add the digits of a number that is not negative, then those of the sum, until one digit is left.",
        "while number > 9:\n    number = sum(map(int, str(number)))\nreturn number",
        (((38,), 2), ((0,), 0), ((9,), 9), ((987654321,), 9), ((10**30 + 7,), 8)),
    ),
    BuiltinProblem(
        "common_prefix",
        "words: list",
        "Return the longest text with which all words of a list begin; the empty text where there are no words.",
        "if not words:\n    return ''\nlow, high = min(words), max(words)\nsize = 0\n"
        "while size < len(low) and low[size] == high[size]:\n    size += 1\nreturn low[:size]",
        (
            ((["flow", "flower", "flood"],), "flo"),
            ((["a", "b"],), ""),
            (([],), ""),
            ((["same", "same"],), "same"),
            ((["", "x"],), ""),
        ),
    ),
    BuiltinProblem(
        "collatz_steps",
        "start: int",
        "Count the steps from a positive number to 1, where an even number is halved and an odd one tripled plus one.",
        "steps = 0\nwhile start != 1:\n    start = start // 2 if start % 2 == 0 else 3 * start + 1\n    steps += 1\n"
        "return steps",
        (((6,), 8), ((1,), 0), ((27,), 111), ((2,), 1), ((97,), 118)),
    ),
    BuiltinProblem(
        "overlaps",
        "spans: list",
        "Join spans [begin, end] that share a point, and return what is left in order of their beginnings.",
        "joined = []\nfor begin, end in sorted(spans):\n    if joined and begin <= joined[-1][1]:\n"
        "        joined[-1][1] = max(joined[-1][1], end)\n    else:\n        joined.append([begin, end])\n"
        "return joined",
        (
            (([[1, 3], [2, 6], [8, 9]],), [[1, 6], [8, 9]]),
            (([[1, 4], [4, 5]],), [[1, 5]]),
            (([],), []),
            (([[5, 6], [1, 9]],), [[1, 9]]),
            (([[3, 4], [1, 2]],), [[1, 2], [3, 4]]),
        ),
    ),
    BuiltinProblem(
        "mean_of_middle",
        "numbers: list",
        "Return the mean of a list without its smallest and its largest number; 0.0 where fewer than three are there.",
        "if len(numbers) < 3:\n    return 0.0\nreturn sum(sorted(numbers)[1:-1]) / (len(numbers) - 2)",
        (
            (([1, 2, 9],), 2.0),
            (([4, 4],), 0.0),
            (([1, 2, 3, 4],), 2.5),
            (([-3, -3, -3],), -3.0),
            (([10, 0, 5, 5],), 5.0),
        ),
    ),
    BuiltinProblem(
        "word_counts",
        "text: str",
        "Count how often each word of a text stands in it, regardless of case. Words are parted by white space.",
        "found = {}\nfor word in text.lower().split():\n    found[word] = found.get(word, 0) + 1\nreturn found",
        (
            (("a b A",), {"a": 2, "b": 1}),
            (("",), {}),
            (("One  one\nONE",), {"one": 3}),
            (("x y z",), {"x": 1, "y": 1, "z": 1}),
        ),
    ),
    BuiltinProblem(
        "is_prime_gap",
        "low: int, high: int",
        "Say whether two numbers are primes between which there is no other prime.",
        "if low >= high or not prime(low) or not prime(high):\n    return False\n"
        "return not any(prime(number) for number in range(low + 1, high))",
        (((7, 11), True), ((7, 13), False), ((2, 3), True), ((9, 11), False), ((11, 7), False), ((113, 127), True)),
        "def prime(number):\n    return number > 1 and all(number % part for part in range(2, int(number**0.5) + 1))",
    ),
    BuiltinProblem(
        "spiral",
        "size: int",
        "Return the numbers from 1 in a square of a given size, written in a spiral from the top left, clockwise.",
        "grid = [[0] * size for _ in range(size)]\nrow, column, down, right = 0, 0, 0, 1\n"
        "for number in range(1, size * size + 1):\n    grid[row][column] = number\n"
        "    if grid[(row + down) % size][(column + right) % size]:\n        down, right = right, -down\n"
        "    row, column = row + down, column + right\nreturn grid",
        (
            ((2,), [[1, 2], [4, 3]]),
            ((1,), [[1]]),
            ((3,), [[1, 2, 3], [8, 9, 4], [7, 6, 5]]),
            ((0,), []),
            ((4,), [[1, 2, 3, 4], [12, 13, 14, 5], [11, 16, 15, 6], [10, 9, 8, 7]]),
        ),
    ),
)


def tasks(n: int | None = None, *, format: str | None = None) -> Iterator[Task]:  # noqa: A002 - the user's word for it
    """Yield the built-in problems, in every format or in one.

    Args:
        n: Most tasks.
        format: ``humaneval``, ``mbpp``, ``functional`` or ``stdin``; None: each problem in all of them.
    """
    if format is not None and format not in FORMATS:
        raise TaskError(f"code has no format {shown(format)}: it has {', '.join(FORMATS)}")
    formats = FORMATS if format is None else (format,)
    pairs = [(problem, form) for problem in BUILTIN_PROBLEMS for form in formats]
    for problem, form in pairs[:n]:
        yield _task(problem, form)


def task_from_seed(seed: int | None) -> Task:
    """Return a built-in task chosen by the seed; a random one for None."""
    number = random.getrandbits(32) if seed is None else seed
    rank, index = divmod(number, len(BUILTIN_PROBLEMS))
    problem, form = BUILTIN_PROBLEMS[index], FORMATS[rank % len(FORMATS)]
    return _task(problem, form)


def rows(form: str) -> list[dict[str, Any]]:
    """Return the problems as rows of a dataset format."""
    write = {"humaneval": _humaneval, "mbpp": _mbpp, "functional": _functional, "stdin": _stdin}[form]
    return [write(problem) for problem in BUILTIN_PROBLEMS]


def _task(problem: BuiltinProblem, form: str) -> Task:
    record = rows(form)[BUILTIN_PROBLEMS.index(problem)]
    return Task.from_record({**row(record), "id": f"code-{form}-{problem.name}"})


def _code(problem: BuiltinProblem, indent: str = "") -> str:
    top = f"{problem.top}\n\n\n" if problem.top else ""
    return f"{top}def {problem.name}({problem.parameters}):\n{_indented(problem.body)}\n".replace("\n", f"\n{indent}")


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.split("\n"))


def _humaneval(problem: BuiltinProblem) -> dict[str, Any]:
    arguments, expected = problem.cases[0]
    example = f">>> {problem.name}({', '.join(map(repr, arguments))})\n    {expected!r}"
    top = f"{problem.top}\n\n\n" if problem.top else ""
    checks = "\n".join(f"assert candidate(*{inputs!r}) == {expected!r}" for inputs, expected in problem.cases)
    return {
        "task_id": f"Made/{problem.name}",
        "prompt": f'{top}def {problem.name}({problem.parameters}):\n    """{problem.text}\n\n    {example}\n    """\n',
        "entry_point": problem.name,
        "canonical_solution": f"{_indented(problem.body)}\n",
        "test": f"def check(candidate):\n{_indented(checks)}\n",
    }


def _mbpp(problem: BuiltinProblem) -> dict[str, Any]:
    tests = [
        f"assert {problem.name}({', '.join(map(repr, arguments))}) == {expected!r}"
        for arguments, expected in problem.cases
    ]
    return {
        "task_id": problem.name,
        "text": f"Write a function {problem.name}({problem.parameters}). {problem.text}",
        "code": _code(problem),
        "test_list": tests[:2],
        "test_setup_code": "",
        "challenge_test_list": tests[2:],
    }


def _tests(problem: BuiltinProblem, kind: str) -> tuple[str, str]:
    listed = [
        {"input": "\n".join(map(json.dumps, arguments)), "output": json.dumps(expected), "testtype": kind}
        for arguments, expected in problem.cases
    ]
    return json.dumps(listed[:2]), json.dumps(listed[2:])


def _functional(problem: BuiltinProblem) -> dict[str, Any]:
    shown_tests, hidden = _tests(problem, "functional")
    names = ", ".join(["self", problem.parameters])
    body = _indented(_indented(problem.body))
    top = f"{problem.top}\n\n\n" if problem.top else ""
    return {
        "question_id": problem.name,
        "question_content": problem.text,
        "starter_code": f"class Solution:\n    def {problem.name}({names}):\n",
        "public_test_cases": shown_tests,
        "private_test_cases": hidden,
        "metadata": json.dumps({"func_name": problem.name}),
        "code": f"{top}class Solution:\n    def {problem.name}({names}):\n{body}\n",
    }


def _stdin(problem: BuiltinProblem) -> dict[str, Any]:
    shown_tests, hidden = _tests(problem, "stdin")
    count = len(problem.cases[0][0])
    call = f"print(json.dumps({problem.name}(*[json.loads(input()) for _ in range({count})])))"
    return {
        "question_id": problem.name,
        "question_content": (
            f"{problem.text} Each argument ({problem.parameters}) is a line of JSON, and so is the result."
        ),
        "starter_code": "",
        "public_test_cases": shown_tests,
        "private_test_cases": hidden,
        "metadata": "{}",
        "code": f"import json\n\n\n{_code(problem)}\n\n{call}\n",
    }
