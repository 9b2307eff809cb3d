"""The log of a gateway's open sessions, from which a restarted gateway resumes them.

``sessions.jsonl``, one JSON object a line: ``{"event": "start", "schema_version": 1, "abandoned": {"ID": "why"}}``,
then events of sessions, each with ``session`` and its number ``n`` there: ``open``, ``turn``, ``response``, ``reward``,
``failed``, ``end``. Token ids, log-probabilities and version spans are those of the ledger, to which a turn refers by
``at``. At each start the file is written anew with the sessions that are still open.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import orjson

from turnwise.append_file import AppendFile, replace_file, write_private, writing
from turnwise.errors import (
    BudgetExceeded,
    DiskError,
    FormatError,
    GatewayError,
    InferenceError,
    RenderError,
    SessionError,
    TurnwiseError,
)
from turnwise.gateway.dialects.core import Origin
from turnwise.media_files import MediaFiles, MediaSpan
from turnwise.model.canonical import unplaced
from turnwise.recorder.ledger import LedgerEntry, LedgerWriter, Resumption, read_calls
from turnwise.recorder.turn_record import TurnRecord
from turnwise.types import Completion, Logprobs, Media, TokenIds

SCHEMA_VERSION = 1
NAME = "sessions.jsonl"
_NO_IDS: TokenIds = np.zeros(0, np.int32)
_NO_LOGPROBS: Logprobs = np.zeros(0, np.float32)
_log = logging.getLogger(__name__)
_FAILURES: dict[str, type[TurnwiseError]] = {
    error.__name__: error for error in (InferenceError, SessionError, RenderError, GatewayError, BudgetExceeded)
}


@dataclass(slots=True)
class SavedSession:
    """An open session as read from the log.

    Attributes:
        lines: All its lines.
        why: The reason why it cannot be rebuilt, or "".
        keys: Its token and reward key.
        trajectory: Fields of its trajectory besides tokens.
        settings: Its own settings, as JSON.
        began: When it was opened (``time.time``).
        expires: When its lifetime ends (``time.time``).
        turns: Its turns, each with the position (``at``) of its call in the ledger; -1 for text.
        responses: Its stored responses: id, origin and items.
        rewards: Its rewards.
        reward_ids: Those with an id, by it.
        failures: The errors of its requests since the last turn, each with the session's counters.
    """

    lines: list[bytes]
    why: str = ""
    keys: tuple[str, str] = ("", "")
    trajectory: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    began: float = 0.0
    expires: float = 0.0
    turns: list[tuple[int, TurnRecord]] = field(default_factory=list)
    responses: list[tuple[str, Origin, list[Mapping[str, Any]]]] = field(default_factory=list)
    rewards: list[tuple[str | None, str, float]] = field(default_factory=list)
    reward_ids: dict[str, tuple[str | None, str, float]] = field(default_factory=dict)
    failures: list[tuple[TurnwiseError, Mapping[str, Any]]] = field(default_factory=list)

    @property
    def temperatures(self) -> set[float]:
        """Temperatures of its turns, where they are known."""
        return {record.temperature for _, record in self.turns if record.temperature is not None}

    def open(self, event: Mapping[str, Any]) -> None:
        """Read the event of its opening. Raises KeyError, TypeError or ValueError."""
        self.keys = str(event["token"]), str(event["reward_key"])
        self.trajectory, self.settings = dict(event["about"]), dict(event["settings"])
        self.began, self.expires = float(event["began"]), float(event["ends"])

    def add(self, event: Mapping[str, Any], files: MediaFiles) -> None:
        """Add a further event, with its images. Raises FormatError, KeyError, TypeError or ValueError."""
        kind = event["event"]
        if kind == "turn":
            self.turns.append((int(event["at"]), TurnRecord.from_json(event, files.read)))
            self.failures.clear()
        elif kind == "response":
            origin = Origin(str(event["turn"]), int(event["instructions"]))
            self.responses.append((str(event["id"]), origin, list(event["items"])))
        elif kind == "reward":
            self.rewards.append((event["turn"], str(event["name"]), float(event["value"])))
            if event["id"]:
                self.reward_ids[str(event["id"])] = self.rewards[-1]
        elif kind == "failed":
            self.failures.append((failure_of(event), event["counters"]))
        else:
            raise ValueError(f"{kind!r} is no event of a session")


@dataclass(slots=True)
class SavedSessions:
    """The contents of a log.

    Attributes:
        open: The sessions that did not end, by id.
        finished: Ids of those that ended.
        abandoned: Why an earlier session could not be rebuilt, by id.
        damaged: Numbers of the lines that are no events.
    """

    open: dict[str, SavedSession] = field(default_factory=dict)
    finished: set[str] = field(default_factory=set)
    abandoned: dict[str, str] = field(default_factory=dict)
    damaged: list[int] = field(default_factory=list)


def read_saved(path: Path) -> SavedSessions:
    """Read a log, without a torn last line, as a kill leaves it. Raises FormatError for another schema version."""
    saved = SavedSessions()
    if not path.exists():
        return saved
    files = MediaFiles.beside(path)
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                break
            try:
                event = orjson.loads(line)
            except orjson.JSONDecodeError:
                event = None
            if number == 1:
                _read_start(path, saved, event)
            elif isinstance(event, dict) and isinstance(event.get("session"), str):
                _read_event(path, number, saved, (event, files), line)
            else:
                saved.damaged.append(number)
    return saved


def _read_start(path: Path, saved: SavedSessions, event: Any) -> None:
    version = event.get("schema_version") if isinstance(event, dict) else None
    if version != SCHEMA_VERSION:
        raise FormatError(
            f"{path} has schema version {version!r}; this version reads {SCHEMA_VERSION}. Start the version that wrote "
            "it to end its sessions, or move it away: what was open then stays in the ledger only"
        )
    saved.abandoned.update(event.get("abandoned", {}))


def _read_event(
    path: Path, number: int, log: SavedSessions, read: tuple[Mapping[str, Any], MediaFiles], line: bytes
) -> None:
    event, files = read
    name, kind = event["session"], event.get("event")
    if kind == "end":
        log.finished.add(name)
        log.open.pop(name, None)
        return
    if kind == "open":
        log.open[name] = SavedSession([])
        log.finished.discard(name)
    elif name not in log.open:
        log.open[name] = SavedSession([], f"{path.name} has no record of its opening")
    saved = log.open[name]
    number_in_session = len(saved.lines)
    saved.lines.append(line)
    try:
        if event.get("n") != number_in_session:
            raise ValueError(
                f"it should be number {number_in_session} of the session, and is number {event.get('n')!r}"
            )
        if kind == "open":
            saved.open(event)
        else:
            saved.add(event, files)
    except (FormatError, AttributeError, KeyError, TypeError, ValueError) as error:
        saved.why = saved.why or f"line {number} of {path.name} does not follow what is before it: {error}"


@dataclass(slots=True)
class RebuildOutcome:
    """The outcome of rebuilding the sessions of a log.

    Attributes:
        lost: By rebuilt session, the calls in the ledger (``at``) that were never committed.
        abandoned: Why a session could not be rebuilt, by id.
    """

    lost: dict[str, list[int]] = field(default_factory=dict)
    abandoned: dict[str, str] = field(default_factory=dict)


class Restorable(Protocol):
    """A session whose turns can be restored."""

    @property
    def recorded_as(self) -> str:
        """``tokens`` or ``text``."""

    def restore(
        self, record: TurnRecord, prompt: TokenIds, completion: Completion, media: Sequence[MediaSpan] = ()
    ) -> None:
        """Commit a turn again. Raises SessionError."""


def rebuild(
    saved: SavedSessions, recorders: Mapping[str, Restorable], ledger: Path | None, finished: Container[str]
) -> RebuildOutcome:
    """Restore the turns of open sessions, with their ids from the ledger.

    Args:
        saved: The log.
        recorders: An empty session for each session of it that can be rebuilt.
        ledger: The ledger; None if no ids were recorded.
        finished: Ids of the sessions that have a trajectory.
    """
    outcome = RebuildOutcome({name: [] for name in recorders}, dict(saved.abandoned))
    outcome.abandoned.update((name, session.why) for name, session in saved.open.items() if session.why)
    for name, recorder in recorders.items():
        if recorder.recorded_as == "text":
            _rebuild_text(outcome, name, recorder, saved.open[name])
    if ledger is not None:
        _rebuild_tokens(outcome, saved, recorders, ledger, finished)
    elif without := [
        name for name, session in recorders.items() if session.recorded_as == "tokens" and saved.open[name].turns
    ]:
        outcome.abandoned.update(dict.fromkeys(without, "its calls were not logged"))
    for name in outcome.abandoned:
        outcome.lost.pop(name, None)
    return outcome


def _rebuild_text(outcome: RebuildOutcome, name: str, recorder: Restorable, saved: SavedSession) -> None:
    try:
        for _, record in saved.turns:
            recorder.restore(record, _NO_IDS, Completion(_NO_IDS, _NO_LOGPROBS, record.finish_reason, ()))
    except SessionError as error:
        outcome.abandoned[name] = str(error)


def _rebuild_tokens(
    outcome: RebuildOutcome,
    saved: SavedSessions,
    recorders: Mapping[str, Restorable],
    ledger: Path,
    finished: Container[str],
) -> None:
    """Restore turns in the order of their calls, which is that of their commits."""
    turns = {
        name: dict(saved.open[name].turns) for name, recorder in recorders.items() if recorder.recorded_as == "tokens"
    }
    reported: set[int] = set()
    unlogged: set[str] = set()

    def is_rebuilt(name: str) -> bool:
        if name not in turns and name not in finished and name not in saved.finished:
            unlogged.add(name)
        return name in turns and name not in outcome.abandoned

    for entry in read_calls(ledger, is_rebuilt):
        if isinstance(entry, Resumption):
            reported.update(at for name in turns for at in entry.lost.get(name, ()))
        elif isinstance(entry, LedgerEntry):
            record = turns[entry.session].pop(entry.at, None)
            if record is not None:
                _restore(outcome, recorders[entry.session], record, entry)
            elif entry.finish_reason in ("stop", "length"):
                outcome.lost[entry.session].append(entry.at)
    for name, unmatched in turns.items():
        outcome.lost[name] = [at for at in outcome.lost[name] if at not in reported]
        if unmatched:
            record = next(iter(unmatched.values()))
            outcome.abandoned.setdefault(name, f"{ledger.name} lacks the call of its turn {record.turn_id}")
        elif saved.damaged and outcome.lost[name]:
            lines = ", ".join(map(str, saved.damaged))
            outcome.abandoned.setdefault(name, f"{NAME} is damaged (line {lines}), and may have held a turn of it")
    for name in unlogged:
        outcome.abandoned.setdefault(name, f"its calls are in {ledger.name}, and its opening is not in {NAME}")


def _restore(outcome: RebuildOutcome, recorder: Restorable, record: TurnRecord, call: LedgerEntry) -> None:
    completion = Completion(
        call.completion_ids, call.logprobs, record.finish_reason, call.weight_versions, mask=call.mask
    )
    try:
        recorder.restore(record, call.prompt_ids, completion, call.media)
    except SessionError as error:
        outcome.abandoned[call.session] = str(error)


def failure_of(event: Mapping[str, Any]) -> TurnwiseError:
    """Return the error of a ``failed`` event."""
    kind, message = _FAILURES[event["type"]], str(event["message"])
    if kind is BudgetExceeded:
        budget: Mapping[str, Any] = event["budget"]
        return BudgetExceeded(event["stop_reason"], message, **budget)
    return kind(message)


class SessionLog:
    """Writer of the log of one gateway.

    An event is in the file when its method returns. If it cannot be written, DiskError is raised; a turn, which stays
    committed, is retained and written before the next event.

    Args:
        path: The file; it is read (``saved``), and replaced by :meth:`begin`.
        ledger: Writer of the ledger; None if no ids are recorded.
    """

    def __init__(self, path: Path, ledger: LedgerWriter | None) -> None:
        self.saved = read_saved(path)
        self._path = path
        self._ledger = ledger
        self._file: AppendFile | None = None
        self._numbers: dict[str, int] = {}
        self._failed: dict[str, tuple[str, Any]] = {}
        # Lines, each with the images that it names.
        self._unwritten: list[tuple[bytes, tuple[Media, ...]]] = []
        self._images = MediaFiles.beside(path)

    def begin(self, rebuilt: RebuildOutcome) -> None:
        """Replace the file by one of the rebuilt sessions, atomically. Raises DiskError."""
        lines_by_session = {name: self.saved.open[name].lines for name in rebuilt.lost}
        head = {"event": "start", "schema_version": SCHEMA_VERSION, "abandoned": rebuilt.abandoned}
        lines = [orjson.dumps(head) + b"\n", *(line for lines in lines_by_session.values() for line in lines)]
        with writing(self._path):
            if self._ledger is not None:
                self._ledger.resume(rebuilt.lost, rebuilt.abandoned)
            if self.saved.damaged or (self.saved.open.keys() & rebuilt.abandoned.keys()):
                self._set_aside()
            replace_file(self._path, b"".join(lines))
            self._file = AppendFile(self._path)
        self._numbers = {name: len(lines) for name, lines in lines_by_session.items()}
        self.saved = SavedSessions(abandoned=rebuilt.abandoned)

    def append_open(self, session: str, **fields: Any) -> None:
        """Append the opening of a session, with what :meth:`SavedSession.open` reads."""
        self._numbers[session] = 0
        try:
            self._append("open", session, fields)
        except DiskError:
            del self._numbers[session]
            raise

    def append_turn(self, session: str, record: TurnRecord) -> None:
        """Append a committed turn."""
        at = -1 if self._ledger is None else self._ledger.last_call(session)
        self._failed.pop(session, None)
        line = self._line("turn", session, {"at": at, **record.to_json()})
        self._numbers[session] += 1
        self._unwritten.append((line, unplaced(record.new or ())))
        self._write_pending()

    def append_response(self, session: str, name: str, origin: Origin, items: Sequence[Mapping[str, Any]]) -> None:
        """Append a stored response."""
        fields = {"id": name, "turn": origin.turn_id, "instructions": origin.instructions, "items": items}
        self._append("response", session, fields)

    def append_reward(self, session: str, turn_id: str | None, name: str, value: float, reward_id: str = "") -> None:
        """Append a reward, with the id that it was sent with."""
        self._append("reward", session, {"turn": turn_id, "name": name, "value": value, "id": reward_id})

    def append_failure(self, session: str, error: TurnwiseError, counters: Mapping[str, Any]) -> None:
        """Append the error of a request, unless it does not affect the session or equals the last one."""
        kind = next((name for name, error_class in _FAILURES.items() if isinstance(error, error_class)), None)
        if kind is None or self._failed.get(session) == (str(error), counters):
            return
        event: dict[str, Any] = {"type": kind, "message": str(error), "counters": counters}
        if isinstance(error, BudgetExceeded):
            event["stop_reason"] = error.stop_reason
            event["budget"] = {"used": error.used, "limit": error.limit, "exact": error.exact}
        try:
            self._append("failed", session, event)
        except DiskError as failure:
            # The request has failed already, and is answered with its own error.
            _log.error("%s", failure)
        else:
            self._failed[session] = str(error), counters

    def append_end(self, session: str) -> None:
        """Append the end of a session, which its trajectory proves, too."""
        try:
            self._append("end", session, {})
        except DiskError as failure:
            _log.error("%s", failure)
        self._numbers.pop(session, None)
        self._failed.pop(session, None)

    def close(self) -> None:
        """Close the file; idempotent."""
        if self._file is not None:
            self._file.close()

    def _append(self, kind: str, session: str, fields: Mapping[str, Any]) -> None:
        self._write_pending()
        line = self._line(kind, session, fields)
        self._open_file.append(line)
        self._numbers[session] += 1

    def _write_pending(self) -> None:
        """Write the turns that are not yet written."""
        while self._unwritten:
            line, images = self._unwritten[0]
            self._images.write(images)
            self._open_file.append(line)
            del self._unwritten[0]

    def _line(self, kind: str, session: str, fields: Mapping[str, Any]) -> bytes:
        return orjson.dumps({"event": kind, "session": session, "n": self._numbers[session], **fields})

    @property
    def _open_file(self) -> AppendFile:
        assert self._file is not None, "begin() comes first"
        return self._file

    def _set_aside(self) -> None:
        """Copy the log with the sessions that could not be rebuilt to another name."""
        number = 1
        while (aside := self._path.with_suffix(f".{number}.damaged")).exists():
            number += 1
        write_private(aside, self._path.read_bytes())
        _log.error("not every session of %s could be rebuilt: it is kept as %s", self._path, aside.name)
