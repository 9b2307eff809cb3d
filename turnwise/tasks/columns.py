"""From a row of any dataset to the columns of a task.

Owns: :func:`mapping_of`, which follows ``columns``, ``map`` and ``format`` of a source. Refuses: checking fields, which
:meth:`turnwise.tasks.core.Task.from_record` does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from turnwise.errors import ConfigError, TaskError, TurnwiseError, shown
from turnwise.references import load_object
from turnwise.tasks.config import SourceConfig
from turnwise.tasks.core import Task, kind

RowMap: TypeAlias = Callable[[Any, str], Any]
"""From a row, and where it stands, to a task or its columns; None leaves the row out."""

_FIELDS = ("id", "prompt", "env", "agent")
# What verl calls its agent loops.
_VERL_AGENTS = {"single_turn_agent": "single_turn", "tool_agent": "react"}
_TOOLS = ("tools_kwargs", "tool_selection")
DATA_SOURCE = "data_source"


def mapping_of(config: SourceConfig) -> RowMap:
    """Return what is done to each row of a source.

    Raises:
        TaskError: ``map`` names nothing that can be called.
    """
    if config.map is not None:
        return _function(config.map)
    if config.format == "verl":
        return _verl
    if config.columns:
        return _Columns(config.columns)
    return lambda row, where: row  # noqa: ARG005 - the signature of all


class _Columns:
    """Moves columns to fields; a column that no field takes becomes an entry of ``data``, as always."""

    def __init__(self, columns: Mapping[str, str]) -> None:
        self._columns = columns

    def __call__(self, row: Any, where: str) -> Any:
        if not isinstance(row, Mapping):
            raise TaskError(f"{where}: columns need a row with names, not {kind(row)}")
        taken = {column for column in self._columns.values() if column in row}
        moved = {key: row[key] for key in _FIELDS if key in row and key not in taken}
        data: dict[str, Any] = {}
        for target, column in self._columns.items():
            value = _at(row, column, where)
            if target == "data" and not isinstance(value, Mapping):
                raise TaskError(f"{where}: column {column!r} is {shown(value)}: 'data' is made of an object")
            if target == "data":
                data.update(value)
            elif target.startswith("data."):
                _put(data, target.removeprefix("data.").split("."), value, where)
            else:
                moved[target] = value
        rest = {key: value for key, value in row.items() if key not in taken and key not in (*_FIELDS, "data")}
        own = row.get("data") if "data" not in taken else None
        inner = own if isinstance(own, Mapping) else {} if own is None else {"data": own}
        return {**moved, "data": {**rest, **inner, **data}}


def _at(row: Mapping[str, Any], column: str, where: str) -> Any:
    """Return a column, or with dots what stands inside of one."""
    if column in row:
        return row[column]
    value: Any = row
    for part in column.split("."):
        if not isinstance(value, Mapping) or part not in value:
            there = ", ".join(repr(key) for key in value) if isinstance(value, Mapping) else kind(value)
            raise TaskError(f"{where}: there is no column {column!r}; where {part!r} is looked for there is: {there}")
        value = value[part]
    return value


def _put(data: dict[str, Any], path: list[str], value: Any, where: str) -> None:
    for part in path[:-1]:
        data = data.setdefault(part, {})
        if not isinstance(data, dict):
            raise TaskError(f"{where}: columns put an entry into data.{part}, which is {shown(data)}: it is no object")
    data[path[-1]] = value


def _function(reference: str) -> RowMap:
    try:
        function = load_object(reference, "map")
    except ConfigError as error:
        raise TaskError(str(error)) from error
    if not callable(function):
        raise TaskError(f"map {reference!r} is {kind(function)}: it must be a function of a row")

    def mapped(row: Any, where: str) -> Any:
        try:
            found = function(row)
        except TaskError as error:
            raise TaskError(f"{where}: {error}") from error
        except TurnwiseError:
            raise
        except Exception as error:  # a function of the user's: what it raises is named as its own
            raise TaskError(f"{where}: map {reference} raised {type(error).__name__}: {error}") from error
        if found is not None and not isinstance(found, (Task, Mapping)):
            raise TaskError(f"{where}: map {reference} returned {kind(found)}: write a task, its columns or None")
        return found

    return mapped


def _verl(row: Any, where: str) -> Any:
    """Read a row as verl's datasets have them.

    ``prompt`` and the columns beside it stay, ``agent_name`` becomes the agent, ``reward_model.ground_truth`` is also
    ``data["ground_truth"]``, and ``extra_info.tools_kwargs`` and ``extra_info.tool_selection`` move to ``data``.
    """
    if not isinstance(row, Mapping):
        raise TaskError(f"{where}: a row of verl's format has columns, it is not {kind(row)}")
    data = {key: value for key, value in row.items() if key not in (*_FIELDS, "agent_name")}
    reward_model = _section(row, "reward_model", where)
    if "ground_truth" in reward_model:
        data["ground_truth"] = reward_model["ground_truth"]
    extra = _section(row, "extra_info", where)
    if extra:
        data["extra_info"] = {key: value for key, value in extra.items() if key not in _TOOLS}
    # A columnar file gives each row the columns of all: a null says no more than its absence.
    said = {key: _without_nulls(extra[key]) for key in _TOOLS if extra.get(key) is not None}
    data |= {key: value for key, value in said.items() if value or key == "tool_selection"}
    agent = row.get("agent_name")
    known = _VERL_AGENTS.get(agent, agent) if isinstance(agent, str) else agent
    return {"prompt": row.get("prompt"), "agent": known, "data": data}


def _section(row: Mapping[str, Any], column: str, where: str) -> Mapping[str, Any]:
    value = row.get(column)
    if value is not None and not isinstance(value, Mapping):
        raise TaskError(f"{where}: column {column!r} is {shown(value)}: verl's rows have an object there")
    return value or {}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
