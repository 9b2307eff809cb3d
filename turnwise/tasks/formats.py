"""Row formats: rows of published datasets, read by the environment that plays them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from turnwise.errors import TaskError, shown
from turnwise.plugins import load_object, references
from turnwise.tasks.core import Task, kind

RowMap: TypeAlias = Callable[[Any, str], Any]
"""From a row and its position to a task or its columns; None leaves the row out."""

ROW_FIELDS: Final = ("id", "prompt", "env", "agent")
"""The fields of a task that are columns of a row; ``data`` takes the others."""
DATA_SOURCE: Final = "data_source"
# What verl calls its agent loops.
_VERL_AGENTS: Final = {"single_turn_agent": "single_turn", "tool_agent": "react"}
_TOOLS: Final = ("tools_kwargs", "tool_selection")


@dataclass(frozen=True, slots=True)
class RowFormat:
    """How the rows of a dataset become tasks.

    References are imported on first use: the environments stand above the tasks.

    Attributes:
        env: The environment that plays them.
        row: ``pkg.module:function`` from a row to a task or its columns.
        columns: Columns that every row has; ``a|b`` is one or the other.
        files: ``pkg.module:function`` from a path to rows, for a dataset that is no table; else "".
    """

    env: str
    row: str
    columns: tuple[str, ...] = ()
    files: str = ""

    def mapping(self, name: str) -> RowMap:
        """Return the mapping of rows, which raises TaskError for a missing column and what ``row`` refuses."""
        function = load_object(self.row, "row format")

        def map_row(row: Any, where: str) -> Any:
            if row is None and self.files:
                return None
            self._check(name, row, where)
            try:
                return function(row)
            except TaskError as error:
                raise TaskError(f"{where}: {error}") from error

        return map_row

    def rows(self, path: str) -> Iterable[Any]:
        """Return the rows of a dataset that is no table. Raises TaskError."""
        rows: Iterable[Any] = load_object(self.files, "row format")(path)
        return rows

    def _check(self, name: str, row: Any, where: str) -> None:
        if not isinstance(row, Mapping):
            raise TaskError(f"{where}: a row of format {name} has columns, but this is {kind(row)}")
        for column in self.columns:
            if _lacks(row, column):
                column_names = " or ".join(map(repr, column.split("|")))
                raise TaskError(
                    f"{where}: column {column_names} is missing, which rows of format {name} have "
                    f"(here: {', '.join(map(repr, row)) or 'nothing'})"
                )


def _lacks(row: Mapping[str, Any], column: str) -> bool:
    return all(row.get(name) is None for name in column.split("|"))


def format_hint(row: Any) -> str:
    """Return how a row with the columns of a published dataset is read; an empty text for other rows."""
    formats = ((name, find_row_format(name)) for name in row_format_references())
    columns = {name: row_format.columns for name, row_format in formats if row_format and isinstance(row, Mapping)}
    fitting = [name for name, names in columns.items() if names and not any(_lacks(row, column) for column in names)]
    if not fitting:
        return ""
    # Columns of a format may be some of another one's.
    name = max(fitting, key=lambda name: len(columns[name]))
    return f"; rows with these columns are read by format {name}, as in 'tasks={{source: FILE, format: {name}}}'"


@functools.cache
def row_format_references() -> Mapping[str, str]:
    """Return the references of the formats that plug in, by their names in ``tasks.format``."""
    return references("row_formats")


@functools.cache
def find_row_format(name: str) -> RowFormat | None:
    """Return the format of a name, or None where none plugs in. Raises ConfigError: it cannot be imported."""
    reference = row_format_references().get(name)
    if reference is None:
        return None
    row_format: RowFormat = load_object(reference, "row format")
    return row_format


def verl_row(row: Any, where: str) -> Any:
    """Map a row of a verl dataset.

    ``agent_name`` becomes the agent, ``reward_model.ground_truth`` also ``data["ground_truth"]``, and
    ``extra_info.tools_kwargs`` and ``extra_info.tool_selection`` move to ``data``; other columns stay.
    """
    if not isinstance(row, Mapping):
        raise TaskError(f"{where}: a row in verl's format has columns, but this is {kind(row)}")
    data = {key: value for key, value in row.items() if key not in (*ROW_FIELDS, "agent_name")}
    reward_model = _section(row, "reward_model", where)
    if "ground_truth" in reward_model:
        data["ground_truth"] = reward_model["ground_truth"]
    extra = _section(row, "extra_info", where)
    if extra:
        data["extra_info"] = {key: value for key, value in extra.items() if key not in _TOOLS}
    # A columnar file gives each row the columns of all: a null is the same as its absence.
    tool_fields = {key: _without_nulls(extra[key]) for key in _TOOLS if extra.get(key) is not None}
    data |= {key: value for key, value in tool_fields.items() if value or key == "tool_selection"}
    agent = row.get("agent_name")
    agent_name = _VERL_AGENTS.get(agent, agent) if isinstance(agent, str) else agent
    return {"prompt": row.get("prompt"), "agent": agent_name, "data": data}


def verl_source(task: Task) -> str | None:
    """Return the dataset that a task of verl's comes from, which its figures are counted under."""
    source = task.data.get(DATA_SOURCE)
    return source if isinstance(source, str) else None


def _section(row: Mapping[str, Any], column: str, where: str) -> Mapping[str, Any]:
    value = row.get(column)
    if value is not None and not isinstance(value, Mapping):
        raise TaskError(f"{where}: column {column!r} is {shown(value)}: verl's rows have an object there")
    return value or {}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
