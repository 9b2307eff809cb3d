"""What ran when: the spans of a run's work, written down as they end.

File format (``timeline.jsonl``), one JSON value a line. An object when a process of the run begins: ``{"event":
"start", "part": 0, "mode": "sync", "at": unix time}``. Then one array a span, in the order in which they end: ``[what,
name, begin, end]``, in seconds since that start. A span that was still open when its process ended in order has
``null`` for its end; a killed process leaves none of those.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import orjson

from turnwise.append_file import AppendFile, writing
from turnwise.errors import DiskError, FormatError

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
    """Writes spans down, and knows how long updates and rollouts ran at the same time.

    From the thread of the event loop only.

    Args:
        path: The file.
        part: Number of this process among those that work on the run.
        mode: Which loop runs.
    """

    def __init__(self, path: Path, *, part: int, mode: str) -> None:
        self._path = path
        with writing(path):
            self._file = AppendFile(path)
        self._begun = time.monotonic()
        self._open: dict[int, tuple[str, str, float]] = {}
        self._next = 0
        self._both = 0.0
        self._both_since: float | None = None
        with writing(path):
            self._file.append(orjson.dumps({"event": "start", "part": part, "mode": mode, "at": round(time.time(), 3)}))

    @contextlib.contextmanager
    def span(self, what: str, name: object) -> Iterator[None]:
        """Write down when the block began and ended."""
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
        """Seconds so far in which groups were on their way while the trainer updated."""
        return self._both + (0.0 if self._both_since is None else self._now() - self._both_since)

    def close(self) -> None:
        """Write down what is open, and close the file. Closing twice is no error."""
        # On a full disk that is missing, as after a kill.
        with contextlib.suppress(DiskError):
            for number in list(self._open):
                self._write(number, None)
        self._file.close()

    def _now(self) -> float:
        return time.monotonic() - self._begun

    def _write(self, number: int, end: float | None) -> None:
        # A task that is cancelled after the end was written down at close.
        if number not in self._open:
            return
        what, name, begin = self._open.pop(number)
        with writing(self._path):
            self._file.append(orjson.dumps([what, name, round(begin, 4), None if end is None else round(end, 4)]))

    def _count(self) -> None:
        running = {what for what, _, _ in self._open.values()}
        both = GROUP in running and UPDATE in running
        if both and self._both_since is None:
            self._both_since = self._now()
        elif not both and self._both_since is not None:
            self._both += self._now() - self._both_since
            self._both_since = None


@dataclass(frozen=True, slots=True)
class Span:
    """One piece of work.

    Attributes:
        what: One of :data:`KINDS`.
        name: Which one: a step, a version, a group's id, a label.
        begin: Seconds since its process began.
        end: The same; None where the process ended before it.
    """

    what: str
    name: str
    begin: float
    end: float | None


@dataclass(slots=True)
class Part:
    """What one process of a run did.

    Attributes:
        number: Which one, from 0.
        mode: Which loop ran.
        at: When it began, in unix time.
        spans: What it did, in the order in which it ended.
    """

    number: int
    mode: str
    at: float
    spans: list[Span] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """How long it worked, as far as its spans tell."""
        return max((each.begin if each.end is None else each.end for each in self.spans), default=0.0)


def read_timeline(path: Path) -> list[Part]:
    """Return what each process of a run did; a line that a killed one left half written is passed over.

    Raises:
        FormatError: There is no such file, or a line is not what it should be.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise FormatError(f"{path} cannot be read: {error}; runs write it while they train") from error
    parts: list[Part] = []
    for number, line in enumerate(lines, 1):
        if not line.endswith((b"}", b"]")):
            continue
        try:
            record = orjson.loads(line)
            if isinstance(record, dict):
                parts.append(Part(int(record["part"]), str(record["mode"]), float(record["at"])))
            else:
                what, name, begin, end = record
                parts[-1].spans.append(Span(str(what), str(name), float(begin), None if end is None else float(end)))
        except (orjson.JSONDecodeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise FormatError(f"{path}:{number}: no record of a timeline: {error!r}") from error
    return parts
