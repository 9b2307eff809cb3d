"""Base of the sandboxed tools: per-episode state, timeouts, ``submit``, and dialogues with a program."""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from turnwise.errors import ConfigError, SandboxError
from turnwise.sandboxes.core import Sandbox, SandboxProcess
from turnwise.tools.core import AgentData, BaseTool
from turnwise.tools.response import OutputLimit, ToolResponse
from turnwise.types import ToolSchema

C = TypeVar("C", bound=BaseModel)
P = TypeVar("P")
_NOTES: Final = 400
"""Characters reserved for the notes after the output."""


class SandboxTool(BaseTool, Generic[P]):
    """A tool in the episode's sandbox, with one place (its state) per instance."""

    def __init__(self, config: Mapping[str, Any] | None, schema: ToolSchema) -> None:
        super().__init__(config, schema)
        self.places: dict[str, P] = {}

    def place(self, sandbox: Sandbox) -> P:
        """Return the initial state of an episode."""
        raise NotImplementedError(f"{type(self).__qualname__} defines no place()")

    async def create(
        self,
        instance_id: str | None = None,
        *,
        agent_data: AgentData | None = None,
        **kwargs: Any,  # noqa: ARG002
    ) -> tuple[str, ToolResponse]:
        """Bind the episode's sandbox; ConfigError if there is none."""
        instance_id = instance_id or uuid.uuid4().hex
        self.places[instance_id] = self.place(sandbox_of(agent_data, self.name))
        return instance_id, ToolResponse()

    async def fork(self, instance_id: str, agent_data: AgentData) -> str:
        """Bind the sandbox of a fork, with the state of an episode. Raises EnvError or SandboxError."""
        made = uuid.uuid4().hex
        self.places[made] = await self.carried(self.places[instance_id], sandbox_of(agent_data, self.name))
        return made

    async def carried(self, place: P, sandbox: Sandbox) -> P:
        """Return the state of an episode in the sandbox of its fork, which has the same files and no process.

        Raises:
            EnvError: It cannot be carried.
            SandboxError: The sandbox failed.
        """
        raise NotImplementedError(f"{type(self).__qualname__} defines no carried()")

    async def leave(self, place: P) -> None:
        """Stop everything that runs in a place."""

    async def release(self, instance_id: str, **kwargs: Any) -> None:  # noqa: ARG002
        """Leave the episode's place."""
        place = self.places.pop(instance_id, None)
        if place is not None:
            await self.leave(place)


class TimedConfig(BaseModel):
    """Limits of tools that run code.

    Attributes:
        timeout: Default timeout of a call in seconds.
        max_timeout: Maximum of the timeout that a call may ask for.
        max_output: Characters of output for the model, head and tail.
        env: Environment variables.
    """

    model_config = ConfigDict(extra="forbid")

    timeout: Annotated[float, Field(gt=0)] = 60.0
    max_timeout: Annotated[float, Field(gt=0)] = 600.0
    max_output: Annotated[int, Field(ge=1000)] = 16_000
    env: dict[str, str] = {}

    def timeout_schema(self) -> dict[str, Any]:
        """Return the schema of the parameter ``timeout``."""
        said = f"time-out in seconds, {self.timeout:g} by default and {self.max_timeout:g} at most"
        return {"type": "number", "exclusiveMinimum": 0, "description": said}

    def timeout_of(self, parameters: Mapping[str, Any]) -> float:
        """Return a call's timeout in seconds."""
        return min(float(parameters.get("timeout") or self.timeout), self.max_timeout)

    def shown(self, output: str, notes: list[str], otherwise: str = "(no output)") -> str:
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


def tool_config(model: type[C], given: Mapping[str, Any] | None, tool: str) -> C:
    """Validate a tool's configuration. Raises ConfigError."""
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
    """Return a tool schema of name, description and properties."""
    parameters = {"type": "object", "properties": dict(properties), "required": list(required)}
    return ToolSchema(name, description, {**parameters, "additionalProperties": False})


_DESCRIPTION: Final = (
    "Hand in your work as it is now. This ends the task: call it once, when you are done and have checked the result."
)


class SubmitTool(BaseTool):
    """``submit``: ends the episode, which is then scored. Takes no configuration."""

    def __init__(self, config: Mapping[str, Any] | None = None, tool_schema: Any = None) -> None:
        if config:
            raise ConfigError(f"tool 'submit' takes no config, but it is {dict(config)!r}")
        super().__init__({}, tool_schema or as_schema_of("submit", _DESCRIPTION, {}, ()))

    async def execute(
        self,
        instance_id: str,  # noqa: ARG002
        parameters: dict[str, Any],  # noqa: ARG002
        **kwargs: Any,  # noqa: ARG002
    ) -> tuple[ToolResponse, float | None, dict[str, float]]:
        """End the episode."""
        return ToolResponse("Submitted.", ends=True), None, {}


