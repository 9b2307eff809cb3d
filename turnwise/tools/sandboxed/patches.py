"""The ``apply_patch`` tool: parsing and applying unified diffs and ``*** Begin Patch`` envelopes."""

from __future__ import annotations

import difflib
import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import Field

from turnwise.config import Section
from turnwise.errors import SandboxFileError, SandboxFileNotFound, ToolError, shown
from turnwise.sandboxes.core import Sandbox
from turnwise.tools.response import ToolResponse
from turnwise.tools.sandboxed.base import FileTool, as_text, make_schema, tool_config

Kind: TypeAlias = Literal["add", "update", "delete"]
_HUNK: Final = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_BEGIN: Final = "*** Begin Patch"
_END: Final = "*** End Patch"
_SECTION: Final = re.compile(r"\*\*\* (Add File|Delete File|Update File|Move to): (.*)")
_MAX_POSITIONS_NAMED: Final = 10
_SAME_NAMES: Final = re.compile(r'diff --git "?a/(.+?)"? "?b/\1"?$')


@dataclass(slots=True)
class Hunk:
    """One hunk of a patch.

    Attributes:
        line: First line by the patch's header, from 1, or None.
        anchors: Lines above it, in order (``@@ def f():``).
        at_end: Whether it ends at the end of the file.
        old_newline: Whether its last old line ends with a line feed; None if unspecified.
        new_newline: The same of its last new line.
    """

    old: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)
    line: int | None = None
    anchors: list[str] = field(default_factory=list)
    at_end: bool = False
    old_newline: bool | None = None
    new_newline: bool | None = None


@dataclass(slots=True)
class FileChange:
    """The change of one file; an added file has at most one hunk, without old lines."""

    kind: Kind
    path: str
    move_to: str | None = None
    hunks: list[Hunk] = field(default_factory=list)


def parse_patch(text: str) -> list[FileChange]:
    """Parse a patch; ToolError quotes the malformed line."""
    lines = text.replace("\r\n", "\n").removesuffix("\n").split("\n")
    enveloped = any(line.strip() == _BEGIN for line in lines)
    changes = _parse_envelope(lines) if enveloped else _parse_unified(lines)
    if not changes:
        raise ToolError(
            "this is not a patch: write a unified diff ('--- a/file', '+++ b/file', '@@ -1,3 +1,4 @@'), or "
            f"'{_BEGIN}' with '*** Update File: path' sections"
        )
    paths = [posixpath.normpath(path) for change in changes for path in {change.path, change.move_to} if path]
    duplicates = sorted({path for path in paths if paths.count(path) > 1})
    if duplicates:
        raise ToolError(f"the patch changes {', '.join(duplicates)} more than once: put all its changes in one section")
    return changes


def apply_hunks(change: FileChange, text: str) -> str:
    """Return an updated file's text; ToolError if a hunk is ambiguous or does not match, quoting the differing line."""
    raw = text.split("\n")
    newline = raw[-1] == ""
    raw = raw[:-1] if newline else raw
    lines = [line.removesuffix("\r") for line in raw]
    ending = "\r" if 2 * text.count("\r\n") > text.count("\n") else ""
    if raw and not newline:
        raw[-1] += ending
    new_lines: list[str] = []
    position = 0
    for number, hunk in enumerate(change.hunks, 1):
        start = _find_start(lines, hunk, position, f"{change.path}: hunk {number}")
        end = start + len(hunk.old)
        if end == len(lines) and hunk.old and hunk.old_newline is False and newline:
            raise ToolError(f"{change.path}: hunk {number} says that the file ends without a line feed; it has one")
        new_lines += raw[position:start] + _with_ends(hunk, raw[start:end], ending)
        if end == len(lines) and hunk.new_newline is not None:
            newline = hunk.new_newline
        position = end
    new_lines += raw[position:]
    result = "\n".join(new_lines)
    return f"{result}\n" if newline and new_lines else result.removesuffix(ending)


def _with_ends(hunk: Hunk, raw: list[str], ending: str) -> list[str]:
    """Return a hunk's new lines; context keeps its line ends, new lines take the predominant one."""
    new_lines = [line + ending for line in hunk.new]
    matcher = difflib.SequenceMatcher(None, hunk.old, hunk.new, autojunk=False)
    for old, new, size in matcher.get_matching_blocks():
        new_lines[new : new + size] = raw[old : old + size]
    return new_lines


def new_file_text(change: FileChange) -> str:
    """Return the text of an added file."""
    hunk = change.hunks[0] if change.hunks else Hunk()
    newline = hunk.new_newline is not False
    return "\n".join(hunk.new) + ("\n" if newline and hunk.new else "")


