"""Finished members of an evaluation, so that an interrupted one rolls out only what is missing.

``finished.jsonl`` has one JSON object a line: a member whose trajectories are in ``trajectories.twz``, with the id,
offset, length and checksum of each::

    {"key": "val-t-e0~greedy", "group": "0-val-t-e0~greedy", "member": 0, "trajectories": [["...", 0, 812, 3405]]}

``{"event": "start"}`` stands where a process began.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson

from turnwise.append_file import AppendFile
from turnwise.errors import FormatError
from turnwise.rollout.core import RestoredGroup
from turnwise.trajectory import Trajectory
from turnwise.trajectory_file import TRAJECTORIES, RecordLocation, TrajectoryWriter

FINISHED = "finished.jsonl"


@dataclass(slots=True)
class _Group:
    id: str
    members: dict[int, list[RecordLocation]]


@dataclass(frozen=True, slots=True)
class _Unwritten:
    """A finished member some of whose trajectories wait for their group reward."""

    key: str
    group_id: str
    member: int
    trajectories: tuple[str, ...]


class FinishedMembers:
    """Writer of an evaluation's trajectories, and the journal of its finished members.

    What cannot be read back (a torn line, a trajectory whose checksum differs) counts as not finished.

    Attributes:
        part: Number of processes that began before this one.
        restored: Number of members that they finished.
    """

    def __init__(self, directory: Path) -> None:
        """Open the files of an evaluation, as their only writer. Raises FormatError where a line is malformed."""
        self._payloads = TrajectoryWriter(directory / TRAJECTORIES)
        self._file = AppendFile(directory / FINISHED, cut=True)
        self._groups: dict[str, _Group] = {}
        # Of this process: what is on disk, and the members that wait for a trajectory of theirs.
        self._locations: dict[str, RecordLocation] = {}
        self._waiting: defaultdict[str, list[_Unwritten]] = defaultdict(list)
        self.part = 0
        for number, line in enumerate((directory / FINISHED).read_bytes().splitlines(), 1):
            try:
                self._restore(orjson.loads(line))
            except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError, ValueError) as error:
                raise FormatError(
                    f"{directory / FINISHED}:{number}: not a finished member: {error!r}. Remove the line: the member "
                    "is rolled out again"
                ) from error
        self.restored = sum(len(group.members) for group in self._groups.values())
        self._file.append(orjson.dumps({"event": "start"}))

    def write(self, trajectory: Trajectory) -> None:
        """Write a trajectory, failed and cancelled ones included. Raises OSError where the disk refuses."""
        self._locations[trajectory.id] = self._payloads.write(trajectory)
        for member in self._waiting.pop(trajectory.id, ()):
            self._note(member)

    def member(
        self, key: str, group_id: str, member: int, trajectories: Sequence[Trajectory], *, pending: bool = False
    ) -> None:
        """Record a member that finished without an error, once its trajectories are written.

        Args:
            key: Request key.
            group_id: The member's group.
            member: Its number.
            trajectories: Its trajectories.
            pending: Whether they are written later, with the reward of their group.
        """
        del pending
        self._note(_Unwritten(key, group_id, member, tuple(trajectory.id for trajectory in trajectories)))

    def restore(self, key: str) -> RestoredGroup | None:
        """Return the members of a requested group that earlier processes finished."""
        group = self._groups.get(key)
        if group is None:
            return None
        members = {
            number: [self._payloads.read(location) for location in locations]
            for number, locations in sorted(group.members.items())
        }
        return RestoredGroup(group.id, members, complete=False)

    def close(self) -> None:
        """Close the files. Idempotent."""
        self._payloads.close()
        self._file.close()

    def _note(self, member: _Unwritten) -> None:
        missing = next((name for name in member.trajectories if name not in self._locations), None)
        if missing is not None:
            self._waiting[missing].append(member)
            return
        locations = [(name, self._locations.pop(name)) for name in member.trajectories]
        record = {
            "key": member.key,
            "group": member.group_id,
            "member": member.member,
            "trajectories": [[name, location.offset, location.length, location.crc] for name, location in locations],
        }
        self._file.append(orjson.dumps(record))

    def _restore(self, record: dict[str, object]) -> None:
        if record.get("event") == "start":
            self.part += 1
            return
        stored = record["trajectories"]
        if not isinstance(stored, list):
            raise TypeError("trajectories must be a list")
        locations = [RecordLocation(int(offset), int(length), int(crc)) for _, offset, length, crc in stored]
        if all(self._payloads.holds(location) for location in locations):
            group = self._groups.setdefault(str(record["key"]), _Group(str(record["group"]), {}))
            group.members[int(str(record["member"]))] = locations
