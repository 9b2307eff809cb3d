"""The log of a gateway's open sessions, from which a gateway that was killed goes on with them.

``sessions.jsonl``, one JSON object a line: ``{"event": "start", "schema_version": 1, "abandoned": {"ID": "why"}}``,
then events of sessions, each with ``session`` and its number ``n`` there: ``open``, ``turn``, ``response``, ``reward``,
``failed``, ``end``. Token ids, log-probabilities and version spans are those of the ledger, to which a turn refers by
``at``. At each start the file is written anew with the sessions that are still open.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import orjson

from turnwise.append_file import AppendFile, private_opener, write_private
from turnwise.errors import (
    BudgetExceeded,
    DiskError,
    FormatError,
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
    each.__name__: each for each in (InferenceError, SessionError, RenderError, BudgetExceeded)
}


@dataclass(slots=True)
class SavedSession:
    """An open session, as the log has it.

    Attributes:
        lines: All its lines.
        why: Why it cannot be rebuilt, or "".
        keys: Its token and reward key.
        about: Fields of its trajectory besides tokens.
        settings: Its own settings, as JSON.
        began: When it was opened (``time.time``).
        ends: When its lifetime ends (``time.time``).
        turns: Its turns, each with the place (``at``) of its call in the ledger; -1 for text.
        responses: Its stored responses: id, origin and items.
        rewards: Its rewards.
        reward_ids: Those with an id, by it.
        failures: The errors of its requests since the last turn, each with the session's counters.
    """

    lines: list[bytes]
    why: str = ""
    keys: tuple[str, str] = ("", "")
    about: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    began: float = 0.0
    ends: float = 0.0
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
        self.about, self.settings = dict(event["about"]), dict(event["settings"])
        self.began, self.ends = float(event["began"]), float(event["ends"])

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
    """A log that was read.

    Attributes:
        open: The sessions that did not end, by id.
        ended: Ids of those that ended.
        abandoned: Why an earlier session could not be rebuilt, by id.
        damaged: The lines, by number, that are no events.
    """

    open: dict[str, SavedSession] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)
    abandoned: dict[str, str] = field(default_factory=dict)
    damaged: list[int] = field(default_factory=list)


def read_saved(path: Path) -> SavedSessions:
    """Read a log; a torn last line, which a kill leaves, is none. Raises FormatError for another schema version."""
    found = SavedSessions()
    if not path.exists():
        return found
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
                _begin(path, found, event)
            elif isinstance(event, dict) and isinstance(event.get("session"), str):
                _add(path, number, found, (event, files), line)
            else:
                found.damaged.append(number)
    return found


def _begin(path: Path, found: SavedSessions, event: Any) -> None:
    version = event.get("schema_version") if isinstance(event, dict) else None
    if version != SCHEMA_VERSION:
        raise FormatError(
            f"{path} has schema version {version!r}; this version reads {SCHEMA_VERSION}. Start the version that wrote "
            "it to end its sessions, or move it away: what was open then stays in the ledger only"
        )
    found.abandoned.update(event.get("abandoned", {}))


def _add(
    path: Path, number: int, found: SavedSessions, read: tuple[Mapping[str, Any], MediaFiles], line: bytes
) -> None:
    event, files = read
    name, kind = event["session"], event.get("event")
    if kind == "end":
        found.ended.add(name)
        found.open.pop(name, None)
        return
    if kind == "open":
        found.open[name] = SavedSession([])
        found.ended.discard(name)
    elif name not in found.open:
        found.open[name] = SavedSession([], f"{path.name} has no record of its opening")
    saved = found.open[name]
    wanted = len(saved.lines)
    saved.lines.append(line)
    try:
        if event.get("n") != wanted:
            raise ValueError(f"it should be number {wanted} of the session, and is number {event.get('n')!r}")
        if kind == "open":
            saved.open(event)
        else:
            saved.add(event, files)
    except (FormatError, AttributeError, KeyError, TypeError, ValueError) as error:
        saved.why = saved.why or f"line {number} of {path.name} does not follow what is before it: {error}"


@dataclass(slots=True)
class Rebuilt:
    """What became of the sessions of a log.

    Attributes:
        lost: By rebuilt session, the calls in the ledger (``at``) that were never committed.
        abandoned: Why a session could not be rebuilt, by id.
    """

    lost: dict[str, list[int]] = field(default_factory=dict)
    abandoned: dict[str, str] = field(default_factory=dict)


class Restorable(Protocol):
    """What is restored of a session: its turns."""

    @property
    def recorded_as(self) -> str:
        """``tokens`` or ``text``."""

    def restore(
        self, record: TurnRecord, prompt: TokenIds, completion: Completion, media: Sequence[MediaSpan] = ()
    ) -> None:
        """Commit a turn again. Raises SessionError."""


def rebuild(
    saved: SavedSessions, recorders: Mapping[str, Restorable], ledger: Path | None, ended: Container[str]
) -> Rebuilt:
    """Restore the turns of open sessions, with their ids from the ledger.

    Args:
        saved: The log.
        recorders: An empty session for each session of it that can be rebuilt.
        ledger: The ledger; None where no ids were recorded.
        ended: Ids of the sessions that have a trajectory.
    """
    found = Rebuilt({name: [] for name in recorders}, dict(saved.abandoned))
    found.abandoned.update((name, each.why) for name, each in saved.open.items() if each.why)
    for name, recorder in recorders.items():
        if recorder.recorded_as == "text":
            _rebuild_text(found, name, recorder, saved.open[name])
    if ledger is not None:
        _rebuild_tokens(found, saved, recorders, ledger, ended)
    elif without := [
        name for name, each in recorders.items() if each.recorded_as == "tokens" and saved.open[name].turns
    ]:
        found.abandoned.update(dict.fromkeys(without, "its calls were not logged"))
    for name in found.abandoned:
        found.lost.pop(name, None)
    return found


def _rebuild_text(found: Rebuilt, name: str, recorder: Restorable, saved: SavedSession) -> None:
    try:
        for _, record in saved.turns:
            recorder.restore(record, _NO_IDS, Completion(_NO_IDS, _NO_LOGPROBS, record.finish_reason, ()))
    except SessionError as error:
        found.abandoned[name] = str(error)


def _rebuild_tokens(
    found: Rebuilt, saved: SavedSessions, recorders: Mapping[str, Restorable], ledger: Path, ended: Container[str]
) -> None:
    """Restore turns in the order of their calls, which is that of their commits."""
    turns = {name: dict(saved.open[name].turns) for name, each in recorders.items() if each.recorded_as == "tokens"}
    named: set[int] = set()
    strange: set[str] = set()

    def wanted(name: str) -> bool:
        if name not in turns and name not in ended and name not in saved.ended:
            strange.add(name)
        return name in turns and name not in found.abandoned

    for each in read_calls(ledger, wanted):
        if isinstance(each, Resumption):
            named.update(at for name in turns for at in each.lost.get(name, ()))
        elif isinstance(each, LedgerEntry):
            record = turns[each.session].pop(each.at, None)
            if record is not None:
                _restore(found, recorders[each.session], record, each)
            elif each.finish_reason in ("stop", "length"):
                found.lost[each.session].append(each.at)
    for name, left in turns.items():
        found.lost[name] = [at for at in found.lost[name] if at not in named]
        if left:
            record = next(iter(left.values()))
            found.abandoned.setdefault(name, f"{ledger.name} lacks the call of its turn {record.turn_id}")
        elif saved.damaged and found.lost[name]:
            lines = ", ".join(map(str, saved.damaged))
            found.abandoned.setdefault(name, f"{NAME} is damaged (line {lines}), and may have held a turn of it")
    for name in strange:
        found.abandoned.setdefault(name, f"its calls are in {ledger.name}, and its opening is not in {NAME}")


def _restore(found: Rebuilt, recorder: Restorable, record: TurnRecord, call: LedgerEntry) -> None:
    completion = Completion(call.completion_ids, call.logprobs, record.finish_reason, call.weight_versions)
    try:
        recorder.restore(record, call.prompt_ids, completion, call.media)
    except SessionError as error:
        found.abandoned[call.session] = str(error)


def failure_of(event: Mapping[str, Any]) -> TurnwiseError:
    """Return the error of a ``failed`` event."""
    kind, told = _FAILURES[event["type"]], str(event["message"])
    if kind is BudgetExceeded:
        budget: Mapping[str, Any] = event["budget"]
        return BudgetExceeded(event["stop_reason"], told, **budget)
    return kind(told)


class SessionLog:
    """Writer of the log of one gateway.

    An event is in the file when its method returns. Where it cannot be written, DiskError is raised; a turn, which
    stays committed, is kept and written before the next event.

    Args:
        path: The file; what it holds is read (``saved``), and replaced by :meth:`begin`.
        ledger: Writer of the ledger; None where no ids are recorded.
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

    def begin(self, rebuilt: Rebuilt) -> None:
        """Replace the file by one of the rebuilt sessions, at once or not at all. Raises DiskError."""
        kept = {name: self.saved.open[name].lines for name in rebuilt.lost}
        head = {"event": "start", "schema_version": SCHEMA_VERSION, "abandoned": rebuilt.abandoned}
        draft = self._path.with_suffix(".new")
        with self._writing():
            if self._ledger is not None:
                self._ledger.resume(rebuilt.lost, rebuilt.abandoned)
            with open(draft, "wb", opener=private_opener) as file:
                file.write(orjson.dumps(head) + b"\n")
                file.writelines(line for lines in kept.values() for line in lines)
                file.flush()
                os.fsync(file.fileno())
            if self.saved.damaged or (self.saved.open.keys() & rebuilt.abandoned.keys()):
                self._set_aside()
            draft.replace(self._path)
            self._file = AppendFile(self._path)
        self._numbers = {name: len(lines) for name, lines in kept.items()}
        self.saved = SavedSessions(abandoned=rebuilt.abandoned)

    def opened(self, session: str, **fields: Any) -> None:
        """Append the opening of a session, with what :meth:`SavedSession.open` reads."""
        self._numbers[session] = 0
        try:
            self._append("open", session, fields)
        except DiskError:
            del self._numbers[session]
            raise

    def turn(self, session: str, record: TurnRecord) -> None:
        """Append a committed turn."""
        at = -1 if self._ledger is None else self._ledger.last_call(session)
        self._failed.pop(session, None)
        line = self._line("turn", session, {"at": at, **record.to_json()})
        self._numbers[session] += 1
        self._unwritten.append((line, unplaced(record.new or ())))
        self._write()

    def response(self, session: str, name: str, origin: Origin, items: Sequence[Mapping[str, Any]]) -> None:
        """Append a stored response."""
        fields = {"id": name, "turn": origin.turn_id, "instructions": origin.instructions, "items": items}
        self._append("response", session, fields)

    def reward(self, session: str, turn_id: str | None, name: str, value: float, reward_id: str = "") -> None:
        """Append a reward, with the id that it was sent with."""
        self._append("reward", session, {"turn": turn_id, "name": name, "value": value, "id": reward_id})

    def failed(self, session: str, error: TurnwiseError, counters: Mapping[str, Any]) -> None:
        """Append the error of a request, unless it is of no matter for the session or equals the last one."""
        kind = next((name for name, each in _FAILURES.items() if isinstance(error, each)), None)
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

    def ended(self, session: str) -> None:
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
        self._write()
        line = self._line(kind, session, fields)
        with self._writing():
            self._opened.append(line)
        self._numbers[session] += 1

    def _write(self) -> None:
        """Write the turns that are not yet written."""
        while self._unwritten:
            with self._writing():
                line, images = self._unwritten[0]
                self._images.write(images)
                self._opened.append(line)
            del self._unwritten[0]

    def _line(self, kind: str, session: str, fields: Mapping[str, Any]) -> bytes:
        return orjson.dumps({"event": kind, "session": session, "n": self._numbers[session], **fields})

    @property
    def _opened(self) -> AppendFile:
        assert self._file is not None, "begin() comes first"
        return self._file

    def _set_aside(self) -> None:
        """Keep what could not be rebuilt under another name."""
        number = 1
        while (aside := self._path.with_suffix(f".{number}.damaged")).exists():
            number += 1
        write_private(aside, self._path.read_bytes())
        _log.error("not every session of %s could be rebuilt: it is kept as %s", self._path, aside.name)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DiskError(
                f"{self._path} cannot be written: {error.strerror or error}. Make room on its file system: what was "
                "recorded before is kept, and the gateway goes on"
            ) from error
