"""The ``editor`` tool, which views and edits text files, and its text operations."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Annotated, Any, Final

from pydantic import Field

from turnwise.config import Section
from turnwise.errors import SandboxFileError, SandboxFileNotFound, SandboxFileTooLarge, ToolError
from turnwise.sandboxes.core import Sandbox
from turnwise.tools.response import ToolResponse
from turnwise.tools.sandboxed.base import FileTool, as_text, make_schema, tool_config

_CONTEXT: Final = 3
_MAX_LINES_COMPARED: Final = 4000
_MIN_SIMILARITY: Final = 0.5
_MAX_LINES_NAMED: Final = 20


def lines_of(text: str) -> list[str]:
    """Split a text at line feeds only, as compilers and ``diff`` do."""
    return [line.rstrip("\r\n") for line in _split_lines(text)]


def numbered(lines: list[str], first: int = 1) -> str:
    """Return lines with numbers, as ``cat -n``."""
    return "\n".join(f"{number:6}\t{line}" for number, line in enumerate(lines, first))


def numbered_excerpt(text: str, first_line: int, last_line: int) -> str:
    """Return lines ``first_line`` to ``last_line`` (from 1, inclusive) with context, numbered."""
    lines = lines_of(text)
    start, end = max(1, first_line - _CONTEXT), min(len(lines), last_line + _CONTEXT)
    return numbered(lines[start - 1 : end], start)


def replace_text(text: str, old: str, new: str) -> tuple[str, int]:
    """Replace the only occurrence of ``old``; return the new text and the first changed line.

    Line ends of ``old`` and ``new`` are adapted to a text with Windows line ends, unless ``old`` matches verbatim.
    Raises ToolError if there are several occurrences (naming the lines) or none (showing the closest text).
    """
    if not old:
        raise ToolError("old_str is empty: give the text to replace, or use insert")
    if old == new:
        raise ToolError("old_str and new_str are the same: nothing would change")
    if "\r\n" in text and "\r" not in old and (old.replace("\n", "\r\n") in text or old not in text):
        old, new = old.replace("\n", "\r\n"), new.replace("\n", "\r\n")
    positions = _find_all(text, old)
    if len(positions) > 1:
        lines = [text.count("\n", 0, position) + 1 for position in positions]
        numbers = ", ".join(map(str, lines[:_MAX_LINES_NAMED])) + (", ..." if len(lines) > _MAX_LINES_NAMED else "")
        raise ToolError(
            f"old_str occurs {len(positions)} times, at lines {numbers}: take more lines around it into old_str, so "
            "that it occurs once"
        )
    if not positions:
        raise ToolError(_explain_no_match(text, old))
    position = positions[0]
    return text[:position] + new + text[position + len(old) :], text.count("\n", 0, position) + 1


def insert_text(text: str, line: int, new: str) -> str:
    """Insert ``new`` after a line (0: at the start); ToolError if there is no such line."""
    lines = _split_lines(text)
    if not 0 <= line <= len(lines):
        raise ToolError(f"insert_line is {line}: the file has {len(lines)} lines, so it must be from 0 to {len(lines)}")
    ending = "\r\n" if "\r\n" in text else "\n"
    if ending == "\r\n" and "\r" not in new:
        new = new.replace("\n", ending)
    if line and not lines[line - 1].endswith("\n"):
        # After a last line without a line feed: the new text is a separate line, and the file ends as before.
        return text + ending + new.removesuffix(ending)
    if not new.endswith("\n"):
        new += ending
    return "".join([*lines[:line], new, *lines[line:]])


def _find_all(text: str, part: str) -> list[int]:
    """Return all occurrences, overlapping ones included, since they would be different edits."""
    positions, start = [], text.find(part)
    while start >= 0:
        positions.append(start)
        start = text.find(part, start + 1)
    return positions


def _explain_no_match(text: str, old: str) -> str:
    lines, old_lines = lines_of(text), lines_of(old.strip("\r\n"))
    count = max(1, len(old_lines))
    squeezed = [_without_spaces(line) for line in old_lines]
    starts = range(max(1, len(lines) - count + 1))
    squeezed_lines = [_without_spaces(line) for line in lines]
    alike = [start + 1 for start in starts if squeezed_lines[start : start + count] == squeezed]
    problem = "old_str does not occur in the file"
    if alike and any(squeezed):
        first = alike[0]
        excerpt = numbered(lines[first - 1 : first - 1 + count], first)
        return f"{problem} exactly; with different whitespace it does, at line {first}:\n{excerpt}\nCopy it exactly."
    if len(lines) > _MAX_LINES_COMPARED:
        return f"{problem}: view the part that you mean and copy it exactly"
    best, score = 0, 0.0
    matcher = difflib.SequenceMatcher(autojunk=False)
    matcher.set_seq2("\n".join(old_lines))
    for start in starts:
        matcher.set_seq1("\n".join(lines[start : start + count]))
        if matcher.real_quick_ratio() > score and matcher.quick_ratio() > score and (ratio := matcher.ratio()) > score:
            best, score = start, ratio
    if score < _MIN_SIMILARITY:
        return f"{problem}, nor anything like it: view the file and copy what you want to replace exactly"
    excerpt = numbered(lines[best : best + count], best + 1)
    return f"{problem}. The nearest is at line {best + 1}:\n{excerpt}\nCopy it exactly."


def _split_lines(text: str) -> list[str]:
    return re.findall(r"[^\n]*\n|[^\n]+", text)


def _without_spaces(line: str) -> str:
    return "".join(line.split())


_MAX_ENTRIES: Final = 400
_COMMANDS: Final[Mapping[str, tuple[str, ...]]] = {
    "view": (),
    "create": ("file_text",),
    "str_replace": ("old_str",),
    "insert": ("insert_line", "new_str"),
}
_DESCRIPTION: Final = (
    "View and edit text files. view: a file with line numbers (view_range for a part), or a folder two levels deep. "
    "create: write a file, new or anew. str_replace: replace old_str, which must stand in the file exactly once, white "
    "space included, by new_str. insert: put new_str behind the line insert_line (0: at the beginning)."
)
_LIST: Final = (
    'test -d "$1" || exit 3; find "$1" -mindepth 1 -maxdepth 2 -name ".*" -prune -o -mindepth 1 -maxdepth 2 '
    "\\( -type d -exec sh -c 'for f; do echo \"$f/\"; done' sh {} + \\) -o -mindepth 1 -maxdepth 2 -print | sort"
)


class EditorConfig(Section):
    """Configuration of ``editor``.

    Attributes:
        max_file: Maximum size of a file in bytes.
        max_output: Characters of a file per view.
    """

    max_file: Annotated[int, Field(gt=0)] = 2_000_000
    max_output: Annotated[int, Field(ge=1000)] = 30_000


class EditorTool(FileTool):
    """``editor``: views and edits text files in the episode's sandbox."""

    def __init__(self, config: Mapping[str, Any] | None = None, tool_schema: Any = None) -> None:
        self.settings: EditorConfig = tool_config(EditorConfig, config, "editor")
        text = {"type": "string"}
        properties = {
            "command": {"type": "string", "enum": list(_COMMANDS)},
            "path": {"type": "string", "description": "absolute, or from the working directory"},
            "file_text": {**text, "description": "for create: the whole content"},
            "old_str": {**text, "description": "for str_replace: what is replaced"},
            "new_str": {**text, "description": "for str_replace (empty if left out) and insert"},
            "insert_line": {"type": "integer", "description": "for insert", "minimum": 0},
            "view_range": {
                "type": "array",
                "items": {"type": "integer"},
                "description": "for view: first and last line; a last line of -1 is the end",
            },
        }
        super().__init__(config, tool_schema or make_schema("editor", _DESCRIPTION, properties, ("command", "path")))
        self.max_output = self.settings.max_output + 2_000

    async def execute(
        self,
        instance_id: str,
        parameters: dict[str, Any],
        **kwargs: Any,  # noqa: ARG002
    ) -> tuple[ToolResponse, float | None, dict[str, float]]:
        """View or edit a file. Raises ToolError with the remedy, or SandboxError."""
        command, path = str(parameters["command"]), str(parameters["path"])
        missing = [name for name in _COMMANDS[command] if parameters.get(name) is None]
        if missing:
            raise ToolError(f"{command} needs {' and '.join(missing)}")
        sandbox = self.states[instance_id]
        if command == "view":
            return ToolResponse(await self._view(sandbox, path, parameters.get("view_range"))), None, {}
        if command == "create":
            return ToolResponse(await self._create(sandbox, path, str(parameters["file_text"]))), None, {}
        text, new = await self._text(sandbox, path), str(parameters.get("new_str") or "")
        if command == "str_replace":
            changed, line = replace_text(text, str(parameters["old_str"]), new)
        else:
            line = int(parameters["insert_line"]) + 1
            changed = insert_text(text, line - 1, new)
        await self._write(sandbox, path, changed)
        part = numbered_excerpt(changed, line, line + new.count("\n"))
        return ToolResponse(f"{path} was changed. Around the change it now reads:\n{part}"), None, {}

    async def _view(self, sandbox: Sandbox, path: str, view_range: Any) -> str:
        try:
            text = await self._text(sandbox, path)
        except ToolError:
            listing = await self._listing(sandbox, path)
            if listing is None:
                raise
            return listing
        lines = lines_of(text)
        first_line, last_line = 1, len(lines)
        if view_range is not None:
            if len(view_range) != 2:
                raise ToolError(f"view_range is {view_range}: give the first and the last line, such as [1, 40]")
            first_line, last_line = view_range[0], len(lines) if view_range[1] == -1 else min(view_range[1], len(lines))
            if not 1 <= first_line <= last_line:
                raise ToolError(f"view_range is {view_range}: the file has {len(lines)} lines, from 1")
        view: list[str] = []
        size = 0
        for line in lines[first_line - 1 : last_line]:
            size += len(line) + 8
            if size > self.settings.max_output and view:
                end = first_line + len(view) - 1
                note = f"({path} has {len(lines)} lines; shown are {first_line} to {end}: give view_range for others)"
                return f"{numbered(view, first_line)}\n{note}"
            view.append(line)
        return numbered(view, first_line) if view else f"({path} is empty)"

    async def _listing(self, sandbox: Sandbox, path: str) -> str | None:
        listing = await sandbox.exec(["sh", "-c", _LIST, "sh", path.rstrip("/") or "/"], timeout=30.0)
        if listing.exit_code == 3:
            return None
        if listing.timed_out:
            raise ToolError(f"{path} takes too long to list: view a folder below it")
        entries = listing.stdout.decode("utf-8", "replace").splitlines()
        more = len(entries) - _MAX_ENTRIES
        note = f"\n({more} further entries are not shown: view a folder below it)" if more > 0 else ""
        return "\n".join(entries[:_MAX_ENTRIES]) + note if entries else f"({path} is an empty folder)"

    async def _create(self, sandbox: Sandbox, path: str, text: str) -> str:
        try:
            await sandbox.read_file(path, max_bytes=self.settings.max_file)
            verb = "overwritten"
        except SandboxFileNotFound:
            verb = "created"
        except SandboxFileError as error:
            raise ToolError(str(error)) from error
        await self._write(sandbox, path, text)
        lines = len(lines_of(text))
        return f"{path} is {verb}, with {lines} lines."

    async def _text(self, sandbox: Sandbox, path: str) -> str:
        try:
            data = await sandbox.read_file(path, max_bytes=self.settings.max_file)
        except SandboxFileNotFound as error:
            raise ToolError(f"there is no file {path!r}: view the folder to see what there is") from error
        except SandboxFileTooLarge as error:
            limit = self.settings.max_file
            raise ToolError(f"{path} has more than {limit} bytes: read parts of it with another tool") from error
        except SandboxFileError as error:
            raise ToolError(str(error)) from error
        return as_text(path, data)

    async def _write(self, sandbox: Sandbox, path: str, text: str) -> None:
        try:
            await sandbox.write_file(path, text.encode("utf-8", "replace"))
        except SandboxFileError as error:
            raise ToolError(f"{path} cannot be written: {error}") from error
