"""The tool that runs Python in an interpreter that lasts.

Owns: :class:`PythonTool` and its configuration. Refuses: running anything outside the episode's sandbox. What happens
inside stands in ``inside/interpreter.py``.
"""

from __future__ import annotations

import base64
import json
import secrets
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field

from turnwise.errors import SandboxFileError, ToolError
from turnwise.sandboxes.core import Sandbox
from turnwise.tools.agent_data import AgentData
from turnwise.tools.core import BaseTool
from turnwise.tools.dialogue import Dialogue, Reply
from turnwise.tools.inside import source
from turnwise.tools.limits import OutputLimit
from turnwise.tools.places import as_schema_of, sandbox_of, tool_config
from turnwise.tools.response import ToolResponse

_GRACE_S: Final = 3.0
"""How long a cell that was interrupted may take to end, before the interpreter is killed."""
_NOTES: Final = 400
_LARGEST_PLOT: Final = 4 * 2**20

_DESCRIPTION: Final = (
    "Run Python in an interpreter that lasts: names, imports and the working directory of earlier calls are still "
    "there. The value of the last expression is shown, and so is whatever is printed. Code gets no input. Code that "
    "takes too long is interrupted."
)


class PythonConfig(BaseModel):
    """How ``python`` runs code.

    Attributes:
        interpreter: The program inside the sandbox.
        timeout: Seconds that a call may take where it does not say.
        max_timeout: The most that a call may say.
        max_output: Characters of output that the model gets to see, of both ends.
        plots: Whether figures of matplotlib that a call leaves open are answered as images, and closed. The model's
            renderer must place images.
        env: Variables of the interpreter.
    """

    model_config = ConfigDict(extra="forbid")

    interpreter: str = "python3"
    timeout: Annotated[float, Field(gt=0)] = 60.0
    max_timeout: Annotated[float, Field(gt=0)] = 600.0
    max_output: Annotated[int, Field(ge=1000)] = 16_000
    plots: bool = False
    env: dict[str, str] = {}


@dataclass(slots=True)
class _Place:
    """Where an episode's code runs: the interpreter is started by its first call."""

    sandbox: Sandbox
    interpreter: Dialogue | None = None


