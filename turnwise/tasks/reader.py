"""Reading the tasks of one source: column mapping, filters, splits and whole-dataset loading."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from turnwise.errors import ConfigError, TaskError, shown, user_code
from turnwise.plugins import load_object
from turnwise.seeding import stable_hash
from turnwise.tasks.config import SourceConfig, SpecRow
from turnwise.tasks.core import Task, kind
from turnwise.tasks.formats import ROW_FIELDS, RowMap, find_row_format, format_hint, verl_row, verl_source
from turnwise.tasks.sources import FunctionRows, Row, Rows, TaskSource, is_table, open_rows


def mapping_of(config: SourceConfig) -> RowMap:
    """Return the row mapping of a source; raise TaskError if ``map`` names no callable."""
    if config.map is not None:
        return _map_function(config.map)
    if config.format == "verl":
        return verl_row
    row_format = find_row_format(config.format)
    if row_format is not None:
        return row_format.mapping(config.format)
    if config.columns:
        return _Columns(config.columns)
    return lambda row, where: row  # noqa: ARG005 - the signature of all


class _Columns:
    """Moves columns to fields; other columns become entries of ``data``."""

    def __init__(self, columns: Mapping[str, str]) -> None:
        self._columns = columns

    def __call__(self, row: Any, where: str) -> Any:
        if not isinstance(row, Mapping):
            raise TaskError(f"{where}: columns need a row with names, not {kind(row)}")
        moved_columns = {column for column in self._columns.values() if column in row}
        task_fields = {key: row[key] for key in ROW_FIELDS if key in row and key not in moved_columns}
        data: dict[str, Any] = {}
        for target, column in self._columns.items():
            value = _at(row, column, where)
            if target == "data" and not isinstance(value, Mapping):
                raise TaskError(f"{where}: column {column!r} is {shown(value)}: 'data' takes an object")
            if target == "data":
                data.update(value)
            elif target.startswith("data."):
                _put(data, target.removeprefix("data.").split("."), value, where)
            else:
                task_fields[target] = value
        handled = {*moved_columns, *ROW_FIELDS, "data"}
        rest = {key: value for key, value in row.items() if key not in handled}
        existing = row.get("data") if "data" not in moved_columns else None
        inner = existing if isinstance(existing, Mapping) else {} if existing is None else {"data": existing}
        return {**task_fields, "data": {**rest, **inner, **data}}


def _at(row: Mapping[str, Any], column: str, where: str) -> Any:
    if column in row:
        return row[column]
    value: Any = row
    for part in column.split("."):
        if not isinstance(value, Mapping) or part not in value:
            there = ", ".join(repr(key) for key in value) if isinstance(value, Mapping) else kind(value)
            raise TaskError(f"{where}: there is no column {column!r}; names where {part!r} is looked up: {there}")
        value = value[part]
    return value


def _put(data: dict[str, Any], path: list[str], value: Any, where: str) -> None:
    for part in path[:-1]:
        data = data.setdefault(part, {})
        if not isinstance(data, dict):
            raise TaskError(f"{where}: columns put an entry into data.{part}, which is {shown(data)}, not an object")
    data[path[-1]] = value


def _map_function(reference: str) -> RowMap:
    try:
        function = load_object(reference, "map")
    except ConfigError as error:
        raise TaskError(str(error)) from error
    if not callable(function):
        raise TaskError(f"map {reference!r} is {kind(function)}: it must be a function of a row")

    def map_row(row: Any, where: str) -> Any:
        try:
            with user_code(TaskError, f"map {reference} raised"):
                task = function(row)
        except TaskError as error:
            raise TaskError(f"{where}: {error}") from error
        if task is not None and not isinstance(task, (Task, Mapping)):
            raise TaskError(f"{where}: map {reference} returned {kind(task)}: return a task, its columns or None")
        return task

    return map_row


Keep: TypeAlias = Callable[[Task], "str | None"]
"""Returns None for a task to keep, else in some words why it is left out (``more than 512 tokens``)."""

# An endless source of which everything is left out would never end.
_DROPPED_IN_A_ROW = 100_000


class Read(NamedTuple):
    """A row: its task, or the reason it was dropped (empty: it belongs to the other split)."""

    number: int
    where: str
    task: Task | None
    dropped: str = ""


@dataclass(slots=True)
class SourceReport:
    """Task and drop counts (by reason) of a source; ``tasks`` is None for a streamed source of unknown length."""

    name: str
    tasks: int | None = None
    dropped: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        count = "streamed" if self.tasks is None else f"{self.tasks:,} task{'' if self.tasks == 1 else 's'}"
        left_out = "".join(f"; {number:,} left out: {reason}" for reason, number in self.dropped.items())
        return f"{self.name}: {count}{left_out}{' so far' if self.tasks is None and left_out else ''}"

    @property
    def line(self) -> str:
        """The report as printed when a run starts."""
        return f"{self}" if self.name == "tasks" else f"tasks: {self}"

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {"name": self.name, "tasks": self.tasks, "dropped": dict(self.dropped)}


class TaskReader:
    """Reads the tasks of a source; ``named`` tasks carry its name (in a mix). TaskError if it does not exist."""

    def __init__(self, config: SourceConfig, *, keep: Keep | None = None, named: bool = False) -> None:
        self._rows = _open_source(config)
        self.name = config.name or self._rows.name
        self._config = config
        self._format = find_row_format(config.format)
        self._map = mapping_of(config)
        self._keep = keep
        self._source = self.name if named or config.name else None
        self._env_given, self._agent_given = config.env != SpecRow(), config.agent != SpecRow()

    def read(self, start: int = 0) -> Iterator[Read]:
        """Yield the rows from ``start`` on; TaskError for malformed ones, or after 100,000 consecutive dropped rows."""
        left_out = 0
        for row in self._rows.read(start):
            read = self._read_row(row)
            left_out = left_out + 1 if read.task is None else 0
            if left_out > _DROPPED_IN_A_ROW and self._rows.may_be_endless:
                raise TaskError(
                    f"{self.name}: {left_out:,} consecutive rows were left out up to {read.where} "
                    f"(the last one: {read.dropped or 'not in this split'}), and it may have no end: leave them out in "
                    "the function itself"
                )
            yield read

    def _read_row(self, row: Row) -> Read:
        value = self._map(row.value, row.where)
        if value is None:
            return Read(row.number, row.where, None, "map returned None")
        task = _task(value, row)
        config = self._config
        if config.test_fraction is not None and _part(task.id, config.test_fraction) != config.split:
            return Read(row.number, row.where, None)
        task = self._with_defaults(task)
        reason = None if self._keep is None else self._keep(task)
        return Read(row.number, row.where, None if reason else task, reason or "")

    def _with_defaults(self, task: Task) -> Task:
        config = self._config
        changes: dict[str, Any] = {}
        if config.id_prefix:
            changes["id"] = f"{config.id_prefix}{task.id}"
        if (self._env_given or self._format is not None) and task.env is None and not task.env_config:
            played_by = None if self._format is None else self._format.env
            changes |= {"env": config.env.name or played_by, "env_config": config.env.config}
        if self._agent_given and task.agent is None and not task.agent_config:
            changes |= {"agent": config.agent.name, "agent_config": config.agent.config}
        if config.format == "verl" and (source := verl_source(task)) is not None:
            changes["source"] = source
        elif self._source is not None and task.source is None:
            changes["source"] = self._source
        return replace(task, **changes) if changes else task


def _open_source(config: SourceConfig) -> Rows:
    """Open a source: as rows, or by its format where the dataset is no table of rows."""
    row_format = find_row_format(config.format)
    if row_format is None or not row_format.files or is_table(config.source):
        return open_rows(config.source, {})
    rows = FunctionRows(row_format.rows, row_format.files, {"path": config.source})
    rows.name = Path(config.source).stem.replace("/", "-") or config.format
    return rows


def _task(value: Any, row: Row) -> Task:
    if isinstance(value, Task):
        return value
    try:
        return Task.from_record(value, where=row.where, default_id=row.id, folder=row.folder)
    except TaskError as error:
        raise TaskError(f"{error}{format_hint(value)}") from error


def _part(task_id: str, test_fraction: float) -> str:
    """Return the split of a task id; a larger fraction only moves ids from ``train`` to ``test``."""
    return "test" if stable_hash("split", task_id) < test_fraction * 2**63 else "train"


class Collected:
    """Tasks in memory, with the location of each id and the number of dropped rows by reason."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self.first_uses: dict[str, str] = {}
        self.dropped: Counter[str] = Counter()

    def take(self, rows: Iterable[Read], limit: int | None = None) -> None:
        """Read all tasks, or ``limit`` of them; raise TaskError for a duplicate id."""
        if limit is not None and len(self.tasks) >= limit:
            return
        for number, where, task, dropped in rows:
            del number
            if dropped:
                self.dropped[dropped] += 1
            if task is None:
                continue
            check_new(task.id, where, self.first_uses.get(task.id))
            self.first_uses[task.id] = where
            self.tasks.append(task)
            if limit is not None and len(self.tasks) >= limit:
                return


