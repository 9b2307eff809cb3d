"""Records of a run's files as JSON values, to read and to change them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import orjson

from turnwise.trajectory import Trajectory
from turnwise.trajectory_file import TRAJECTORIES, TrajectoryWriter, index_path, located_trajectories, read_trajectories


def read_records(file: Path) -> list[dict[str, Any]]:
    """Return the records of a file of JSON lines or of trajectories."""
    if file.name == TRAJECTORIES:
        return [orjson.loads(trajectory.to_bytes()) for trajectory in read_trajectories(file)]
    return [orjson.loads(line) for line in file.read_bytes().splitlines()]


def write_records(file: Path, records: Iterable[dict[str, Any]]) -> None:
    """Write a file of JSON lines or of trajectories anew."""
    if file.name != TRAJECTORIES:
        file.write_bytes(b"".join(orjson.dumps(record) + b"\n" for record in records))
        return
    file.unlink(missing_ok=True)
    index_path(file).unlink(missing_ok=True)
    writer = TrajectoryWriter(file)
    for record in records:
        writer.write(Trajectory.from_bytes(orjson.dumps(record)))
    writer.close()


def record_bytes(file: Path) -> list[bytes]:
    """Return the bytes of each trajectory's record, as they are in the file."""
    data = file.read_bytes()
    return [data[location.offset : location.offset + location.length] for location, _ in located_trajectories(file)]


def spoil(file: Path, number: int) -> None:
    """Change a byte in the middle of a trajectory's record."""
    location = [location for location, _ in located_trajectories(file)][number]
    data = bytearray(file.read_bytes())
    data[location.offset + location.length // 2] ^= 1
    file.write_bytes(bytes(data))