def _find_start(lines: list[str], hunk: Hunk, position: int, where: str) -> int:
    start = position
    for anchor in hunk.anchors:
        start = _find_anchor(lines, anchor, start, where) + 1
    if not hunk.old:
        if hunk.line is not None:
            return max(position, min(hunk.line, len(lines)))  # a hunk without old lines names the line before it
        return start if hunk.anchors else len(lines)
    starts = [at for at in range(start, len(lines) - len(hunk.old) + 1) if lines[at : at + len(hunk.old)] == hunk.old]
    if hunk.at_end:
        starts = [at for at in starts if at + len(hunk.old) == len(lines)]
    if not starts:
        raise ToolError(f"{where} {_mismatch(lines, hunk, start)}")
    if hunk.line is not None and hunk.line - 1 in starts:
        return hunk.line - 1
    if len(starts) > 1 and not hunk.anchors:
        line_numbers = ", ".join(str(at + 1) for at in starts[:_MAX_POSITIONS_NAMED])
        raise ToolError(
            f"{where} fits at {len(starts)} positions, at lines {line_numbers}: give more lines of context"
            + ("" if hunk.line is None else f" (it does not fit at line {hunk.line}, as given)")
        )
    return starts[0]


def _find_anchor(lines: list[str], anchor: str, start: int, where: str) -> int:
    for at in range(start, len(lines)):
        if lines[at] == anchor:
            return at
    for at in range(start, len(lines)):
        if lines[at].strip() == anchor.strip():
            return at
    raise ToolError(f"{where}: there is no line {anchor!r} below line {start}, where '@@ {anchor}' looks for it")


def _mismatch(lines: list[str], hunk: Hunk, start: int) -> str:
    best, matched = start, -1
    for at in range(start, max(start + 1, len(lines))):
        count = 0
        while count < len(hunk.old) and at + count < len(lines) and lines[at + count] == hunk.old[count]:
            count += 1
        if count > matched:
            best, matched = at, count
    if matched == len(hunk.old):
        return f"is marked as the end of the file, but line {best + matched} is not its last line"
    expected = shown(hunk.old[matched], 200)
    if matched == 0:
        near = [at + 1 for at in range(start, len(lines)) if lines[at].split() == hunk.old[0].split()]
        hint = f"; with different whitespace it is line {near[0]}: {shown(lines[near[0] - 1], 200)}" if near else ""
        return f"does not match: the file has no line {expected}{f' below line {start}' if start else ''}{hint}"
    at = best + matched
    actual = f"line {at + 1} of the file is {shown(lines[at], 200)}" if at < len(lines) else "the file ends there"
    return f"does not match: its first {matched} lines do at line {best + 1}, but then it has {expected}, and {actual}"


def _parse_unified(lines: list[str]) -> list[FileChange]:
    changes: list[FileChange] = []
    moved_from: str | None = None
    same_name: re.Match[str] | None = None
    at = 0
    while at < len(lines):
        line = lines[at]
        if line.startswith(("GIT binary patch", "Binary files ")):
            raise ToolError(f"line {at + 1} of the patch is {shown(line)}: binary files cannot be patched")
        if line.startswith("diff --git "):
            moved_from, same_name = None, _SAME_NAMES.match(line)
        elif same_name is not None and line.startswith(("new file mode ", "deleted file mode ")):
            if not _has_lines(lines, at):
                # An empty file that is new or deleted has a header only.
                changes.append(FileChange("add" if line.startswith("new") else "delete", same_name[1]))
        elif line.startswith("rename from "):
            moved_from = line.removeprefix("rename from ")
        elif line.startswith("rename to ") and moved_from is not None:
            changes.append(FileChange("update", moved_from, line.removeprefix("rename to ")))
        elif _is_header(lines, at):
            change = _header(lines[at], lines[at + 1], changes[-1] if moved_from is not None and changes else None)
            if not changes or changes[-1] is not change:
                changes.append(change)
            at = _read_hunks(lines, at + 2, change)
            continue
        elif line.startswith("@@ "):
            above = "no '--- a/file', '+++ b/file' is above it"
            raise ToolError(f"line {at + 1} of the patch is {shown(line)}, and {above}")
        at += 1
    return changes


def _has_lines(lines: list[str], at: int) -> bool:
    """Whether a git section has hunks or a binary patch after its header."""
    for line in lines[at:]:
        if line.startswith(("--- ", "GIT binary patch", "Binary files ")):
            return True
        if line.startswith("diff --git "):
            return False
    return False


def _is_header(lines: list[str], at: int) -> bool:
    return lines[at].startswith("--- ") and at + 1 < len(lines) and lines[at + 1].startswith("+++ ")


