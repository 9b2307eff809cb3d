"""The feedback on sessions: ``feedback.jsonl`` of a run.

One JSON object a line: session, id, turn, value, text, source, correction; or session and task, the row that its client
gave; or of a deleted session its id, ``deleted``. What was learned from which session is in the checkpoints.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import orjson

from turnwise.append_file import AppendFile
from turnwise.errors import FormatError, shown
from turnwise.gateway.errors import ApiError, invalid
from turnwise.trainer.algorithms.teacher_contexts import RecordedTurn

FEEDBACK: Final = "feedback.jsonl"
USER: Final = "user"
MOST_SCORE: Final = 1000.0
"""Sums of scores stay finite."""
_MOST_ENTRIES: Final = 10_000


@dataclass(frozen=True, slots=True)
class Feedback:
    """Feedback on a session.

    Attributes:
        id: Of the client, so that what it sends again counts once; or "".
        turn: Index of the turn that it is about; None for the whole session.
        value: Its score; None for text alone, which is no reward.
        text: What the user wrote, redacted.
        source: Who gave it: the user, or a function of ``custom.live`` by the name of its key.
        correction: The text that should have been answered at the turn, redacted; or "".
    """

    id: str
    turn: int | None
    value: float | None
    text: str
    source: str = USER
    correction: str = ""


class FeedbackLog:
    """Writer and contents of the file.

    Attributes:
        by_session: Feedback by the session's id, in order of arrival.
        tasks: Task rows by the session's id, of those that have one.
        changed: Set when a session may have become ready to be learned from.
    """

    def __init__(self, directory: Path) -> None:
        """Open the file of a run. Raises FormatError for a malformed line, DiskError where the disk refuses."""
        self.by_session: defaultdict[str, list[Feedback]] = defaultdict(list)
        self.tasks: dict[str, dict[str, Any]] = {}
        self.changed = asyncio.Event()
        path = directory / FEEDBACK
        self._file = AppendFile(path, cut=True)
        for number, line in enumerate(path.read_bytes().splitlines(), 1):
            try:
                record = orjson.loads(line)
                if "deleted" in record:
                    continue
                session = record.pop("session")
                if "task" in record:
                    self.tasks[session] = record["task"]
                else:
                    self.by_session[session].append(Feedback(**record))
            except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError) as error:
                raise FormatError(f"{path}:{number}: no feedback: {error!r}; remove the line") from error

    def add(self, session: str, feedback: Feedback) -> None:
        """Record feedback; what was sent with the same id is not added again. Raises ApiError or DiskError."""
        entries = self.by_session[session]
        existing = next((entry for entry in entries if feedback.id and entry.id == feedback.id), None)
        if existing is not None and existing != feedback:
            raise invalid("id", f"is {shown(feedback.id)}, the id of other feedback on this session: take another")
        if existing is None and feedback.correction and feedback.turn in self.corrections(session):
            raise ApiError(409, f"turn {feedback.turn} has a correction already", code="correction_exists")
        if len(entries) >= _MOST_ENTRIES:
            raise ApiError(429, f"the session has {_MOST_ENTRIES} pieces of feedback, the maximum")
        if existing is None:
            self._file.append(orjson.dumps({"session": session, **asdict(feedback)}))
            entries.append(feedback)
            self.changed.set()

    def add_task(self, session: str, row: dict[str, Any]) -> None:
        """Record the task row of a session. Raises DiskError."""
        self._file.append(orjson.dumps({"session": session, "task": row}))
        self.tasks[session] = row

    def scores(self, session: str) -> list[tuple[int | None, str, float]]:
        """Return the scores of a session: turn, source and value."""
        entries = self.by_session.get(session, ())
        return [(entry.turn, entry.source, entry.value) for entry in entries if entry.value is not None]

    def corrections(self, session: str) -> dict[int | None, str]:
        """Return the corrections of a session by turn."""
        entries = self.by_session.get(session, ())
        return {entry.turn: entry.correction for entry in entries if entry.correction}

    def sync(self) -> None:
        """Flush to disk (fsync). Raises DiskError."""
        self._file.sync()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class UserCorrections:
    """Context of self-distillation: what the user wrote that the assistant should have answered.

    A turn has one correction, so that the context of a turn that was taught stays what it was.
    """

    def __init__(self, run: Path) -> None:
        """Read the corrections of a run. Raises FormatError for a malformed line."""
        lines = (run / FEEDBACK).read_bytes().split(b"\n")[:-1]
        try:
            records = [orjson.loads(line) for line in lines]
        except orjson.JSONDecodeError as error:
            raise FormatError(f"{run / FEEDBACK}: no feedback: {error}; remove the line") from error
        self._texts = {
            (record["session"], record["turn"]): record["correction"] for record in records if record.get("correction")
        }

    def __call__(self, turn: RecordedTurn) -> str | None:
        """Return the correction of a turn."""
        text = self._texts.get((turn.trajectory.id, turn.number))
        return None if text is None else f"The user corrected an attempt at this step to:\n{text}"


CORRECTIONS: Final = f"{UserCorrections.__module__}:{UserCorrections.__qualname__}"
