"""Working directory, environment variables and prompt placeholders of a black-box program."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from turnwise.errors import AgentError, shown
from turnwise.ext.programs.recipes import Dialect
from turnwise.model.canonical import canonical_messages, clean
from turnwise.types import Message, ToolSchema, text_of

API_KEY: Final = "turnwise"
"""The key that a program sends: its address alone identifies it."""
PLACEHOLDERS: Final = (
    "prompt", "prompt_file", "task", "system", "user", "tools", "model", "api_key", "base_url", "openai_base_url",
    "anthropic_base_url", "tools_url", "mcp_url", "event_url", "home", "work", "python", "context_length", "max_turns",
)  # fmt: skip
"""What texts of a recipe may hold in braces; docs/external-agents.md says what each stands for."""
_PLACEHOLDER: Final = re.compile(r"\{([a-z_]+|input\.[^{}!]+)(!j)?\}")
INPUT: Final = "input"
"""The row of the task, as JSON; ``input.COLUMN`` is one column, ``input.COLUMN.KEY`` what is in it."""
MAX_RESULT_BYTES: Final = 4 * 2**20
"""Maximum bytes of a file that holds an answer."""
_MAX_ARGUMENT_BYTES: Final = 131_071
"""Maximum bytes of one argument on Linux."""

# A separate program, so that it imports nothing of this package. Written where the tools are offered.
_TOOL_SCRIPT: Final = Path(__file__).with_name("tool.py.in").read_text("utf-8")


def fill(text: str, values: Mapping[str, str]) -> str:
    """Replace placeholders, ``{name!j}`` as JSON; leave other braces."""

    def value(match: re.Match[str]) -> str:
        if match[1] not in values:
            if match[1].startswith(f"{INPUT}.") and INPUT in values:
                columns = ", ".join(json.loads(values[INPUT]))
                raise AgentError(f"blackbox: {match[0]}: the task has no such column; it has {columns}")
            return match[0]
        return json.dumps(values[match[1]], ensure_ascii=False) if match[2] else values[match[1]]

    return _PLACEHOLDER.sub(value, text)


def placeholders_in(texts: Sequence[str]) -> set[str]:
    """Return the placeholders in texts."""
    return {match[1] for text in texts for match in _PLACEHOLDER.finditer(text)}


def tool_script(url: str) -> str:
    """Return the source of the command ``tool``."""
    return _TOOL_SCRIPT.replace("{url!r}", repr(url))


def observation_values(observation: Sequence[Message]) -> dict[str, str]:
    """Return the placeholder values of an observation. Raises AgentError if it holds images."""
    if any(message.media for message in canonical_messages(observation)):
        raise AgentError(
            "the observation holds an image, and a program is given its task as text: let a tool return the image, or "
            "choose another agent"
        )
    system = [text_of(message) for message in observation if message["role"] in ("system", "developer")]
    user = [text_of(message) for message in observation if message["role"] not in ("system", "developer")]
    texts_by_name = {"system": system, "user": user, "task": [*system, *user]}
    # Arguments and files cannot hold a NUL or a lone surrogate.
    return {
        name: clean("\n\n".join(filter(None, texts))).replace("\0", "\ufffd") for name, texts in texts_by_name.items()
    }


def row_values(row: Mapping[str, Any]) -> dict[str, str]:
    """Return the placeholder values of a row and of all that is in it: texts as they are, the rest as JSON."""
    values: dict[str, str] = {}

    def add(name: str, value: Any) -> None:
        values[name] = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        if isinstance(value, (Mapping, list)):
            for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
                add(f"{name}.{key}", item)

    add(INPUT, row)
    return {name: clean(text).replace("\0", "\ufffd") for name, text in values.items()}


def shell_tools(tools: Sequence[ToolSchema]) -> str:
    """Return instructions for calling the tools from a shell."""
    if not tools:
        return ""
    lines = [
        "Besides everything else there is a command `tool`, which calls one of these tools and prints its answer:",
        *(f"- {tool.name}: {tool.description} Arguments: {json.dumps(tool.parameters)}" for tool in tools),
        f"Call one as: tool {tools[0].name} '{{...}}', with the arguments as a JSON object.",
    ]
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Workdir:
    """Folders of one episode."""

    root: Path
    home: Path
    work: Path

    @classmethod
    def make(cls, base: Path | None, workspace: Path | None, provided: str | None) -> Self:
        """Create the folders.

        Args:
            base: Parent; by default the system's temporary folder.
            workspace: Folder copied into the working directory, if any.
            provided: Working directory to use instead, made by the environment.
        """
        try:
            root = Path(tempfile.mkdtemp(prefix="turnwise-", dir=base))
            home, work = root / "home", Path(provided) if provided else root / "work"
            for folder in (home, root / "tmp"):
                folder.mkdir()
            if provided is None:
                if workspace is None:
                    work.mkdir()
                else:
                    shutil.copytree(workspace, work, symlinks=True)
        except OSError as error:
            raise AgentError(f"cannot create the program's folders: {error}") from error
        if not work.is_dir():
            raise AgentError(f"info['workspace'] is {shown(provided)}, which is not a folder")
        return cls(root, home, work)

    def write(self, files: Mapping[str, str]) -> None:
        """Write files; relative paths are below ``work``."""
        for name, text in files.items():
            path = Path(os.path.normpath(self.work / name))
            if not any(path.is_relative_to(folder) for folder in (self.work, self.root)):
                raise AgentError(f"file {shown(name)} is not below the program's own folders: give a relative path")
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
            except OSError as error:
                raise AgentError(f"file {shown(name)} cannot be written: {error}") from error

    def read(self, name: str) -> str | None:
        """Return a file's text, None where it cannot be read; relative paths are below ``work``."""
        path = self.work / name
        try:
            # A pipe or a device has no end.
            if not path.is_file() or path.stat().st_size > MAX_RESULT_BYTES:
                return None
            return path.read_text(errors="replace")
        except OSError:
            return None

    def install_tool(self, url: str) -> Path:
        """Write the command ``tool``; return its folder."""
        folder = self.root / "bin"
        folder.mkdir()
        script = folder / "tool.py"
        script.write_text(tool_script(url))
        command = folder / "tool"
        command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -I -S {shlex.quote(str(script))} "$@"\n')
        command.chmod(0o755)
        return folder

    def remove(self) -> None:
        """Remove the folders, whatever their permissions."""

        def force_remove(function: Any, path: str, _: object) -> None:
            try:
                os.chmod(os.path.dirname(path), 0o700)
                os.chmod(path, 0o700)
                function(path)
            except OSError:
                return

        shutil.rmtree(self.root, onerror=force_remove)


