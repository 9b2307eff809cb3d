"""Demonstrations of lookups: seven of eight ask for a person's team or for a team's manager, which is one call.

``lookup`` asks for a person's manager, which takes both tools, one after the other: what the first says is the argument
of the second. One of eight demonstrations shows that. Without it the warm-started model never does it, and what is
never sampled cannot be rewarded.
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

BOTH_CALLS = 8
"""One of so many demonstrations asks for a person's manager."""


class PartOfLookup(LookupEnv):
    """Asks what the task says: for a person's team, for the manager of a team, or for a person's manager."""

    def reset(self, task: Task | None = None, *, seed: int | None = None) -> ResetResult:
        """Draw a table from the seed, and ask one question of it."""
        question, info = super().reset(task, seed=seed)
        self.asks, self.team = ("both", None) if task is None else (task.data["asks"], task.data["team"])
        if self.asks == "team":
            question = f"Which team is {self.table.person} in?"
        elif self.asks == "manager":
            question = f"Who manages team {self.team}?"
        return question, info


def questions(count: int, seed: int) -> Iterator[Task]:
    """Yield questions of the three kinds."""
    for number, task in enumerate(lookup_tasks(count, split="train", seed=seed)):
        asks = "both" if number % BOTH_CALLS == 0 else "team" if number % 2 else "manager"
        team = TEAMS[stable_hash("team", seed, number) % len(TEAMS)]
        yield Task(task.id, task.prompt, task.data | {"asks": asks, "team": team})


def plan(env: PartOfLookup) -> list[ToolCall | str]:
    """Return the right moves of an episode: one call or two, then what the last one says."""
    table = env.table
    team = table.teams[table.person]
    first = tool_call("team_of", person=table.person)
    if env.asks == "team":
        return [first, team]
    if env.asks == "manager":
        return [tool_call("manager_of", team=env.team), table.managers[str(env.team)]]
    return [first, tool_call("manager_of", team=team), table.answer]


async def demonstrations(count: int, seed: int) -> list[dict[str, Any]]:
    """Play questions in the environment; return the conversations in OpenAI's form."""
    rng = random.Random(seed)
    return [await conversation(PartOfLookup(), task, rng.getrandbits(62), plan) for task in questions(count, seed)]
