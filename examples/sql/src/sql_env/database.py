"""Read-only SQLite databases with bounded queries."""

from __future__ import annotations

import functools
import itertools
import random
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from sql_env.schemas import SCHEMAS, Rows
from turnwise.errors import TaskError, ToolError
from turnwise.seeding import stable_hash

MOST_STEPS: Final = 10_000_000
"""Instructions of SQLite's machine that a query may take: the same on every machine, mostly less than half a second."""
SECONDS_PER_STEP: Final = 1.5 / 10_000_000
"""Processor time that a step may take on average. Only deliberately slow queries reach it."""
LONGEST_VALUE: Final = 4_096
"""Bytes of a text, a blob or a row in a generated database; bounds what a query can accumulate."""
LONGEST_VALUE_IN_FILES: Final = 1_000_000
LONGEST_QUERY: Final = 10_000
MOST_COLUMNS: Final = 200
"""Columns of a result."""
LARGEST_RESULT: Final = 32_000_000
"""Bytes of the rows of a result: many short values could still exceed the memory."""
LARGEST_TEMPORARY_FILES: Final = 64_000_000
"""Bytes that a query may write to temporary files, where rows are sorted or collected that exceed SQLite's cache."""

_STEPS_BETWEEN_CALLS: Final = 1_000
_BYTES_PER_VALUE: Final = 32
_READS: Final = frozenset((sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE))
# Nondeterministic functions, and those that reach outside the database.
_FORBIDDEN_FUNCTIONS: Final = frozenset(
    ("random", "randomblob", "load_extension", "current_date", "current_time", "current_timestamp", "fts3_tokenizer")
)


@dataclass(frozen=True, slots=True)
class Result:
    """Result of a query.

    Attributes:
        rows: At most the requested number.
        more: Whether there are further rows.
    """

    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]
    more: bool


class Database:
    """A read-only connection, usable from any thread, one query at a time. Closing it ends a running query.

    Attributes:
        steps: Limit of SQLite instructions for a query.
        tables: The ``CREATE`` statements of tables and views, by name.
    """

    def __init__(
        self, connection: sqlite3.Connection, *, steps: int = MOST_STEPS, longest_value: int = LONGEST_VALUE
    ) -> None:
        self.steps = steps
        self._connection = connection
        self._lock = threading.Lock()
        self._closed = False
        connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
        connection.execute("PRAGMA query_only = ON")
        # Not in memory, where nothing would limit them.
        connection.execute("PRAGMA temp_store = FILE")
        for limit, maximum in (
            (sqlite3.SQLITE_LIMIT_LENGTH, longest_value),
            (sqlite3.SQLITE_LIMIT_SQL_LENGTH, LONGEST_QUERY),
            (sqlite3.SQLITE_LIMIT_ATTACHED, 0),
            (sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, 200),
            (sqlite3.SQLITE_LIMIT_EXPR_DEPTH, 200),
        ):
            connection.setlimit(limit, maximum)
        tables = connection.execute("SELECT name, sql FROM sqlite_schema WHERE type IN ('table', 'view') ORDER BY name")
        self.tables: dict[str, str] = {name: sql for name, sql in tables if not name.startswith("sqlite_")}
        # After reading the tables: those of a file may have more columns.
        connection.setlimit(sqlite3.SQLITE_LIMIT_COLUMN, MOST_COLUMNS)
        connection.set_authorizer(_authorize)

    def query(self, sql: str, *, most_rows: int) -> Result:
        """Run one query.

        Raises:
            ToolError: The query writes, is wrong, or exceeds a limit; the message is for the model.
        """
        with self._lock, self._limited() as written:
            try:
                with closing(self._connection.execute(sql)) as cursor:
                    if cursor.description is None:
                        raise ToolError("this is not a query: write one SELECT statement")
                    rows = _fetch_rows(cursor, most_rows + 1)
                    columns = tuple(str(column[0]) for column in cursor.description)
            except sqlite3.DatabaseError as error:
                too_much = written() > LARGEST_TEMPORARY_FILES
                raise ToolError(_TOO_MUCH_WRITTEN if too_much else _explained(error)) from error
            except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
                raise ToolError(f"{error}: write one SELECT statement of plain text") from error
        return Result(columns, rows[:most_rows], len(rows) > most_rows)

    def close(self) -> None:
        """Stop a running query and close the database. Idempotent."""
        self._closed = True
        with self._lock:
            self._connection.close()

    @contextmanager
    def _limited(self) -> Iterator[Callable[[], int]]:
        """Limit a query in this thread; yields a function that returns the bytes that it has written."""
        if self._closed:
            raise ToolError("the database is closed")
        steps, until = 0, time.thread_time() + self.steps * SECONDS_PER_STEP
        before = bytes_written()

        def written() -> int:
            return bytes_written() - before

        def exceeds_limit() -> bool:
            nonlocal steps
            steps += _STEPS_BETWEEN_CALLS
            exceeded = steps > self.steps or time.thread_time() > until or written() > LARGEST_TEMPORARY_FILES
            return self._closed or exceeded

        self._connection.set_progress_handler(exceeds_limit, _STEPS_BETWEEN_CALLS)
        try:
            yield written
        finally:
            if not self._closed:
                self._connection.set_progress_handler(None, 0)