def check_new(task_id: str, where: str, first_use: str | None) -> None:
    """Raise TaskError for a duplicate id."""
    if first_use is not None:
        raise TaskError(f"{where}: the id {task_id!r} is already used ({first_use}): ids must be unique in a dataset")


def load_tasks(source: TaskSource | SourceConfig, *, limit: int | None = None, **arguments: Any) -> list[Task]:
    """Load the tasks of a source into memory, in its order.

    Args:
        source: One of

            - ``rows.jsonl``: one JSON object per line;
            - ``rows.parquet`` (extra ``parquet``);
            - a folder whose files are named after splits (``train.jsonl``, ``test-00000-of-00002.parquet``), or that
              ``datasets`` wrote or can read (extra ``datasets``); ``folder:split`` where it has several splits;
            - ``hf://owner/name:split?name=main``, a dataset of the Hugging Face hub, streamed (extra ``datasets``);
            - ``pkg.module:function`` or ``path/file.py:function``, which returns tasks or rows; arguments may follow as
              ``?n=200&split=test``;
            - such a function itself, or any iterable of tasks and rows;
            - a :class:`~turnwise.tasks.config.SourceConfig`, which also maps the rows.
        limit: Maximum number of tasks. Ids of rows without one are row numbers, independent of ``limit``.
        **arguments: Arguments of a function.

    Raises:
        TaskError: The source cannot be read, a row is malformed, or an id repeats.
        MissingExtraError: The package that reads this kind of source is not installed.
    """
    if limit is not None and limit < 0:
        raise TaskError(f"limit is {limit}: it must be 0 or more (or None for all rows)")
    collected = Collected()
    if limit != 0:
        collected.take(_reads(source, arguments), limit)
    return collected.tasks


def iter_tasks(source: TaskSource | SourceConfig, **arguments: Any) -> Iterator[Task]:
    """Stream the tasks of a source as of :func:`load_tasks`, which may be endless; one batch of rows is held at a time.

    Raises:
        TaskError: A row is malformed (when it is reached). Duplicate ids are not detected.
        MissingExtraError: The package that reads this kind of source is not installed.
    """
    return (read.task for read in _reads(source, arguments) if read.task is not None)


def _reads(source: TaskSource | SourceConfig, arguments: dict[str, Any]) -> Iterator[Read]:
    if isinstance(source, SourceConfig):
        if arguments:
            raise TaskError(f"arguments ({', '.join(arguments)}) are for functions; write them into {source.source}")
        reads = TaskReader(source).read()
        return reads if source.limit is None else _limited(reads, source.limit)
    return (Read(row.number, row.where, _task(row.value, row)) for row in open_rows(source, arguments).read())


def _limited(reads: Iterator[Read], limit: int) -> Iterator[Read]:
    count = 0
    for read in reads:
        yield read
        count += read.task is not None
        if count == limit:
            return
