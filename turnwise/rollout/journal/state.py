"""Format and state of a journal: which groups are finished, partly finished, or trained.

Events, each with ``event`` and these keys::

    start   part, after_step, payload    process ``part`` resumes from the checkpoint of a step; trajectories.twz has
                                         ``payload`` bytes. Takes and drops of later steps are undone
    member  key, group, member, trajectories [, pending]    a member ended without an error
    group   key, group, head, facts, trajectories, baselines    a group is complete
    take    step, keys                   a train step was given these groups
    back    step, keys                   it ended without training these of them
    drop    step, key, why               a group will not be trained
    orphan  trajectory, place            a kill came between writing a trajectory and its event
    late    ids                          trajectories that a custom manager put into no group in time
    end                                  the process ended in order, without a disk failure

A trajectory is ``[id, offset, length, crc]``: its place in trajectories.twz, or in pending.twz. Each line is one
JSON object; its last key, ``crc``, is the crc32 of the line's text without that key.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from turnwise.errors import FormatError
from turnwise.trajectory_file import RecordLocation


@dataclass(frozen=True, slots=True)
class Stored:
    """A trajectory on disk.

    Attributes:
        pending: Whether it is in pending.twz, without its group reward.
    """

    id: str
    location: RecordLocation
    pending: bool = False

    def record(self) -> list[Any]:
        """Return its form in the journal."""
        return [self.id, self.location.offset, self.location.length, self.location.crc]


@dataclass(frozen=True, slots=True)
class CompleteGroup:
    """A complete group on disk.

    Attributes:
        head: Fields of the group besides its trajectories.
        facts: Its ``GroupFacts``, as JSON.
    """

    head: dict[str, Any]
    facts: dict[str, Any]
    trajectories: tuple[Stored, ...]
    baselines: tuple[Stored, ...] = ()


@dataclass(slots=True)
class Entry:
    """State of one request key.

    Attributes:
        complete: The group, once all of its members are there.
        arrived: Index in the order of completion, from 0.
        train_step: The step that was given it.
        dropped: (step, why) where it will not be trained.
    """

    group_id: str
    members: dict[int, tuple[Stored, ...]] = field(default_factory=dict)
    complete: CompleteGroup | None = None
    arrived: int = 0
    train_step: int | None = None
    dropped: tuple[int, str] | None = None

    @property
    def consumed(self) -> bool:
        """Whether it was trained or dropped."""
        return self.train_step is not None or self.dropped is not None

    def stored(self) -> Iterator[Stored]:
        """Yield its trajectories."""
        if self.complete is not None:
            yield from self.complete.trajectories
            yield from self.complete.baselines
        else:
            for member in self.members.values():
                yield from member


class JournalState:
    """State of a journal by key, built by :meth:`apply`.

    Attributes:
        payload: Bytes of trajectories.twz at the last start, or None.
        starts: (part, after_step) of each process.
    """

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self.payload: int | None = None
        self.starts: list[tuple[int, int]] = []
        self._groups = 0

    def apply(self, event: Mapping[str, Any]) -> None:
        """Apply an event.

        Raises:
            AttributeError, KeyError, TypeError or ValueError: It is malformed.
        """
        match event["event"]:
            case "start":
                self.payload = int(event["payload"])
                self.starts.append((int(event["part"]), int(event["after_step"])))
                self.undo_after(int(event["after_step"]))
            case "member":
                entry = self._entry(event["key"], event["group"])
                pending = bool(event.get("pending"))
                entry.members[int(event["member"])] = read_stored(event["trajectories"], pending)
            case "group":
                entry = self._entry(event["key"], event["group"])
                trajectories, baselines = read_stored(event["trajectories"]), read_stored(event["baselines"])
                entry.complete = CompleteGroup(event["head"], event["facts"], trajectories, baselines)
                entry.arrived, self._groups = self._groups, self._groups + 1
                # Requested again after it was dropped.
                entry.dropped = None
            case "take":
                for key in event["keys"]:
                    if key in self.entries:
                        self.entries[key].train_step = int(event["step"])
            case "back":
                for key in event["keys"]:
                    if key in self.entries:
                        self._undo_take(self.entries[key], int(event["step"]))
            case "drop":
                if event["key"] in self.entries:
                    self.entries[event["key"]].dropped = int(event["step"]), str(event["why"])
            case "orphan" | "late" | "end":
                pass
            case other:
                raise ValueError(f"event is {other!r}")

    def forget_consumed(self) -> None:
        """Drop consumed entries from memory, except members in pending.twz that wait for their group reward."""
        self.entries = {
            key: entry
            for key, entry in self.entries.items()
            if not entry.consumed or any(stored.pending for stored in entry.stored())
        }

    def undo_after(self, step: int) -> None:
        """Undo takes and drops of later steps: their weights are lost."""
        for entry in self.entries.values():
            if entry.train_step is not None and entry.train_step > step:
                entry.train_step = None
            if entry.dropped is not None and entry.dropped[0] > step:
                entry.dropped = None

    def _undo_take(self, entry: Entry, step: int) -> None:
        """Undo the take of a group by a step, and a later drop."""
        if entry.train_step == step:
            entry.train_step = None
        if entry.dropped is not None and entry.dropped[0] == step:
            entry.dropped = None

    def _entry(self, key: str, group_id: str) -> Entry:
        entry = self.entries.get(key)
        if entry is None or entry.group_id != group_id:
            # Another group for the same key: the one before it was consumed, or is not wanted any more.
            entry = self.entries[key] = Entry(group_id)
        return entry


def read_stored(records: list[list[Any]], pending: bool = False) -> tuple[Stored, ...]:
    """Return trajectories from their form in the journal."""
    return tuple(
        Stored(str(name), RecordLocation(int(offset), int(length), int(crc)), pending)
        for name, offset, length, crc in records
    )


JOURNAL = "journal.jsonl"
SCHEMA_VERSION = 1
_SEAL = b',"crc":'


@dataclass(frozen=True, slots=True)
class JournalFile:
    """Contents of a journal file.

    Attributes:
        events: (line number, event) of each valid line, in order.
        end: Byte offset after the last one.
        damaged_bytes: Bytes after that: damage by a kill or a power cut.
    """

    events: list[tuple[int, dict[str, Any]]]
    end: int
    damaged_bytes: int


def seal(record: Mapping[str, Any]) -> bytes:
    """Return a record's line (without line break)."""
    text = orjson.dumps(record, option=orjson.OPT_SERIALIZE_NUMPY)
    return b"%b%b%d}" % (text[:-1], _SEAL, zlib.crc32(text))


