"""What the tools share that work in the sandbox of an episode.

Owns: :class:`SandboxTool`, which has a place in the sandbox of each episode, :class:`TimedConfig` of those whose calls
have a time, and what both are made of. Refuses: opening a sandbox; that is the environment's to do.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Annotated, Any, Final, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from turnwise.errors import ConfigError
from turnwise.sandboxes.core import Sandbox
from turnwise.tools.agent_data import AgentData
from turnwise.tools.core import BaseTool
from turnwise.tools.limits import OutputLimit
from turnwise.tools.response import ToolResponse
from turnwise.types import ToolSchema

C = TypeVar("C", bound=BaseModel)
P = TypeVar("P")
_NOTES: Final = 400
"""Characters that are kept for what is said behind the output."""


class SandboxTool(BaseTool, Generic[P]):
    """A tool that works in the sandbox of the episode, and has a place there: what it keeps between its calls.

    Attributes:
        places: By instance.
    """

    def __init__(self, config: Mapping[str, Any] | None, schema: ToolSchema) -> None:
        super().__init__(config, schema)
        self.places: dict[str, P] = {}

    def place(self, sandbox: Sandbox) -> P:
        """Return the place that an episode begins with."""
        raise NotImplementedError(f"{type(self).__qualname__} defines no place()")

    async def create(
        self,
        instance_id: str | None = None,
        *,
        agent_data: AgentData | None = None,
        **kwargs: Any,  # noqa: ARG002
    ) -> tuple[str, ToolResponse]:
        """Take the episode's sandbox. Raises ConfigError where there is none."""
        instance_id = instance_id or uuid.uuid4().hex
        self.places[instance_id] = self.place(sandbox_of(agent_data, self.name))
        return instance_id, ToolResponse()

    async def leave(self, place: P) -> None:
        """End what goes on in a place."""

    async def release(self, instance_id: str, **kwargs: Any) -> None:  # noqa: ARG002
        """Leave the episode's place."""
        place = self.places.pop(instance_id, None)
        if place is not None:
            await self.leave(place)


class TimedConfig(BaseModel):
    """How a tool runs what a model writes.

    Attributes:
        timeout: Seconds that a call may take where it does not say.
        max_timeout: The most that a call may say.
        max_output: Characters of output that the model gets to see, of both ends.
        env: Variables of what is run.
    """

    model_config = ConfigDict(extra="forbid")

    timeout: Annotated[float, Field(gt=0)] = 60.0
    max_timeout: Annotated[float, Field(gt=0)] = 600.0
    max_output: Annotated[int, Field(ge=1000)] = 16_000
    env: dict[str, str] = {}

    def timeout_schema(self) -> dict[str, Any]:
        """Return what a model is told of the parameter ``timeout``."""
        said = f"seconds it may take, {self.timeout:g} by default and {self.max_timeout:g} at most"
        return {"type": "number", "exclusiveMinimum": 0, "description": said}

    def timeout_of(self, parameters: Mapping[str, Any]) -> float:
        """Return the seconds that a call may take."""
        return min(float(parameters.get("timeout") or self.timeout), self.max_timeout)

    def shown(self, output: str, notes: list[str], otherwise: str = "(no output)") -> str:
        """Return what a model is shown: both ends of the output, and notes behind it."""
        text = OutputLimit(self.max_output - _NOTES).cut(output).rstrip("\n")
        return "\n".join(([text] if text else []) + notes) or otherwise


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
