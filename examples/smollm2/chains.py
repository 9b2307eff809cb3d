"""Chains of operations that read from left to right, and demonstrations of a single operation.

In a chain of ``calculator`` each operation works on the result so far: "Take 5, plus 3, then times 2" is (5 + 3) * 2.
Where no multiplication follows an addition or subtraction, the chain written down as it is said ("5 * 3 + 2") has the
same value without brackets: it *reads from left to right*. One call is then enough, and a model that was shown single
operations sometimes writes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

from turnwise.envs.demonstrations import conversation
from turnwise.envs.solution import tool_call
from turnwise.errors import TaskError
from turnwise.ext.environments.calculator import CalculatorEnv, Problem, problem
from turnwise.ext.environments.calculator import tasks as calculator_tasks
from turnwise.seeding import stable_hash
from turnwise.tasks import Task
from turnwise.types import ToolCall

KINDS = ("plain", "brackets", "both")


def reads_left_to_right(chain: Problem) -> bool:
    """Return whether no multiplication stands behind an addition or a subtraction."""
    signs = "".join(sign for sign, _ in chain.steps)
    return "*" not in signs.lstrip("*")


def tasks(
    n: int = 200, *, split: str = "train", seed: int = 0, operations: int = 3, kind: str = "plain"
) -> Iterator[Task]:
    """Yield ``n`` problems of a split.

    ``plain`` ones read from left to right, those of kind ``brackets`` do not, and ``both`` are as they are drawn.
    """
    if kind not in KINDS:
        raise TaskError(f"chains.tasks: kind is {kind!r}: it must be one of {', '.join(KINDS)}")
    count = index = 0
    while count < n:
        chain = problem(stable_hash("smollm2", split, seed, index), operations=operations, split=split)
        index += 1
        if kind == "both" or reads_left_to_right(chain) == (kind == "plain"):
            count += 1
            yield Task(f"chain-{split}-{seed}-{index}", chain.question, chain.to_data())


def plan(env: CalculatorEnv) -> list[ToolCall | str]:
    """Return the right moves of an episode of one operation: a call, then its result."""
    ((sign, number),) = env.problem.steps
    return [tool_call("calculate", expression=f"{env.problem.start} {sign} {number}"), str(env.problem.answer)]


def whole_plan(env: CalculatorEnv) -> list[ToolCall | str]:
    """Return the right moves of an episode of two operations: one call, with brackets where they matter, its result."""
    (first, by), (second, to) = env.problem.steps
    start = f"{env.problem.start} {first} {by}"
    inner = start if reads_left_to_right(env.problem) else f"({start})"
    return [tool_call("calculate", expression=f"{inner} {second} {to}"), str(env.problem.answer)]


async def demonstrations(count: int, seed: int) -> list[dict[str, Any]]:
    """Play problems of one operation in the environment; return the conversations in OpenAI's form."""
    problems = calculator_tasks(count, split="train", seed=seed, operations=1)
    return [await conversation(CalculatorEnv(), task, number, plan) for number, task in enumerate(problems)]


async def bracketed_demonstrations(count: int, seed: int) -> list[dict[str, Any]]:
    """Play problems of two operations, of which every other one needs brackets; return the conversations."""
    with_brackets = tasks(count - count // 2, seed=seed, operations=2, kind="brackets")
    without = tasks(count // 2, seed=seed, operations=2)
    problems = [task for pair in zip_longest(with_brackets, without) for task in pair if task is not None]
    return [await conversation(CalculatorEnv(), task, number, whole_plan) for number, task in enumerate(problems)]