class PythonTool(BaseTool):
    """``python``: an interpreter in the sandbox of the episode, started by the first call."""

    def __init__(self, config: Mapping[str, Any] | None = None, tool_schema: Any = None) -> None:
        """Take a configuration, see :class:`PythonConfig`.

        Raises:
            ConfigError: It has an unknown key or a wrong value.
        """
        self.settings: PythonConfig = tool_config(PythonConfig, config, "python")
        properties = {
            "code": {"type": "string", "description": "what is run"},
            "timeout": {
                "type": "number",
                "exclusiveMinimum": 0,
                "description": f"seconds it may take, {self.settings.timeout:g} by default and "
                f"{self.settings.max_timeout:g} at most",
            },
        }
        super().__init__(config, tool_schema or as_schema_of("python", _DESCRIPTION, properties, ("code",)))
        self.max_output = self.settings.max_output
        self.media = ("image",) if self.settings.plots else ()
        self._places: dict[str, _Place] = {}

    async def create(
        self,
        instance_id: str | None = None,
        *,
        agent_data: AgentData | None = None,
        **kwargs: Any,  # noqa: ARG002
    ) -> tuple[str, ToolResponse]:
        """Take the episode's sandbox. Raises ConfigError where there is none."""
        instance_id = instance_id or uuid.uuid4().hex
        self._places[instance_id] = _Place(sandbox_of(agent_data, self.name))
        return instance_id, ToolResponse()

    async def execute(
        self,
        instance_id: str,
        parameters: dict[str, Any],
        **kwargs: Any,  # noqa: ARG002
    ) -> tuple[ToolResponse, float | None, dict[str, float]]:
        """Run code.

        Raises:
            ToolError: There is no interpreter in this sandbox.
            SandboxError: The sandbox failed.
        """
        place, settings = self._places[instance_id], self.settings
        timeout = min(float(parameters.get("timeout") or settings.timeout), settings.max_timeout)
        marker = secrets.token_hex(16)
        request = {"code": str(parameters["code"]), "marker": marker, "plots": settings.plots}
        program = await self._open(place)
        try:
            reply = await program.ask(json.dumps(request).encode() + b"\n", marker, timeout)
            timed_out = reply.note is None and not reply.ended
            if timed_out:
                await program.interrupt()
                last = await program.wait(_GRACE_S)
                reply = Reply(reply.output + last.output, last.note, last.ended)
            if reply.note is None:
                return await self._restart(place, program, reply, timeout, timed_out=timed_out), None, {}
        except BaseException:
            # Given up in the middle: whatever is read next would be read as the answer to something else.
            await self._end(place)
            raise
        try:
            ended: Any = json.loads(reply.note)
            plots, failed = [str(path) for path in ended["plots"]], ended["error"] is not None
        except (ValueError, TypeError, KeyError):
            # The code itself wrote what ends an answer.
            return await self._restart(place, program, reply, timeout, timed_out=timed_out), None, {}
        images = [image for path in plots if (image := await self._image(place, path))]
        if timed_out:
            notes = [f"(no end within {timeout:g} s: the code was interrupted; names are still there)"]
            return self._told(reply.output, notes, images, "timeout"), None, {}
        return self._told(reply.output, [], images), None, {"exceptions": float(failed)}

    async def release(self, instance_id: str, **kwargs: Any) -> None:  # noqa: ARG002
        """End the interpreter."""
        place = self._places.pop(instance_id, None)
        if place is not None:
            await self._end(place)

    async def _open(self, place: _Place) -> Dialogue:
        if place.interpreter is None:
            probe = await place.sandbox.exec([self.settings.interpreter, "-c", ""], timeout=_GRACE_S * 5)
            if not probe.ok:
                raise ToolError(
                    f"there is no {self.settings.interpreter!r} that runs in this sandbox (exit code "
                    f"{probe.exit_code}): use another tool"
                )
            command = [self.settings.interpreter, "-u", "-c", source("interpreter")]
            process = await place.sandbox.spawn(command, env=self.settings.env)
            place.interpreter = Dialogue(process, 4 * self.settings.max_output)
        return place.interpreter

    async def _end(self, place: _Place) -> None:
        program, place.interpreter = place.interpreter, None
        if program is not None:
            await program.close()

    async def _restart(
        self, place: _Place, program: Dialogue, reply: Reply, timeout: float, *, timed_out: bool
    ) -> ToolResponse:
        """Give up an interpreter that ended, or that nothing interrupts; the next call starts one."""
        code = await program.exit_code() if reply.ended else None
        await self._end(place)
        if timed_out:
            why = f"(no end within {timeout:g} s: the interpreter had to be killed)"
        elif code is None:
            why = "(the interpreter did not say how the code ended)"
        else:
            why = f"(the interpreter ended with exit code {code})"
        notes = [why, "(a new one is there now: names and imports are gone, files are not)"]
        return self._told(reply.output, notes, [], "timeout" if timed_out else "interpreter_died")

    async def _image(self, place: _Place, path: str) -> str | None:
        try:
            data = await place.sandbox.read_file(path, max_bytes=_LARGEST_PLOT)
        except SandboxFileError:
            return None  # the code removed it, or made it larger than a model takes
        return f"data:image/png;base64,{base64.b64encode(data).decode()}"

    def _told(self, output: bytes, notes: list[str], images: list[str], error: str | None = None) -> ToolResponse:
        text = OutputLimit(self.settings.max_output - _NOTES).cut(output.decode("utf-8", "replace")).rstrip("\n")
        shown = "\n".join(([text] if text else []) + notes)
        return ToolResponse(shown or ("" if images else "(no output)"), image=images or None, error=error)
