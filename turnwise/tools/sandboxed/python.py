"""The ``python`` tool, a persistent interpreter in the sandbox."""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from turnwise.errors import EnvError, SandboxFileError, ToolError, undo_on_error_async
from turnwise.sandboxes.core import Sandbox
from turnwise.tools.response import ToolResponse
from turnwise.tools.sandboxed.base import Dialogue, Reply, SandboxTool, TimedConfig, as_schema_of, tool_config
from turnwise.tools.sandboxed.inside import source

_GRACE_S: Final = 3.0
"""How long a cell that was interrupted may take to end, before the interpreter is killed."""
_LARGEST_PLOT: Final = 4 * 2**20

_DESCRIPTION: Final = (
    "Run Python in an interpreter that lasts: names, imports and the working directory of earlier calls are still "
    "there. The value of the last expression is shown, and so is whatever is printed. Code gets no input. Code that "
    "takes too long is interrupted."
)


class PythonConfig(TimedConfig):
    """Configuration of ``python``.

    Attributes:
        interpreter: The program inside the sandbox.
        plots: Return open matplotlib figures as images and close them; the renderer must accept images.
    """

    interpreter: str = "python3"
    plots: bool = False


@dataclass(slots=True)
class Place:
    """The interpreter of an episode, started by its first call."""

    sandbox: Sandbox
    interpreter: Dialogue | None = None


class PythonTool(SandboxTool[Place]):
    """``python``: an interpreter in the episode's sandbox, started by the first call."""

    def __init__(self, config: Mapping[str, Any] | None = None, tool_schema: Any = None) -> None:
        self.settings: PythonConfig = tool_config(PythonConfig, config, "python")
        properties = {
            "code": {"type": "string", "description": "what is run"},
            "timeout": self.settings.timeout_schema(),
        }
        super().__init__(config, tool_schema or as_schema_of("python", _DESCRIPTION, properties, ("code",)))
        self.max_output = self.settings.max_output
        self.media = ("image",) if self.settings.plots else ()

    def place(self, sandbox: Sandbox) -> Place:
        """Return a place without an interpreter."""
        return Place(sandbox)

    async def carried(self, place: Place, sandbox: Sandbox) -> Place:
        """Return a place without an interpreter.

        Raises:
            EnvError: The interpreter of the episode runs: what it holds cannot be copied to another process.
        """
        if place.interpreter is not None:
            raise EnvError(
                "tool 'python' cannot fork: its interpreter runs, and a program that runs cannot be copied: fork "
                'before its first call, or give the environment forks = "replay"'
            )
        return Place(sandbox)

    async def leave(self, place: Place) -> None:
        """Kill the interpreter."""
        program, place.interpreter = place.interpreter, None
        if program is not None:
            await program.close()

    async def execute(
        self,
        instance_id: str,
        parameters: dict[str, Any],
        **kwargs: Any,  # noqa: ARG002
    ) -> tuple[ToolResponse, float | None, dict[str, float]]:
        """Run code. Raises ToolError (no interpreter) or SandboxError."""
        place, settings = self.places[instance_id], self.settings
        timeout = settings.timeout_of(parameters)
        marker = secrets.token_hex(16)
        request = {"code": str(parameters["code"]), "marker": marker, "plots": settings.plots}
        program = await self._open(place)
        # Given up in the middle: whatever is read next would be read as the answer to something else.
        async with undo_on_error_async(lambda: self.leave(place)):
            reply = await program.ask(json.dumps(request).encode() + b"\n", marker, timeout)
            timed_out = reply.note is None and not reply.ended
            if timed_out:
                await program.interrupt()
                last = await program.wait(_GRACE_S)
                reply = Reply(reply.output + last.output, last.note, last.ended)
            if reply.note is None:
                return await self._restart(place, program, reply, timeout, timed_out=timed_out), None, {}
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

    async def _open(self, place: Place) -> Dialogue:
        if place.interpreter is None:
            probe = await place.sandbox.exec([self.settings.interpreter, "-c", ""], timeout=_GRACE_S * 5)
            if not probe.ok:
                raise ToolError(
                    f"{self.settings.interpreter!r} does not run in this sandbox (exit code "
                    f"{probe.exit_code}): use another tool"
                )
            command = [self.settings.interpreter, "-u", "-c", source("interpreter")]
            process = await place.sandbox.spawn(command, env=self.settings.env)
            place.interpreter = Dialogue(process, 4 * self.settings.max_output)
        return place.interpreter

    async def _restart(
        self, place: Place, program: Dialogue, reply: Reply, timeout: float, *, timed_out: bool
    ) -> ToolResponse:
        """Drop an interpreter that ended or ignores interrupts; the next call starts one."""
        code = await program.exit_code() if reply.ended else None
        await self.leave(place)
        if timed_out:
            why = f"(no end within {timeout:g} s: the interpreter had to be killed)"
        elif code is None:
            why = "(the interpreter did not report how the code ended)"
        else:
            why = f"(the interpreter ended with exit code {code})"
        notes = [why, "(a new interpreter was started: names and imports are lost, files are kept)"]
        return self._told(reply.output, notes, [], "timeout" if timed_out else "interpreter_died")

    async def _image(self, place: Place, path: str) -> str | None:
        try:
            data = await place.sandbox.read_file(path, max_bytes=_LARGEST_PLOT)
        except SandboxFileError:
            return None  # the code removed it, or made it larger than a model takes
        return f"data:image/png;base64,{base64.b64encode(data).decode()}"

    def _told(self, output: bytes, notes: list[str], images: list[str], error: str | None = None) -> ToolResponse:
        shown = self.settings.shown(output.decode("utf-8", "replace"), notes, "" if images else "(no output)")
        return ToolResponse(shown, image=images or None, error=error)