_LONGEST_TAIL: Final = 64 * 1024
"""Bytes that may follow a marker in its line."""
_AFTERMATH_S: Final = 0.2
"""How long the last output of a program that was ended is waited for."""


class HeadTailBuffer:
    """The head and tail (half of ``limit`` bytes each) of a byte stream; what is between is only counted."""

    def __init__(self, limit: int) -> None:
        self._half = max(1, limit // 2)
        self._head = bytearray()
        self._tail: deque[bytes] = deque()
        self._held = 0
        self._dropped = 0

    def add(self, data: bytes) -> None:
        """Append bytes."""
        room = self._half - len(self._head)
        self._head += data[:room] if room > 0 else b""
        rest = data[max(room, 0) :]
        if not rest:
            return
        self._tail.append(rest)
        self._held += len(rest)
        while self._held - len(self._tail[0]) >= self._half:
            gone = self._tail.popleft()
            self._held -= len(gone)
            self._dropped += len(gone)

    def take(self) -> bytes:
        """Return and clear what was kept, with a line that counts the missing bytes."""
        tail = b"".join(self._tail)
        dropped = self._dropped + max(0, len(tail) - self._half)
        tail = tail[-self._half :]
        found = bytes(self._head) + (b"\n[... %d bytes cut ...]\n" % dropped if dropped else b"") + tail
        self._head, self._tail = bytearray(), deque()
        self._held = self._dropped = 0
        return found


@dataclass(frozen=True, slots=True)
class Reply:
    """A program's answer: output, the note after the marker (None without marker), whether it has ended."""

    output: bytes
    note: str | None
    ended: bool


class Dialogue:
    """A request-response dialogue with one running program; ``limit`` is the bytes kept of an answer."""

    def __init__(self, process: SandboxProcess, limit: int) -> None:
        self._process = process
        self._output = HeadTailBuffer(limit)
        self._marker = b""
        self._pending = b""
        self._note: str | None = None
        self._ended = False
        self._failure: SandboxError | None = None
        self._news = asyncio.Event()
        self._pump = asyncio.create_task(self._follow())

    async def ask(self, question: bytes, marker: str, timeout: float | None) -> Reply:
        """Write a question and wait for ``marker``, printed with a note when done. Raises SandboxError."""
        self._marker, self._note = marker.encode(), None
        self._news.clear()
        try:
            await self._process.write(question)
        except BrokenPipeError:
            # It has ended, or no longer reads; its last output is read.
            timeout = _AFTERMATH_S if timeout is None else min(timeout, _AFTERMATH_S)
        return await self.wait(timeout)

    async def wait(self, timeout: float | None) -> Reply:
        """Continue to wait for the marker. Raises as :meth:`ask`."""
        try:
            async with asyncio.timeout(timeout):
                while self._note is None and not self._ended:
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            pass
        if self._failure is not None:
            raise self._failure
        if self._ended:
            # No marker comes any more of which this could be the beginning.
            self._output.add(self._pending)
            self._pending = b""
        return Reply(self._output.take(), self._note, self._ended)

    async def interrupt(self) -> None:
        """Send SIGINT."""
        await self._process.interrupt()

    async def close(self) -> None:
        """Kill the program; idempotent."""
        self._pump.cancel()
        await asyncio.gather(self._pump, return_exceptions=True)
        await self._process.kill()

    async def exit_code(self) -> int:
        """Return the exit code of a program that has ended."""
        return await self._process.wait()

    async def _follow(self) -> None:
        reading = asyncio.create_task(self._read())
        try:
            # Its end, not that of its output: what it left in the background may hold that open.
            await self._process.wait()
            await asyncio.wait({reading}, timeout=_AFTERMATH_S)
        except SandboxError as error:
            self._failure = self._failure or error
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            self._ended = True
            self._news.set()

    async def _read(self) -> None:
        try:
            while data := await self._process.read():
                self._take(data)
                self._news.set()
        except SandboxError as error:
            self._failure = error

    def _take(self, data: bytes) -> None:
        data = self._pending + data
        self._pending = b""
        if self._note is not None or not self._marker:
            self._output.add(data)
            return
        before, found, behind = data.partition(self._marker)
        if not found:
            keep = _overlap(data, self._marker)
            self._output.add(data[: len(data) - keep])
            self._pending = data[len(data) - keep :]
            return
        note, newline, rest = behind.partition(b"\n")
        if not newline and len(behind) < _LONGEST_TAIL:
            self._output.add(before)
            self._pending = self._marker + behind
            return
        self._output.add(before)
        self._note = note.decode("utf-8", "replace")
        # What follows (from programs in the background) is part of the next answer; the marker is done with.
        self._marker, self._pending = b"", rest


def _overlap(data: bytes, marker: bytes) -> int:
    """Return the length of the longest suffix of ``data`` that is a prefix of the marker."""
    for size in range(min(len(marker) - 1, len(data)), 0, -1):
        if data.endswith(marker[:size]):
            return size
    return 0
