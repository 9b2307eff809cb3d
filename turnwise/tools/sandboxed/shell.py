"""The ``shell`` tool: single commands or a persistent bash session in the sandbox."""

from __future__ import annotations

import re
import secrets
import shlex
from collections.abc import Mapping
from typing import Any, Final

from turnwise.errors import EnvError, SandboxFileNotFound, ToolError, undo_on_error_async
from turnwise.sandboxes.core import Sandbox
from turnwise.tools.response import ToolResponse
from turnwise.tools.sandboxed.base import SandboxTool, TimedConfig, make_schema, tool_config
from turnwise.tools.sandboxed.dialogue import Answer, Dialogue

_INTERRUPTS: Final = 2
"""A list of commands goes on after an interrupt that comes when one of them has just ended."""
_GRACE_S: Final = 1.0
"""Seconds that an interrupted command may take to end before it is interrupted again or killed."""
_KILL_S: Final = 2.0
_START_S: Final = 20.0

# Interactive: an interrupt then ends what the shell itself runs, loops included, but not the shell.
_START: Final = (
    "if command -v bash >/dev/null 2>&1; then exec bash --norc --noprofile --noediting -i; else exec sh -i; fi"
)
_ENV: Final = {"PS1": "", "PS2": "", "TERM": "dumb", "PAGER": "cat", "GIT_PAGER": "cat", "HISTFILE": "/dev/null"}
# The marker is written to a copy of the output that a command cannot redirect.
_SETUP: Final = "exec 9>&1; PS1=; PS2=; set +H 2>/dev/null; set +o history 2>/dev/null\n"
# Kills all descendants of process $1, except the trees of the processes named after it (background jobs).
_KILL: Final = r"""
top=$1; shift; spared=" $* "; all=; for f in /proc/[0-9]*/stat; do
  read -r line 2>/dev/null < "$f" || continue; rest=${line##*) }; set -- $rest; all="$all ${line%% *}:$2"; done
front=$top; while [ -n "$front" ]; do next=; for pair in $all; do
  case " $front " in *" ${pair#*:} "*) p=${pair%:*}
    case "$spared" in *" $p "*) ;; *) next="$next $p"; kill -9 "$p" 2>/dev/null;; esac;; esac; done; front=$next; done
"""

# Bash's messages about a missing terminal when a process that it ran was killed.
_NOISE: Final = re.compile(r"^bash: \[\d+: \d+ \(\d+\)\] tcsetattr: .*\n", re.MULTILINE)

_STATE: Final = "declare -p; declare -f; alias -p; shopt -p; set +o; umask -p"
"""Prints a shell's state as commands that another shell can read (some, of read-only variables, fail there)."""

_STATELESS: Final = (
    "Run a command with bash. Each call starts in the same folder: a change of directory and the variables of earlier "
    "calls are gone, files stay. Commands get no input. Background commands (&) continue; redirect their output."
)
_PERSISTENT: Final = (
    "Run a command in a bash session that lasts: the working directory, variables, functions and background jobs (&) "
    "of earlier calls are still there. Commands get no input. A command that takes too long is interrupted."
)


class ShellConfig(TimedConfig):
    """Configuration of ``shell``.

    Attributes:
        persistent: Whether all calls of an episode share one session.
    """

    persistent: bool = True


