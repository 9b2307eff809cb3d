"""What a task says about tools: which are offered, and what they are called with besides the model's arguments.

Owns: :func:`selected`, :func:`tools_kwargs` and where a task may say so. Refuses: names that no tool has; a task that
means another tool than there is must not run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from turnwise.errors import TaskError, shown
from turnwise.tasks import Task
from turnwise.tools.core import FunctionTool, Tool
from turnwise.tools.instances import taken_by
from turnwise.tools.registry import nearest
from turnwise.tools.schema import detached

_BASE: tuple[str, ...] = ("create_kwargs", "execute_kwargs", "calc_reward_kwargs", "release_kwargs")
_FUNCTION: tuple[str, ...] = ("execute_kwargs",)
_TAKEN: frozenset[str] = frozenset(("self", "instance_id", "parameters", "agent_data"))
"""What a tool's methods are given by others than the task."""


def selected(tools: Mapping[str, Tool], task: Task | None) -> dict[str, Tool]:
    """Return the tools that a task selects, in the environment's order; all, where it says nothing.

    A task says so in ``data["tool_selection"]`` or ``data["extra_info"]["tool_selection"]``: a list of names. An empty
    list offers none.

    Raises:
        TaskError: It is no list of names, or names a tool that is not there.
    """
    found = _said(task, "tool_selection")
    if task is None or found is None:
        return dict(tools)
    where, names = found
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise TaskError(f"{where} is {shown(names)}: it must be a list of tool names")
    _check_known(where, names, tools)
    return {name: tool for name, tool in tools.items() if name in names}


def tools_kwargs(tools: Mapping[str, Tool], task: Task | None) -> dict[str, dict[str, dict[str, Any]]]:
    """Return a task's arguments for tools: by tool name, and then by ``create_kwargs``, ``execute_kwargs``, ...

    A task gives them in ``data["tools_kwargs"]`` or ``data["extra_info"]["tools_kwargs"]``. A null is nothing said, as
    columnar files write it.

    Raises:
        TaskError: They are malformed, name a tool or a parameter that is not there, or lack one that a function needs.
    """
    found = _said(task, "tools_kwargs")
    given: dict[str, dict[str, dict[str, Any]]] = {}
    where = "" if task is None else f"task {task.id!r}"
    if found is not None:
        where, value = found
        given = _read(where, value, tools)
    for name, tool in tools.items():
        if task is not None and isinstance(tool, FunctionTool):
            _check_injected(f"{where}", name, tool, given.get(name, {}).get("execute_kwargs", {}))
    return given


def _said(task: Task | None, key: str) -> tuple[str, Any] | None:
    """Return where a task says something and what, or None where it does not."""
    if task is None:
        return None
    info = task.data.get("extra_info")
    places = {f"data[{key!r}]": task.data.get(key)}
    if isinstance(info, Mapping):
        places[f"data['extra_info'][{key!r}]"] = info.get(key)
    said = [(f"task {task.id!r}: {place}", value) for place, value in places.items() if value is not None]
    if len(said) > 1:
        raise TaskError(f"task {task.id!r} says {' and '.join(places)}: keep one of them")
    return said[0] if said else None


def _check_known(where: str, names: Any, tools: Mapping[str, Tool]) -> None:
    unknown = [name for name in names if name not in tools]
    if unknown:
        hints = "".join(nearest(name, tools) for name in unknown[:1])
        raise TaskError(
            f"{where} names {', '.join(map(repr, unknown))}{hints}, but the tools are {', '.join(tools) or 'none'}"
        )


def _read(where: str, value: Any, tools: Mapping[str, Tool]) -> dict[str, dict[str, dict[str, Any]]]:
    wrong = (
        f"{where} is {shown(value)}: it must be an object from tool names to objects such as {{create_kwargs: {{...}}}}"
    )
    if not isinstance(value, Mapping) or not all(each is None or isinstance(each, Mapping) for each in value.values()):
        raise TaskError(wrong)
    said = {name: each for name, each in value.items() if each is not None}
    _check_known(where, said, tools)
    given: dict[str, dict[str, dict[str, Any]]] = {}
    for name, parts in said.items():
        allowed = _FUNCTION if isinstance(tools[name], FunctionTool) else _BASE
        given[name] = {}
        for key, arguments in parts.items():
            if arguments is None:
                continue
            if key not in allowed:
                raise TaskError(
                    f"{where}[{name!r}] has {key!r}{nearest(key, allowed)}: allowed are {', '.join(allowed)}"
                )
            if not isinstance(arguments, Mapping) or not all(isinstance(each, str) for each in arguments):
                raise TaskError(f"{where}[{name!r}][{key!r}] is {shown(arguments)}: it must be an object")
            _check_taken(f"{where}[{name!r}][{key!r}]", tools[name], key, arguments)
            # Copies: the row is everybody's, and a tool may change what it is given.
            given[name][key] = detached(dict(arguments))
    return given


def _check_taken(where: str, tool: Tool, key: str, arguments: Mapping[str, Any]) -> None:
    """Hold arguments of a task against the method that will be called with them."""
    if isinstance(tool, FunctionTool):
        return  # see _check_injected
    named, takes_any = taken_by(tool, key)
    takes_any = takes_any or key in named
    unknown = [each for each in arguments if each in _TAKEN or not (takes_any or each in named)]
    if unknown:
        method = f"{type(tool).__qualname__}.{key.removesuffix('_kwargs')}"
        raise TaskError(
            f"{where} has {', '.join(map(repr, unknown))}, which {method} does not take from a task: it takes "
            f"{', '.join(sorted(named - _TAKEN)) or 'nothing'}"
        )


def _check_injected(where: str, name: str, tool: FunctionTool, arguments: Mapping[str, Any]) -> None:
    unknown = [each for each in arguments if each not in tool.injected]
    if unknown:
        takes = ", ".join(tool.injected) or "none"
        raise TaskError(
            f"{where}[{name!r}]['execute_kwargs'] has {', '.join(map(repr, unknown))}: the Injected parameters of "
            f"{tool.fn.__qualname__} are {takes}"
        )
    missing = [each for each, needed in tool.injected.items() if needed and each not in arguments]
    if missing:
        raise TaskError(
            f"{where}: the tool {name!r} needs {', '.join(map(repr, missing))}: give it in "
            f"data['tools_kwargs'][{name!r}]['execute_kwargs'], or give the parameter a default"
        )
