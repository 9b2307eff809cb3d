"""The tool that applies a patch to files.

Owns: :class:`ApplyPatchTool`: everything in a patch, or nothing. Refuses: files outside the episode's sandbox; how a
patch is read stands in ``patches.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from turnwise.errors import SandboxFileError, SandboxFileNotFound, ToolError
from turnwise.sandboxes.core import Sandbox
from turnwise.tools.patches import FileChange, added, parse_patch, patched
from turnwise.tools.places import SandboxTool, as_schema_of, tool_config
from turnwise.tools.response import ToolResponse

Files: TypeAlias = dict[str, bytes | None]
"""What paths hold; None: there is no such file."""

_DESCRIPTION: Final = (
    "Apply a patch to files: all of it, or nothing where a part does not fit. The patch is a unified diff as git "
    "writes it, or lines between '*** Begin Patch' and '*** End Patch' with sections '*** Add File: path' (lines with "
    "+), '*** Delete File: path' and '*** Update File: path' (perhaps '*** Move to: path'), whose hunks begin with "
    "'@@' (and perhaps a line above the change) and hold lines with ' ', '-' or '+'. Context must match the file "
    "exactly."
)


class ApplyPatchConfig(BaseModel):
    """What ``apply_patch`` takes.

    Attributes:
        max_file: Bytes of a file that it changes.
    """

    model_config = ConfigDict(extra="forbid")

    max_file: Annotated[int, Field(gt=0)] = 4_000_000


class ApplyPatchTool(SandboxTool[Sandbox]):
    """``apply_patch``: changes files in the sandbox of the episode by a patch."""

    def __init__(self, config: Mapping[str, Any] | None = None, tool_schema: Any = None) -> None:
        """Take a configuration, see :class:`ApplyPatchConfig`.

        Raises:
            ConfigError: It has an unknown key or a wrong value.
        """
        self.settings: ApplyPatchConfig = tool_config(ApplyPatchConfig, config, "apply_patch")
        properties = {"patch": {"type": "string", "description": "the patch"}}
        super().__init__(config, tool_schema or as_schema_of("apply_patch", _DESCRIPTION, properties, ("patch",)))

    def place(self, sandbox: Sandbox) -> Sandbox:
        """Nothing is kept between calls."""
        return sandbox

    async def execute(
        self,
        instance_id: str,
        parameters: dict[str, Any],
        **kwargs: Any,  # noqa: ARG002
    ) -> tuple[ToolResponse, float | None, dict[str, float]]:
        """Apply a patch.

        Raises:
            ToolError: It cannot be read or does not fit; nothing is changed then.
            SandboxError: The sandbox failed.
        """
        sandbox = self.places[instance_id]
        changes = parse_patch(str(parameters["patch"]))
        before: Files = {}
        after: Files = {}
        for change in changes:
            await self._plan(sandbox, change, before, after)
        await _carry_out(sandbox, before, after)
        return ToolResponse("\n".join(_told(change) for change in changes)), None, {}

    async def _plan(self, sandbox: Sandbox, change: FileChange, before: Files, after: Files) -> None:
        for path in (change.path, change.move_to):
            if path is not None:
                before[path] = await self._read(sandbox, path)
        held = before[change.path]
        target = change.move_to or change.path
        if change.kind == "add":
            if held is not None:
                raise ToolError(f"{change.path} is there already: update it, or add another file")
            after[change.path] = added(change).encode("utf-8", "replace")
            return
        if held is None:
            raise ToolError(f"there is no file {change.path!r} to {change.kind}")
        if change.move_to is not None and before[target] is not None:
            raise ToolError(f"{change.path} cannot move to {target}, where there is a file")
        after[change.path] = None
        if change.kind == "update":
            result = patched(change, _text(change.path, held)) if change.hunks else None
            after[target] = held if result is None else result.encode("utf-8", "replace")
        elif change.hunks and patched(change, _text(change.path, held)):
            raise ToolError(f"{change.path} is to be deleted, but the patch does not name all its lines")

    async def _read(self, sandbox: Sandbox, path: str) -> bytes | None:
        try:
            return await sandbox.read_file(path, max_bytes=self.settings.max_file)
        except SandboxFileNotFound:
            return None
        except SandboxFileError as error:
            raise ToolError(f"{path} cannot be patched: {error}") from error


async def _carry_out(sandbox: Sandbox, before: Files, after: Files) -> None:
    begun: list[str] = []
    try:
        for path, data in after.items():
            begun.append(path)
            await _put(sandbox, path, data)
    except (SandboxFileError, ToolError) as error:
        for path in begun:
            try:
                await _put(sandbox, path, before[path])
            except (SandboxFileError, ToolError):
                continue  # the one that could not be written
        raise ToolError(f"nothing was changed: {error}") from error


async def _put(sandbox: Sandbox, path: str, data: bytes | None) -> None:
    if data is not None:
        await sandbox.write_file(path, data)
        return
    removed = await sandbox.exec(["rm", "-f", "--", path])
    if not removed.ok:
        raise ToolError(f"{path} cannot be removed: {removed.text.strip()}")


def _text(path: str, data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ToolError(f"{path} is no text in UTF-8 ({error.reason} at byte {error.start})") from error


def _told(change: FileChange) -> str:
    if change.kind == "add":
        return f"added {change.path}"
    if change.kind == "delete":
        return f"deleted {change.path}"
    return f"updated {change.path}" if change.move_to is None else f"moved {change.path} to {change.move_to}"