class ShellTool(SandboxTool["ShellSession"]):
    """``shell``: commands in the episode's sandbox, each on its own or in one session."""

    def __init__(self, config: Mapping[str, Any] | None = None, tool_schema: Any = None) -> None:
        self.settings: ShellConfig = tool_config(ShellConfig, config, "shell")
        properties = {
            "command": {"type": "string", "description": "the command to run; several lines are fine"},
            "timeout": self.settings.timeout_schema(),
        }
        text = _PERSISTENT if self.settings.persistent else _STATELESS
        super().__init__(config, tool_schema or make_schema("shell", text, properties, ("command",)))
        self.max_output = self.settings.max_output

    def new_state(self, sandbox: Sandbox) -> ShellSession:
        """Return a session, whose shell is started by its first command."""
        return ShellSession(sandbox, self.settings.env, 4 * self.settings.max_output)

    async def fork_state(self, session: ShellSession, sandbox: Sandbox) -> ShellSession:
        """Return a session in the same folder, with the same variables, functions and options.

        Raises:
            EnvError: Jobs of the session run in the background: a running program cannot be copied.
            SandboxError: The sandbox failed.
        """
        return await session.fork(sandbox)

    async def close_state(self, session: ShellSession) -> None:
        """Close the session."""
        await session.close()

    async def execute(
        self,
        instance_id: str,
        parameters: dict[str, Any],
        **kwargs: Any,  # noqa: ARG002
    ) -> tuple[ToolResponse, float | None, dict[str, float]]:
        """Run a command. Raises ToolError (malformed command) or SandboxError."""
        command, session = str(parameters["command"]), self.states[instance_id]
        if "\0" in command:
            raise ToolError("the command holds a NUL character: leave it out")
        timeout = self.settings.timeout_of(parameters)
        if not self.settings.persistent:
            return await self._run_alone(session.sandbox, command, timeout), None, {}
        return await self._run_in_session(session, command, timeout), None, {}

    async def _run_alone(self, sandbox: Sandbox, command: str, timeout: float) -> ToolResponse:
        # One stream, so that errors keep their position in the output.
        result = await sandbox.exec(
            f"exec 2>&1\n{command}", timeout=timeout, env=self.settings.env, max_output=4 * self.settings.max_output
        )
        if result.timed_out:
            return self._respond(result.stdout, [f"(no end within {timeout:g} s: the command was killed)"], "timeout")
        return self._respond(result.stdout, [f"(exit code {result.exit_code})"] if result.exit_code else [])

    async def _run_in_session(self, session: ShellSession, command: str, timeout: float) -> ToolResponse:
        result = await session.run(command, timeout)
        notes = []
        if result.timed_out and result.restarted:
            notes.append(f"(no end within {timeout:g} s: the shell had to be killed, and a new one was started)")
        elif result.timed_out:
            notes.append(f"(no end within {timeout:g} s: the command was interrupted; the session continues)")
        elif result.restarted:
            notes.append(f"(the shell ended with exit code {result.exit_code}; a new one was started)")
        elif result.exit_code:
            notes.append(f"(exit code {result.exit_code})")
        if result.restarted:
            notes.append(f"(variables, functions and jobs are gone; the working directory is {result.cwd})")
        return self._respond(result.output, notes, "timeout" if result.timed_out else None)

    def _respond(self, output: bytes, notes: list[str], error: str | None = None) -> ToolResponse:
        text = _NOISE.sub("", output.decode("utf-8", "replace"))
        return ToolResponse(self.settings.render(text, notes), error=error)


class SessionResult:
    """The result of a command in a session; ``exit_code`` is the shell's if the command ended it."""

    __slots__ = ("cwd", "exit_code", "output", "restarted", "timed_out")

    def __init__(self, output: bytes, exit_code: int, cwd: str, *, timed_out: bool, restarted: bool) -> None:
        self.output, self.exit_code, self.cwd = output, exit_code, cwd
        self.timed_out, self.restarted = timed_out, restarted


