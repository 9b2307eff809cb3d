"""Where finished trajectories are kept: one line of JSON each, appended.

Owns: :class:`TrajectoryWriter`, :class:`Place` (where one lies) and :func:`read_trajectories`. Refuses: knowing which
of them count (``journal.py``).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from turnwise.append import AppendFile
from turnwise.errors import FormatError
from turnwise.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class Place:
    """Where a trajectory lies in its file.

    Attributes:
        offset: Where its line begins.
        length: Bytes of the line, without its line break.
        crc: crc32 of them.
    """

    offset: int
    length: int
    crc: int


class TrajectoryWriter:
    """Appends trajectories to a file; each is in the file when :meth:`write` returns.

    Half a line that a killed process left is cut off.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = AppendFile(path, cut=True)

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._file.size

    def write(self, trajectory: Trajectory) -> Place:
        """Append one trajectory, whole or not at all.

        Raises:
            FormatError: It cannot be written as JSON.
            OSError: The disk is full, or the file is gone.
        """
        line = trajectory.to_bytes()
        return Place(self._file.append(line), len(line), zlib.crc32(line))

    def holds(self, place: Place) -> bool:
        """Whether what was written to a place is there."""
        return zlib.crc32(self._file.read(place.offset, place.length)) == place.crc

    def read(self, place: Place) -> Trajectory:
        """Return the trajectory that lies in a place.

        Raises:
            FormatError: Something else lies there.
        """
        line = self._file.read(place.offset, place.length)
        if zlib.crc32(line) != place.crc:
            raise FormatError(
                f"{self.path}: the {place.length} bytes at {place.offset} are not those that were written: the file "
                "was changed, or the disk lost them"
            )
        return Trajectory.from_bytes(line)

    def lines(self, offset: int) -> Iterator[tuple[Place, bytes]]:
        """Yield the lines from an offset on, which is where a line begins, with their places."""
        with self.path.open("rb") as file:
            file.seek(offset)
            for line in file:
                yield Place(offset, len(line) - 1, zlib.crc32(line[:-1])), line[:-1]
                offset += len(line)

    def truncate(self, size: int) -> None:
        """Cut the file to its first ``size`` bytes."""
        self._file.truncate(size)

    def strike(self, place: Place) -> None:
        """Make a line unreadable, so that its trajectory can be written again: half written lines lack the brace."""
        with self.path.open("r+b") as file:
            file.seek(place.offset + place.length - 1)
            file.write(b" ")

    def sync(self) -> None:
        """Force what was written to disk."""
        self._file.sync()

    def close(self) -> None:
        """Close the file. Closing twice is no error."""
        self._file.close()


def read_trajectories(path: Path) -> Iterator[Trajectory]:
    """Yield the trajectories of a file in the order in which they were written.

    A line that a killed process left half written is passed over; it has no closing brace, or no line break.

    Raises:
        FormatError: Another line cannot be read. The message names file and line.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            whole, line = line.endswith(b"\n"), line.rstrip(b"\n")
            if not line or not line.endswith(b"}"):
                continue
            try:
                yield Trajectory.from_bytes(line)
            except FormatError as error:
                if not whole:
                    return
                raise FormatError(f"{path}:{number}: {error}") from error
