"""What the tools share that work in the sandbox of an episode.

Owns: :func:`sandbox_of`, :func:`tool_config` and :func:`as_schema_of`. Refuses: opening a sandbox; that is the
environment's to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from turnwise.errors import ConfigError
from turnwise.sandboxes.core import Sandbox
from turnwise.tools.agent_data import AgentData
from turnwise.types import ToolSchema

C = TypeVar("C", bound=BaseModel)


def sandbox_of(agent_data: AgentData | None, tool: str) -> Sandbox:
    """Return the sandbox in which an episode's commands run.

    Raises:
        ConfigError: The environment opened none.
    """
    if agent_data is None or agent_data.sandbox is None:
        raise ConfigError(
            f"tool {tool!r} works in the sandbox of the episode, and the environment opened none: leave the tool out, "
            "or write 'await self.open_sandbox()' in its reset()"
        )
    return agent_data.sandbox


def tool_config(model: type[C], given: Mapping[str, Any] | None, tool: str) -> C:
    """Return a tool's configuration as its model.

    Raises:
        ConfigError: A key is unknown or a value is wrong.
    """
    try:
        return model.model_validate(dict(given or {}))
    except ValidationError as error:
        found = error.errors()[0]
        where = ".".join(["config", *map(str, found["loc"])])
        known = ", ".join(model.model_fields)
        raise ConfigError(
            f"tool {tool!r}: {where} is {found['input']!r}: {found['msg']}; its keys are {known}"
        ) from error


def as_schema_of(name: str, description: str, properties: Mapping[str, Any], required: tuple[str, ...]) -> ToolSchema:
    """Return what a model is told of a tool."""
    parameters = {"type": "object", "properties": dict(properties), "required": list(required)}
    return ToolSchema(name, description, {**parameters, "additionalProperties": False})
