"""Descriptions of environments: what each is, its tools and tasks, and what its episodes begin with."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from turnwise.envs.core import close_env, reset_env, schemas
from turnwise.envs.registration import EnvSpec, env_class, env_names
from turnwise.errors import TurnwiseError, shown
from turnwise.tasks.core import Task, message_record
from turnwise.tasks.reader import iter_tasks
from turnwise.tools.core import as_tool
from turnwise.types import Message, ToolSchema

MOST_TASKS = 1000
"""Tasks that are counted; a source may be endless."""


@dataclass(frozen=True, slots=True)
class EnvInfo:
    """An environment as a class, without an episode.

    Attributes:
        name: A registered name, or the reference it was asked by.
        reference: ``pkg.module:Class``.
        summary: First sentence of its docstring.
        config: Its constructor's parameters with their defaults.
        tools: Names of the tools that every instance has.
        tasks: Its source of tasks, or None.
        problem: Why it cannot be used here; the other fields are then empty.
    """

    name: str
    reference: str = ""
    summary: str = ""
    config: str = ""
    tools: tuple[str, ...] = ()
    tasks: str | None = None
    problem: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@dataclass(frozen=True, slots=True)
class FirstObservation:
    """What an episode begins with.

    Attributes:
        task: The task, or None where the environment takes none.
        messages: Head of the conversation.
        tools: Schemas of the tools on offer.
        agents: Number of agents that take turns.
    """

    task: Task | None
    messages: Sequence[Message] = field(default=())
    tools: Sequence[ToolSchema] = field(default=())
    agents: int = 1

    def to_json(self) -> dict[str, Any]:
        """Return task, messages, schemas and number of agents as JSON values."""
        task = None if self.task is None else self.task.to_record()
        messages = [message_record(message) for message in self.messages]
        offered = [schema.to_json() for schema in self.tools]
        return {"task": task, "messages": messages, "schemas": offered, "agents": self.agents}


def describe(name: str) -> EnvInfo:
    """Return the description of an environment; what cannot be imported is described by its ``problem``."""
    try:
        cls = env_class(name)
        # An instance may compute its tools.
        declared = cls.tools if isinstance(cls.tools, (list, tuple)) else ()
        names = [*cls.tool_methods, *(as_tool(tool).name for tool in declared)]
    except TurnwiseError as error:
        return EnvInfo(name, problem=str(error))
    return EnvInfo(
        name=name,
        reference=f"{cls.__module__}:{cls.__qualname__}",
        # Not inspect.getdoc: it would give a class without docstring that of its base.
        summary=" ".join((cls.__doc__ or "").split("\n\n")[0].split()),
        config=", ".join(_parameter(parameter) for parameter in inspect.signature(cls).parameters.values()),
        tools=tuple(names),
        tasks=cls.default_tasks,
    )


def catalogue() -> list[EnvInfo]:
    """Return the descriptions of all registered environments, by name."""
    return [describe(name) for name in env_names()]


def count_tasks(source: str) -> int:
    """Return the number of tasks of a source, at most :data:`MOST_TASKS`. Raises TaskError or MissingExtraError."""
    return sum(1 for _ in itertools.islice(iter_tasks(source), MOST_TASKS))


async def first_observation(spec: EnvSpec, source: str | None = None) -> FirstObservation:
    """Begin an episode of the first task with seed 0, and close it.

    Args:
        spec: The environment.
        source: Source of the task; by default the environment's.

    Raises:
        TurnwiseError: The environment cannot be made or begin an episode, or its source has no task.
    """
    async with spec.toolbox() as toolbox:
        env = spec.make(await toolbox.tools())
        try:
            source = source or env.default_tasks
            task = None if source is None else next(iter(iter_tasks(source)), None)
            messages, info = await reset_env(env, task, seed=0)
            return FirstObservation(task, messages, schemas(env), max(1, len(info.get("agents", ()))))
        finally:
            await close_env(env)


def _parameter(parameter: inspect.Parameter) -> str:
    if parameter.default is inspect.Parameter.empty:
        return parameter.name
    return f"{parameter.name}={shown(parameter.default, 40)}"
