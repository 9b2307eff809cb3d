"""SingleTurnEnv: a prompt, one answer, a score."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from turnwise.envs.core import Env, ResetResult, Score, ScoreParts, StepResult, score_env
from turnwise.envs.rewards.core import Rubric, as_rubric
from turnwise.errors import EnvError
from turnwise.tasks.core import Task
from turnwise.tools.response import refuse_calls
from turnwise.types import Message


class SingleTurnEnv(Env):
    """Scores the model's first message after the task's prompt.

    Subclass it and write ``score`` (the task is ``self.task``), or give a scorer.
    """

    task: Task

    def __init__(self, scorer: Callable[..., Any] | Rubric | Mapping[str, Any] | str | None = None) -> None:
        """Set the scorer.

        Args:
            scorer: A reward function, plain or async, of a number or named parts; a Rubric, or a dict of its parts; in
                configurations also a built-in name or ``pkg.module:function``. Functions declare their parameters, such
                as ``(task, final)``: see :class:`Rubric`. Not needed where a subclass writes ``score``.

        Raises:
            ConfigError: The scorer cannot be loaded or used.
            EnvError: There is no scorer, and the class writes no ``score`` either.
        """
        self._rubric = None if scorer is None else as_rubric(scorer)
        if self._rubric is None and type(self).score is SingleTurnEnv.score:
            raise EnvError(
                f"{type(self).__qualname__} has no scorer: give scorer=function (in "
                "configurations 'pkg.module:function'), or write score() in a subclass"
            )

    def reset(self, task: Task | None = None, *, seed: int | None = None) -> ResetResult:  # noqa: ARG002
        """Start with the task's prompt."""
        if task is None:
            raise EnvError(f"{type(self).__qualname__}.reset got no task: its prompt is the conversation")
        self.task = task
        return task.messages(), {}

    async def step(self, action: Message) -> StepResult:
        """Score the message; calls in it are answered by errors."""
        answers = refuse_calls(action)
        parts: ScoreParts = await score_env(self, action)
        return StepResult(answers, sum(parts.values()), True, False, parts.info())

    async def score(self, final: Message | None) -> Score:
        """Apply the scorer."""
        if self._rubric is None:
            raise EnvError(f"{type(self).__qualname__} has no scorer")
        return await self._rubric.score(self, self.task, final)
