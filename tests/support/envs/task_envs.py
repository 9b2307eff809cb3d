"""Environments and agents that tasks name, as ``support.envs.task_envs:Class``."""

from __future__ import annotations

from typing import Any, ClassVar

from turnwise.agents import SingleTurnAgent
from turnwise.envs import ToolEnv
from turnwise.tools import function_tool
from turnwise.types import Message, text_of


@function_tool
def look_up(name: str) -> str:
    """Look a name up."""
    return name


class Paid(ToolEnv):
    """Pays ``pays`` to whoever answers."""

    tools = (look_up,)
    default_tasks: ClassVar[str] = "support.envs.task_rows:finite?n=3"

    def __init__(self, pays: float = 0.25) -> None:
        self.pays = pays

    def score(self, final: Message | None) -> float:
        return self.pays if final is not None and text_of(final) else 0.0


class Closing(Paid):
    """Counts how many of it were made and closed."""

    made = closed = 0

    def __init__(self, pays: float = 0.25) -> None:
        super().__init__(pays)
        type(self).made += 1

    async def close(self) -> None:
        await super().close()
        type(self).closed += 1


class Broken(Paid):
    """Cannot be made."""

    def __init__(self, **config: Any) -> None:
        raise OSError("no such database")


class Greeting(SingleTurnAgent):
    """Asks once; takes a configuration."""

    def __init__(self, greeting: str = "hello") -> None:
        self.greeting = greeting
