"""Forks of episodes: the states that an episode can be forked from, and the environment's answers before a fork.

An agent is code with local variables, which cannot be copied. So a forked episode runs it again from its beginning: up
to the fork its model calls and its environment answer as they did in the original, from there on they are real.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from turnwise.envs.core import Env, StepResult
from turnwise.errors import AgentError
from turnwise.recorder.history import snapshot
from turnwise.recorder.session import Session
from turnwise.types import Message, ToolCall

STILL_S = 5.0
"""Seconds without a step towards the fork after which an episode counts as diverged."""


class ForkDiverged(AgentError):
    """A forked episode's agent did not repeat itself up to the fork."""

    retryable: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class EnvAnswer:
    """An answer of the environment to a message or a call.

    Attributes:
        action: What identifies the message or call.
        result: The StepResult or ToolResponse.
    """

    action: str
    result: Any


@dataclass(slots=True)
class BranchPoint:
    """A state of an episode right before a model call.

    Attributes:
        env: A fork of the environment; nothing is done in it, forks are made of it.
        answers: Number of the environment's answers before it.
        turns: The turns before it, by session.
        rewards: Number of the episode's rewards before it.
        session: The session that makes the call.
        turn: The turn that the call became; None where it failed.
    """

    env: Env
    answers: int
    turns: dict[str, tuple[str, ...]]
    rewards: int
    session: str
    turn: str | None = None


@dataclass(slots=True)
class EpisodeRecord:
    """What forks of an episode need to know of it.

    Attributes:
        observation: The messages of the reset, as they were.
        answers: The environment's answers, in order.
        points: The states that it can be forked from.
        point: Where it was forked itself; None for the initial episode.
        pending: Answers before its own fork that were not repeated yet.
        live: Whether it acts and samples, rather than repeating what was before its fork.
        sessions: The episode's sessions.
        refused: Why the environment could not be forked, the last time.
        refusals: How often it could not.
    """

    observation: list[Message] = field(default_factory=list)
    answers: list[EnvAnswer] = field(default_factory=list)
    points: list[BranchPoint] = field(default_factory=list)
    point: BranchPoint | None = None
    pending: list[EnvAnswer] = field(default_factory=list)
    live: bool = True
    sessions: Mapping[str, Session] = field(default_factory=dict)
    refused: str = ""
    refusals: int = 0
    _busy: int = 0
    _moved: asyncio.Event = field(default_factory=asyncio.Event)

    def fork(self, point: BranchPoint) -> EpisodeRecord:
        """Return the record of a fork at a point."""
        answers = self.answers[: point.answers]
        return EpisodeRecord(snapshot(self.observation), list(answers), point=point, pending=list(answers), live=False)

    @contextlib.contextmanager
    def env_call(self) -> Iterator[None]:
        """Wrap a call of the environment: meanwhile its state cannot be taken."""
        self._busy += 1
        try:
            yield
        finally:
            self._busy -= 1

    @property
    def before(self) -> dict[str, tuple[str, ...]]:
        """The turns before its own fork, by session."""
        return {} if self.point is None else self.point.turns

    @property
    def idle(self) -> bool:
        """Whether no call of the environment runs."""
        return not self._busy

    def note(self, action: Message | ToolCall, agent: str, result: Any) -> None:
        """Keep an answer of the environment to a session's message or call."""
        self.answers.append(EnvAnswer(_identity(action, agent), _copy(result)))

    async def repeat(self, action: Message | ToolCall, agent: str) -> EnvAnswer | None:
        """Return what the environment answered before the fork; None where it is to act, once it may.

        Raises:
            ForkDiverged: This was not done in the original, and the episode does not get to its fork.
        """
        identity = _identity(action, agent)
        for answer in self.pending:
            if answer.action == identity:
                self.pending.remove(answer)
                self.repeated()
                return replace(answer, result=_copy(answer.result))
        # Another part of the agent may still have to get there.
        await self._until(lambda: self.live, f"calls {identity[:200]}")
        return None

    def repeated(self) -> None:
        """Note that something before the fork was done again."""
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    async def passes(self, session: str, *, first: bool) -> bool:
        """Wait until a request may sample; return whether it is the first that does.

        That is the one of the turn that the fork samples again, once all before the fork was done again. Requests of
        other parts of the agent, which the original sampled after the fork, wait for it.

        Args:
            session: The session that makes the request.
            first: Whether it asks what that turn answered.

        Raises:
            ForkDiverged: The agent does not get to its fork.
        """
        if self.live:
            return False
        assert self.point is not None
        # A fork without a turn to sample again takes whichever request comes first.
        may_begin = session == self.point.session and (first or self.point.turn is None)
        await self._until(lambda: self.live or (may_begin and not self._missing()), f"asks session {session!r}")
        was_live, self.live = self.live, True
        self.repeated()
        return not was_live

    async def _until(self, holds: Callable[[], bool], doing: str) -> None:
        """Wait for something before the fork to be done again, as long as anything is. Raises ForkDiverged."""
        while not holds():
            moved = self._moved
            try:
                async with asyncio.timeout(STILL_S):
                    await moved.wait()
            except TimeoutError:
                missing = self._missing() or f"the next request of session {self.point.session!r}" if self.point else ""
                raise ForkDiverged(
                    f"the agent {doing}, which it did not before the fork in the original, and left out {missing}: "
                    f"{_REMEDY}"
                ) from None

    def _missing(self) -> str:
        """Return what was done before the fork and not done again yet, or nothing."""
        names = [name for name, turns in self.before.items() if turns and name not in self.sessions]
        names += [name for name, session in self.sessions.items() if session.replaying]
        if names:
            return f"turns of session {names[0]!r}"
        return self.pending[0].action[:200] if self.pending else ""

    def add_point(self, session: str, env: Env, rewards: int) -> None:
        """Keep the state before a model call: a fork of the environment, and the number of rewards."""
        turns = {
            name: (*self.before.get(name, ()), *opened.sampled_turns)
            for name, opened in self.sessions.items()
            if name in self.before or opened.sampled_turns
        }
        inherited = 0 if self.point is None else self.point.rewards
        self.points.append(BranchPoint(env, len(self.answers), self.before | turns, inherited + rewards, session))

    def assign_turns(self) -> None:
        """Set the turn of each point, once the episode is over."""
        for point in self.points:
            path = (*self.before.get(point.session, ()), *self.sessions[point.session].sampled_turns)
            index = len(point.turns.get(point.session, ()))
            point.turn = path[index] if index < len(path) else None


