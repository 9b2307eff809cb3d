"""The lines of a journal: JSON with a checksum, and which of them a kill or a power cut may have spoilt.

Owns: :func:`seal`, :func:`unseal` and :func:`read_journal`. Refuses: knowing what an event means
(``journal_state.py``).

Each line is one JSON object. Its last key, ``crc``, is the crc32 of the line's text without that key.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from turnwise.errors import FormatError

JOURNAL = "journal.jsonl"
SCHEMA_VERSION = 1
_SEAL = b',"crc":'


@dataclass(frozen=True, slots=True)
class JournalFile:
    """A journal, read.

    Attributes:
        events: (line, what it says) of each line that is whole, in order.
        end: Bytes of the file up to the end of the last one.
        spoilt: Bytes that follow: what a kill or a power cut left.
    """

    events: list[tuple[int, dict[str, Any]]]
    end: int
    spoilt: int


def seal(record: Mapping[str, Any]) -> bytes:
    """Return a line (without its line break)."""
    text = orjson.dumps(record)
    return b"%b%b%d}" % (text[:-1], _SEAL, zlib.crc32(text))


def unseal(line: bytes) -> dict[str, Any] | None:
    """Return what a line says, or None where it is not as it was written."""
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
    """Read a journal; one that is not there is empty.

    Spoilt lines are passed over where a process may have left them: at the end, and before another process starts.

    Raises:
        FormatError: Another line is spoilt, or has another schema version.
    """
    if not path.exists():
        return JournalFile([], 0, 0)
    events: list[tuple[int, dict[str, Any]]] = []
    end = offset = 0
    spoilt: int | None = None
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            offset += len(line)
            if line == b"\n":
                continue
            record = unseal(line[:-1]) if line.endswith(b"\n") else None
            if record is None:
                spoilt = spoilt or number
                continue
            if record["event"] == "start":
                if record.get("schema_version") != SCHEMA_VERSION:
                    version = record.get("schema_version")
                    raise FormatError(f"{path}:{number}: schema version {version}; this version reads {SCHEMA_VERSION}")
            elif spoilt is not None:
                raise FormatError(
                    f"{path}:{spoilt}: the line is not as it was written (its checksum differs), and whole lines "
                    "follow: restore the file from a copy, or remove it: what no checkpoint has trained is then rolled "
                    "out again"
                )
            spoilt, end = None, offset
            events.append((number, record))
    return JournalFile(events, end, offset - end)
