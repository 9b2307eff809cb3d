"""The journal of a run: records finished groups and their use in training, so that a killed run can resume.

Payloads are written once, in ``trajectories.twz``; the journal holds their offsets. Trajectories that wait for their
group reward are in ``pending.twz``.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Self

from turnwise.append_file import AppendFile, private_directory, writing
from turnwise.errors import DiskError, FormatError, TrainError
from turnwise.rollout.core import GroupFacts, RestoredGroup
from turnwise.rollout.journal.state import JOURNAL, SCHEMA_VERSION, Entry, JournalState, Stored, read_journal, seal
from turnwise.trajectory import Trajectory, TrajectoryGroup
from turnwise.trajectory_file import TRAJECTORIES, TrajectoryWriter
from turnwise.types import StopReason


def drop_lost(
    state: JournalState,
    file_of: Callable[[Stored], TrajectoryWriter | None],
    payloads: Path,
    journal: Path,
    say: Callable[[str], None],
) -> None:
    """Verify everything still to be trained, and forget what a power cut lost."""
    waiting = {key: entry for key, entry in state.entries.items() if not entry.consumed}
    needed = {stored for entry in waiting.values() for stored in _trajectories_of(entry)}
    damaged = {stored for stored in needed if (file := file_of(stored)) is None or not file.holds(stored.location)}
    last_intact = max((stored.location.offset for stored in needed - damaged if not stored.pending), default=-1)
    for stored in damaged:
        if not stored.pending and stored.location.offset < last_intact:
            raise FormatError(
                f"{payloads}: trajectory {stored.id} at byte {stored.location.offset} is corrupt (its checksum "
                f"differs), and intact ones follow: restore the file from a copy, or empty {journal}: what no "
                "checkpoint has trained is then rolled out again, and the audit reports that the journal begins late"
            )
    for key, entry in waiting.items():
        if entry.complete is not None and not damaged.isdisjoint(
            (*entry.complete.trajectories, *entry.complete.baselines)
        ):
            entry.complete = None
        entry.members = {number: member for number, member in entry.members.items() if damaged.isdisjoint(member)}
        if entry.complete is None and not entry.members:
            del state.entries[key]
    if lost := [stored for stored in damaged if not stored.pending]:
        say(
            f"{payloads}: {len(lost)} finished trajectories are incomplete on disk (power was lost before they were "
            "synced): they are rolled out again"
        )


def _trajectories_of(entry: Entry) -> Iterator[Stored]:
    """Yield an entry's trajectories, including members of a whole group, from which a lost one is rebuilt."""
    if entry.complete is not None:
        yield from entry.complete.trajectories
        yield from entry.complete.baselines
    for member in entry.members.values():
        yield from member