def _header(old: str, new: str, renamed: FileChange | None) -> FileChange:
    source, target = _path(old), _path(new)
    if renamed is not None and target is not None and target == renamed.move_to:
        return renamed
    if source is None and target is None:
        raise ToolError("a section of the patch has /dev/null on both sides: name the file")
    if source is None:
        return FileChange("add", target or "")
    if target is None:
        return FileChange("delete", source)
    return FileChange("update", source, target if target != source else None)


def _path(header: str) -> str | None:
    name = header[4:].split("\t")[0].strip().strip('"')
    if name == "/dev/null":
        return None
    return name[2:] if name[:2] in ("a/", "b/") else name


def _read_hunks(lines: list[str], at: int, change: FileChange) -> int:
    while at < len(lines) and (header := _HUNK.match(lines[at])) is not None:
        old_left, new_left = int(header[2] or 1), int(header[4] or 1)
        hunk = Hunk(line=int(header[1]))
        change.hunks.append(hunk)
        at += 1
        sign = " "
        while at < len(lines):
            line = lines[at]
            if line.startswith("\\"):
                hunk.old_newline = False if sign in " -" else hunk.old_newline
                hunk.new_newline = False if sign in " +" else hunk.new_newline
                at += 1
                continue
            counts_reached = old_left <= 0 and new_left <= 0
            if _hunk_ends(lines, at, counts_reached=counts_reached, one_each=old_left == new_left == 1):
                break
            sign, rest = (line[0], line[1:]) if line else (" ", "")
            if sign in " -":
                hunk.old.append(rest)
                old_left, hunk.old_newline = old_left - 1, True
            if sign in " +":
                hunk.new.append(rest)
                new_left, hunk.new_newline = new_left - 1, True
            at += 1
    return at


def _hunk_ends(lines: list[str], at: int, *, counts_reached: bool, one_each: bool) -> bool:
    """Whether a hunk ends at a line: by its counts if they are right, else by the next header."""
    line = lines[at]
    if line[:1] not in ("", " ", "+", "-"):
        return True
    if _is_header(lines, at) and at + 2 < len(lines) and lines[at + 2].startswith("@@ "):
        # A removed line '-- x' and an added '++ x' look like a header; the counts tell them apart.
        return not one_each
    return counts_reached and not line.strip()


def _parse_envelope(lines: list[str]) -> list[FileChange]:
    start = next(at for at, line in enumerate(lines) if line.strip() == _BEGIN)
    changes: list[FileChange] = []
    hunk: Hunk | None = None
    for at in range(start + 1, len(lines)):
        line = lines[at]
        if line.strip() == _END:
            return [_check_change(change) for change in changes]
        section = _SECTION.match(line)
        if section is not None:
            hunk = None
            _open_section(changes, section[1], section[2].strip(), at)
            continue
        if not changes:
            raise ToolError(f"line {at + 1} of the patch is {shown(line)}: a '*** Update File: path' must come first")
        if line.strip() == "*** End of File" and hunk is not None:
            hunk.at_end = True
            continue
        opens = line.startswith("@@")
        if hunk is None or hunk.at_end or (opens and (hunk.old or hunk.new)):
            hunk = Hunk()
            changes[-1].hunks.append(hunk)
        if not opens:
            _body_line(changes[-1], hunk, line, at)
        elif line[2:].strip() and _HUNK.match(line) is None:
            hunk.anchors.append(line[3:].rstrip())
    raise ToolError(f"the patch has no '{_END}': write it as the last line")


def _open_section(changes: list[FileChange], word: str, path: str, at: int) -> None:
    if not path:
        raise ToolError(f"line {at + 1} of the patch names no file")
    if word == "Move to":
        if not changes or changes[-1].kind != "update" or changes[-1].hunks:
            raise ToolError(f"line {at + 1} of the patch: '*** Move to' stands right below an '*** Update File'")
        changes[-1].move_to = path
        return
    kinds: dict[str, Kind] = {"Add File": "add", "Delete File": "delete", "Update File": "update"}
    changes.append(FileChange(kinds[word], path))


def _body_line(change: FileChange, hunk: Hunk, line: str, at: int) -> None:
    sign, rest = (line[0], line[1:]) if line else (" ", "")
    allowed = {"add": "+", "delete": "", "update": " +-"}[change.kind]
    if sign not in allowed:
        if not line.strip():
            return
        rules = {
            "add": "every line of a new file begins with '+'",
            "delete": "a file that is deleted has no lines",
            "update": "a line begins with ' ', '+' or '-', a hunk with '@@'",
        }
        raise ToolError(f"line {at + 1} of the patch is {shown(line)}: {rules[change.kind]}")
    if sign in " -":
        hunk.old.append(rest)
    if sign in " +":
        hunk.new.append(rest)


