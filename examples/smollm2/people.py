"""Demonstrations of single lookups: the team of a person, or the manager of a team, never both.

``lookup`` asks for a person's manager, which takes both tools, one after the other: what the first says is the argument
of the second. That is what training has to find.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from turnwise.envs.core import ResetResult
from turnwise.envs.demonstrations import conversation
from turnwise.envs.library.lookup import TEAMS, LookupEnv
from turnwise.envs.library.lookup import tasks as lookup_tasks
from turnwise.envs.solution import tool_call
from turnwise.seeding import stable_hash
from turnwise.tasks import Task
from turnwise.types import ToolCall


class SingleLookup(LookupEnv):
    """Asks for a person's team, or for the manager of the team that the task names."""

    team: str | None

    def reset(self, task: Task | None = None, *, seed: int | None = None) -> ResetResult:
        """Draw a table from the seed, and ask one question of it."""
        _, info = super().reset(task, seed=seed)
        self.team = None if task is None else task.data.get("team")
        question = f"Which team is {self.table.person} in?" if self.team is None else f"Who manages team {self.team}?"
        return question, info


def single_lookups(count: int, seed: int) -> Iterator[Task]:
    """Yield questions that one call answers; every other one is about a team."""
    for number, task in enumerate(lookup_tasks(count, split="train", seed=seed)):
        if number % 2:
            team = TEAMS[stable_hash("team", seed, number) % len(TEAMS)]
            task = Task(task.id, task.prompt, task.data | {"team": team})
        yield task


def plan(env: SingleLookup) -> list[ToolCall | str]:
    """Return the right moves of an episode: a call, then what it says."""
    if env.team is None:
        return [tool_call("team_of", person=env.table.person), env.table.teams[env.table.person]]
    return [tool_call("manager_of", team=env.team), env.table.managers[env.team]]


async def demonstrations(count: int, seed: int) -> list[dict[str, Any]]:
    """Play single lookups in the environment; return the conversations in OpenAI's form."""
    rng = random.Random(seed)
    return [await conversation(SingleLookup(), task, rng.getrandbits(62), plan) for task in single_lookups(count, seed)]
