"""Where finished trajectories are kept: one line of JSON each, appended.

Owns: :class:`TrajectoryWriter` and :func:`read_trajectories`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from turnwise.errors import FormatError
from turnwise.inference.ledger import append_whole
from turnwise.trajectory import Trajectory


class TrajectoryWriter:
    """Appends trajectories to a file; each is in the file when :meth:`write` returns."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        torn = path.exists() and path.stat().st_size > 0 and _last_byte(path) != b"\n"
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._closed = False
        if torn:
            # A killed process left half a line: it stays unreadable, but must not swallow the next one.
            os.write(self._file, b"\n")

    def write(self, trajectory: Trajectory) -> None:
        """Append one trajectory, whole or not at all.

        Raises:
            FormatError: It cannot be written as JSON.
            OSError: The disk is full, or the file is gone.
        """
        append_whole(self._file, trajectory.to_bytes() + b"\n")

    def close(self) -> None:
        """Close the file. Closing twice is no error."""
        if not self._closed:
            self._closed = True
            os.close(self._file)


def _last_byte(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1)


def read_trajectories(path: Path) -> Iterator[Trajectory]:
    """Yield the trajectories of a file in the order in which they were written.

    A line that a killed process left half written is passed over; it has no closing brace.

    Raises:
        FormatError: Another line cannot be read. The message names file and line.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            line = line.rstrip(b"\n")
            if not line or not line.endswith(b"}"):
                continue
            try:
                yield Trajectory.from_bytes(line)
            except FormatError as error:
                raise FormatError(f"{path}:{number}: {error}") from error