def _check_change(change: FileChange) -> FileChange:
    change.hunks = [hunk for hunk in change.hunks if hunk.old or hunk.new]
    if change.kind == "update" and not change.hunks and change.move_to is None:
        raise ToolError(f"the section of {change.path} changes nothing: give its lines, or leave it out")
    return change


Files: TypeAlias = dict[str, bytes | None]
"""File contents by path; None: there is no such file."""

_DESCRIPTION: Final = (
    "Apply a patch to files: all of it, or nothing where a part does not fit. The patch is a unified diff as git "
    "writes it, or lines between '*** Begin Patch' and '*** End Patch' with sections '*** Add File: path' (lines with "
    "+), '*** Delete File: path' and '*** Update File: path' (perhaps '*** Move to: path'), whose hunks begin with "
    "'@@' (and perhaps a line above the change) and hold lines with ' ', '-' or '+'. Context must match the file "
    "exactly."
)


class ApplyPatchConfig(Section):
    """Configuration of ``apply_patch``.

    Attributes:
        max_file: Maximum size of a changed file in bytes.
    """

    max_file: Annotated[int, Field(gt=0)] = 4_000_000


class ApplyPatchTool(FileTool):
    """``apply_patch``: changes files in the episode's sandbox by a patch."""

    def __init__(self, config: Mapping[str, Any] | None = None, tool_schema: Any = None) -> None:
        self.settings: ApplyPatchConfig = tool_config(ApplyPatchConfig, config, "apply_patch")
        properties = {"patch": {"type": "string", "description": "the patch"}}
        super().__init__(config, tool_schema or make_schema("apply_patch", _DESCRIPTION, properties, ("patch",)))

    async def execute(
        self,
        instance_id: str,
        parameters: dict[str, Any],
        **kwargs: Any,  # noqa: ARG002
    ) -> tuple[ToolResponse, float | None, dict[str, float]]:
        """Apply a patch, as a whole or, after a ToolError, not at all. Raises SandboxError."""
        sandbox = self.states[instance_id]
        changes = parse_patch(str(parameters["patch"]))
        old_files: Files = {}
        new_files: Files = {}
        for change in changes:
            await self._plan(sandbox, change, old_files, new_files)
        await _write_files(sandbox, old_files, new_files)
        return ToolResponse("\n".join(_summary(change) for change in changes)), None, {}

    async def _plan(self, sandbox: Sandbox, change: FileChange, old_files: Files, new_files: Files) -> None:
        for path in (change.path, change.move_to):
            if path is not None:
                old_files[path] = await self._read(sandbox, path)
        content = old_files[change.path]
        target = change.move_to or change.path
        if change.kind == "add":
            if content is not None:
                raise ToolError(f"{change.path} already exists: update it, or add another file")
            new_files[change.path] = new_file_text(change).encode("utf-8", "replace")
            return
        if content is None:
            raise ToolError(f"there is no file {change.path!r} to {change.kind}")
        if change.move_to is not None and old_files[target] is not None:
            raise ToolError(f"{change.path} cannot move to {target}: a file exists there")
        new_files[change.path] = None
        if change.kind == "update":
            result = apply_hunks(change, as_text(change.path, content)) if change.hunks else None
            new_files[target] = content if result is None else result.encode("utf-8", "replace")
        elif change.hunks and apply_hunks(change, as_text(change.path, content)):
            raise ToolError(f"{change.path} cannot be deleted: the patch does not list all its lines")

    async def _read(self, sandbox: Sandbox, path: str) -> bytes | None:
        try:
            return await sandbox.read_file(path, max_bytes=self.settings.max_file)
        except SandboxFileNotFound:
            return None
        except SandboxFileError as error:
            raise ToolError(f"{path} cannot be patched: {error}") from error


async def _write_files(sandbox: Sandbox, old_files: Files, new_files: Files) -> None:
    touched: list[str] = []
    try:
        for path, data in new_files.items():
            touched.append(path)
            await _write_or_remove(sandbox, path, data)
    except (SandboxFileError, ToolError) as error:
        for path in touched:
            try:
                await _write_or_remove(sandbox, path, old_files[path])
            except (SandboxFileError, ToolError):
                continue  # the file that could not be written
        raise ToolError(f"nothing was changed: {error}") from error


async def _write_or_remove(sandbox: Sandbox, path: str, data: bytes | None) -> None:
    if data is not None:
        await sandbox.write_file(path, data)
        return
    removed = await sandbox.exec(["rm", "-f", "--", path])
    if not removed.ok:
        raise ToolError(f"{path} cannot be removed: {removed.text.strip()}")


def _summary(change: FileChange) -> str:
    if change.kind == "add":
        return f"added {change.path}"
    if change.kind == "delete":
        return f"deleted {change.path}"
    return f"updated {change.path}" if change.move_to is None else f"moved {change.path} to {change.move_to}"
