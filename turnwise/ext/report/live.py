"""A run that is read while it is written: what is new of it since a position, as the served page takes it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, NamedTuple

import orjson

from turnwise.errors import FormatError
from turnwise.ext.report.runs import Decode, read_facts, read_gaps, thinned, token_decoder
from turnwise.ext.report.trajectories import (
    LARGEST,
    MOST_ROWS,
    MOST_TASKS,
    Row,
    dumped,
    entry_row,
    episodes_of,
    error_counts,
    part_figures,
    table_columns,
    task_columns,
    trajectory_record,
    trajectory_row,
)
from turnwise.trainer.observe.run_log import METRICS_FILE, effective_records
from turnwise.trajectory import Trajectory
from turnwise.trajectory_file import TRAJECTORIES, TrajectoryFile, located_trajectories, trajectory_at

MOST_POINTS: Final = 2_000
"""Most points of a curve when the page is opened; later ones are added to it."""
_READING_S = 0.1
"""Seconds after which a reading of trajectories pauses, so that requests are answered."""
_FIGURES_S = 1.0
_FIGURES_SHARE = 10
"""Figures of all trajectories are computed at most every second, and in at most a tenth of the time."""


class Position(NamedTuple):
    """How much of a run a page has received.

    Attributes:
        generation: Changes when the run is read from its beginning again.
        rows: Number of rows.
        complete: Number of rows of which more than the index was read.
        points: Number of records of metrics.
        revision: Of all that is sent as a whole.
    """

    generation: int = 0
    rows: int = 0
    complete: int = 0
    points: int = 0
    revision: int = 0

    @classmethod
    def parse(cls, text: str) -> Position:
        """Return the position of a text as ``str`` makes it; the beginning for any other text."""
        parts = text.split(".")
        is_valid = len(parts) == len(cls._fields) and all(part.isascii() and part.isdigit() for part in parts)
        return cls(*(int(part[:18]) for part in parts)) if is_valid else cls()

    def __str__(self) -> str:
        return ".".join(map(str, self))


class LiveRun:
    """A run whose files are read incrementally: each :meth:`read` continues where the last one ended.

    Rows come from the index first, which is quick, and then one by one from the trajectories. Not for several threads
    at a time, :meth:`record`, :meth:`words` and :meth:`search` aside.

    Args:
        source: Directory of a run, or a file of trajectories.
        name: Unique among the runs of a report.

    Raises:
        FormatError: There is no run, or its files cannot be read.
    """

    def __init__(self, source: Path, name: str) -> None:
        self._source = source
        self._name = name
        self._generation = 0
        self._decode: Decode | None = None
        self._gaps_size = -1
        self._reset()
        # A file that cannot be read is an error now, and a note later.
        if self.facts.trajectories is not None:
            try:
                TrajectoryFile(self.facts.trajectories).close()
            except FormatError as error:
                raise FormatError(
                    f"{error}; leave this run out, or serve it with the version of Turnwise that wrote it"
                ) from error
        self._read_metrics()

    def _reset(self) -> None:
        """Discard all that was read."""
        self.facts = read_facts(self._source, self._name, metrics=False)
        self._states = self._file_states()
        self._generation += 1
        self._rows: list[Row] = []
        self._ids: set[str] = set()
        self._complete = self._trajectories_end = 0
        self._file_identity: tuple[int, int] | None = None
        self._points: list[tuple[int, dict[str, float]]] = []
        self._metrics_end = 0
        self._metrics_notes: list[str] = []
        self._figures: dict[str, Any] = {"parts": {}, "errors": []}
        self._tasks: dict[str, list[Any]] = {}
        self._rows_changed = False
        self._figures_due = 0.0
        self._failure = ""
        self._last_content = b""
        self._revision = 0

    @property
    def position(self) -> Position:
        """All that was read."""
        return Position(self._generation, len(self._rows), self._complete, len(self._points), self._revision)

    def read(self) -> bool:
        """Read what was written since the last call, for a fraction of a second; return whether more is there."""
        try:
            if self._has_restarted():
                self._reset()
            self._read_metrics()
            has_more = self._read_rows()
            self._failure = ""
        except FormatError as error:
            has_more, self._failure = False, str(error)
        except OSError as error:
            has_more, self._failure = False, f"{error.filename}: {error.strerror or error}"
        self._compute(has_more)
        return has_more

    def _file_states(self) -> tuple[Any, ...]:
        """Return what tells whether the small files are others than those that were read."""
        if self._source.is_file():
            return ()
        times = [
            file.stat().st_mtime_ns if (file := self._source / name).exists() else None
            for name in ("config.yaml", "summary.json", "checkpoints")
        ]
        return (*times, *((self._source / name).exists() for name in (METRICS_FILE, TRAJECTORIES)))

    def _has_restarted(self) -> bool:
        """Whether the files are others, or shorter, than what was read of them; re-reads the small ones."""
        if (states := self._file_states()) != self._states:
            previous, self.facts = self.facts, read_facts(self._source, self._name, metrics=False)
            self._states = states
            self.facts.series, self.facts.meanings = previous.series, previous.meanings
            self.facts.warnings = previous.warnings
            if self.facts.success_reward != previous.success_reward or self.facts.role != previous.role:
                return True
        file = self.facts.trajectories
        if file is None or not file.exists():
            return self._trajectories_end > 0
        stat = file.stat()
        previous_identity, self._file_identity = self._file_identity, (stat.st_dev, stat.st_ino)
        return stat.st_size < self._trajectories_end or previous_identity not in (None, self._file_identity)

    def _read_metrics(self) -> None:
        file = self._source / METRICS_FILE
        if not file.is_file():
            return
        if file.stat().st_size < self._metrics_end:
            self._reset()
        with file.open("rb") as metrics_file:
            metrics_file.seek(self._metrics_end)
            data = metrics_file.read()
        data = data[: data.rfind(b"\n") + 1]
        # A process that resumed repeats steps, and writes trajectories again.
        if self._metrics_end and any(_is_start(line) for line in data.splitlines()):
            self._reset()
            data = file.read_bytes()
            data = data[: data.rfind(b"\n") + 1]
        self._points += self.facts.add_records(effective_records(data, file), self._metrics_notes)
        self._metrics_end += len(data)

    def _read_rows(self) -> bool:
        file = self.facts.trajectories
        if file is None:
            return False
        if not self._rows:
            with TrajectoryFile(file) as trajectory_file:
                self._add_rows([entry_row(entry, self.facts) for entry in trajectory_file.entries])
                if trajectory_file.entries:
                    last_entry = trajectory_file.entries[-1]
                    self._trajectories_end = last_entry.offset + last_entry.length
        deadline = time.monotonic() + _READING_S
        while self._complete < len(self._rows):
            if time.monotonic() > deadline:
                return True
            offset = self._rows[self._complete].offset
            row = trajectory_row(offset, trajectory_at(file, offset), self.facts)
            row.slot = (offset, 0)
            self._rows[self._complete] = row
            self._complete += 1
            self._rows_changed = True
        for location, trajectory in located_trajectories(file, self._trajectories_end):
            if trajectory.id in self._ids:
                # The earlier one is void: it was written again.
                self._reset()
                return True
            self._add_rows([trajectory_row(location.offset, trajectory, self.facts)])
            self._complete = len(self._rows)
            self._trajectories_end = location.offset + location.length
            if time.monotonic() > deadline:
                return True
        return False

    def _add_rows(self, rows: Sequence[Row]) -> None:
        for row in rows:
            row.slot = (row.offset, 0)
            self._ids.add(row.id)
        self._rows += rows
        self._rows_changed = self._rows_changed or bool(rows)

    def _compute(self, has_more: bool) -> None:
        """Compute the figures if rows were added and it is time, and note whether anything changed."""
        now = time.monotonic()
        if self._rows_changed and (now >= self._figures_due or (not has_more and not self._tasks)):
            episodes = episodes_of(self._rows, self.facts)
            self._figures = {"parts": part_figures(episodes), "errors": error_counts(self._rows)}
            self._tasks = task_columns(episodes, MOST_TASKS)
            self._rows_changed = False
            self._figures_due = time.monotonic() + max(_FIGURES_S, _FIGURES_SHARE * (time.monotonic() - now))
        if (
            content := dumped({"head": self._head(), "facts": self._facts(), "tasks": self._tasks})
        ) != self._last_content:
            self._last_content = content
            self._revision += 1

    def _head(self) -> dict[str, Any]:
        notes = [*self.facts.notes, *self._metrics_notes]
        if self._failure:
            notes.append(f"{self._failure}; what was read before is shown")
        if (unread := len(self._rows) - self._complete) > 0:
            notes.append(f"{unread:,} trajectories are still being read: their calls, errors and forks are missing")
        if (left_out := len(self._rows) - MOST_ROWS) > 0:
            notes.append(f"the table lists the first {MOST_ROWS:,} of {len(self._rows):,}: {left_out:,} are left out")
        return self.facts.head(len(self._rows), min(len(self._rows), MOST_ROWS), len(self._rows), notes)

    def _facts(self) -> dict[str, Any]:
        return {
            "meanings": self.facts.meanings,
            "warnings": [asdict(warning) for warning in self.facts.warnings],
            "config": self.facts.config,
            **self._figures,
        }

    def news_since(self, seen: Position) -> dict[str, Any] | None:
        """Return what is new since a position, as orjson-serialisable values; None if nothing is."""
        current = self.position
        if seen == current:
            return None
        is_restart = seen.generation != current.generation or any(
            old > new for old, new in zip(seen, current, strict=True)
        )
        seen = Position() if is_restart else seen
        news: dict[str, Any] = {"fresh": is_restart, "head": self._head()}
        if seen.revision != current.revision:
            news |= {"facts": self._facts(), "tasks": self._tasks}
        # Rows of which more was read, and new ones.
        stretches = {(seen.complete, min(current.complete, seen.rows)), (seen.rows, current.rows)}
        news["rows"] = [
            [begin, table_columns(self._rows[begin : min(end, MOST_ROWS)])]
            for begin, end in sorted(stretches)
            if begin < min(end, MOST_ROWS)
        ]
        news["series"] = self._series(seen.points)
        return news

    def _series(self, points_seen: int) -> dict[str, Any]:
        """Return the curves, or, if the page has points of them, those that were added."""
        if not points_seen:
            return {name: thinned(*series, MOST_POINTS) for name, series in sorted(self.facts.series.items())}
        new_points: dict[str, tuple[list[int], list[float]]] = {}
        for step, values in self._points[points_seen:]:
            for name, value in values.items():
                steps, points = new_points.setdefault(name, ([], []))
                steps.append(step)
                points.append(float(f"{value:.6g}"))
        return new_points

    def _trajectory(self, offset: int) -> Trajectory:
        if self.facts.trajectories is None:
            raise FormatError(f"{self.facts.name} has no trajectories")
        return trajectory_at(self.facts.trajectories, offset)

    def record(self, offset: int) -> bytes:
        """Return the JSON of the trajectory at an offset, as the page shows it. Raises FormatError."""
        trajectory = self._trajectory(offset)
        gaps_file = self._source / "diagnostics.jsonl"
        if gaps_file.is_file() and (size := gaps_file.stat().st_size) != self._gaps_size:
            self._gaps_size, self.facts.gaps = size, read_gaps(gaps_file, [])
        data = dumped(trajectory_record(trajectory, self.facts))
        return data if len(data) <= LARGEST else dumped(trajectory_record(trajectory, self.facts, tokens=False))

    def words(self, offset: int) -> dict[str, str]:
        """Return the texts of the token ids of the trajectory at an offset; none where no tokenizer is found."""
        if self._decode is None:
            self._decode, _ = token_decoder(self.facts.models)
        decode = self._decode
        if decode is None:
            return {}
        segments = self._trajectory(offset).segments
        token_ids = {token_id for segment in segments for token_id in segment.token_ids.tolist()}
        return {str(token_id): decode(token_id) for token_id in token_ids}

    def search(self, text: str, begin: int) -> dict[str, Any]:
        """Look for a text in messages for a fraction of a second, whatever its case, from a row's number on.

        Returns:
            ``found`` ids, the number of the ``next`` row to continue at (None at the end) and ``of`` how many.
        """
        deadline = time.monotonic() + _READING_S
        rows, needle = self._rows[:MOST_ROWS], text.lower()
        matching_ids: list[str] = []
        for number in range(begin, len(rows)):
            if time.monotonic() > deadline and number > begin:
                return {"found": matching_ids, "next": number, "of": len(rows)}
            messages = [segment.messages for segment in self._trajectory(rows[number].offset).segments]
            if any(needle in line.lower() for line in _texts(messages)):
                matching_ids.append(rows[number].id)
        return {"found": matching_ids, "next": None, "of": len(rows)}


def _texts(value: Any) -> list[str]:
    """Return all texts in a value, keys included."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for key, element in value.items() for text in (str(key), *_texts(element))]
    if isinstance(value, list | tuple):
        return [text for element in value for text in _texts(element)]
    return [orjson.dumps(value, default=str).decode()]


def _is_start(line: bytes) -> bool:
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        return False
    return isinstance(record, dict) and record.get("kind") == "start"
