"""Tools by name.

Owns: the one registry of the module-level functions that ``@function_tool`` decorates, and the names of the tools that
ship (:data:`SHIPPED`). Refuses: methods (they belong to their environment) and functions made inside others (they have
no address).
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from turnwise.errors import RegistryError

if TYPE_CHECKING:
    from turnwise.tools.core import FunctionTool

SHIPPED: Final[Mapping[str, str]] = {
    "apply_patch": "turnwise.tools.apply_patch:ApplyPatchTool",
    "editor": "turnwise.tools.editor:EditorTool",
    "python": "turnwise.tools.python:PythonTool",
    "shell": "turnwise.tools.shell:ShellTool",
    "submit": "turnwise.tools.submit:SubmitTool",
}
"""The tools that ship by name: BaseTools, all but ``submit`` at work in the episode's sandbox."""

_TOOLS: dict[str, FunctionTool] = {}


def register_tool(tool: FunctionTool) -> None:
    """Put a tool under its name. The same function again (a module that is loaded anew) replaces itself.

    Raises:
        RegistryError: Another function has this name.
    """
    known = _TOOLS.get(tool.name)
    if known is not None and (_place(known) != _place(tool) or _stand_side_by_side(known, tool)):
        raise RegistryError(
            f"the tool name {tool.name!r} is taken by {_place(known)}{_line(known)}; {_place(tool)}{_line(tool)} needs "
            "another one: write "
            '@function_tool("other_name")'
        )
    _TOOLS[tool.name] = tool


def get_tool(name: str) -> FunctionTool:
    """Return the tool of this name.

    Raises:
        RegistryError: There is none; the message says which come close.
    """
    found = _TOOLS.get(name)
    if found is None:
        raise RegistryError(
            f"there is no tool {name!r}{nearest(name, [*_TOOLS, *SHIPPED])}; decorate a function with @function_tool "
            f"and import its module, or name one that ships: {', '.join(SHIPPED)}"
        )
    return found


def tool_names() -> list[str]:
    """Return the registered names, sorted."""
    return sorted(_TOOLS)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` with the known names that come close, or an empty text."""
    close = difflib.get_close_matches(name, list(known), n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""


def _place(tool: FunctionTool) -> str:
    return f"{tool.fn.__module__}.{tool.fn.__qualname__} ({tool.fn.__code__.co_filename})"


def _line(tool: FunctionTool) -> str:
    return f" line {tool.fn.__code__.co_firstlineno}"


def _stand_side_by_side(one: FunctionTool, other: FunctionTool) -> bool:
    """Whether functions of one name and file are two of it, rather than one that moved and was loaded anew."""
    lines = {tool.fn.__code__.co_firstlineno for tool in (one, other)}
    if len(lines) == 1:
        return False
    try:
        tree = ast.parse(Path(one.fn.__code__.co_filename).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return False
    starts = {
        min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == one.fn.__code__.co_name
    }
    return lines <= starts
