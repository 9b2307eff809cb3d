"""The sessions that a gateway holds: who may use which, how long, and what is left of them.

Three keys, none of which can be made from another: a session's *token* is all that an agent needs to talk to the model,
and all that it can do; its *reward key* notes rewards on this session only; the gateway's *admin key* makes and ends
sessions.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
import secrets
import time
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from turnwise.append_file import AppendFile
from turnwise.errors import BudgetExceeded, FormatError, RenderError, TurnwiseError, shown
from turnwise.gateway.config import GatewayLimits, SessionSettings
from turnwise.gateway.dialects.core import Fields, Reader, not_found
from turnwise.gateway.dialects.responses_request import Conversations
from turnwise.gateway.errors import ApiError, invalid
from turnwise.model.canonical import clean
from turnwise.recorder.matching import EchoPolicy, ReasoningPolicy
from turnwise.recorder.session import Session
from turnwise.trajectory import Trajectory
from turnwise.types import StopReason

FIXED_SAMPLING = frozenset({"temperature", "top_p", "top_k", "min_p", "seed"})
"""What a request may not choose where what it samples is trained."""
_MOST = 2**31 - 1


def read_settings(body: Fields, context_length: int) -> SessionSettings:
    """Return the settings of a body. Each has the meaning of the gateway's configuration key of its name.

    Args:
        body: What a controller sent.
        context_length: The gateway's own, which a session's cannot exceed.

    Raises:
        ApiError: One is wrong; it is named.
    """
    top_p = body.number("top_p", 0, 1)
    if top_p == 0:
        raise invalid("top_p", "must be above 0; a temperature of 0 is greedy")
    fixed = None if body.get("fixed_sampling") is None else body.flag("fixed_sampling")
    return SessionSettings(
        seed=body.whole("seed", -(2**63), 2**63 - 1),
        temperature=body.number("temperature", 0, 100),
        top_p=top_p,
        top_k=body.whole("top_k", 0, _MOST),
        min_p=body.number("min_p", 0, 1),
        fixed_sampling=fixed,
        context_length=body.whole("context_length", 1, context_length),
        max_tokens_per_turn=body.whole("max_tokens_per_turn", 1, _MOST),
        max_total_tokens=body.whole("max_total_tokens", 1, 2**63 - 1),
        max_turns=body.whole("max_turns", 1, _MOST),
        reasoning=cast("ReasoningPolicy | None", _one_of(body, "reasoning", ("keep", "template"))),
        echo=cast("EchoPolicy | None", _one_of(body, "echo", ("same", "strict"))),
    )


def check_known(body: Fields, known: Set[str]) -> None:
    """Raise where a body has a field that nobody reads: what a controller misspelt must not go unnoticed.

    Raises:
        ApiError: It names all of them.
    """
    unknown = sorted(key for key in body if key not in known)
    if unknown:
        raise invalid(unknown[0], f"unknown: {', '.join(map(shown, unknown))}; there are {', '.join(sorted(known))}")


def _one_of(body: Fields, key: str, allowed: tuple[str, ...]) -> str | None:
    if body.get(key) is None:
        return None
    value = body.text(key)
    if value not in allowed:
        raise invalid(key, f"must be {' or '.join(allowed)}, not {shown(value)}")
    return value


_MOST_REWARDS = 10_000
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class GatewaySession:
    """One session and who may use it.

    Attributes:
        id: Names its trajectory.
        token: What an agent's URL holds.
        reward_key: What notes rewards.
        session: The recorder.
        reader: The renderer that reads its turns.
        conversations: Of its Responses.
        trajectory: What its trajectory says besides tokens (group, task, partition ...).
        rewards: As they arrived.
        running: Requests that are being answered.
        expires: When it is ended, on the clock of ``time.monotonic``.
        used: When its last request came or ended, on that clock.
        closed: Whether it takes no further request.
        temperatures: At which its requests were sampled.
        spent: The budget that its last request ran into, or None.
        exhausted: Set while ``spent`` is a budget that no shorter history brings back.
        unrendered: Why its last request could not be rendered, or None.
        turn_metrics: What is counted of single turns, by turn id.
        fixed_sampling: Whether no request may change how it is sampled; None leaves it to the gateway.
        noted: What its trajectory says among its metrics of how it was made.
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
    running: set[asyncio.Task[Any]] = field(default_factory=set)
    used: float = field(default_factory=time.monotonic)
    closed: bool = False
    temperatures: set[float] = field(default_factory=set)
    spent: BudgetExceeded | None = None
    exhausted: asyncio.Event = field(default_factory=asyncio.Event)
    unrendered: RenderError | None = None
    turn_metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    fixed_sampling: bool | None = None
    noted: dict[str, float] = field(default_factory=dict)

    def state(self) -> dict[str, Any]:
        """Return what a controller is told."""
        return {
            "id": self.id,
            "running": len(self.running),
            "turns": self.session.turns,
            "turn_ids": self._turn_ids(),
            "metrics": self.session.metrics(),
            "rewards": [list(reward) for reward in self.rewards],
        }

    def note_reward(self, turn_id: str | None, name: str, value: float) -> None:
        """Note a reward.

        Raises:
            ApiError: It is not finite, it names a turn that is none of this session's, or there are too many.
        """
        if turn_id is not None and turn_id not in self._turn_ids():
            raise invalid("turn_id", f"is {shown(turn_id)}, which is no turn of session {self.id}")
        if not math.isfinite(value):
            raise invalid("value", f"must be a finite number, not {value}")
        if len(self.rewards) >= _MOST_REWARDS:
            raise ApiError(429, f"session {self.id} has {_MOST_REWARDS} rewards, more than it needs")
        self.rewards.append((turn_id, name, value))

    def note_outcome(self, error: TurnwiseError | None) -> None:
        """Note how a request ended; what is left of an earlier one's failure is forgotten when one succeeds."""
        self.spent = error if isinstance(error, BudgetExceeded) else None
        self.unrendered = error if isinstance(error, RenderError) else None
        if self.spent is not None and self.spent.stop_reason != StopReason.CONTEXT_OVERFLOW:
            self.exhausted.set()
        elif error is None:
            self.exhausted.clear()

    def finished(self, stop_reason: StopReason, error: str | None) -> Trajectory:
        """Return what it leaves.

        A session that is called completed, but whose last request failed, ended with that: an agent that the model
        could not answer has not failed its task.
        """
        if stop_reason is StopReason.COMPLETED and error is None:
            failure = self.session.failure or self.unrendered
            if failure is not None:
                stop_reason, error = StopReason.ERROR, clean(f"{type(failure).__name__}: {failure}")
            elif self.spent is not None:
                stop_reason = StopReason(self.spent.stop_reason)
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
            metrics={**self.session.metrics(), **self.noted, **self._sampled_at()},
        )

    def _sampled_at(self) -> dict[str, float]:
        """Return what the logits of its turns were divided by, or how many such numbers there are."""
        if len(self.temperatures) == 1:
            return {"temperature": next(iter(self.temperatures))}
        return {"temperatures": float(len(self.temperatures))} if self.temperatures else {}

    def _turn_ids(self) -> list[str]:
        return [each.turn_id for each in self.session.segments(messages=False) if each.turn_id is not None]


