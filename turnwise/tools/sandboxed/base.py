"""Base of the sandboxed tools: per-episode state, timeouts and output limits, and the tool ``submit``."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Annotated, Any, Final, Generic, TypeVar

from pydantic import BaseModel, Field

from turnwise.config import Section, load_config
from turnwise.errors import ConfigError, ToolError
from turnwise.sandboxes.core import Sandbox
from turnwise.tools.core import AgentData, BaseTool
from turnwise.tools.response import OutputLimit, ToolResponse
from turnwise.types import ToolSchema

C = TypeVar("C", bound=BaseModel)
P = TypeVar("P")
_NOTES: Final = 400
"""Characters reserved for the notes after the output."""


class SandboxTool(BaseTool, Generic[P]):
    """A tool in the episode's sandbox, with one state per instance."""

    def __init__(self, config: Mapping[str, Any] | None, schema: ToolSchema) -> None:
        super().__init__(config, schema)
        self.states: dict[str, P] = {}

    def new_state(self, sandbox: Sandbox) -> P:
        """Return the initial state of an episode."""
        raise NotImplementedError(f"{type(self).__qualname__} defines no new_state()")

    async def create(
        self,
        instance_id: str | None = None,
        *,
        agent_data: AgentData | None = None,
        **kwargs: Any,  # noqa: ARG002
    ) -> tuple[str, ToolResponse]:
        """Bind the episode's sandbox; ConfigError if there is none."""
        instance_id = instance_id or uuid.uuid4().hex
        self.states[instance_id] = self.new_state(sandbox_of(agent_data, self.name))
        return instance_id, ToolResponse()

    async def fork(self, instance_id: str, agent_data: AgentData) -> str:
        """Bind the sandbox of a fork, with the state of an episode. Raises EnvError or SandboxError."""
        fork_id = uuid.uuid4().hex
        self.states[fork_id] = await self.fork_state(self.states[instance_id], sandbox_of(agent_data, self.name))
        return fork_id

    async def fork_state(self, state: P, sandbox: Sandbox) -> P:
        """Return the state of an episode in the sandbox of its fork, which has the same files and no process.

        Raises:
            EnvError: It cannot be copied.
            SandboxError: The sandbox failed.
        """
        raise NotImplementedError(f"{type(self).__qualname__} defines no fork_state()")

    async def close_state(self, state: P) -> None:
        """Stop everything that runs for an episode."""

    async def release(self, instance_id: str, **kwargs: Any) -> None:  # noqa: ARG002
        """Close the episode's state."""
        state = self.states.pop(instance_id, None)
        if state is not None:
            await self.close_state(state)


class FileTool(SandboxTool[Sandbox]):
    """A tool on the files of the episode's sandbox, which are its only state."""

    def new_state(self, sandbox: Sandbox) -> Sandbox:
        """Return the sandbox."""
        return sandbox

    async def fork_state(self, state: Sandbox, sandbox: Sandbox) -> Sandbox:  # noqa: ARG002
        """Return the fork's sandbox."""
        return sandbox


def as_text(path: str, data: bytes) -> str:
    """Return the text of a file; ToolError if it is none."""
    if b"\0" in data:
        raise ToolError(f"{path} is not a text file: it holds NUL bytes")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ToolError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start})") from error


class TimedConfig(Section):
    """Limits of tools that run code.

    Attributes:
        timeout: Default timeout of a call in seconds.
        max_timeout: Maximum of the timeout that a call may ask for.
        max_output: Characters of output for the model, head and tail.
        env: Environment variables.
    """

    timeout: Annotated[float, Field(gt=0)] = 60.0
    max_timeout: Annotated[float, Field(gt=0)] = 600.0
    max_output: Annotated[int, Field(ge=1000)] = 16_000
    env: dict[str, str] = Field(default_factory=dict)

    def timeout_schema(self) -> dict[str, Any]:
        """Return the schema of the parameter ``timeout``."""
        description = f"time-out in seconds, {self.timeout:g} by default and {self.max_timeout:g} at most"
        return {"type": "number", "exclusiveMinimum": 0, "description": description}

    def timeout_of(self, parameters: Mapping[str, Any]) -> float:
        """Return a call's timeout in seconds."""
        return min(float(parameters.get("timeout") or self.timeout), self.max_timeout)

    def render(self, output: str, notes: list[str], otherwise: str = "(no output)") -> str:
        """Return both ends of the output, followed by notes."""
        text = OutputLimit(self.max_output - _NOTES).cut(output).rstrip("\n")
        return "\n".join(([text] if text else []) + notes) or otherwise


def sandbox_of(agent_data: AgentData | None, tool: str) -> Sandbox:
    """Return the episode's sandbox; ConfigError if the environment opened none."""
    if agent_data is None or agent_data.sandbox is None:
        raise ConfigError(
            f"tool {tool!r} needs a sandbox, and the environment opened none: leave the tool out, "
            "or write 'await self.open_sandbox()' in its reset()"
        )
    return agent_data.sandbox


def tool_config(model: type[C], config: Mapping[str, Any] | None, tool: str) -> C:
    """Validate a tool's configuration. Raises ConfigError."""
    try:
        return load_config(model, defaults=config)
    except ConfigError as error:
        raise ConfigError(f"tool {tool!r}: config: {error}; its keys are {', '.join(model.model_fields)}") from error


def make_schema(name: str, description: str, properties: Mapping[str, Any], required: tuple[str, ...]) -> ToolSchema:
    """Return a tool schema of name, description and properties."""
    parameters = {"type": "object", "properties": dict(properties), "required": list(required)}
    return ToolSchema(name, description, {**parameters, "additionalProperties": False})


_DESCRIPTION: Final = (
    "Hand in your work as it is now. This ends the task: call it once, when you are done and have checked the result."
)


class SubmitTool(BaseTool):
    """``submit``: ends the episode, which is then scored."""

    def __init__(self, config: Mapping[str, Any] | None = None, tool_schema: Any = None) -> None:
        if config:
            raise ConfigError(f"tool 'submit' takes no config, but it is {dict(config)!r}")
        super().__init__({}, tool_schema or make_schema("submit", _DESCRIPTION, {}, ()))

    async def execute(
        self,
        instance_id: str,  # noqa: ARG002
        parameters: dict[str, Any],  # noqa: ARG002
        **kwargs: Any,  # noqa: ARG002
    ) -> tuple[ToolResponse, float | None, dict[str, float]]:
        """End the episode."""
        return ToolResponse("Submitted.", ends=True), None, {}