def unseal(line: bytes) -> dict[str, Any] | None:
    """Return the record of a line, or None where its checksum fails."""
    text, _, crc = line.rpartition(_SEAL)
    text += b"}"
    if crc != b"%d}" % zlib.crc32(text):
        return None
    try:
        record = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    return record if isinstance(record, dict) and "event" in record else None


def read_journal(path: Path) -> JournalFile:
    """Read a journal; a missing file is empty.

    Damaged lines are skipped where a kill may have left them: at the end, and before the start of another process.

    Raises:
        FormatError: Another line is damaged, or has another schema version.
    """
    if not path.exists():
        return JournalFile([], 0, 0)
    events: list[tuple[int, dict[str, Any]]] = []
    end = offset = 0
    damaged_line: int | None = None
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            offset += len(line)
            if line == b"\n":
                continue
            record = unseal(line[:-1]) if line.endswith(b"\n") else None
            if record is None:
                damaged_line = damaged_line or number
                continue
            if record["event"] == "start":
                if record.get("schema_version") != SCHEMA_VERSION:
                    version = record.get("schema_version")
                    raise FormatError(f"{path}:{number}: schema version {version}; this version reads {SCHEMA_VERSION}")
            elif damaged_line is not None:
                raise FormatError(
                    f"{path}:{damaged_line}: the line is corrupt (its checksum differs), and intact lines follow: "
                    "restore the file from a copy, or empty it: what no checkpoint has trained is then rolled out "
                    "again, and the audit reports that the journal begins late"
                )
            damaged_line, end = None, offset
            events.append((number, record))
    return JournalFile(events, end, offset - end)
