"""The lookup environment twice: as ours and as TRL's ``environment_factory`` takes it.

Both offer the same tools with the same schemas in the same order (TRL sorts by name), answer with the same texts, and
score alike. The table of an episode is drawn from the same seed on both sides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from turnwise.envs.basic.lookup import NAMES, TEAMS, Table, table
from turnwise.envs.core import ResetResult
from turnwise.envs.tool_env import ToolEnv
from turnwise.errors import ToolError
from turnwise.seeding import stable_hash
from turnwise.tasks import Task
from turnwise.tools.core import function_tool
from turnwise.types import Message, text_of


def _schema(name: str, description: str, parameter: str, text: str) -> dict[str, Any]:
    # Word for word what transformers.utils.get_json_schema makes of the methods of Peer below: the prompt holds
    # it, and the prompts of both sides have to be the same ids.
    properties = {parameter: {"type": "string", "description": text}}
    parameters = {"type": "object", "properties": properties, "required": [parameter]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


MANAGER_OF = _schema("manager_of", "The manager of a team.", "team", "The team's name.")
TEAM_OF = _schema("team_of", "The team of a person.", "person", "The person's name.")
TOOLS = [MANAGER_OF, TEAM_OF]


ENVIRONMENT: dict[str, Any] = {"name": f"{Path(__file__)}:OurLookup"}


def question(person: str) -> str:
    """Return what the user asks."""
    return f"Who manages {person}?"


def people(count: int) -> list[str]:
    """Return who is asked about in each task, in order."""
    return [NAMES[stable_hash("benchmark", index) % len(NAMES)] for index in range(count)]


def task_id(index: int) -> str:
    """Return the name of a task; names sort as tasks are trained."""
    return f"{index:05d}"


def tasks(n: int) -> list[Task]:
    """Return our side's tasks."""
    return [Task(task_id(index), question(person), {"person": person}) for index, person in enumerate(people(n))]


def rows(count: int) -> list[dict[str, Any]]:
    """Return the peer's rows."""
    return [
        {"prompt": [{"role": "user", "content": question(person)}], "task": task_id(index), "person": person}
        for index, person in enumerate(people(count))
    ]


def reset_seed(task_id: str) -> int:
    """Return the seed with which our side resets the members of a group: run seed 0, first epoch."""
    return stable_hash("reset", 0, task_id, 0)


def answers(messages: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return what each good call of a conversation was answered, by the call. Both sides have to know the same."""
    found: dict[str, str] = {}
    asked: list[Mapping[str, Any]] = []
    for message in messages:
        if message["role"] == "assistant":
            asked = list(message.get("tool_calls") or ())
        elif message["role"] == "tool" and asked:
            call = asked.pop(0)
            function = call.get("function", call)
            if message["content"] in {*NAMES, *TEAMS}:
                found[f"{function['name']} {sorted(function['arguments'].items())}"] = message["content"]
    return found


class OurLookup(ToolEnv):
    """The environment of our side."""

    def reset(self, task: Task | None = None, *, seed: int | None = None) -> ResetResult:
        if task is None or seed is None:
            raise ValueError("this environment takes a task and a seed")
        self.table = table(seed, person=task.data["person"])
        return question(self.table.person), {}

    @function_tool(inline=True, schema=MANAGER_OF)
    def manager_of(self, team: str) -> str:
        return _manager_of(self.table, team)

    @function_tool(inline=True, schema=TEAM_OF)
    def team_of(self, person: str) -> str:
        return _team_of(self.table, person)

    def score(self, final: Message | None) -> float:
        return _reward(self.table, None if final is None else text_of(final))


class Peer:
    """The environment of TRL's side. Its public methods are the tools, their docstrings the schemas."""

    def reset(self, **row: Any) -> None:
        self._table = table(reset_seed(row["task"]), person=row["person"])

    # No return annotation: it would become a part of the schema.
    def manager_of(self, team: str):  # type: ignore[no-untyped-def]
        """The manager of a team.

        Args:
            team: The team's name.
        """
        return _manager_of(self._table, team)

    def team_of(self, person: str):  # type: ignore[no-untyped-def]
        """The team of a person.

        Args:
            person: The person's name.
        """
        return _team_of(self._table, person)

    def _reward(self, completion: list[dict[str, Any]]) -> float:
        final = completion[-1]
        said = final["role"] == "assistant" and not final.get("tool_calls")
        return _reward(self._table, final.get("content") if said else None)


def _team_of(hidden: Table, person: str) -> str:
    if person not in hidden.teams:
        raise ToolError(f"there is no person {person!r}")
    return hidden.teams[person]


def _manager_of(hidden: Table, team: str) -> str:
    if team not in hidden.managers:
        raise ToolError(f"there is no team {team!r}")
    return hidden.managers[team]


def _reward(hidden: Table, answer: str | None) -> float:
    return float(answer is not None and answer.strip() == hidden.answer)
