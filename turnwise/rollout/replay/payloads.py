"""Payloads of finished groups that live outside of this process: the contract of a store, and how it gets a trajectory.

A store keeps rows by key. A row is one trajectory in columns, so that a reader fetches only those that it needs:

- ``record`` (uint8): JSON of the trajectory without its segments
- ``segments`` (uint8): JSON list of its segments without ids, log-probabilities and messages, with their lengths
- ``token_ids`` (int32): ids of all segments, one after the other
- ``logprobs`` (float32): log-probabilities of all sampled segments, one after the other
- ``messages`` (uint8): JSON list of the segments' messages and tools
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import orjson

from turnwise.errors import FormatError, TrainError
from turnwise.trajectory import Segment, Trajectory, read_segment, segment_record

Columns: TypeAlias = dict[str, npt.NDArray[Any]]

DTYPES = {"record": np.uint8, "segments": np.uint8, "token_ids": np.int32, "logprobs": np.float32, "messages": np.uint8}
"""The columns of a row."""
_OF_TOKENS = ("segments", "token_ids", "logprobs")
_NO_IDS = np.empty(0, np.int32)


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


def pack_trajectory(trajectory: Trajectory) -> Columns:
    """Return a trajectory as a row; :func:`unpack_trajectory` is the inverse.

    Raises:
        FormatError: It holds what JSON cannot.
    """
    segments = trajectory.segments
    scored = [each.logprobs for each in segments if each.logprobs is not None]
    return {
        "record": _bytes(replace(trajectory, segments=[]).to_bytes()),
        "segments": _json(trajectory.id, [_shape(each) for each in segments]),
        "token_ids": np.concatenate([_NO_IDS, *(each.token_ids for each in segments)], dtype=np.int32),
        "logprobs": np.concatenate([np.empty(0, np.float32), *scored], dtype=np.float32),
        "messages": _json(trajectory.id, [_said(each) for each in segments]),
    }


def unpack_trajectory(row: Columns) -> Trajectory:
    """Return the trajectory of a row: without segments where it has no ``token_ids``, and without messages and tools
    where it has no ``messages``.

    Raises:
        FormatError: The row is damaged.
    """
    trajectory = Trajectory.from_bytes(row["record"].tobytes())
    if "token_ids" not in row:
        return trajectory
    ids, logprobs = row["token_ids"], row["logprobs"]
    try:
        shapes = orjson.loads(row["segments"].tobytes())
        said = orjson.loads(row["messages"].tobytes()) if "messages" in row else [{"messages": ()}] * len(shapes)
        for shape, messages in zip(shapes, said, strict=True):
            count, scored = shape.pop("lengths")
            mine = {"token_ids": ids[:count], "logprobs": None if scored is None else logprobs[:scored]}
            trajectory.segments.append(read_segment({**shape, **messages, **mine}))
            ids, logprobs = ids[count:], logprobs[scored or 0 :]
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"the row of trajectory {trajectory.id!r} is damaged: {error!r}") from error
    if len(ids) or len(logprobs):
        raise FormatError(f"the row of trajectory {trajectory.id!r} has more ids than its segments")
    return trajectory


def _shape(segment: Segment) -> dict[str, Any]:
    record = segment_record(replace(segment, token_ids=_NO_IDS, logprobs=None, messages=(), tools=None))
    scored = None if segment.logprobs is None else len(segment.logprobs)
    kept = {name: value for name, value in record.items() if name not in ("token_ids", "logprobs", "messages")}
    return {**kept, "lengths": [len(segment.token_ids), scored]}


def _said(segment: Segment) -> dict[str, Any]:
    return {"messages": segment.messages} | ({} if segment.tools is None else {"tools": segment.tools})


def _json(name: str, records: list[dict[str, Any]]) -> npt.NDArray[np.uint8]:
    try:
        return _bytes(orjson.dumps(records))
    except TypeError:
        # A model may write numbers of more than 64 bits as arguments: what holds them is kept as JSON text.
        texts = ("messages", "tools", "template_args")
    try:
        return _bytes(
            orjson.dumps(
                [{key: json.dumps(value) if key in texts else value for key, value in each.items()} for each in records]
            )
        )
    except TypeError as error:
        raise FormatError(f"trajectory {name!r} cannot be written as JSON: {error}") from error


def _bytes(data: bytes) -> npt.NDArray[np.uint8]:
    # A copy that may be written, as torch wants it.
    return np.frombuffer(bytearray(data), np.uint8)
