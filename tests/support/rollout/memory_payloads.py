"""A payload store in memory, which can be lost as by a crash."""

from collections.abc import Collection, Mapping, Sequence

from turnwise.columns import Columns
from turnwise.rollout.replay.group_store import PayloadsLost, PayloadStore


class MemoryPayloads(PayloadStore):
    """Fake store: rows in this process, which :meth:`lose` loses as a crash would.

    Attributes:
        rows: What it holds.
    """

    def __init__(self) -> None:
        self.rows: dict[str, Columns] = {}
        self._lost = False

    def lose(self) -> None:
        """Lose all rows; every call fails."""
        self.rows.clear()
        self._lost = True

    async def start(self) -> None:
        """Do nothing."""

    async def put(self, rows: Mapping[str, Columns]) -> None:
        """Store copies of rows."""
        self._check()
        self.rows |= {key: {name: column.copy() for name, column in row.items()} for key, row in rows.items()}

    async def get(self, keys: Sequence[str], columns: Sequence[str]) -> list[Columns]:
        """Return copies of columns."""
        self._check()
        if missing := [key for key in keys if key not in self.rows]:
            raise PayloadsLost(f"row {missing[0]} is not in the store")
        return [{name: self.rows[key][name].copy() for name in columns} for key in keys]

    async def clear(self, keys: Collection[str]) -> None:
        """Forget rows."""
        self._check()
        for key in keys:
            self.rows.pop(key, None)

    async def close(self) -> None:
        """Forget everything."""
        self.rows.clear()

    def _check(self) -> None:
        if self._lost:
            raise PayloadsLost("the store was lost")
