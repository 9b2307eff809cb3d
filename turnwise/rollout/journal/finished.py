"""Finished members of an evaluation, so that an interrupted one rolls out only what is missing.

``finished.jsonl`` has one JSON object a line: a member whose trajectories are in ``trajectories.twz``, with the id,
offset, length and checksum of each::

    {"key": "val-t-e0~greedy", "group": "0-val-t-e0~greedy", "member": 0, "trajectories": [["...", 0, 812, 3405]]}

``{"event": "start"}`` stands where a process began.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from turnwise.append_file import AppendFile
from turnwise.errors import FormatError
from turnwise.rollout.core import RestoredGroup
from turnwise.rollout.journal.state import Stored, read_stored
from turnwise.trajectory import Trajectory
from turnwise.trajectory_file import TRAJECTORIES, TrajectoryWriter

FINISHED = "finished.jsonl"


class FinishedMembers:
    """Writer of an evaluation's trajectories, and the journal of its finished members.

    What cannot be read back (a torn line, a trajectory whose checksum differs) counts as not finished.

    Attributes:
        part: Number of processes that began before this one.
        restored: Number of members that they finished.
    """

    def __init__(self, directory: Path) -> None:
        """Open the files of an evaluation, as their only writer.

        Raises:
            DiskError: The disk refuses.
            FormatError: A line is malformed.
        """
        self._payloads = TrajectoryWriter(directory / TRAJECTORIES)
        self._file = AppendFile(directory / FINISHED, cut=True)
        # Of earlier processes: the groups, and their members on disk.
        self._groups: dict[str, tuple[str, dict[int, tuple[Stored, ...]]]] = {}
        # Of this process: what is on disk, and the members that wait for a trajectory of theirs.
        self._written: dict[str, Stored] = {}
        self._waiting: defaultdict[str, list[tuple[dict[str, Any], list[str]]]] = defaultdict(list)
        self.part = 0
        for number, line in enumerate((directory / FINISHED).read_bytes().splitlines(), 1):
            try:
                self._restore(orjson.loads(line))
            except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError, ValueError) as error:
                raise FormatError(
                    f"{directory / FINISHED}:{number}: not a finished member: {error!r}. Remove the line: the member "
                    "is rolled out again"
                ) from error
        self.restored = sum(len(members) for _, members in self._groups.values())
        self._file.append(orjson.dumps({"event": "start"}))

    def write(self, trajectory: Trajectory) -> None:
        """Write a trajectory, failed and cancelled ones included. Raises DiskError where the disk refuses."""
        self._written[trajectory.id] = Stored(trajectory.id, self._payloads.write(trajectory))
        for record, trajectory_ids in self._waiting.pop(trajectory.id, ()):
            self._record_when_written(record, trajectory_ids)

    def member(
        self, key: str, group_id: str, member: int, trajectories: Sequence[Trajectory], *, pending: bool = False
    ) -> None:
        """Record a member, once its trajectories are written; see :meth:`~turnwise.rollout.core.MemberJournal.member`.

        With ``pending`` they are written later, with the reward of their group.
        """
        del pending
        trajectory_ids = [trajectory.id for trajectory in trajectories]
        self._record_when_written({"key": key, "group": group_id, "member": member}, trajectory_ids)

    def restore(self, key: str) -> RestoredGroup | None:
        """Return the members of a requested group that earlier processes finished."""
        if key not in self._groups:
            return None
        group_id, members = self._groups[key]
        trajectories = {
            number: [self._payloads.read(stored.location) for stored in member]
            for number, member in sorted(members.items())
        }
        return RestoredGroup(group_id, trajectories, complete=False)

    def close(self) -> None:
        """Close the files. Idempotent."""
        self._payloads.close()
        self._file.close()

    def _record_when_written(self, record: dict[str, Any], trajectory_ids: list[str]) -> None:
        missing = next((trajectory_id for trajectory_id in trajectory_ids if trajectory_id not in self._written), None)
        if missing is not None:
            self._waiting[missing].append((record, trajectory_ids))
            return
        stored = [self._written.pop(trajectory_id).record() for trajectory_id in trajectory_ids]
        self._file.append(orjson.dumps({**record, "trajectories": stored}))

    def _restore(self, record: dict[str, Any]) -> None:
        if record.get("event") == "start":
            self.part += 1
            return
        member = read_stored(record["trajectories"])
        if all(self._payloads.holds(stored.location) for stored in member):
            _, members = self._groups.setdefault(str(record["key"]), (str(record["group"]), {}))
            members[int(record["member"])] = member