@dataclass(frozen=True, slots=True)
class ForkGate:
    """The gate of a session whose episode may be forked.

    Attributes:
        record: Of the episode.
        session: Name of the session.
        keep: Keeps the state before a request; ``first``: it is the first that samples after the episode's own fork.
    """

    record: EpisodeRecord
    session: str
    keep: Callable[..., Awaitable[None]]

    def note_repeat(self) -> None:
        """Note that a turn before the fork was given again."""
        self.record.repeated()

    async def admit(self, *, first: bool) -> None:
        """Wait until a request may sample, and keep the state before it. Raises ForkDiverged."""
        await self.keep(self.record, self.session, first=await self.record.passes(self.session, first=first))


_REMEDY = (
    "an agent whose episodes are forked must repeat itself when it sees the same answers (no clock, no "
    "unseeded randomness, nothing done to the environment or its sandbox but through episode.step and episode.call)"
)


def _identity(action: Message | ToolCall, agent: str) -> str:
    """Return what identifies an action: its session, and a message by its turn, else by its content."""
    if isinstance(action, ToolCall):
        arguments = json.dumps(action.arguments, sort_keys=True, default=repr)
        return f"call of {agent}: {action.id} {action.name} {arguments}"
    turn = action.get("turn_id")
    return f"step of {agent}: " + (turn or json.dumps([action.get("content"), action.get("tool_calls")], default=repr))


def _copy(result: Any) -> Any:
    """Return a copy of an answer: agents edit messages in place, and an episode cuts texts of tools."""
    if isinstance(result, StepResult):
        observation: Sequence[Message] | str = result.observation
        return result._replace(observation=snapshot(observation), info=copy.copy(result.info))
    return copy.copy(result)