def environment(
    dialect: Dialect,
    values: Mapping[str, str],
    variables: Mapping[str, str],
    passed: Sequence[str],
    *,
    temporary: str,
    path: str,
) -> dict[str, str]:
    """Return the complete environment of a program.

    Args:
        dialect: Which variables carry the session's base URL.
        values: Placeholder values, ``home`` included.
        variables: Further variables, of highest precedence.
        passed: Names of variables passed on from this process.
        temporary: ``TMPDIR``.
        path: ``PATH``.
    """
    env = {name: os.environ[name] for name in passed if name in os.environ}
    env |= {
        "PATH": path,
        "HOME": values["home"],
        "TMPDIR": temporary,
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "NO_COLOR": "1",
        "TURNWISE_MODEL": values["model"],
    }
    if dialect != "anthropic":
        env |= dict.fromkeys(("OPENAI_BASE_URL", "OPENAI_API_BASE"), values["openai_base_url"])
        env |= {"OPENAI_API_KEY": values["api_key"], "OPENAI_MODEL": values["model"]}
    if dialect != "openai":
        env |= {"ANTHROPIC_BASE_URL": values["anthropic_base_url"], "ANTHROPIC_API_KEY": values["api_key"]}
        env["ANTHROPIC_MODEL"] = values["model"]
    if values["tools_url"]:
        env |= {"TURNWISE_TOOLS_URL": values["tools_url"], "TURNWISE_MCP_URL": values["mcp_url"]}
    return env | {name: fill(text, values) for name, text in variables.items()}


def check_arguments(argv: Sequence[str]) -> None:
    """Check the length of a command line's arguments."""
    for argument in argv:
        if len(argument.encode()) > _MAX_ARGUMENT_BYTES:
            raise AgentError(
                f"an argument of {argv[0]} has {len(argument.encode())} bytes, more than the system allows "
                f"({_MAX_ARGUMENT_BYTES}): give the prompt as stdin: '{{prompt}}', or name {{prompt_file}}"
            )


async def read_answer(location: str, stdout: str, read: Callable[[str], Awaitable[str | None]]) -> str | None:
    """Return a program's answer; None where it is missing, or is the last message.

    Args:
        location: ``message``, ``stdout``, ``file:PATH`` or ``json:PATH#a.b``.
        stdout: Standard output.
        read: Returns a file's text, or None.
    """
    kind, _, location = location.partition(":")
    if kind == "message":
        return None
    if kind == "stdout":
        return stdout
    name, _, keys = location.rpartition("#") if kind == "json" else (location, "", "")
    text = stdout if name == "stdout" else await read(name)
    if kind == "file" or text is None:
        return text
    try:
        value = json.loads(text)
        for key in keys.split("."):
            value = value[int(key)] if isinstance(value, list) else value[key]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
