"""The recorded sessions of users: open ones resume after a kill, ended ones wait in the run's journal for feedback."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

from turnwise.errors import DiskError
from turnwise.ext.live.arms import APPROVED, is_session
from turnwise.ext.live.feedback import CORRECTIONS
from turnwise.ext.live.sources import DerivedFeedback, session_task
from turnwise.gateway.config import GatewayLimits, SessionSettings
from turnwise.gateway.dialects.core import Reader
from turnwise.gateway.errors import ApiError
from turnwise.gateway.session_log import NAME, SessionLog
from turnwise.gateway.sessions import GatewaySession, Open, Sessions
from turnwise.recorder.ledger import LedgerWriter
from turnwise.recorder.session import Session
from turnwise.rollout.core import RolloutRequest
from turnwise.rollout.replay.group_store import group_facts
from turnwise.rollout.sessions import EpisodeSessions, Sampler
from turnwise.seeding import stable_hash
from turnwise.tasks.core import Task
from turnwise.trainer.config.train import TrainConfig
from turnwise.trajectory import Trajectory, TrajectoryGroup
from turnwise.trajectory_file import TRAJECTORIES, TrajectoryFile
from turnwise.types import StopReason

if TYPE_CHECKING:
    from turnwise.trainer.run.run import TrainRun

_DIGEST_BYTES: Final = 12


def session_digest(key: str, name: str) -> str:
    """Return what stands for a session on disk, where neither its name nor the user's key is written."""
    return hashlib.blake2b(f"{key}\0{name}".encode(), digest_size=_DIGEST_BYTES).hexdigest()


def session_request(session_id: str) -> RolloutRequest:
    """Return the request by whose key the journal has a session."""
    return RolloutRequest(Task(session_id, ""))


def replay_request(session_id: str, row: Mapping[str, Any], group_size: int) -> RolloutRequest:
    """Return the request of a group that the run's environment and agent sample from the task of a session."""
    return RolloutRequest(replace(session_task(session_id, row), id=session_id), group_size=group_size, tag="replay")


def session_opener(config: TrainConfig, sampler_of: Callable[[str], Sampler], *, trained: bool) -> Open:
    """Return what opens sessions that sample as the run's rollouts do; those of trained ones at one temperature.

    Args:
        config: The run's configuration.
        sampler_of: Returns the sampler of a session by its id.
        trained: Whether the sessions are recorded to be trained.
    """

    def open_session(session_id: str, settings: SessionSettings, began: datetime) -> tuple[Session, Reader]:
        del settings, began
        sampler = sampler_of(session_id)
        sessions = EpisodeSessions(
            {"main": sampler},
            config.rollout,
            episode_id=session_id,
            seed=stable_hash("live", config.seed, session_id),
            temperature=config.rollout.temperature,
            trained=trained,
        )
        return sessions.open("main", "main"), cast(Reader, sampler.renderer)

    return open_session


