"""A black-box program that runs in the sandbox of its episode."""

from __future__ import annotations

import posixpath
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from turnwise.errors import AgentError, SandboxError, SandboxFileError, shown
from turnwise.ext.programs.program import Exit, Output
from turnwise.ext.programs.workdir import MAX_RESULT_BYTES, tool_script
from turnwise.sandboxes.core import Sandbox, SandboxProcess

_PREPARE: Final = """set -e; root="${TMPDIR:-/tmp}/turnwise-$1"; mkdir -p "$root/home" "$root/tmp" "$root/bin"
printf '%s\\n' "$root" "$(pwd)" "$PATH"
"""
_STATUS: Final = b"turnwise-status:"
_FLOODED: Final = b"turnwise-flooded\n"
# The script outlives the program, so that killing it kills all processes that the program left.
# The outputs are files of the sandbox, whose size is checked every second.
_RUN: Final = """d=$1; most=$2; shift 2
: >"$d/stdout"; : >"$d/stderr"
while sleep 1; do
  if [ $(($(wc -c <"$d/stdout") + $(wc -c <"$d/stderr"))) -gt "$most" ]; then echo turnwise-flooded; exit; fi
done &
"$@" <"$d/stdin" >"$d/stdout" 2>"$d/stderr"
echo "turnwise-status:$?"
read -r _"""
_SIZES: Final = 'wc -c <"$1/stdout"; wc -c <"$1/stderr"'
_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class ProgramFolder:
    """Folders of one episode's program in a sandbox.

    Attributes:
        root: Parent of all but ``work``.
        work: Working directory, that of the sandbox's commands.
        path: The ``PATH``.
    """

    sandbox: Sandbox
    root: str
    home: str
    work: str
    path: str

    @classmethod
    async def make(cls, sandbox: Sandbox, workspace: Path | None) -> Self:
        """Create the folders."""
        result = await sandbox.exec(["sh", "-c", _PREPARE, "sh", secrets.token_hex(8)], timeout=_SECONDS)
        lines = result.stdout.decode("utf-8", "replace").split("\n")
        if not result.ok or len(lines) < 3:
            raise AgentError(f"cannot create the program's folders in its sandbox: {result.text.strip()[-500:]}")
        root, work, path = lines[:3]
        if workspace is not None:
            await sandbox.upload(workspace, work)
        return cls(sandbox, root, f"{root}/home", work, path)

    async def write(self, files: Mapping[str, str]) -> None:
        """Write files; relative paths are below ``work``."""
        for name, text in files.items():
            path = posixpath.normpath(posixpath.join(self.work, name))
            if not any(path.startswith(f"{folder}/") for folder in (self.work, self.root)):
                raise AgentError(f"file {shown(name)} is not below the program's own folders: give a relative path")
            try:
                await self.sandbox.write_file(path, text.encode())
            except SandboxFileError as error:
                raise AgentError(f"file {shown(name)} cannot be written: {error}") from error

    async def install_tool(self, url: str) -> str:
        """Write the command ``tool``; return its folder."""
        folder = f"{self.root}/bin"
        await self.sandbox.write_file(f"{folder}/tool.py", tool_script(url).encode())
        command = f'#!/bin/sh\nexec python3 -I -S {folder}/tool.py "$@"\n'
        await self.sandbox.write_file(f"{folder}/tool", command.encode(), mode=0o755)
        return folder

    async def read(self, name: str) -> str | None:
        """Return a file's text, None where it cannot be read; relative paths are below ``work``."""
        try:
            data = await self.sandbox.read_file(posixpath.join(self.work, name), max_bytes=MAX_RESULT_BYTES)
        except SandboxFileError:
            return None
        return data.decode("utf-8", "replace")


class SandboxedProgram:
    """A running program in a sandbox. Use :meth:`start`, and always :meth:`end`."""

    def __init__(self, folder: ProgramFolder, process: SandboxProcess, kept_bytes: int, output_limit: int) -> None:
        self._folder = folder
        self._process = process
        self._kept_bytes = kept_bytes
        self._limit = output_limit
        self._flooded = False
        self._status: int | None = None
        self._failure: SandboxError | None = None

    @classmethod
    async def start(
        cls,
        folder: ProgramFolder,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        stdin: bytes,
        kept_bytes: int,
        output_limit: int,
    ) -> Self:
        """Start a program; it is over when its outputs have more than ``output_limit`` bytes together."""
        await folder.sandbox.write_file(f"{folder.root}/stdin", stdin)
        command = ["sh", "-c", _RUN, "sh", folder.root, str(output_limit), *argv]
        process = await folder.sandbox.spawn(command, cwd=folder.work, env=env)
        return cls(folder, process, kept_bytes, output_limit)

    async def wait(self) -> None:
        """Wait for the program's exit or the end of its output limit; its descendants may still run."""
        output = b""
        try:
            while piece := await self._process.read():
                output = (output + piece)[-self._kept_bytes :]
                _, marker, rest = output.rpartition(_STATUS)
                if marker and rest.endswith(b"\n"):
                    self._status = _status(rest)
                    return
                if output.endswith(_FLOODED):
                    self._flooded = True
                    return
        except SandboxError as error:
            # The caller that ends the program gets the error.
            self._failure = error

    async def end(self, *, collect: bool = True) -> Exit:
        """Kill the rest of the tree and return the exit.

        Args:
            collect: Whether to fetch its outputs.
        """
        if self._failure is not None:
            raise self._failure
        await self._process.kill()
        empty = Output("", 0, cut=False)
        if not collect:
            return Exit(self._status, empty, empty, None, self._flooded)
        root, sandbox = self._folder.root, self._folder.sandbox
        outputs = await sandbox.exec(
            ["sh", "-c", 'cat "$1/stdout"; cat "$1/stderr" >&2', "sh", root],
            timeout=_SECONDS,
            max_output=self._kept_bytes,
        )
        sizes = [len(outputs.stdout), len(outputs.stderr)]
        if outputs.truncated:
            counted = await sandbox.exec(["sh", "-c", _SIZES, "sh", root], timeout=_SECONDS)
            # Of a file that the program removed there is no size.
            counts = [int(size) for size in counted.stdout.split()]
            sizes = counts if len(counts) == len(sizes) else sizes
        stdout, stderr = (
            Output(data.decode("utf-8", "replace"), size, cut=size > self._kept_bytes)
            for data, size in zip((outputs.stdout, outputs.stderr), sizes, strict=True)
        )
        return Exit(self._status, stdout, stderr, None, self._flooded or sum(sizes) > self._limit)


def _status(text: bytes) -> int | None:
    """Parse the exit status that the sandbox's shell reports; negative after a signal."""
    try:
        code = int(text)
    except ValueError:
        return None
    return 128 - code if 128 < code < 160 else code
