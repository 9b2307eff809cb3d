"""The sessions of a gateway: access, settings, lifetime, rewards and finished trajectories.

Three independent keys: a session's *token* lets an agent call the model and nothing else; its *reward key* adds rewards
to this session only; the gateway's *admin key* creates and ends sessions.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import math
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Set
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from turnwise.errors import BudgetExceeded, DiskError, GatewayError, RenderError, TurnwiseError, shown
from turnwise.gateway.config import SETTINGS, GatewayLimits, SessionSettings
from turnwise.gateway.dialects.core import Reader
from turnwise.gateway.dialects.fields import Fields
from turnwise.gateway.dialects.responses_request import Conversations
from turnwise.gateway.errors import ApiError, Lenient, invalid, not_found
from turnwise.gateway.session_log import NAME, SavedSession, SessionLog, rebuild
from turnwise.model.canonical import clean
from turnwise.recorder.ledger import LedgerWriter
from turnwise.recorder.session import Session
from turnwise.trajectory import Trajectory
from turnwise.trajectory_file import TrajectoryFile, TrajectoryWriter
from turnwise.types import StopReason

FIXED_SAMPLING = frozenset({"temperature", "top_p", "top_k", "min_p", "seed"})
"""Sampling parameters that a request may not choose if its turns are trained."""
_MOST_ID = 256


def read_settings(body: Fields, context_length: int) -> SessionSettings:
    """Return the settings of a body, named like the gateway's configuration keys; ``context_length`` is an upper bound.

    Raises ApiError for an invalid one.
    """
    try:
        settings = SessionSettings.model_validate({key: body.get(key) for key in SETTINGS.intersection(body)})
    except ValidationError as error:
        problem = error.errors()[0]
        raise invalid(str(problem["loc"][0]), f"{problem['msg']}, not {shown(problem['input'])}") from None
    if (settings.context_length or 0) > context_length:
        raise invalid("context_length", f"must be at most {context_length}, not {settings.context_length}")
    return settings


def read_id(body: Fields, key: str) -> str:
    """Return an id, empty if missing. Raises ApiError if it is too long or not printable."""
    name = body.text(key, "")
    if len(name) > _MOST_ID or not name.isprintable():
        problem = f"must have at most {_MOST_ID} characters, all printable, not the {len(name)} of {shown(name)}"
        raise invalid(body.name(key), problem)
    return name


def check_known(body: Fields, allowed: Set[str]) -> None:
    """Raise ApiError if a body has unknown fields, so that misspellings do not go unnoticed."""
    unknown = sorted(key for key in body if key not in allowed)
    if unknown:
        raise invalid(unknown[0], f"unknown: {', '.join(map(shown, unknown))}; known: {', '.join(sorted(allowed))}")


_MOST_REWARDS = 10_000
_log = logging.getLogger(__name__)


class RetriedRequests:
    """The requests of a session whose client counts its retries, by what an attempt and its retries have in common.

    A retry gets the turn of the lost answer: sampled anew, that turn would be trained as a branch no agent has seen.
    """

    def __init__(self) -> None:
        self._first_attempts: Counter[str] = Counter()
        self._running: defaultdict[str, list[asyncio.Task[None]]] = defaultdict(list)

    @contextlib.asynccontextmanager
    async def attempt(
        self, session: Session, task: asyncio.Task[None], key: str, *, is_retry: bool, count: int
    ) -> AsyncIterator[list[str]]:
        """Yield the turns that answer a retry; none for a request that samples.

        As many turns as requests answer all of them: a retry then is one whose answer was lost, the last by default. An
        attempt that still runs is awaited.

        Args:
            session: The recorder.
            task: The request's task.
            key: Of the request; "" if its client counts nothing.
            is_retry: Whether the client sends it again.
            count: Number of turns that answer the request.
        """
        if not key:
            yield []
            return
        if not is_retry:
            self._first_attempts[key] += 1
        turns = session.turns_by_request[key]
        expected = max(1, self._first_attempts[key]) * count
        running = list(self._running[key])
        if is_retry and len(turns) < expected and running:
            await asyncio.wait(running)
        self._running[key].append(task)
        try:
            yield turns[-count:] if is_retry and len(turns) >= expected else []
        finally:
            self._running[key].remove(task)


@dataclass(slots=True)
class GatewaySession:
    """A session with its keys and state.

    Attributes:
        id: Names its trajectory.
        token: Token of the agent's URL.
        reward_key: Key for adding rewards.
        session: The recorder.
        reader: Renderer that parses its turns.
        conversations: Stored Responses conversations.
        trajectory: Fields of its trajectory besides tokens (group, task, partition ...).
        rewards: In order of arrival.
        reward_ids: The rewards that were sent with an id, by that id.
        running: Requests in flight.
        expires: End of its lifetime (``time.monotonic``).
        used: When its last request came or ended (``time.monotonic``).
        closed: Whether further requests are refused.
        temperatures: Temperatures of its requests.
        budget_error: Budget error of its last request, or None.
        exhausted: Set while ``budget_error`` is a budget that compaction cannot restore.
        request_error: What kept its last request from being rendered or handled, or None.
        retries: Requests that a client may send again.
        turn_metrics: Metrics by turn id.
        fixed_sampling: Whether requests cannot change their sampling; None for the gateway's setting.
        sampling_metrics: Sampling settings for the trajectory's metrics.
        lenient: What is ignored instead of refused; None for the gateway's setting.
        log: The log of its rewards and failures, or None.
        reopened: If it was restored without turns, ``used`` at that moment and how it was opened; else None.
    """

    id: str
    token: str
    reward_key: str
    session: Session
    reader: Reader
    trajectory: dict[str, str]
    expires: float
    conversations: Conversations = field(default_factory=Conversations)
    rewards: list[tuple[str | None, str, float]] = field(default_factory=list)
    reward_ids: dict[str, tuple[str | None, str, float]] = field(default_factory=dict)
    running: set[asyncio.Task[Any]] = field(default_factory=set)
    used: float = field(default_factory=time.monotonic)
    closed: bool = False
    temperatures: set[float] = field(default_factory=set)
    budget_error: BudgetExceeded | None = None
    exhausted: asyncio.Event = field(default_factory=asyncio.Event)
    request_error: RenderError | GatewayError | None = None
    retries: RetriedRequests = field(default_factory=RetriedRequests)
    turn_metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    fixed_sampling: bool | None = None
    sampling_metrics: dict[str, float] = field(default_factory=dict)
    lenient: frozenset[Lenient] | None = None
    log: SessionLog | None = None
    reopened: tuple[float, tuple[dict[str, str], SessionSettings]] | None = None

    @property
    def keys(self) -> dict[str, str]:
        """Id, token, path and reward key, for controllers."""
        return {"id": self.id, "token": self.token, "path": f"/s/{self.token}", "reward_key": self.reward_key}

    def state(self) -> dict[str, Any]:
        """Return the state for controllers."""
        return {
            "id": self.id,
            "running": len(self.running),
            "turns": self.session.turns,
            "turn_ids": self._turn_ids(),
            "metrics": self.session.metrics(),
            "rewards": [list(reward) for reward in self.rewards],
        }

    def note_reward(self, turn_id: str | None, name: str, value: float, reward_id: str = "") -> None:
        """Add a reward; one that was added with the same id is not added again.

        Raises ApiError if it is not finite, names an unknown turn, differs from the reward of the same id, or exceeds
        the maximum number; DiskError.
        """
        existing = self.reward_ids.get(reward_id)
        if existing is not None:
            if existing != (turn_id, name, value):
                raise invalid("id", f"is {shown(reward_id)}, the id of another reward: {existing[1]} = {existing[2]:g}")
            return
        if turn_id is not None and turn_id not in self._turn_ids():
            raise invalid("turn_id", f"is {shown(turn_id)}, which is not a turn of session {self.id}")
        if not math.isfinite(value):
            raise invalid("value", f"must be a finite number, not {value}")
        if len(self.rewards) >= _MOST_REWARDS:
            raise ApiError(429, f"session {self.id} has {_MOST_REWARDS} rewards, the maximum")
        if self.log is not None:
            self.log.append_reward(self.id, turn_id, name, value, reward_id)
        self.rewards.append((turn_id, name, value))
        if reward_id:
            self.reward_ids[reward_id] = self.rewards[-1]

    def note_outcome(self, error: TurnwiseError | None) -> None:
        """Record the outcome of a request; a success clears an earlier failure. The error loses its traceback."""
        if error is not None:
            # Its frames hold the request, and those of a large one take a hundred megabytes.
            error.__traceback__ = error.__context__ = error.__cause__ = None
            if self.log is not None:
                self.log.append_failure(self.id, error, self.session.counters)
        self.budget_error = error if isinstance(error, BudgetExceeded) else None
        self.request_error = error if isinstance(error, (RenderError, GatewayError)) else None
        if self.budget_error is not None and self.budget_error.stop_reason != StopReason.CONTEXT_OVERFLOW:
            self.exhausted.set()
        elif error is None:
            self.exhausted.clear()

    def to_trajectory(self, stop_reason: StopReason, error: str | None) -> Trajectory:
        """Return the trajectory; completed sessions whose last request failed take the stop reason of that failure."""
        if stop_reason is StopReason.COMPLETED and error is None:
            failure = self.session.failure or self.request_error
            if failure is not None:
                stop_reason, error = StopReason.ERROR, clean(f"{type(failure).__name__}: {failure}")
            elif self.budget_error is not None:
                stop_reason = StopReason(self.budget_error.stop_reason)
        return Trajectory(
            id=self.id,
            episode_id=self.trajectory.get("episode_id", self.id),
            group_id=self.trajectory.get("group_id", self.id),
            task_id=self.trajectory.get("task_id", self.id),
            partition=self.trajectory.get("partition", "train"),
            segments=self.session.segments(),
            rewards=list(self.rewards),
            stop_reason=stop_reason,
            error=error,
            reasoning=self.session.reasoning,
            echo=self.session.echo,
            recorded=self.session.recorded_as,
            turn_metrics=self.turn_metrics,
            turn_times=dict(self.session.turn_times),
            metrics={**self.session.metrics(), **self.sampling_metrics, **self._common_temperature()},
        )

    def _common_temperature(self) -> dict[str, float]:
        """Return the temperature of its turns, or the number of different ones."""
        if len(self.temperatures) == 1:
            return {"temperature": next(iter(self.temperatures))}
        return {"temperatures": float(len(self.temperatures))} if self.temperatures else {}

    def _turn_ids(self) -> list[str]:
        return [segment.turn_id for segment in self.session.segments(messages=False) if segment.turn_id is not None]


Open = Callable[[str, SessionSettings, datetime], tuple[Session, Reader]]
"""Creates a session from id, settings and time of opening, and returns it with the renderer that reads its turns."""


class Sessions:
    """All sessions of a gateway.

    Sessions that a killed gateway left open are rebuilt: with their tokens, keys and lifetime.

    Args:
        open_session: Creates a session.
        limits: Limits for agents.
        finished: File of finished trajectories, one a line; a session has ended once its line is written. A restarted
            gateway reuses the file; None keeps nothing. The log of open sessions stands beside it.
        ledger: Ledger of the model's calls, from which ids are restored; None for sessions of text.

    Raises:
        FormatError: The log has another schema version, or the ledger cannot be read.
        DiskError: The log cannot be written.
    """

    def __init__(
        self,
        open_session: Open,
        limits: GatewayLimits,
        finished: Path | None = None,
        ledger: LedgerWriter | None = None,
    ) -> None:
        self.limits = limits
        self._open = open_session
        self._by_token: dict[str, GatewaySession] = {}
        self._by_id: dict[str, GatewaySession] = {}
        self._ending: dict[str, asyncio.Task[Trajectory]] = {}
        self._finished_ids = _read_ids(finished) if finished is not None else set()
        self._file = TrajectoryWriter(finished) if finished is not None else None
        self._log = SessionLog(finished.with_name(NAME), ledger) if finished is not None else None
        self._abandoned: Mapping[str, str] = {}
        if self._log is not None:
            self._restore(self._log, None if ledger is None else ledger.path)

    def create(
        self,
        session_id: str | None,
        trajectory_fields: dict[str, str],
        seconds: float | None = None,
        settings: SessionSettings | None = None,
    ) -> GatewaySession:
        """Open a session. Raises ApiError if there are too many or the id is taken; DiskError.

        The answer to its opening may have been lost with a killed gateway: a session that was opened with the same
        arguments, and that no agent has used, is returned again.

        Args:
            session_id: Its id; None for a new one.
            trajectory_fields: Fields of its trajectory besides tokens.
            seconds: Lifetime; at most, and by default, the gateway's limit.
            settings: Its own settings.
        """
        settings = settings or SessionSettings()
        reopened = self._by_id.get(session_id or "")
        if reopened is not None and reopened.reopened == (reopened.used, (trajectory_fields, settings)):
            return reopened
        if len(self._by_id) >= self.limits.sessions:
            raise ApiError(429, f"{len(self._by_id)} sessions are open, which is the limit", retry_after=1)
        session_id = session_id or secrets.token_hex(12)
        if session_id in self._by_id or session_id in self._finished_ids:
            raise ApiError(409, f"session {session_id!r} exists already", param="id")
        if session_id in self._abandoned:
            raise ApiError(
                409, f"{self._abandoned_message(session_id)}. Take another id", param="id", code="session_abandoned"
            )
        began = time.time()
        session, reader = self._open(session_id, settings, datetime.fromtimestamp(began))
        lasts = min(seconds or self.limits.session_seconds, self.limits.session_seconds)
        token, reward_key = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
        if self._log is not None:
            self._log.append_open(
                session_id,
                token=token,
                reward_key=reward_key,
                about=trajectory_fields,
                settings=settings.model_dump(mode="json", exclude_none=True),
                began=began,
                ends=began + lasts,
            )
        entry = self._register(session, reader, trajectory_fields, time.monotonic() + lasts, (token, reward_key))
        self._apply_settings(entry, settings)
        return entry

    def adopt(self, session: Session, reader: Reader, name: str | None = None) -> GatewaySession:
        """Give an externally owned session a token, until :meth:`release`. Raises ApiError if it has one.

        ``name`` distinguishes the forks of a session, which share its id.
        """
        if (name or session.id) in self._by_id:
            raise ApiError(409, f"session {name or session.id!r} has an address already", param="id")
        return self._register(session, reader, {}, math.inf, name=name)

    async def release(self, entry: GatewaySession) -> None:
        """Revoke the token of an adopted session, cancelling its requests in flight."""
        await self._stop(entry)
        self._forget(entry)

    def _register(
        self,
        session: Session,
        reader: Reader,
        trajectory_fields: dict[str, str],
        expires: float,
        keys: tuple[str, str] | None = None,
        name: str | None = None,
    ) -> GatewaySession:
        token, reward_key = keys or (secrets.token_urlsafe(32), secrets.token_urlsafe(32))
        entry = GatewaySession(
            id=name or session.id,
            token=token,
            reward_key=reward_key,
            session=session,
            reader=reader,
            trajectory=trajectory_fields,
            expires=expires,
        )
        self._by_token[entry.token] = self._by_id[entry.id] = entry
        return entry

    def _apply_settings(self, entry: GatewaySession, settings: SessionSettings) -> None:
        """Give a session its settings, and its log, from the next event on."""
        entry.fixed_sampling = settings.fixed_sampling
        entry.sampling_metrics = settings.sampling_metrics()
        entry.lenient = settings.lenient
        entry.log = log = self._log
        if log is not None:
            entry.session.journal = partial(log.append_turn, entry.id)
            entry.conversations.journal = partial(log.append_response, entry.id)

    def _restore(self, log: SessionLog, ledger: Path | None) -> None:
        """Rebuild the open sessions of the log."""
        saved, recorders, readers = log.saved, dict[str, Session](), dict[str, Reader]()
        for name in self._finished_ids.intersection(saved.open):
            del saved.open[name]
        for name, session in saved.open.items():
            if not session.why:
                try:
                    began = datetime.fromtimestamp(session.began)
                    settings = SessionSettings.model_validate(session.settings)
                    recorders[name], readers[name] = self._open(name, settings, began)
                except (ApiError, TurnwiseError, ValueError) as error:
                    session.why = str(error)
        rebuilt = rebuild(saved, recorders, ledger, self._finished_ids)
        for name, lost in list(rebuilt.lost.items()):
            try:
                self._reopen(saved.open[name], recorders[name], readers[name])
            except TurnwiseError as error:
                del rebuilt.lost[name]
                rebuilt.abandoned[name] = str(error)
            else:
                _log.info("session %r resumes with %d turns (%d lost)", name, recorders[name].turns, len(lost))
        for name in saved.open.keys() & rebuilt.abandoned.keys():
            _log.error("session %r is not rebuilt: %s", name, rebuilt.abandoned[name])
        log.begin(rebuilt)
        self._abandoned = rebuilt.abandoned

    def _reopen(self, saved: SavedSession, session: Session, reader: Reader) -> None:
        """Enter a session whose turns were restored."""
        conversations = Conversations()
        conversations.restore(session.segments() if saved.responses else (), saved.responses)
        # It ends when it would have ended; how long it was idle is counted anew, as no agent could reach it.
        # Of a clock that was set back meanwhile no session lasts longer than one that begins now.
        expires = time.monotonic() + min(saved.expires - time.time(), self.limits.session_seconds)
        entry = self._register(session, reader, saved.trajectory, expires, saved.keys)
        entry.conversations = conversations
        entry.rewards, entry.reward_ids = list(saved.rewards), dict(saved.reward_ids)
        entry.temperatures = saved.temperatures
        settings = SessionSettings.model_validate(saved.settings)
        if not saved.turns:
            entry.reopened = entry.used, (saved.trajectory, settings)
        for error, counters in saved.failures:
            session.counters = counters
            entry.note_outcome(error)
            if not isinstance(error, (BudgetExceeded, RenderError, GatewayError)):
                session.failure = error
        self._apply_settings(entry, settings)

    def of_token(self, token: str) -> GatewaySession:
        """Return the session of a token. Raises ApiError, without telling ended sessions from unknown ones."""
        # A dictionary look-up leaks nothing about a token of 256 random bits.
        entry = self._by_token.get(token)
        if entry is None or entry.closed or entry.expires < time.monotonic():
            raise not_found("no open session has this address; it may have ended")
        return entry

    def of_id(self, session_id: str) -> GatewaySession:
        """Return an open session by id, for holders of a key. Raises ApiError."""
        entry = self._by_id.get(session_id)
        if entry is None:
            if session_id in self._abandoned:
                raise not_found(self._abandoned_message(session_id))
            suffix = " any more: it ended" if session_id in self._finished_ids else ""
            raise not_found(f"no session {session_id!r} is open{suffix}")
        return entry

    def rewarded_by(self, session_id: str, key: str) -> GatewaySession:
        """Return the session that a reward key belongs to.

        Raises ApiError for a wrong key or unknown session, indistinguishably, and for a session that is being ended.
        """
        entry = self._by_id.get(session_id)
        reward_key = entry.reward_key if entry is not None else secrets.token_urlsafe(32)
        if not hmac.compare_digest(reward_key.encode(), key.encode("utf-8", "replace")) or entry is None:
            raise ApiError(401, "this key may not add rewards to this session", code="invalid_key")
        if entry.closed:
            raise ApiError(409, f"session {session_id!r} is being ended: its rewards are final", retry_after=1)
        return entry

    async def end(
        self, session_id: str, stop_reason: StopReason = StopReason.COMPLETED, error: str | None = None
    ) -> Trajectory:
        """End a session: cancel its requests and write its trajectory. Raises ApiError, also if the disk fails."""
        entry = self.of_id(session_id)
        if entry.closed:
            raise ApiError(409, f"session {session_id!r} is being ended", retry_after=1)
        entry.closed = True
        # Its own task: a server that stops cancels the request, and the end must not stay half done.
        ending = self._ending[session_id] = asyncio.ensure_future(self._end(entry, stop_reason, error))
        ending.add_done_callback(lambda _: self._ending.pop(session_id, None))
        return await asyncio.shield(ending)

    async def _end(self, entry: GatewaySession, stop_reason: StopReason, error: str | None) -> Trajectory:
        await self._stop(entry)
        try:
            trajectory = entry.to_trajectory(stop_reason, error)
            if self._file is not None:
                await asyncio.to_thread(self._file.write, trajectory)
        except DiskError as failure:
            raise ApiError(507, f"session {entry.id!r}: {failure}", code="disk_full", retry_after=10) from failure
        else:
            self._finished_ids.add(entry.id)
            self._forget(entry)
            entry.session.close()
            if self._log is not None:
                self._log.append_end(entry.id)
            return trajectory
        finally:
            # What is not written yet can be ended again.
            entry.closed = entry.id in self._finished_ids

    async def sweep(self) -> int:
        """End expired and idle sessions with ``timeout``, keeping their trajectories; return their number."""
        now = time.monotonic()
        idle = now - self.limits.idle_seconds
        late = [
            entry
            for entry in self._by_id.values()
            if entry.expires < now or (entry.used < idle and not entry.running and entry.expires < math.inf)
        ]
        count = 0
        for entry in late:
            if entry.closed:
                continue
            try:
                await self.end(entry.id, StopReason.TIMEOUT)
            except (ApiError, TurnwiseError) as error:
                # What could not be written stays open and is tried again; it keeps no other one from its end.
                _log.error("%s", error)
            else:
                count += 1
        return count

    async def close(self) -> None:
        """End all sessions with ``cancelled`` and close the file; trajectories that cannot be written are logged."""
        # What is being ended is waited for; where that fails, it is tried once more.
        await asyncio.gather(*self._ending.values(), return_exceptions=True)
        for entry in list(self._by_id.values()):
            try:
                await self.end(entry.id, StopReason.CANCELLED)
            except (ApiError, TurnwiseError) as error:
                _log.error("%s", error)
        if self._file is not None:
            self._file.close()
        if self._log is not None:
            self._log.close()

    def __len__(self) -> int:
        return len(self._by_id)

    def _abandoned_message(self, session_id: str) -> str:
        why = self._abandoned[session_id]
        return f"session {session_id!r} was open when the gateway was killed, and could not be rebuilt: {why}"

    async def _stop(self, entry: GatewaySession) -> None:
        entry.closed = True
        running = [task for task in entry.running if task is not asyncio.current_task()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _forget(self, entry: GatewaySession) -> None:
        self._by_token.pop(entry.token, None)
        self._by_id.pop(entry.id, None)


def _read_ids(path: Path) -> set[str]:
    """Return the ids of a file's trajectories."""
    if not path.exists():
        return set()
    with TrajectoryFile(path) as file:
        return {entry.id for entry in file.entries}
