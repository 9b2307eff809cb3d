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
from turnwise.tools.sandboxed.base import SandboxTool, TimedConfig, make_schema, tool_config
from turnwise.tools.sandboxed.dialogue import Answer, Dialogue
from turnwise.tools.sandboxed.inside import source

_GRACE_S: Final = 3.0
"""Seconds that an interrupted cell may take to end before the interpreter is killed."""
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
class PythonSession:
    """The interpreter of an episode, started by its first call."""

    sandbox: Sandbox
    interpreter: Dialogue | None = None


class PythonTool(SandboxTool[PythonSession]):
    """``python``: an interpreter in the episode's sandbox, started by the first call."""

    def __init__(self, config: Mapping[str, Any] | None = None, tool_schema: Any = None) -> None:
        self.settings: PythonConfig = tool_config(PythonConfig, config, "python")
        properties = {
            "code": {"type": "string", "description": "what is run"},
            "timeout": self.settings.timeout_schema(),
        }
        super().__init__(config, tool_schema or make_schema("python", _DESCRIPTION, properties, ("code",)))
        self.max_output = self.settings.max_output
        self.media = ("image",) if self.settings.plots else ()

    def new_state(self, sandbox: Sandbox) -> PythonSession:
        """Return a session without an interpreter."""
        return PythonSession(sandbox)

    async def fork_state(self, session: PythonSession, sandbox: Sandbox) -> PythonSession:
        """Return a session without an interpreter.

        Raises:
            EnvError: The interpreter of the episode runs: what it holds cannot be copied to another process.
        """
        if session.interpreter is not None:
            raise EnvError(
                "tool 'python' cannot fork: its interpreter runs, and a running program cannot be copied: fork "
                'before its first call, or give the environment forks = "replay"'
            )
        return PythonSession(sandbox)

    async def close_state(self, session: PythonSession) -> None:
        """Kill the interpreter."""
        program, session.interpreter = session.interpreter, None
        if program is not None:
            await program.close()

    async def execute(
        self,
        instance_id: str,
        parameters: dict[str, Any],
        **kwargs: Any,  # noqa: ARG002
    ) -> tuple[ToolResponse, float | None, dict[str, float]]:
        """Run code. Raises ToolError (no interpreter) or SandboxError."""
        session, settings = self.states[instance_id], self.settings
        timeout = settings.timeout_of(parameters)
        marker = secrets.token_hex(16)
        request = {"code": str(parameters["code"]), "marker": marker, "plots": settings.plots}
        program = await self._open(session)
        # After an abandoned call the next answer would be this one's: the interpreter is closed.
        async with undo_on_error_async(lambda: self.close_state(session)):
            answer = await program.ask(json.dumps(request).encode() + b"\n", marker, timeout)
            timed_out = answer.note is None and not answer.program_ended
            if timed_out:
                await program.interrupt()
                late_answer = await program.wait(_GRACE_S)
                answer = Answer(answer.output + late_answer.output, late_answer.note, late_answer.program_ended)
            if answer.note is None:
                return await self._restart(session, program, answer, timeout, timed_out=timed_out), None, {}
        try:
            outcome: Any = json.loads(answer.note)
            plots, failed = [str(path) for path in outcome["plots"]], outcome["error"] is not None
        except (ValueError, TypeError, KeyError):
            # The code itself wrote the marker.
            return await self._restart(session, program, answer, timeout, timed_out=timed_out), None, {}
        images = [image for path in plots if (image := await self._image(session, path))]
        if timed_out:
            notes = [f"(no end within {timeout:g} s: the code was interrupted; names are still there)"]
            return self._respond(answer.output, notes, images, "timeout"), None, {}
        return self._respond(answer.output, [], images), None, {"exceptions": float(failed)}

    async def _open(self, session: PythonSession) -> Dialogue:
        if session.interpreter is None:
            probe = await session.sandbox.exec([self.settings.interpreter, "-c", ""], timeout=_GRACE_S * 5)
            if not probe.ok:
                raise ToolError(
                    f"{self.settings.interpreter!r} does not run in this sandbox (exit code "
                    f"{probe.exit_code}): use another tool"
                )
            command = [self.settings.interpreter, "-u", "-c", source("interpreter")]
            process = await session.sandbox.spawn(command, env=self.settings.env)
            session.interpreter = Dialogue(process, 4 * self.settings.max_output)
        return session.interpreter

    async def _restart(
        self, session: PythonSession, program: Dialogue, answer: Answer, timeout: float, *, timed_out: bool
    ) -> ToolResponse:
        """Drop an interpreter that ended or ignores interrupts; the next call starts one."""
        code = await program.exit_code() if answer.program_ended else None
        await self.close_state(session)
        if timed_out:
            reason = f"(no end within {timeout:g} s: the interpreter had to be killed)"
        elif code is None:
            reason = "(the interpreter did not report how the code ended)"
        else:
            reason = f"(the interpreter ended with exit code {code})"
        notes = [reason, "(a new interpreter was started: names and imports are lost, files are kept)"]
        return self._respond(answer.output, notes, [], "timeout" if timed_out else "interpreter_died")

    async def _image(self, session: PythonSession, path: str) -> str | None:
        try:
            data = await session.sandbox.read_file(path, max_bytes=_LARGEST_PLOT)
        except SandboxFileError:
            return None  # the code removed it, or it exceeds the limit
        return f"data:image/png;base64,{base64.b64encode(data).decode()}"

    def _respond(self, output: bytes, notes: list[str], images: list[str], error: str | None = None) -> ToolResponse:
        text = self.settings.render(output.decode("utf-8", "replace"), notes, "" if images else "(no output)")
        return ToolResponse(text, image=images or None, error=error)
