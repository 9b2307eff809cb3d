"""Environments for tasks without a world: agents with their own reward, and tasks with loaded tools."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from turnwise.envs.core import ResetResult, Score
from turnwise.envs.rewards.core import Rubric, as_rubric
from turnwise.envs.single_turn import SingleTurnEnv
from turnwise.envs.tool_env import ToolEnv
from turnwise.errors import EnvError
from turnwise.tasks import Task
from turnwise.types import Message, with_system


class TaskEnv(SingleTurnEnv):
    """Starts with the task's prompt; only the agent's own reward counts."""

    def __init__(self) -> None:
        super().__init__()

    async def score(self, final: Message | None) -> Score:  # noqa: ARG002 - nothing is worth anything here
        """Score nothing."""
        return {}


class TaskToolEnv(ToolEnv):
    """Starts with the task's prompt, offers the loaded tools, and scores by a function."""

    def __init__(
        self,
        scorer: Callable[..., Any] | Rubric | Mapping[str, Any] | str | None = None,
        *,
        system: str | None = None,
        tool_rewards: bool | None = None,
    ) -> None:
        """Set the scorer.

        Args:
            scorer: As for :class:`~turnwise.envs.single_turn.SingleTurnEnv`. For rewards from tools only:
            ``turnwise.envs.basic.task_env:only_tools``.
            system: A system prompt for tasks without one.
            tool_rewards: Whether rewards of tools count beside the scorer's; by default unless it is ``verl``.
        """
        if scorer is None:
            raise EnvError(
                "environment 'tool' has no scorer: give config.scorer, a reward function by "
                "name or as pkg.module:function; where only the tools give rewards, "
                "'turnwise.envs.basic.task_env:only_tools'"
            )
        self._rubric = as_rubric(scorer)
        self._system = system
        self.tool_rewards = not self._rubric.exclusive if tool_rewards is None else tool_rewards

    def reset(self, task: Task | None = None, *, seed: int | None = None) -> ResetResult:  # noqa: ARG002
        """Begin with the task's prompt."""
        if task is None:
            raise EnvError("environment 'tool' got no task: its prompt is the conversation")
        self.task = task
        return with_system(task.messages(), self._system), {}

    async def score(self, final: Message | None) -> Score:
        """Apply the scorer."""
        return await self._rubric.score(self, self.task, final)


def only_tools() -> dict[str, float]:
    """Score nothing: only the tools give rewards."""
    return {}
