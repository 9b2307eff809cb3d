"""Commands as the agent is asked for them, and what its refusals mean.

Owns: the request of a command, and the result or the error of one that did not start.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from typing import Any

from turnwise.errors import SandboxFileNotFound, shown
from turnwise.sandboxes.core import Command, ExecResult
from turnwise.sandboxes.local.channel import Refused


def message(command: Command, cwd: str, env: Mapping[str, str] | None) -> dict[str, Any]:
    """Return the request that starts a command."""
    argv = None if isinstance(command, str) else [str(word) for word in command]
    if argv == []:
        raise ValueError("command is an empty sequence: give a program and its arguments, or a text for the shell")
    shell = str(command) if isinstance(command, str) else None
    return {"op": "exec", "argv": argv, "shell": shell, "cwd": cwd, "env": dict(env or {})}


def not_there(error: Refused, command: Command, cwd: str | None) -> SandboxFileNotFound:
    """Return the error of a folder or a program that is not there."""
    if error.what == "cwd":
        return SandboxFileNotFound(f"cwd {cwd!r} inside: {error.reason}")
    return SandboxFileNotFound(f"{shown(command)}: {error.reason}")


def refused(error: Refused, command: Command, cwd: str | None, duration: float) -> ExecResult:
    """Return the result of a command that did not start.

    Raises:
        SandboxFileNotFound: ``cwd`` is no folder.
    """
    if error.what == "cwd":
        raise not_there(error, command, cwd)
    program = command if isinstance(command, str) else command[0]
    code = 127 if error.number == errno.ENOENT else 126
    text = f"{shown(program)}: {error.reason}\n".encode()
    return ExecResult(code, b"", text, duration=duration)