def references(event: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
    """Yield (offset, checksum) of a line's references into trajectories.twz."""
    if event["event"] == "orphan":
        yield event["place"][0], event["place"][2]
    elif not event.get("pending"):
        for _, offset, _, crc in (*event.get("trajectories", ()), *event.get("baselines", ())):
            yield offset, crc


def unreferenced(
    payloads: TrajectoryWriter, since: int, offsets: Mapping[int, int], say: Callable[[str], None]
) -> list[tuple[Stored, bool]]:
    """Return the trajectories without a journal line, each with whether it ended without an error: a kill came between
    the two writes.
    """
    if payloads.torn:
        say(f"{payloads.path}: the last {payloads.torn} bytes are an incomplete write: truncated")
    unlisted: list[tuple[Stored, bool]] = []
    for location in payloads.locations(since):
        if location.offset not in offsets:
            trajectory = payloads.read(location)
            completed = trajectory.stop_reason not in (StopReason.ERROR, StopReason.CANCELLED)
            finished = trajectory.partition == "train" and trajectory.error is None and completed
            unlisted.append((Stored(trajectory.id, location), finished))
    return unlisted


PENDING = "pending.twz"
_FACTS = tuple(fact.name for fact in fields(GroupFacts) if fact.name not in ("key", "arrived"))


class Journal:
    """The journal, opened for writing by :meth:`open`.

    Each method returns once its line is in the file: a later kill does not lose it.

    Attributes:
        payloads: Writer of trajectories.twz.
        next_step: The step after the checkpoint that this process resumed from.
        given_to: The newest step that this process gave groups to.
        given: Their keys, in order.
        unclaimed: Ids of trajectories that a custom manager wrote and put into no group in time.
        restored: Ids of trajectories of earlier processes that may be trained: this one did not sample them.
    """

    def __init__(self, directory: Path, state: JournalState, file: AppendFile, payloads: TrajectoryWriter) -> None:
        self._directory = directory
        self._state = state
        self._file = file
        self.payloads = payloads
        self._pending = TrajectoryWriter(directory / PENDING, index=False) if (directory / PENDING).exists() else None
        # Trajectories that no line names yet.
        self._written: dict[str, Stored] = {}
        self._closed = False
        self._refused = False
        self.next_step = 1
        self.given_to = 0
        self.given: list[str] = []
        self.unclaimed: set[str] = set()
        self.restored: frozenset[str] = frozenset()

    @classmethod
    def open(
        cls, directory: Path, *, part: int = 0, after_step: int = 0, say: Callable[[str], None] | None = None
    ) -> Self:
        """Open the journal of a run directory, as its only writer.

        Args:
            directory: The run directory, created if missing.
            part: Index of this process among those of the run, from 0.
            after_step: Step of the checkpoint resumed from. Groups taken by later steps are available again.
            say: Called with messages about damage by a kill or a power cut.

        Raises:
            FormatError: A file is corrupt in a way that neither explains.
            TrainError: The disk refuses.
        """
        say = say or (lambda _: None)
        private_directory(directory)
        path = directory / JOURNAL
        read = read_journal(path)
        state, offsets = JournalState(), dict[int, int]()
        for number, event in read.events:
            try:
                state.apply(event)
                offsets.update(references(event))
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise FormatError(f"{path}:{number}: malformed journal line: {error!r}") from error
        if read.events and read.events[-1][1]["event"] != "end":
            say(
                f"{path}: process {state.starts[-1][0]} of the run did not end in order: it was killed (kill -9, out "
                "of memory), power or disk space ran out, or code in it called os._exit; "
                f"{read.damaged_bytes} bytes of an incomplete write are truncated"
            )
        with writing(path):
            file, payloads = AppendFile(path, cut=True), TrajectoryWriter(directory / TRAJECTORIES)
            file.truncate(read.end)
            orphans = [] if state.payload is None else unreferenced(payloads, state.payload, offsets, say)
            journal = cls(directory, state, file, payloads)
            journal.next_step = after_step + 1
            # Before the check of the disk: groups that are available again must be intact, too.
            state.undo_after(after_step)
            drop_lost(state, journal._file_of, payloads.path, path, say)
            journal._note_orphans(orphans)
            start = {"part": part, "after_step": after_step, "payload": payloads.size}
            journal._note("start", schema_version=SCHEMA_VERSION, **start)
            state.forget_consumed()
            journal.restored = frozenset(stored.id for entry in state.entries.values() for stored in entry.stored())
        return journal

    def write(self, trajectory: Trajectory) -> None:
        """Write a trajectory, failed and cancelled ones included; it counts once a member or a group refers to it."""
        with self._writing():
            location = self.payloads.write(trajectory)
        if trajectory.partition == "train":
            self._written[trajectory.id] = Stored(trajectory.id, location)

    def member(
        self, key: str, group_id: str, member: int, trajectories: Sequence[Trajectory], *, pending: bool = False
    ) -> None:
        """Record a member, whose trajectories were written; see :meth:`~turnwise.rollout.core.MemberJournal.member`.

        With ``pending`` they are held in ``pending.twz``.
        """
        stored = [self._store_aside(trajectory) if pending else self._stored(trajectory) for trajectory in trajectories]
        more = {"pending": True} if pending else {}
        records = [stored_trajectory.record() for stored_trajectory in stored]
        self._note("member", key=key, group=group_id, member=member, trajectories=records, **more)
        for stored_trajectory in stored if not pending else ():
            self._written.pop(stored_trajectory.id, None)

    def group(self, group: TrajectoryGroup, facts: GroupFacts) -> None:
        """Record a complete group, writing those of its trajectories that are not written yet.

        Args:
            group: The group.
            facts: Its facts for the strategy; ``facts.key`` is the request key.
        """
        entry = self._state.entries.get(facts.key)
        members = entry.members.values() if entry is not None and entry.group_id == group.id else ()
        written = {stored.id: stored for member in members for stored in member if not stored.pending}
        trajectories = [written.get(trajectory.id) or self._stored(trajectory) for trajectory in group.trajectories]
        baselines = [written.get(trajectory.id) or self._stored(trajectory) for trajectory in group.baselines]
        head = {"task_id": group.task_id, "failed": group.failed, "source": group.source, "partition": group.partition}
        values = asdict(facts)
        self._note(
            "group",
            key=facts.key,
            group=group.id,
            head=head,
            facts={name: values[name] for name in _FACTS},
            trajectories=[stored.record() for stored in trajectories],
            baselines=[stored.record() for stored in baselines],
        )
        for stored in (*trajectories, *baselines):
            self._written.pop(stored.id, None)

    def take(self, step: int, keys: Sequence[str], *, back: bool = False) -> None:
        """Record groups given to a train step, or given ``back`` untrained. Raises TrainError where the disk
        refuses.
        """
        self._note("back" if back else "take", step=step, keys=list(keys))
        if not back:
            self.given = [*(self.given if step == self.given_to else ()), *keys]
            self.given_to = step

    def drop(self, step: int, key: str, why: str) -> None:
        """Record that a group will not be trained. Raises TrainError where the disk refuses."""
        self._note("drop", step=step, key=key, why=why)

    def restore(self, key: str) -> RestoredGroup | None:
        """Return the finished, untrained parts of a requested group."""
        entry = self._state.entries.get(key)
        if entry is None or entry.consumed:
            return None
        members = {number: self._read(stored) for number, stored in sorted(entry.members.items())}
        return RestoredGroup(entry.group_id, members, entry.complete is not None)

    def facts(self, key: str, arrived: int) -> GroupFacts | None:
        """Return the facts of a complete, untrained group, without reading its trajectories."""
        entry = self._state.entries.get(key)
        if entry is None or entry.consumed or entry.complete is None:
            return None
        return _facts(key, entry, arrived)

    def load(self, key: str) -> TrajectoryGroup:
        """Read a complete group."""
        entry = self._state.entries.get(key)
        if entry is None or entry.complete is None:
            raise TrainError(f"{self._directory / JOURNAL} has no complete group of {key!r}")
        complete = entry.complete
        return TrajectoryGroup(
            entry.group_id,
            trajectories=self._read(complete.trajectories),
            baselines=self._read(complete.baselines),
            **complete.head,
        )

    def forget(self, key: str) -> None:
        """Drop a group from memory; its lines stay."""
        self._state.entries.pop(key, None)

    async def sync(self, run_blocking: Callable[[Callable[[], None]], Awaitable[None]] = asyncio.to_thread) -> None:
        """Flush to disk (fsync) by ``run_blocking``: a power cut loses at most what comes after. Raises DiskError."""
        waited = self._waits()
        files = [file for file in (self._pending, self.payloads, self._file) if file is not None]

        def flush() -> None:
            for file in files:
                file.sync()

        with self._writing():
            await run_blocking(flush)
            # Not where a group became complete meanwhile: its line may not be on disk yet.
            if self._pending is not None and not waited and not self._waits():
                self._pending.truncate(0)

    def _waits(self) -> bool:
        return any(stored.pending for entry in self._state.entries.values() for stored in entry.stored())

    def close(self) -> None:
        """Record an orderly end and close the files. Idempotent."""
        if self._closed:
            return
        self._closed = True
        # Where the disk refused something the note is missing, as after a kill.
        if not self._refused:
            with contextlib.suppress(DiskError):
                if late := sorted(self.unclaimed & self._written.keys()):
                    self._note("late", ids=late)
                self._note("end")
        for file in (self._pending, self.payloads, self._file):
            if file is not None:
                file.close()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except DiskError:
            self._refused = True
            raise

    def _note(self, event: str, **values: Any) -> None:
        record = {"event": event, **values}
        with self._writing():
            self._file.append(seal(record))
        self._state.apply(record)

    def _stored(self, trajectory: Trajectory) -> Stored:
        if trajectory.id not in self._written:
            with self._writing():
                self._written[trajectory.id] = Stored(trajectory.id, self.payloads.write(trajectory))
        return self._written[trajectory.id]

    def _store_aside(self, trajectory: Trajectory) -> Stored:
        with self._writing():
            if self._pending is None:
                self._pending = TrajectoryWriter(self._directory / PENDING, index=False)
            return Stored(trajectory.id, self._pending.write(trajectory), pending=True)

    def _file_of(self, stored: Stored) -> TrajectoryWriter | None:
        return self._pending if stored.pending else self.payloads

    def _read(self, stored: Sequence[Stored]) -> list[Trajectory]:
        trajectories = []
        for record in stored:
            file = self._file_of(record)
            if file is None:
                raise FormatError(f"{self._directory / PENDING} is missing, and it held trajectory {record.id}")
            trajectories.append(file.read(record.location))
        return trajectories

    def _note_orphans(self, orphans: Sequence[tuple[Stored, bool]]) -> None:
        pending = {stored.id for entry in self._state.entries.values() for stored in entry.stored() if stored.pending}
        for orphan, finished in orphans:
            if orphan.id in pending:
                # It is written again, with its group's reward.
                self.payloads.invalidate(orphan.location)
            elif finished:
                self._note("orphan", trajectory=orphan.id, place=orphan.record()[1:])


def _facts(key: str, entry: Entry, arrived: int) -> GroupFacts:
    assert entry.complete is not None
    values: dict[str, Any] = {name: entry.complete.facts[name] for name in _FACTS if name in entry.complete.facts}
    values["rewards"] = tuple(values.get("rewards", ()))
    return GroupFacts(**values, key=key, arrived=arrived)