class ShellSession:
    """A shell in a sandbox, restarted if a command ended it; ``limit`` is the bytes kept of an output."""

    def __init__(self, sandbox: Sandbox, env: Mapping[str, str], limit: int) -> None:
        self.sandbox = sandbox
        self._env = {**_ENV, **env}
        self._limit = limit
        self._shell: Dialogue | None = None
        self._pid = ""
        self._jobs: tuple[str, ...] = ()
        self._cwd: str | None = None

    async def run(self, command: str, timeout: float) -> SessionResult:
        """Run a command until it ends or times out. Raises SandboxError."""
        shell = await self._open()
        # After an abandoned command the next answer would be this one's: the shell is closed.
        async with undo_on_error_async(self.close):
            answer = await self._ask(shell, f"eval {shlex.quote(command)} </dev/null\n", timeout)
            timed_out = answer.note is None and not answer.program_ended
            output = answer.output
            if timed_out:
                answer = await self._stop(shell)
                output += answer.output
        if answer.note is not None:
            exit_code = self._read_note(answer.note)
            return SessionResult(output, exit_code, self._cwd or "", timed_out=timed_out, restarted=False)
        exit_code = await shell.exit_code() if answer.program_ended else 137
        await self.close()
        await self._open()
        return SessionResult(output, exit_code, self._cwd or "", timed_out=timed_out, restarted=True)

    async def fork(self, sandbox: Sandbox) -> ShellSession:
        """Return a session in another sandbox in the state of this one; see :meth:`ShellTool.fork_state`."""
        fork = ShellSession(sandbox, self._env, self._limit)
        fork._cwd = self._cwd
        if self._shell is None:
            return fork
        if self._jobs:
            raise EnvError(
                f"tool 'shell' cannot fork: jobs run in the background ({', '.join(self._jobs)}), and a running "
                "program cannot be copied: fork before they start or after they end"
            )
        # Through a file, since the output of a dialogue is cut at a limit.
        path, fork_path = await _temporary_file(self.sandbox), await _temporary_file(sandbox)
        async with undo_on_error_async(self.close):
            await self._ask(self._shell, f"{{ {_STATE}; }} >{path} 2>/dev/null\n", _START_S)
        await sandbox.write_file(fork_path, await self.sandbox.read_file(path))
        await self.sandbox.exec(["rm", "-f", path], timeout=_START_S)
        async with undo_on_error_async(fork.close):
            answer = await fork._ask(await fork._open(), f". {fork_path} 2>/dev/null; rm -f {fork_path}\n", _START_S)
        fork._read_note(answer.note or "")
        return fork

    async def close(self) -> None:
        """Kill the shell; idempotent."""
        shell, self._shell = self._shell, None
        if shell is not None:
            await shell.close()

    async def _stop(self, shell: Dialogue) -> Answer:
        """Stop a shell's command: by an interrupt, or by killing it but not the shell and its jobs."""
        output = b""
        for _ in range(_INTERRUPTS):
            await shell.interrupt()
            answer = await shell.wait(_GRACE_S)
            output += answer.output
            if answer.note is not None or answer.program_ended:
                return Answer(output, answer.note, answer.program_ended)
        await self.sandbox.exec(["sh", "-c", _KILL, "sh", self._pid, *self._jobs], timeout=_KILL_S)
        answer = await shell.wait(_KILL_S)
        return Answer(output + answer.output, answer.note, answer.program_ended)

    async def _open(self) -> Dialogue:
        if self._shell is not None:
            return self._shell
        try:
            process = await self.sandbox.spawn(_START, cwd=self._cwd, env=self._env)
        except SandboxFileNotFound:
            # The last shell's working directory no longer exists.
            process = await self.sandbox.spawn(_START, env=self._env)
        shell = Dialogue(process, self._limit)
        async with undo_on_error_async(shell.close):
            answer = await self._ask(shell, _SETUP, _START_S)
        if answer.note is None:
            await shell.close()
            text = answer.output.decode("utf-8", "replace").strip()
            raise ToolError(f"no shell starts in this sandbox: {text or 'no output'}")
        self._read_note(answer.note)
        self._shell = shell
        return shell

    async def _ask(self, shell: Dialogue, lines: str, timeout: float) -> Answer:
        # In two halves: a shell that echoes its commands (set -x, set -v) must not write the whole marker too early.
        first, second = secrets.token_hex(8), secrets.token_hex(8)
        state = '"$?" "$$" "$(echo $(jobs -p))" "$PWD"'
        mark = f'{{ printf "%s%s %s\\t%s\\t%s\\t%s\\n" {first} {second} {state} >&9; }} 2>/dev/null\n'
        return await shell.ask((lines + mark).encode("utf-8", "surrogateescape"), first + second, timeout)

    def _read_note(self, note: str) -> int:
        exit_code, pid, jobs, cwd = (note.strip().split("\t", 3) + [""] * 4)[:4]
        self._pid, self._jobs, self._cwd = pid, tuple(jobs.split()), cwd or None
        return int(exit_code) if exit_code.isdigit() else 1


async def _temporary_file(sandbox: Sandbox) -> str:
    # Where /tmp is not the sandbox's own (Landlock), TMPDIR names the folder that is.
    result = await sandbox.exec('mktemp "${TMPDIR:-/tmp}/turnwise-shell-XXXXXX"', timeout=_START_S)
    if not result.ok:
        raise EnvError(f"tool 'shell' cannot fork: no temporary file can be made: {result.text.strip()}")
    return result.stdout.decode("utf-8", "surrogateescape").strip()
