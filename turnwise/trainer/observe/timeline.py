"""The timeline of a run: spans of its work, recorded as they end.

File format (``timeline.jsonl``), one JSON value a line. A process begins with ``{"event": "start", "part": 0, "mode":
"sync", "at": unix time}``, followed by one array per span in order of ending: ``[what, name, begin, end]``, in seconds
since that start. A span still open at an orderly exit has ``null`` for its end; a killed process leaves none of those.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import orjson

from turnwise.append_file import AppendFile
from turnwise.errors import DiskError

GROUP: Final = "group"
"""From a group's first episode until the group is finished, by the group's id."""
WAIT: Final = "wait"
"""The trainer waits for groups, by the step that they are for."""
UPDATE: Final = "update"
"""The trainer makes a batch, or a part of it, into new weights, by the step."""
SYNC: Final = "sync"
"""The weights go to the servers, by their version."""
EVALUATION: Final = "evaluation"
"""Held-out tasks are rolled out, by the label."""
CHECKPOINT: Final = "checkpoint"
"""A checkpoint is written, by its step."""
KINDS: Final = (GROUP, WAIT, UPDATE, SYNC, EVALUATION, CHECKPOINT)


class Timeline:
    """Records spans, and measures the overlap of updates and rollouts. For the event loop's thread only."""

    def __init__(self, path: Path, *, part: int, mode: str) -> None:
        self._file = AppendFile(path)
        self._started = time.monotonic()
        self._open: dict[int, tuple[str, str, float]] = {}
        self._next = 0
        self._both = 0.0
        self._both_since: float | None = None
        self._file.append(orjson.dumps({"event": "start", "part": part, "mode": mode, "at": round(time.time(), 3)}))

    @contextlib.contextmanager
    def span(self, what: str, name: object) -> Iterator[None]:
        """Record the begin and end of the block."""
        number, self._next = self._next, self._next + 1
        self._open[number] = what, str(name), self._now()
        self._count()
        try:
            yield
        finally:
            self._write(number, self._now())
            self._count()

    @property
    def overlap(self) -> float:
        """Seconds so far in which an update ran with groups in flight."""
        return self._both + (0.0 if self._both_since is None else self._now() - self._both_since)

    def close(self) -> None:
        """Record open spans, and close the file. Idempotent."""
        # On a full disk that is missing, as after a kill.
        with contextlib.suppress(DiskError):
            for number in list(self._open):
                self._write(number, None)
        self._file.close()

    def _now(self) -> float:
        return time.monotonic() - self._started

    def _write(self, number: int, end: float | None) -> None:
        # A task that is cancelled after the end was written down at close.
        if number not in self._open:
            return
        what, name, begin = self._open.pop(number)
        self._file.append(orjson.dumps([what, name, round(begin, 4), None if end is None else round(end, 4)]))

    def _count(self) -> None:
        running = {what for what, _, _ in self._open.values()}
        overlapping = GROUP in running and UPDATE in running
        if overlapping and self._both_since is None:
            self._both_since = self._now()
        elif not overlapping and self._both_since is not None:
            self._both += self._now() - self._both_since
            self._both_since = None
