"""Payloads of finished groups that live outside of this process: the contract of a store, and how it gets a trajectory.

A store keeps rows by key. A row is one trajectory in columns (``turnwise.columns.DTYPES``), so that a reader
fetches only those that it needs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence

from turnwise.columns import DTYPES, Columns
from turnwise.errors import TrainError

_OF_TOKENS = ("segments", "token_ids", "logprobs")


class PayloadsLost(TrainError):
    """A store does not answer, or no longer has what it was given."""


class PayloadStore(ABC):
    """Keeps rows by key outside of this process. Each method but the last two raises :class:`PayloadsLost`."""

    @abstractmethod
    async def start(self) -> None:
        """Start the store or connect to it. Idempotent.

        Raises:
            TrainError: It cannot be had; the message says what is missing.
        """

    @abstractmethod
    async def put(self, rows: Mapping[str, Columns]) -> None:
        """Store rows; when it returns they can be read."""

    @abstractmethod
    async def get(self, keys: Sequence[str], columns: Sequence[str]) -> list[Columns]:
        """Return these columns of rows, in the order of the keys."""

    @abstractmethod
    async def clear(self, keys: Collection[str]) -> None:
        """Forget rows. Unknown keys are ignored."""

    @abstractmethod
    async def restart(self) -> None:
        """Replace a lost store by an empty one.

        Raises:
            TrainError: Another program owns the store, or it does not start.
        """

    @abstractmethod
    async def close(self) -> None:
        """End the store, or disconnect from one of another program. Idempotent."""


class MemoryPayloads(PayloadStore):
    """Fake store: rows in this process, which :meth:`lose` loses as a crash would.

    Attributes:
        rows: What it holds.
        restarts: How often it was restarted.
    """

    def __init__(self) -> None:
        self.rows: dict[str, Columns] = {}
        self.restarts = 0
        self._lost = False

    def lose(self) -> None:
        """Lose all rows; every call fails until the next restart."""
        self.rows.clear()
        self._lost = True

    async def start(self) -> None:
        """Do nothing."""

    async def put(self, rows: Mapping[str, Columns]) -> None:
        """Store copies of rows."""
        self._check()
        self.rows |= {key: {name: each.copy() for name, each in row.items()} for key, row in rows.items()}

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

    async def restart(self) -> None:
        """Begin anew, without rows."""
        self.rows.clear()
        self._lost, self.restarts = False, self.restarts + 1

    async def close(self) -> None:
        """Forget everything."""
        self.rows.clear()

    def _check(self) -> None:
        if self._lost:
            raise PayloadsLost("the store was lost")


def columns_of(fields: Collection[str] | None) -> tuple[str, ...]:
    """Return the columns that hold these fields of a trajectory (``tokens``, ``messages`` ...); None for all."""
    if fields is None:
        return tuple(DTYPES)
    tokens = "tokens" in fields
    return ("record", *(_OF_TOKENS if tokens else ()), *(("messages",) if tokens and "messages" in fields else ()))
