"""The deletion of sessions by their users: ``deleted.jsonl`` of a run, and what it removes from the other files.

A line is one of a journal, with the ``id`` of the session; ``when``, in seconds since 1970; ``step``, the one that had
learned from it or was about to, or null. It is on disk before the deletion is answered. A line with the event
``erased`` has the ``id`` of an episode that was sampled from the session's task.

Other files are overwritten in place: offsets into them stay right, their writers need not know of it, and a full disk
has room for it. It is repeated at each start, since a kill may leave a part of it, and a copy may be restored.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import time
from collections import defaultdict
from collections.abc import Container, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from turnwise.append_file import AppendFile, writing
from turnwise.ext.live.arms import is_session
from turnwise.ext.live.sessions import replay_request, session_digest, session_request
from turnwise.gateway.errors import ApiError
from turnwise.media_files import FOLDER
from turnwise.rollout.audit import DELETED
from turnwise.rollout.journal.state import read_journal, seal
from turnwise.trajectory_file import TRAJECTORIES, TrajectoryEntry, TrajectoryFile

if TYPE_CHECKING:
    from turnwise.trainer.run.run import TrainRun

_FILES: Final = ("*.jsonl", "ledgers/*.jsonl", "*.damaged")
"""Files of lines, some of which hold texts or tokens of sessions; the last are logs that a restart set aside."""
_NAME: Final = rb'(?:\d+-train-)?\d+-([0-9a-f]+)[^"]*'
"""The name of a session with its digest, or of an episode that was sampled from its task."""
_SESSION: Final = re.compile(rb'\{"(event":"\w+","session|session|deleted)":"(' + _NAME + rb')"')
"""How the lines of a session begin."""
_CONTEXT: Final = re.compile(rb'\["' + _NAME + rb'",\d+,"((?:[^"\\]|\\.)*)"')
"""What a teacher was told of a turn."""
_IMAGE: Final = re.compile(rb'\["\w+","([0-9a-f]{64})",\d+,\d+\]')


class Deletions:
    """The deleted sessions of a run.

    Attributes:
        ids: Their ids by digest.
        pending: Ids of those that files of the run may still hold something of.
    """

    def __init__(self, run: TrainRun) -> None:
        """Read the file of a run. Raises FormatError for a damaged line."""
        self._run = run
        events = [event for _, event in read_journal(run.directory / DELETED).events]
        self.pending = {str(event["id"]) for event in events if event["event"] == "deleted"}
        self.ids = {name.partition("-")[2]: name for name in self.pending}

    def digest(self, key: str, name: str) -> str:
        """Return the digest of a session. Raises ApiError for a deleted one."""
        digest = session_digest(key, name)
        if digest in self.ids:
            raise ApiError(410, "this session was deleted: open another one", code="deleted")
        return digest

    def add(self, session_id: str, step: int | None) -> None:
        """Record a deletion; it is on disk on return. Raises DiskError."""
        self._append({"event": "deleted", "id": session_id, "when": time.time(), "step": step})
        self.ids[session_id.partition("-")[2]] = session_id

    def _append(self, *events: dict[str, Any]) -> None:
        with contextlib.closing(AppendFile(self._run.directory / DELETED, cut=True)) as file:
            for event in events:
                file.append(seal(event))
            file.sync()

    async def erase(self) -> None:
        """Remove pending sessions from the files of the run, not while a step learns from them. Raises DiskError."""
        if not (names := set(self.pending)):
            return
        directory, journal = self._run.directory, self._run.journal
        entries = await asyncio.to_thread(entries_of, directory / TRAJECTORIES, names)
        if episodes := [entry for entry in entries if not is_session(entry)]:
            self._append(*({"event": "erased", "id": episode.id} for episode in episodes))
        keys = {session_request(entry.id).key for entry in entries if is_session(entry)}
        for key in sorted(keys | {replay_request(episode.task_id, {}, 1).key for episode in episodes}):
            # In step 0: a resume undoes what the journal dropped later, and would look for the trajectory.
            journal.drop(0, key, "deleted")
        await journal.sync()
        for entry in entries:
            await asyncio.to_thread(journal.payloads.invalidate, entry.location)
        files = [path for pattern in _FILES for path in directory.glob(pattern)]
        digests = {name.partition("-")[2].encode() for name in names}
        await asyncio.to_thread(erase_lines, files, digests, directory / FOLDER)
        self.pending -= names


def entries_of(path: Path, names: Container[str]) -> list[TrajectoryEntry]:
    """Return the entries of sessions, and of the episodes that were sampled from their tasks."""
    with TrajectoryFile(path) as file:
        return [entry for entry in file.entries if (entry.id if is_session(entry) else entry.task_id) in names]


def erase_lines(files: Iterable[Path], digests: Container[bytes], media: Path) -> None:
    """Overwrite the lines of sessions in place, and remove the images that only they name. Raises DiskError."""
    images, needed = set[bytes](), set[bytes]()
    pieces: defaultdict[Path, list[tuple[int, bytes]]] = defaultdict(list)
    for path in files:
        begins = 0
        with path.open("rb") as lines:
            for line in lines:
                session = _SESSION.match(line)
                if is_deleted := session is not None and session[3] in digests:
                    pieces[path].append((begins, _erased_line(session, len(line))))
                if b'"media":' in line:
                    (images if is_deleted else needed).update(_IMAGE.findall(line))
                if b'"contexts":' in line:
                    texts = (context for context in _CONTEXT.finditer(line) if context[1] in digests)
                    pieces[path] += [(begins + text.start(2), b" " * len(text[2])) for text in texts]
                begins += len(line)
    with writing(media):
        # Before the lines that name them.
        for image in images - needed:
            (media / image.decode()).unlink(missing_ok=True)
    for path, overwritten in pieces.items():
        with writing(path), path.open("r+b", buffering=0) as file:
            for begins, data in overwritten:
                os.pwrite(file.fileno(), data, begins)
            os.fsync(file.fileno())


def _erased_line(session: re.Match[bytes], length: int) -> bytes:
    """Return a line of ``length`` bytes that readers skip, for one that begins so."""
    kind = b'event":"end","session' if session[1].startswith(b"event") else b"deleted"
    return (b'{"%b":"%b"}' % (kind, session[2])).ljust(length - 1)[: length - 1] + b"\n"
