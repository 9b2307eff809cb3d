"""The shop's rows in an in-memory SQLite database."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final, TypeAlias

from turnwise.errors import ToolError, shown, undo_on_error

_TABLES: Final = Path(__file__).with_name("shipped").joinpath("tables.sql").read_text("utf-8")

# Without ``products``: nothing can change it.
COMPARED: Final = ("users", "payment_methods", "variants", "orders", "order_items", "payments", "declined", "transfers")
"""The tables whose rows must be those of the goal, in any order."""


Shop: TypeAlias = Mapping[str, Sequence[tuple[Any, ...]]]
"""The initial rows of a shop's tables, each table after those that it refers to."""


class Store:
    """A shop's tables; read-only outside of :meth:`transaction`."""

    def __init__(self, shop: Shop) -> None:
        self._connection = _connect()
        self._connection.executescript(_TABLES)
        self._connection.execute("BEGIN")
        for table, rows in shop.items():
            marks = ", ".join("?" * len(rows[0]))
            self._connection.executemany(f"INSERT INTO {table} VALUES ({marks})", rows)
        self._connection.execute("COMMIT")
        self._connection.execute("PRAGMA query_only = ON")

    def __deepcopy__(self, memo: dict[int, Any]) -> Store:
        """Return a store with the same rows in a database of its own."""
        copy = memo[id(self)] = Store.__new__(Store)
        copy._connection = _connect()
        self._connection.backup(copy._connection)
        copy._connection.execute("PRAGMA query_only = ON")
        return copy

    def rows(self, sql: str, *values: Any) -> list[sqlite3.Row]:
        """Return the rows of a query."""
        return self._execute(sql, values).fetchall()

    def row(self, sql: str, *values: Any) -> sqlite3.Row | None:
        """Return the first row of a query, or None."""
        row: sqlite3.Row | None = self._execute(sql, values).fetchone()
        return row

    def write(self, sql: str, *values: Any) -> None:
        """Execute a write; only within :meth:`transaction`."""
        self._execute(sql, values)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Open a write transaction, rolled back on any exception."""
        self._connection.execute("PRAGMA query_only = OFF")
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            with undo_on_error(lambda: self._connection.execute("ROLLBACK")):
                yield
            self._connection.execute("COMMIT")
        finally:
            self._connection.execute("PRAGMA query_only = ON")

    def digest(self) -> dict[str, str]:
        """Return a hash of each table of ``COMPARED``, without regard to row order, white space and case."""
        hashes = {}
        for table in COMPARED:
            rows = sorted(
                json.dumps([_normalized(value) for value in row]) for row in self.rows(f"SELECT * FROM {table}")
            )
            hashes[table] = blake2b("\n".join(rows).encode(), digest_size=16).hexdigest()
        return hashes

    def close(self) -> None:
        """Close the database. Idempotent."""
        self._connection.close()

    def _execute(self, sql: str, values: tuple[Any, ...]) -> sqlite3.Cursor:
        try:
            return self._connection.execute(sql, values)
        except UnicodeEncodeError as error:
            # Half a surrogate pair, which JSON can write and SQLite cannot hold.
            raise ToolError(f"{shown(error.object)} is not text that can be stored") from error


def _connect() -> sqlite3.Connection:
    connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    connection.row_factory = sqlite3.Row
    connection.execute("PRAGMA foreign_keys = ON")
    return connection


def _normalized(value: Any) -> Any:
    return " ".join(value.split()).casefold() if isinstance(value, str) else value
