"""The calculator environment twice: the shipped one, and as TRL's ``environment_factory`` takes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from turnwise.ext.environments.arithmetic import evaluate, read_number, write_number
from turnwise.ext.environments.calculator import Problem, problem
from turnwise.seeding import stable_hash
from turnwise.tasks import Task
from turnwise.types import text_of

OPERATIONS = 3
ENVIRONMENT: dict[str, Any] = {"name": "calculator", "config": {"operations": OPERATIONS}}


def _problems(count: int) -> list[tuple[str, Problem]]:
    drawn = (problem(stable_hash("benchmark", index), operations=OPERATIONS) for index in range(count))
    return [(f"{index:05d}", each) for index, each in enumerate(drawn)]


def tasks(n: int) -> list[Task]:
    """Return our side's tasks."""
    return [Task(name, each.question, each.to_data()) for name, each in _problems(n)]


def rows(count: int) -> list[dict[str, Any]]:
    """Return the peer's rows."""
    return [
        {"prompt": [{"role": "user", "content": each.question}], "task": name, "answer": each.answer}
        for name, each in _problems(count)
    ]


def answers(messages: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return what each good call of a conversation was answered, by its expression."""
    found: dict[str, str] = {}
    asked: list[Mapping[str, Any]] = []
    for message in messages:
        if message["role"] == "assistant":
            asked = list(message.get("tool_calls") or ())
        elif message["role"] == "tool" and asked:
            call = asked.pop(0)
            given = call.get("function", call).get("arguments")
            answer = text_of(message)  # type: ignore[arg-type]
            if isinstance(given, Mapping) and read_number(answer) is not None:
                found[str(given.get("expression"))] = answer
    return found


class Peer:
    """The environment of TRL's side. Its public method is the tool, its docstring the schema."""

    def reset(self, **row: Any) -> None:
        self._answer = row["answer"]

    # No return annotation: it would become a part of the schema.
    def calculate(self, expression: str):  # type: ignore[no-untyped-def]
        """The value of an arithmetic expression such as 12 * 3.

        Args:
            expression: The expression.
        """
        return write_number(evaluate(expression))

    def _reward(self, completion: list[dict[str, Any]]) -> float:
        final = completion[-1]
        if final["role"] != "assistant" or final.get("tool_calls"):
            return 0.0
        return float(read_number(str(final.get("content") or "")) == self._answer)
