r"""MathEnv: word problems with a calculator, compared exactly as fractions or, for other answers, by math-verify."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Final

from turnwise.envs.core import ResetResult, Score, Solution
from turnwise.envs.rewards.core import Rubric
from turnwise.envs.rewards.matching import Numeric, extract_answer, parse_number
from turnwise.envs.solution import tool_call
from turnwise.envs.tool_env import ToolEnv
from turnwise.errors import EnvError, TaskError, shown
from turnwise.ext.environments.arithmetic import evaluate, write_number
from turnwise.ext.environments.math.generated import generated_rows
from turnwise.ext.environments.math.symbolic import Symbolic
from turnwise.tasks import SourceConfig, Task, iter_tasks
from turnwise.tools.core import function_tool
from turnwise.types import Message, text_of, with_system

_CALCULATION: Final = re.compile(r"<<([^<>=]+)=([^<>=]*)>>")
_MARK: Final = "####"


def tasks(
    n: int | None = None, *, path: str | Path | None = None, split: str | None = None, seed: int = 0
) -> Iterator[Task]:
    """Yield word problems.

    Args:
        n: Most tasks; by default all of a file, or 200 generated ones.
        path: A jsonl file with the columns ``question`` and ``answer``, or a directory that holds ``<split>.jsonl``.
            None generates problems.
        split: ``train`` (default) or ``test``, where ``path`` is not a file.
        seed: Seed of generated problems.
    """
    if path is not None:
        file = _file(Path(path).expanduser(), split)
        source = SourceConfig(source=str(file), name=file.stem, map="turnwise.ext.environments.math:row")
        yield from itertools.islice(iter_tasks(source), n)
        return
    split_name = split or "train"
    for index, (question, solution) in enumerate(generated_rows(200 if n is None else n, split=split_name, seed=seed)):
        record = row({"question": question, "answer": solution})
        yield Task.from_record(record, default_id=f"math-{split_name}-{seed}-{index}")


def row(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the task columns of a GSM8K row: the target of ``map: turnwise.ext.environments.math:row``.

    Args:
        record: ``question``, and ``answer``: the solution with its result after ``####``, or the result alone.
    """
    question, solution = _column(record, "question"), _column(record, "answer")
    result = solution.rpartition(_MARK)[2].strip()
    if not result or (_MARK not in solution and "\n" in result):
        raise TaskError(
            f"column 'answer' is {shown(solution)}, which has no result: end it with a line '{_MARK} 42', or "
            "write the result alone"
        )
    return {"id": record.get("id"), "prompt": question, "answer": result, "solution": solution}


def competition_row(record: Mapping[str, Any]) -> dict[str, Any]:
    r"""Return the task columns of a row of MATH or MATH-500: the target of ``format: math``.

    Args:
        record: ``problem``, ``solution``, whose last ``\boxed{...}`` is the result, and perhaps ``answer``, the result
            alone; also ``level``, ``type`` or ``subject``, ``unique_id``.
    """
    problem, solution = _column(record, "problem"), _column(record, "solution")
    answer_column = record.get("answer")
    answer = (
        answer_column if isinstance(answer_column, str) and answer_column.strip() else extract_answer(solution, "boxed")
    )
    if not answer:
        raise TaskError(
            f"column 'solution' is {shown(solution)}, which has no \\boxed{{...}}, and there is no column 'answer'"
        )
    details = {key: record[key] for key in ("level", "type", "subject") if record.get(key) is not None}
    return {
        "id": record.get("unique_id") or record.get("id"),
        "prompt": problem,
        "answer": answer.strip(),
        "solution": solution,
        **details,
    }


def calculations(solution: str) -> list[tuple[str, str]]:
    """Return the calculations marked in a solution as ``<<12*3=36>>``: expressions and results, in order."""
    return [(match[1].strip(), match[2].strip()) for match in _CALCULATION.finditer(solution)]


def _file(path: Path, split: str | None) -> Path:
    if path.is_dir():
        path = path / f"{split or 'train'}.jsonl"
    elif split is not None:
        raise TaskError(f"{path}: split={split!r} is for directories; name a file, or a directory with {split}.jsonl")
    if not path.is_file():
        raise TaskError(f"{path}: there is no such file: give path=FILE.jsonl with the columns 'question' and 'answer'")
    return path


def _column(record: Mapping[str, Any], name: str) -> str:
    value = record.get(name) if isinstance(record, Mapping) else None
    if value is None:
        there = ", ".join(map(repr, record)) if isinstance(record, Mapping) else shown(record)
        raise TaskError(f"column {name!r} is missing (here: {there or 'nothing'})")
    if not isinstance(value, str) or not value.strip():
        raise TaskError(f"column {name!r} is {shown(value)}: it must be a non-empty string")
    return value


INSTRUCTIONS: Final = (
    "Solve the problem step by step. Use the tool calculator for every calculation. When you know the result, end with "
    "a line that holds nothing but #### and the result, such as: #### 42"
)

_NUMERIC: Final = {form: Numeric(extract=form, relative=0.0) for form in ("boxed", "hash", "text")}


class MathEnv(ToolEnv):
    r"""A problem, a calculator, and an answer that is right or wrong.

    The answer is the last ``\boxed{...}`` of the last message, else what follows its last ``####``, else its only
    number. A percent sign is right only where the question has one, or says percent.
    """

    score_range: ClassVar[tuple[float, float]] = (0.0, 1.0)
    default_tasks: ClassVar[str] = "turnwise.ext.environments.math:tasks"

    def __init__(self, instructions: str | None = INSTRUCTIONS) -> None:
        """Set the system prompt.

        Args:
            instructions: The system prompt, or None. A task's own system message takes precedence.
        """
        self.instructions = instructions

    def reset(self, task: Task | None = None, *, seed: int | None = None) -> ResetResult:  # noqa: ARG002
        """Pose the task's problem."""
        if task is None:
            raise EnvError(
                "math.reset got no task: tasks come from turnwise.ext.environments.math:tasks, made or with "
                "?path=FILE.jsonl"
            )
        answer = task.data.get("answer")
        if not isinstance(answer, str) or not answer.strip():
            raise TaskError(
                f"task {task.id!r}: data['answer'] is {shown(answer)}: it must be the right answer as a text"
            )
        self.row = task
        self.symbolic = None if parse_number(answer) is not None else Rubric.lone(Symbolic())
        return with_system(task.messages(), self.instructions), {}

    @function_tool(inline=True)
    def calculator(self, expression: str) -> str:
        """Evaluates an arithmetic expression, such as (120 - 15%) * 3.

        Args:
            expression: Numbers, + - * / ** and parentheses. A percent sign belongs to the number before it.
        """
        return write_number(evaluate(expression))

    async def score(self, final: Message | None) -> Score:
        """1 for the right answer, else 0."""
        if self.symbolic is not None:
            return await self.symbolic.score(self, self.row, final)
        text = "" if final is None else text_of(final)
        form = next((form for form in ("boxed", "hash") if extract_answer(text, form) is not None), "text")
        question = f"{self.row.prompt} {self.row.data['answer']}".lower()
        if "%" in (extract_answer(text, form) or "") and "%" not in question and "percent" not in question:
            return 0.0
        return _NUMERIC[form](text, self.row.data)

    def solve(self) -> Solution:
        """Do the calculations that the row's solution marks, then say the answer."""
        for expression, _ in calculations(str(self.row.data.get("solution", ""))):
            yield tool_call("calculator", expression=expression)
        yield f"#### {self.row.data['answer']}"