class RecordedSessions(Sessions):
    """The sessions of users who consented.

    Attributes:
        ids: Ids of open, ended and abandoned sessions, ``PART-DIGEST``, by digest.
        turns: Number of turns of each ended session, by id; 0 of one that ended in an error.
    """

    def __init__(
        self,
        run: TrainRun,
        open_session: Open,
        limits: GatewayLimits,
        ledger: LedgerWriter,
        derived: DerivedFeedback,
        is_approved: Callable[[str], bool],
    ) -> None:
        """Rebuild what a killed process left open. Raises FormatError or DiskError as :class:`Sessions`.

        ``is_approved`` says of a session's id whether the approved weights of a canary serve it.
        """
        super().__init__(open_session, limits)
        self._run, self._derived, self._feedback = run, derived, derived.log
        self._is_approved = is_approved
        # A dictionary would hold texts of sessions that may be deleted.
        run.journal.payloads.has_dictionary = False
        # Closed with the sources, which may read it until then.
        file = derived.opened.enter_context(TrajectoryFile(run.directory / TRAJECTORIES))
        entries = [entry for entry in file.entries if entry.partition == "train" and is_session(entry)]
        self.turns = {entry.id: 0 if entry.failed else entry.turns for entry in entries}
        self._finished_ids |= self.turns.keys()
        # Those that no step has learned from, as far as is known.
        self._untrained = {name: None for name, turns in self.turns.items() if turns}
        self._log = SessionLog(run.directory / NAME, ledger)
        self._restore(self._log, ledger.path)
        self.ids = {name.partition("-")[2]: name for name in (*self._abandoned, *self.turns, *self._by_id)}
        for entry in entries:
            if self.turns[entry.id] and self._is_untrained(entry.id):
                derived.begin(entry.id, partial(file.read, entry))

    def open(self, part: int, digest: str, task_type: str) -> GatewaySession:
        """Open a session under an id of this process. Raises ApiError or DiskError."""
        entry = self.create(f"{part}-{digest}", {"task_id": task_type})
        self.ids[digest] = entry.id
        return entry

    async def remove(self, session_id: str) -> None:
        """Forget a session; of an open one the requests are cancelled, and no trajectory is written."""
        await asyncio.gather(*filter(None, [self._ending.get(session_id)]), return_exceptions=True)
        if (deriving := self._derived.pending.get(session_id)) is not None:
            deriving.cancel()
            await asyncio.wait([deriving])
        if (entry := self._by_id.get(session_id)) is not None:
            await self.release(entry)
            entry.session.close()
            if entry.log is not None:
                entry.log.append_end(session_id)
        self.turns.pop(session_id, None)
        self._untrained.pop(session_id, None)

    def ready(self, *, approved: bool = False) -> list[str]:
        """Return the ended sessions that can be learned from, and were not yet, in the order of their end.

        With ``approved`` those of the approved weights instead, which no step has counted.
        """
        # Most sessions never have feedback, which is why that is asked first.
        teaching = [name for name in self._untrained if self._teaches(name) and name not in self._derived.pending]
        for name in teaching:
            if not self._is_untrained(name):
                del self._untrained[name]
        return [name for name in teaching if name in self._untrained and self._is_approved(name) is approved]

    def _teaches(self, session_id: str) -> bool:
        distill = self._run.config.algorithm.self_distill
        corrected = distill is not None and CORRECTIONS in distill.contexts and self._feedback.corrections(session_id)
        return bool(corrected or self._feedback.scores(session_id))

    def _is_untrained(self, session_id: str) -> bool:
        # The journal forgets a session that a step was given, and has it again where that step is undone.
        return self._run.journal.facts(session_request(session_id).key, 0) is not None

    async def close(self) -> None:
        """End all sessions: those of an orderly stop wait for feedback, too."""
        await asyncio.gather(*self._ending.values(), return_exceptions=True)
        for name in list(self._by_id):
            # What cannot be written is tried, and reported, once more.
            with contextlib.suppress(ApiError):
                await self.end(name, StopReason.TIMEOUT)
        await super().close()

    async def _end(self, entry: GatewaySession, stop_reason: StopReason, error: str | None) -> Trajectory:
        await self._stop(entry)
        try:
            trajectory = entry.to_trajectory(stop_reason, error)
            if self._is_approved(entry.id):
                trajectory.policy, trajectory.frozen = APPROVED, True
            self._store(trajectory)
        except DiskError as failure:
            entry.closed = False
            raise ApiError(507, f"the session stays open: {failure}", code="disk_full", retry_after=10) from failure
        turns = sum(segment.sampled for segment in trajectory.segments)
        self.turns[entry.id] = 0 if trajectory.error is not None else turns
        if self.turns[entry.id]:
            self._untrained[entry.id] = None
            self._derived.begin(entry.id, lambda: trajectory)
        recorded = await super()._end(entry, stop_reason, error)
        self._feedback.changed.set()
        return recorded

    def _store(self, trajectory: Trajectory) -> None:
        """Write a trajectory once; a finished one as a group of its own, which waits until it is requested."""
        if trajectory.error is not None or trajectory.stop_reason is StopReason.CANCELLED:
            self._run.journal.write(trajectory)
            return
        group = TrajectoryGroup(trajectory.id, trajectory.id, [trajectory])
        self._run.journal.group(group, group_facts(group, session_request(trajectory.id).key, 0))
