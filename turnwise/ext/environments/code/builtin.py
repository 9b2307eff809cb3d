"""Built-in programming problems, each as a row of four formats."""

from __future__ import annotations

import json
import random
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from typing import Any, Final

from turnwise.errors import TaskError, shown
from turnwise.ext.environments.code.formats import row
from turnwise.tasks import Task

FORMATS: Final = ("humaneval", "mbpp", "functional", "stdin")


@dataclass(frozen=True, slots=True)
class BuiltinProblem:
    """A problem with its reference body and its test cases.

    Attributes:
        top: Code before the function.
    """

    name: str
    parameters: str
    text: str
    body: str
    cases: tuple[tuple[tuple[Any, ...], Any], ...]
    top: str = ""


def _read_problems() -> tuple[BuiltinProblem, ...]:
    file = resources.files("turnwise.ext.environments.code") / "shipped" / "problems.toml"
    records = tomllib.loads(file.read_text("utf-8"))["problem"]
    return tuple(
        BuiltinProblem(**{**record, "cases": tuple((tuple(inputs), expected) for inputs, expected in record["cases"])})
        for record in records
    )


BUILTIN_PROBLEMS: Final = _read_problems()


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
    cases = [
        {"input": "\n".join(map(json.dumps, arguments)), "output": json.dumps(expected), "testtype": kind}
        for arguments, expected in problem.cases
    ]
    return json.dumps(cases[:2]), json.dumps(cases[2:])


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
