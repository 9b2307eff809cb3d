"""Where finished trajectories are kept: one line of JSON each, appended.

Owns: :class:`TrajectoryWriter` and :func:`read_trajectories`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from turnwise.append import AppendFile
from turnwise.errors import FormatError
from turnwise.trajectory import Trajectory


class TrajectoryWriter:
    """Appends trajectories to a file; each is in the file when :meth:`write` returns."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = AppendFile(path)

    def write(self, trajectory: Trajectory) -> None:
        """Append one trajectory, whole or not at all.

        Raises:
            FormatError: It cannot be written as JSON.
            OSError: The disk is full, or the file is gone.
        """
        self._file.append(trajectory.to_bytes())

    def close(self) -> None:
        """Close the file. Closing twice is no error."""
        self._file.close()


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
