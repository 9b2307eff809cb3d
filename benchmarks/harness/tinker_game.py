"""The episodes of ``tinker_overhead``: turns of a fixed length, rewards that no sample changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from turnwise.envs.single_turn import SingleTurnEnv
from turnwise.tasks import Task
from turnwise.types import Message

ENVIRONMENT: dict[str, Any] = {"name": f"{__file__}:Stories"}
_ANIMALS = ("fox", "hen", "owl", "cat", "bee", "cow", "ant", "elk")
_ends: Counter[str] = Counter()


def question(index: int) -> str:
    """Return the prompt of a task."""
    return f"Tell me a story of {index + 10} sentences about a {_ANIMALS[index % len(_ANIMALS)]} that lost its way."


def reward(number: int) -> float:
    """Return the reward of an episode by its number within its group: half of a group earns 1, half 0."""
    return float(number % 2)


def tasks(n: int) -> list[Task]:
    """Return the tasks of ``turnwise train``."""
    return [Task(f"{index:05d}", question(index)) for index in range(n)]


def answers(messages: Sequence[Mapping[str, Any]]) -> dict[str, str]:  # noqa: ARG001 - there are no tools
    """Return what tools answered: nothing."""
    return {}


class Stories(SingleTurnEnv):
    """Rewards every other episode of a task that ends."""

    async def score(self, final: Message | None) -> float:  # noqa: ARG002 - both sides must have equal advantages
        """Return the reward of the task's next episode."""
        name = self.task.id
        _ends[name] += 1
        return reward(_ends[name])
