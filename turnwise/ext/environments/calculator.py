"""Calculator environment: a chain of arithmetic operations, one tool call each."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from turnwise.envs.core import ResetResult, Solution
from turnwise.envs.solution import tool_call
from turnwise.envs.tool_env import ToolEnv
from turnwise.errors import EnvError, TaskError, shown
from turnwise.ext.environments.arithmetic import evaluate, read_number, write_number
from turnwise.seeding import stable_hash
from turnwise.tasks import Task
from turnwise.tasks.seeded import check_split, in_split
from turnwise.tools.core import function_tool
from turnwise.types import Message, text_of

WORDS = {"+": "plus", "-": "minus", "*": "times"}


@dataclass(frozen=True, slots=True)
class Problem:
    """A start number and a chain of operations."""

    start: int
    steps: tuple[tuple[str, int], ...]

    @property
    def question(self) -> str:
        """The problem in words."""
        operations = ", then ".join(f"{WORDS[sign]} {number}" for sign, number in self.steps)
        return f"Take {self.start}, {operations}. What is the result?"

    @property
    def results(self) -> list[int]:
        """The result of each operation."""
        values = [self.start]
        for sign, number in self.steps:
            value = values[-1]
            values.append(value + number if sign == "+" else value - number if sign == "-" else value * number)
        return values[1:]

    @property
    def answer(self) -> int:
        """The last result."""
        return self.results[-1]

    def to_data(self) -> dict[str, Any]:
        """Return the task data."""
        return {"start": self.start, "steps": [list(step) for step in self.steps]}

    @classmethod
    def from_data(cls, data: Mapping[str, Any], where: str) -> Problem:
        """Parse task data. Raises TaskError."""
        start: Any = data.get("start")
        steps: Any = data.get("steps")
        fits = type(start) is int and isinstance(steps, Sequence) and len(steps) > 0
        if not fits or not all(_is_step(step) for step in steps):
            raise TaskError(
                f"{where}: data is {shown(dict(data))}: calculator reads a whole number 'start' and 'steps' such "
                f'as [["*", 7], ["-", 5]], with the signs {" ".join(WORDS)}'
            )
        return cls(start, tuple((sign, number) for sign, number in steps))


def _is_step(step: Any) -> bool:
    if not isinstance(step, Sequence) or isinstance(step, str) or len(step) != 2:
        return False
    return step[0] in WORDS and type(step[1]) is int


def problem(seed: int, *, operations: int = 2, largest: int = 99, split: str = "train") -> Problem:
    """Draw a problem; about a quarter of all are ``test``.

    No result is negative, or above 50 times the largest number.
    """
    check_split("calculator", split)
    rng = random.Random(stable_hash("calculator", seed))
    while True:
        candidate = Problem(rng.randint(2, largest), ())
        while len(candidate.steps) < operations:
            longer = Problem(candidate.start, (*candidate.steps, (rng.choice(list(WORDS)), rng.randint(2, largest))))
            if 0 <= longer.answer <= 50 * largest:
                candidate = longer
        if in_split(split, candidate.question):
            return candidate


class CalculatorEnv(ToolEnv):
    """Asks for the result of a chain of operations; one call computes one of them."""

    score_range: ClassVar[tuple[float, float]] = (0.0, 1.0)
    default_tasks: ClassVar[str] = "turnwise.ext.environments.calculator:tasks"

    def __init__(self, operations: int = 2, largest: int = 99) -> None:
        """Set the difficulty of problems drawn without a task."""
        _check(EnvError, operations, largest)
        self.operations, self.largest = operations, largest

    def reset(self, task: Task | None = None, *, seed: int | None = None) -> ResetResult:
        """Ask the task's problem, or one drawn from the seed."""
        if task is None:
            seed = random.getrandbits(63) if seed is None else seed
            self.problem = problem(seed, operations=self.operations, largest=self.largest)
        else:
            self.problem = Problem.from_data(task.data, f"task {task.id!r}")
        return self.problem.question, {}

    @function_tool(inline=True)
    def calculate(self, expression: str) -> str:
        """The value of an arithmetic expression such as 12 * 3."""
        return write_number(evaluate(expression))

    def score(self, final: Message | None) -> float:
        """1 for the right number and nothing else, else 0."""
        return float(final is not None and read_number(text_of(final)) == self.problem.answer)

    def solve(self) -> Solution:
        """Compute one operation after the other."""
        value = str(self.problem.start)
        for sign, number in self.problem.steps:
            (answer,) = yield tool_call("calculate", expression=f"{value} {sign} {number}")
            value = text_of(answer)
        yield value


def _check(error: type[EnvError | TaskError], operations: Any, largest: Any) -> None:
    for name, value, minimum in (("operations", operations, 1), ("largest", largest, 5)):
        if type(value) is not int or value < minimum:
            raise error(f"calculator: {name} is {shown(value)}: it must be a whole number of at least {minimum}")


def tasks(
    n: int = 200, *, split: str = "train", seed: int = 0, operations: int = 2, largest: int = 99
) -> Iterator[Task]:
    """Yield ``n`` problems of a split."""
    _check(TaskError, operations, largest)
    for index in range(n):
        drawn_problem = problem(stable_hash(split, seed, index), operations=operations, largest=largest, split=split)
        yield Task(f"calculator-{split}-{seed}-{index}", drawn_problem.question, drawn_problem.to_data())
