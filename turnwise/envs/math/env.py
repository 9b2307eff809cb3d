r"""Word problems with a calculator.

Owns: :class:`MathEnv`, and which rule compares an answer with the right one. The row decides that alone, so a result
never depends on what is installed:

- where the right answer is a number (every row of GSM8K), numbers are compared exactly, as fractions;
- where it is anything else (``\frac{\sqrt{3}}{2}``), math-verify compares symbolically (extra ``rewards``), and an
  episode of such a row does not begin without it.
"""

from __future__ import annotations

from typing import ClassVar, Final

from turnwise.envs.core import ResetResult, Score, Solution
from turnwise.envs.math.rows import calculations
from turnwise.envs.rewards.answers import extract_answer
from turnwise.envs.rewards.core import Rubric
from turnwise.envs.rewards.numeric import Numeric, parse_number
from turnwise.envs.rewards.symbolic import Symbolic
from turnwise.envs.solution import tool_call
from turnwise.envs.tool_env import ToolEnv
from turnwise.errors import EnvError, TaskError, shown
from turnwise.tasks import Task
from turnwise.tools.arithmetic import evaluate, write_number
from turnwise.tools.core import function_tool
from turnwise.types import Message, text_of

INSTRUCTIONS: Final = (
    "Solve the problem step by step. Use the tool calculator for every calculation. When you know the result, end with "
    "a line that holds nothing but #### and the result, such as: #### 42"
)

_NUMERIC: Final = {form: Numeric(extract=form, relative=0.0) for form in ("boxed", "hash", "text")}


class MathEnv(ToolEnv):
    r"""A problem, a calculator, and an answer that is right or wrong.

    The answer is what stands in the last ``\boxed{...}`` of the last message, else behind its last ``####``, else the
    only number in it.
    """

    score_range: ClassVar[tuple[float, float]] = (0.0, 1.0)
    default_tasks: ClassVar[str] = "turnwise.envs.math:tasks"

    def __init__(self, instructions: str | None = INSTRUCTIONS) -> None:
        """Say what stands before the problem.

        Args:
            instructions: The system prompt; None for none. A task that begins with a system message keeps its own.
        """
        self.instructions = instructions

    def reset(self, task: Task | None = None, *, seed: int | None = None) -> ResetResult:  # noqa: ARG002
        """Pose the task's problem.

        Raises:
            EnvError: There is no task.
            TaskError: It does not say the right answer.
            MissingExtraError: The right answer is no number, and math-verify is not installed.
        """
        if task is None:
            raise EnvError(
                "math.reset got no task: tasks come from turnwise.envs.math:tasks, made or with ?path=FILE.jsonl"
            )
        answer = task.data.get("answer")
        if not isinstance(answer, str) or not answer.strip():
            raise TaskError(
                f"task {task.id!r}: data['answer'] is {shown(answer)}: it must be the right answer as a text"
            )
        self.row = task
        self.symbolic = None if parse_number(answer) is not None else Rubric.lone(Symbolic())
        messages = task.messages()
        if self.instructions is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self.instructions})
        return messages, {}

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
        return _NUMERIC[form](text, self.row.data)

    def solve(self) -> Solution:
        """Do the calculations that the row's solution marks, then say the answer."""
        for expression, _ in calculations(str(self.row.data.get("solution", ""))):
            yield tool_call("calculator", expression=expression)
        yield f"#### {self.row.data['answer']}"
