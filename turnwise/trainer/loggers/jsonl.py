"""The file of JSON lines that every run has.

Owns: :class:`JSONLLogger` and :func:`read_metrics`. Refuses: computing metrics.

Each process of a run begins with ``{"kind": "start", "part": p, "step": n}``: it goes on after step ``n``, and what an
earlier process logged of later ones was not saved. It stays there, and readers leave it out.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from turnwise.append import AppendFile, writing
from turnwise.errors import FormatError


class JSONLLogger:
    """Appends one JSON object per line; each line is on its way to disk when :meth:`log` returns."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with writing(path):
            self._file = AppendFile(path)

    def log(self, record: Mapping[str, Any]) -> None:
        """Append a record. Values that are not finite become null. Raises DiskError where the disk refuses."""
        with writing(self.path):
            self._file.append(orjson.dumps(dict(record), option=orjson.OPT_SERIALIZE_NUMPY))

    def close(self) -> None:
        """Close the file. Closing twice is no error."""
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file that count; a line that a killed process left half written is passed over.

    What a process logged of steps that the next one did not find in a checkpoint is left out: that one made them anew.
    Of two evaluations of one label at one step the later one counts.

    Raises:
        FormatError: Another line is no JSON object.
    """
    found: list[dict[str, Any]] = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if not line.endswith(b"}"):
            continue
        try:
            record = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise FormatError(f"{path}:{number}: not JSON: {error}") from error
        if record.get("kind") == "start":
            found = [each for each in found if each.get("step", 0) <= record["step"]]
            continue
        if record.get("kind") == "eval":
            found = [each for each in found if _evaluation(each) != _evaluation(record)]
        found.append(record)
    return found


def _evaluation(record: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what an evaluation is told by."""
    return record.get("kind"), record.get("step"), record.get("label")