def bytes_written() -> int:
    """Return the bytes that this thread has written to files; 0 where the system does not count them."""
    try:
        with open("/proc/thread-self/io", "rb", buffering=0) as file:
            return int(file.read().split()[3])
    except (OSError, IndexError, ValueError):
        return 0


def _fetch_rows(cursor: sqlite3.Cursor, most_rows: int) -> list[tuple[Any, ...]]:
    rows: list[tuple[Any, ...]] = []
    size = 0
    for row in itertools.islice(cursor, most_rows):
        size += sum(_BYTES_PER_VALUE + (len(value) if isinstance(value, (str, bytes)) else 0) for value in row)
        if size > LARGEST_RESULT:
            raise ToolError(f"the result has more than {LARGEST_RESULT // 1_000_000} MB: ask for fewer rows or columns")
        rows.append(row)
    return rows


def _authorize(action: int, first: str | None, second: str | None, *_: str | None) -> int:
    if action in _READS:
        # Table-valued pragmas read like tables.
        forbidden = action == sqlite3.SQLITE_READ and (first or "").lower().startswith("pragma_")
    else:
        forbidden = action != sqlite3.SQLITE_FUNCTION or (second or "").lower() in _FORBIDDEN_FUNCTIONS
    return sqlite3.SQLITE_DENY if forbidden else sqlite3.SQLITE_OK


_TOO_MUCH_WRITTEN: Final = (
    f"the query writes more than {LARGEST_TEMPORARY_FILES // 1_000_000} MB of temporary files and was stopped: sort or "
    "group fewer rows, or shorter ones"
)


def _explained(error: sqlite3.DatabaseError) -> str:
    text = str(error)
    if text == "interrupted":
        return "the query takes too long and was stopped: join on the keys, or ask for less"
    if "not authorized" in text or "prohibited" in text:
        return f"{text}: this database is read-only; SELECT statements with its tables and plain functions are allowed"
    return text


def create_database(schema: str, seed: int, *, steps: int = MOST_STEPS) -> Database:
    """Create an in-memory database, determined by the seed."""
    kind = SCHEMAS[schema]
    connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    connection.executescript(kind.tables)
    connection.execute("BEGIN")
    for table, rows in _rows(schema, seed).items():
        connection.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(rows[0]))})", rows)
    connection.execute("COMMIT")
    return Database(connection, steps=steps)


@functools.lru_cache(maxsize=32)
def _rows(schema: str, seed: int) -> Rows:
    return SCHEMAS[schema].rows(random.Random(stable_hash("sql", schema, seed)))


def open_file(path: str, where: str, *, steps: int = MOST_STEPS) -> Database:
    """Open a database file for reading.

    Args:
        path: The file.
        where: Its origin, for messages.
        steps: As in :class:`Database`.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise TaskError(f"{where} is {path!r}: there is no such file")
    try:
        uri = f"{file.absolute().as_uri()}?mode=ro"
        connection = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)
        try:
            return Database(connection, steps=steps, longest_value=LONGEST_VALUE_IN_FILES)
        except sqlite3.DatabaseError:
            connection.close()
            raise
    except sqlite3.DatabaseError as error:
        raise TaskError(f"{where} is {path!r}, which cannot be read as a SQLite database: {error}") from error
