"""The file of JSON lines that every run has.

Owns: :class:`JSONLLogger` and :func:`read_metrics`. Refuses: computing metrics.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a file; a line that a killed process left half written is passed over.

    A resumed run logs steps again; keep the later one of two with the same step.

    Raises:
        FormatError: Another line is no JSON object.
    """
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if not line.endswith(b"}"):
            continue
        try:
            yield orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise FormatError(f"{path}:{number}: not JSON: {error}") from error