Open = Callable[[str, SessionSettings], tuple[Session, Reader]]
"""Makes the session of an id with its settings, and the renderer that reads its turns."""


class Sessions:
    """All sessions of a gateway.

    Args:
        open_session: Makes one.
        limits: What agents may use.
        finished: A file of finished trajectories, one a line. A session has ended when its line is there; a gateway
            that starts again on the same file answers for them. None keeps nothing.
    """

    def __init__(self, open_session: Open, limits: GatewayLimits, finished: Path | None = None) -> None:
        self.limits = limits
        self._open = open_session
        self._by_token: dict[str, GatewaySession] = {}
        self._by_id: dict[str, GatewaySession] = {}
        self._ending: dict[str, asyncio.Task[Trajectory]] = {}
        self._done = _read_ids(finished) if finished is not None else set()
        # Half a line may end like a whole one.
        self._file = AppendFile(finished, cut=True) if finished is not None else None

    def create(
        self,
        session_id: str | None,
        about: dict[str, str],
        seconds: float | None = None,
        settings: SessionSettings | None = None,
    ) -> GatewaySession:
        """Open a session.

        Args:
            session_id: Its name; one is made where it is None.
            about: What its trajectory says besides tokens.
            seconds: After which it ends by itself; by default, and at most, the gateway's own limit.
            settings: What it does in a way of its own, if anything.

        Raises:
            ApiError: There are too many, or the id is taken.
        """
        if len(self._by_id) >= self.limits.sessions:
            raise ApiError(429, f"{len(self._by_id)} sessions are open, which is the limit", retry_after=1)
        session_id = session_id or secrets.token_hex(12)
        if session_id in self._by_id or session_id in self._done:
            raise ApiError(409, f"session {session_id!r} exists already", param="id")
        settings = settings or SessionSettings()
        session, reader = self._open(session_id, settings)
        lasts = min(seconds or self.limits.session_seconds, self.limits.session_seconds)
        entry = self._enter(session, reader, about, time.monotonic() + lasts)
        entry.fixed_sampling = settings.fixed_sampling
        entry.noted = settings.noted()
        return entry

    def adopt(self, session: Session, reader: Reader) -> GatewaySession:
        """Give a session that somebody else records and ends an address, until :meth:`release`.

        Raises:
            ApiError: It has one.
        """
        if session.id in self._by_id:
            raise ApiError(409, f"session {session.id!r} has an address already", param="id")
        return self._enter(session, reader, {}, math.inf)

    async def release(self, entry: GatewaySession) -> None:
        """Take an address away: what is being sampled through it is cancelled when this returns."""
        await self._stop(entry)
        self._forget(entry)

    def _enter(self, session: Session, reader: Reader, about: dict[str, str], expires: float) -> GatewaySession:
        entry = GatewaySession(
            id=session.id,
            token=secrets.token_urlsafe(32),
            reward_key=secrets.token_urlsafe(32),
            session=session,
            reader=reader,
            trajectory=about,
            expires=expires,
        )
        self._by_token[entry.token] = self._by_id[entry.id] = entry
        return entry

    def of_token(self, token: str) -> GatewaySession:
        """Return the session that an agent's token opens.

        Raises:
            ApiError: There is none. Nothing tells a session that ended from one that never was.
        """
        # A dictionary's look-up says nothing of a token of 256 random bits.
        entry = self._by_token.get(token)
        if entry is None or entry.closed or entry.expires < time.monotonic():
            raise not_found("no open session has this address; it may have ended")
        return entry

    def of_id(self, session_id: str) -> GatewaySession:
        """Return an open session by its id. Only for those who hold a key.

        Raises:
            ApiError: There is none.
        """
        entry = self._by_id.get(session_id)
        if entry is None:
            ended = " any more: it ended" if session_id in self._done else ""
            raise not_found(f"no session {session_id!r} is open{ended}")
        return entry

    def rewarded_by(self, session_id: str, key: str) -> GatewaySession:
        """Return the session whose rewards a key may note.

        Raises:
            ApiError: It is not this session's key, and an unknown session is answered the same way; or the session is
                being ended, and its trajectory would not hold what is noted now.
        """
        entry = self._by_id.get(session_id)
        wanted = entry.reward_key if entry is not None else secrets.token_urlsafe(32)
        if not hmac.compare_digest(wanted.encode(), key.encode("utf-8", "replace")) or entry is None:
            raise ApiError(401, "this key notes no rewards of this session", code="invalid_key")
        if entry.closed:
            raise ApiError(409, f"session {session_id!r} is being ended: its rewards are read", retry_after=1)
        return entry

    async def end(
        self, session_id: str, stop_reason: StopReason = StopReason.COMPLETED, error: str | None = None
    ) -> Trajectory:
        """End a session: what is being sampled for it is cancelled, what it leaves is on disk when this returns.

        Raises:
            ApiError: No such session is open, or the disk takes nothing more: the session can then be ended again.
        """
        entry = self.of_id(session_id)
        if entry.closed:
            raise ApiError(409, f"session {session_id!r} is being ended", retry_after=1)
        entry.closed = True
        # Its own task: a server that stops cancels who asked for the end, and the end is not to stay half done.
        ending = self._ending[session_id] = asyncio.ensure_future(self._end(entry, stop_reason, error))
        ending.add_done_callback(lambda _: self._ending.pop(session_id, None))
        return await asyncio.shield(ending)

    async def _end(self, entry: GatewaySession, stop_reason: StopReason, error: str | None) -> Trajectory:
        await self._stop(entry)
        try:
            trajectory = entry.finished(stop_reason, error)
            if self._file is not None:
                await asyncio.to_thread(self._file.append, trajectory.to_bytes())
        except OSError as failure:
            message = f"session {entry.id!r} cannot be written: {failure.strerror or failure}"
            raise ApiError(507, message, code="disk_full", retry_after=10) from failure
        else:
            self._done.add(entry.id)
            self._forget(entry)
            entry.session.close()
            return trajectory
        finally:
            # What is not written yet can be ended again.
            entry.closed = entry.id in self._done

    async def sweep(self) -> int:
        """End the sessions whose time is over, or that nobody has used for too long. Returns how many there were.

        They end with ``timeout``: what was sampled in them is on record.
        """
        now = time.monotonic()
        idle = now - self.limits.idle_seconds
        late = [
            entry
            for entry in self._by_id.values()
            if entry.expires < now or (entry.used < idle and not entry.running and entry.expires < math.inf)
        ]
        ended = 0
        for entry in late:
            if entry.closed:
                continue
            try:
                await self.end(entry.id, StopReason.TIMEOUT)
            except (ApiError, TurnwiseError) as error:
                # What could not be written stays open and is tried again; it keeps no other one from its end.
                _log.error("%s", error)
            else:
                ended += 1
        return ended

    async def close(self) -> None:
        """End every session, with ``cancelled``, and close the file. What the disk refuses is logged, and lost."""
        # What is being ended is waited for; where that fails, it is tried once more.
        await asyncio.gather(*self._ending.values(), return_exceptions=True)
        for entry in list(self._by_id.values()):
            try:
                await self.end(entry.id, StopReason.CANCELLED)
            except (ApiError, TurnwiseError) as error:
                _log.error("%s", error)
        if self._file is not None:
            self._file.close()

    def __len__(self) -> int:
        return len(self._by_id)

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
    """Return the ids of the trajectories of a file. A line that a killed process left half is none."""
    found: set[str] = set()
    if not path.exists():
        return found
    with path.open("rb") as lines:
        for line in lines:
            try:
                found.add(Trajectory.from_bytes(line).id)
            except FormatError:
                continue
    return found
