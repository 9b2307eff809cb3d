"""What a kill or a power cut left of a run's trajectories, when the next process opens its journal.

Owns: :func:`unnamed` (trajectories that no journal line names) and :func:`drop_lost` (lines whose trajectories are not
on disk). Refuses: to go on where something is spoilt that neither can have spoilt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from turnwise.errors import FormatError
from turnwise.rollout.journal_state import Entry, JournalState, Stored
from turnwise.rollout.writer import TrajectoryWriter
from turnwise.types import StopReason


def drop_lost(
    state: JournalState,
    file_of: Callable[[Stored], TrajectoryWriter | None],
    payloads: Path,
    journal: Path,
    say: Callable[[str], None],
    *,
    max_uses: int = 1,
) -> None:
    """Look at everything that is still to be trained, also once more, and forget what a power cut took.

    Raises:
        FormatError: Something is spoilt, but what was written after it is there.
    """
    waiting = {key: entry for key, entry in state.entries.items() if not entry.consumed or entry.reusable(max_uses)}
    needed = {each for entry in waiting.values() for each in _all(entry)}
    bad = {each for each in needed if (file := file_of(each)) is None or not file.holds(each.place)}
    last = max((each.place.offset for each in needed - bad if not each.pending), default=-1)
    for each in bad:
        if not each.pending and each.place.offset < last:
            line = _line_number(payloads, each.place.offset)
            raise FormatError(
                f"{payloads}:{line}: trajectory {each.id} is not as it was written (its checksum "
                f"differs), and whole ones follow: restore the file from a copy, or remove {journal}: what "
                "no checkpoint has trained is then rolled out again"
            )
    for key, entry in waiting.items():
        if entry.whole is not None and not bad.isdisjoint((*entry.whole.trajectories, *entry.whole.baselines)):
            entry.whole = None
        entry.members = {number: each for number, each in entry.members.items() if bad.isdisjoint(each)}
        if entry.whole is None and not entry.members and not entry.consumed:
            del state.entries[key]
    if lost := [each for each in bad if not each.pending]:
        say(
            f"{payloads}: {len(lost)} finished trajectories are not whole on disk (power was cut before "
            "they were forced there): they are rolled out again"
        )


def _all(entry: Entry) -> Iterator[Stored]:
    """Yield what an entry names, also members of a whole group: what the group is made of again where it is lost."""
    if entry.whole is not None:
        yield from entry.whole.trajectories
        yield from entry.whole.baselines
    for member in entry.members.values():
        yield from member


def named(event: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
    """Yield (offset, checksum) of what a line names in trajectories.jsonl."""
    if event["event"] == "orphan":
        yield event["place"][0], event["place"][2]
    elif not event.get("pending"):
        for _, offset, _, crc in (*event.get("trajectories", ()), *event.get("baselines", ())):
            yield offset, crc


def unnamed(
    payloads: TrajectoryWriter, since: int, offsets: Mapping[int, int], say: Callable[[str], None]
) -> list[tuple[Stored, bool]]:
    """Return the trajectories that no line names, and whether each ended without an error: then its process was killed
    between the two files.

    Lines at the end that cannot be read are cut off.
    """
    found: list[tuple[Stored, bool]] = []
    spoilt: int | None = None
    for place, line in payloads.lines(since):
        if place.offset in offsets:
            whole = offsets[place.offset] == place.crc
        else:
            record = _head(line)
            whole = record is not None
            if record is not None:
                found.append((Stored(str(record["id"]), place), _finished(record)))
        if whole:
            spoilt = None
        elif spoilt is None:
            spoilt = place.offset
    if spoilt is not None:
        say(f"{payloads.path}: the last {payloads.size - spoilt} bytes were not written whole: cut")
        payloads.truncate(spoilt)
    return found


def _head(line: bytes) -> dict[str, Any] | None:
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    wanted = {"id", "partition", "error", "stop_reason"}
    return record if isinstance(record, dict) and wanted <= record.keys() else None


def _finished(record: Mapping[str, Any]) -> bool:
    ended = record["stop_reason"] not in (StopReason.ERROR, StopReason.CANCELLED)
    return record["partition"] == "train" and record["error"] is None and ended


def _line_number(path: Path, offset: int) -> int:
    with path.open("rb") as file:
        return file.read(offset).count(b"\n") + 1
