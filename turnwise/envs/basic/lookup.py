"""Lookup environment: two dependent tool calls over a table drawn from the seed, then an exact answer."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from turnwise.envs.core import ResetResult, Solution
from turnwise.envs.solution import tool_call
from turnwise.envs.tool_env import ToolEnv
from turnwise.errors import TaskError, ToolError
from turnwise.seeding import stable_hash
from turnwise.tasks import Task
from turnwise.tasks.seeded import SPLITS, in_split
from turnwise.tools.core import function_tool
from turnwise.types import Message, text_of

NAMES = (  # noqa: SIM905
    "ana ben cleo dan eva finn gus hana ivan jane kai lea mia "
    "noah olga paul quinn rosa sam tara umar vera will xena yuri zoe"
).split()
TEAMS = "amber birch cobalt dune ember fjord grove heron iris jade kelp lotus".split()  # noqa: SIM905


@dataclass(frozen=True, slots=True)
class Table:
    """Hidden data and question of an episode."""

    person: str
    teams: dict[str, str]
    managers: dict[str, str]

    @property
    def answer(self) -> str:
        """The person's manager."""
        return self.managers[self.teams[self.person]]


def table(seed: int, *, person: str | None = None, split: str = "train") -> Table:
    """Draw the table of an episode; about a quarter of all tables are ``test``."""
    if split not in SPLITS or person not in (None, *NAMES):
        raise TaskError(f"lookup has no person={person!r} or no split={split!r}: people {NAMES}, splits {SPLITS}")
    rng = random.Random(stable_hash("lookup", seed))
    asked_person = person or rng.choice(NAMES)
    while True:
        teams = {name: rng.choice(TEAMS) for name in NAMES}
        managers = {team: rng.choice(NAMES) for team in TEAMS}
        if in_split(split, *teams.values(), *managers.values()):
            return Table(asked_person, teams, managers)


class LookupEnv(ToolEnv):
    """Asks for a person's manager: look up the team, then the team's manager."""

    score_range: ClassVar[tuple[float, float]] = (0.0, 1.0)
    default_tasks: ClassVar[str] = "turnwise.envs.basic.lookup:tasks"

    def reset(self, task: Task | None = None, *, seed: int | None = None) -> ResetResult:
        """Draw a table from the seed; the task may name the person and the split."""
        data = {} if task is None else task.data
        seed = random.getrandbits(63) if seed is None else seed
        self.table = table(seed, person=data.get("person"), split=data.get("split", "train"))
        return f"Who manages {self.table.person}?", {}

    @function_tool(inline=True)
    def team_of(self, person: str) -> str:
        """The team of a person."""
        if person not in self.table.teams:
            raise ToolError(f"there is no person {person!r}")
        return self.table.teams[person]

    @function_tool(inline=True)
    def manager_of(self, team: str) -> str:
        """The manager of a team."""
        if team not in self.table.managers:
            raise ToolError(f"there is no team {team!r}")
        return self.table.managers[team]

    def score(self, final: Message | None) -> float:
        """1 for exactly the manager's name, else 0."""
        return float(final is not None and text_of(final).strip() == self.table.answer)

    def solve(self) -> Solution:
        """Look the team up, then its manager."""
        (team,) = yield tool_call("team_of", person=self.table.person)
        (manager,) = yield tool_call("manager_of", team=text_of(team))
        yield text_of(manager)


def tasks(n: int = 200, *, split: str = "train", seed: int = 0) -> Iterator[Task]:
    """Yield ``n`` questions of a split; their tables are drawn at reset."""
    for index in range(n):
        person = NAMES[stable_hash("lookup", split, seed, index) % len(NAMES)]
        data = {"person": person, "split": split}
        yield Task(f"lookup-{split}-{seed}-{index}", f"Who manages {person}?", data)
