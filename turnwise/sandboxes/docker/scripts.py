"""Shell scripts that run inside containers, from ``inside/NAME.sh``.

An image needs ``/bin/sh``, ``cat``, ``head``, ``tr``, ``grep``, ``mkdir``, ``chmod`` and ``tar``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from turnwise.sandboxes.core import Command

ID_VARIABLE: Final = "TURNWISE_EXEC"
"""The environment variable that names the command that a process belongs to."""
NOT_FOUND: Final = 90
NOT_A_FILE: Final = 91
UNREADABLE: Final = 92
_CONSTANTS: Final = {
    "ID_VARIABLE": ID_VARIABLE,
    "NOT_FOUND": str(NOT_FOUND),
    "NOT_A_FILE": str(NOT_A_FILE),
    "UNREADABLE": str(UNREADABLE),
}


def _read(name: str) -> str:
    """Return a script without its comments; ``%NAME%`` in it stands for a constant or another script."""
    lines = Path(__file__).with_name("inside").joinpath(f"{name}.sh").read_text("utf-8").splitlines(keepends=True)
    text = "".join(line for line in lines if not line.lstrip().startswith("#"))
    return re.sub("%([A-Z_]+|words|look)%", lambda match: _CONSTANTS.get(match[1]) or _read(match[1]), text)


PID_1: Final = _read("pid_1")
KILL: Final = _read("kill")
INTERRUPT: Final = _read("interrupt")
READ_FILE: Final = _read("read_file")
WRITE_FILE: Final = _read("write_file")
UNPACK: Final = _read("unpack")
PACK: Final = _read("pack")
_RUN: Final = _read("run")
_SPAWN: Final = _read("spawn")


def run_command(command: Command, cwd: str, *, has_input: bool) -> list[str]:
    """Return the argv that runs a command to its end; the first input line is the end marker."""
    return script(_RUN, cwd, "1" if has_input else "0", *_words(command))


def spawn_command(command: Command, cwd: str) -> list[str]:
    """Return the argv that starts a long-running command; the first input line is a marker."""
    return script(_SPAWN, cwd, *_words(command))


def script(text: str, *arguments: str) -> list[str]:
    """Return the argv of a script."""
    return ["/bin/sh", "-c", text, "turnwise", *arguments]


def _words(command: Command) -> Sequence[str]:
    return ["text", command] if isinstance(command, str) else ["words", *command]
