"""The environment of agents that bring their own reward.

Owns: :class:`TaskEnv`. Refuses: scoring, and tools.
"""

from __future__ import annotations

from turnwise.envs.core import Score
from turnwise.envs.single_turn import SingleTurnEnv
from turnwise.types import Message


class TaskEnv(SingleTurnEnv):
    """The task's prompt begins the conversation, and that is all: an agent that gives no reward earned none."""

    def __init__(self) -> None:
        super().__init__()

    async def score(self, final: Message | None) -> Score:  # noqa: ARG002 - nothing is worth anything here
        """Score nothing."""
        return {}
