"""Forks of episodes: the states that an episode can be forked from, and the environment's answers before a fork.

An agent is code with local variables, which cannot be copied. So a forked episode runs it again from its beginning: up
to the fork its model calls and its environment answer as they did in the original, from there on they are real.
"""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from turnwise.envs.core import Env, StepResult
from turnwise.errors import AgentError
from turnwise.recorder.history import snapshot
from turnwise.recorder.session import Session
from turnwise.types import Message, ToolCall


class ForkDiverged(AgentError):
    """A forked episode's agent did not repeat itself up to the fork."""

    retryable: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class EnvAnswer:
    """An answer of the environment: the method, what it was called with, and the result."""

    method: str
    given: str
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
        left: Answers before its own fork that were not given again yet.
        live: Whether it acts and samples, rather than repeating what was before its fork.
        refused: Why the environment could not be forked, the last time.
        refusals: How often it could not.
    """

    observation: list[Message] = field(default_factory=list)
    answers: list[EnvAnswer] = field(default_factory=list)
    points: list[BranchPoint] = field(default_factory=list)
    point: BranchPoint | None = None
    left: list[EnvAnswer] = field(default_factory=list)
    live: bool = True
    refused: str = ""
    refusals: int = 0
    _busy: int = 0

    def fork(self, point: BranchPoint) -> EpisodeRecord:
        """Return the record of a fork at a point."""
        answers = self.answers[: point.answers]
        return EpisodeRecord(snapshot(self.observation), list(answers), point=point, left=list(answers), live=False)

    @contextlib.contextmanager
    def acting(self) -> Iterator[None]:
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

    def note(self, method: str, argument: Message | ToolCall, result: Any) -> None:
        """Keep an answer of the environment."""
        self.answers.append(EnvAnswer(method, _given(argument), _copy(result)))

    def again(self, method: str, argument: Message | ToolCall) -> Any:
        """Return what the environment answered before the fork.

        Raises:
            ForkDiverged: This was not done in the original.
        """
        given = _given(argument)
        for answer in self.left:
            if (answer.method, answer.given) == (method, given):
                self.left.remove(answer)
                return _copy(answer.result)
        raise ForkDiverged(
            f"the agent called {method} with {given[:200]} before the fork, which it did not in the original episode: "
            f"{_REMEDY}"
        )

    def check_repeated(self, session: str, sessions: Mapping[str, Session]) -> None:
        """Check, when the first request samples, that all before the fork was done again, and nothing else.

        Raises:
            ForkDiverged: Something was not, or another session makes the request.
        """
        assert self.point is not None
        if session != self.point.session:
            raise ForkDiverged(
                f"the agent asks session {session!r} where the original asked {self.point.session!r}: {_REMEDY}"
            )
        missing = [name for name, turns in self.before.items() if turns and name not in sessions]
        missing += [name for name, session in sessions.items() if session.replaying]
        if missing or self.left:
            what = f"turns of session {missing[0]!r}" if missing else f"a call of {self.left[0].method}"
            raise ForkDiverged(f"the agent left out {what} before the fork: {_REMEDY}")

    def asks(self, session: str, env: Env, sessions: Mapping[str, Session], rewards: int) -> None:
        """Keep the state before a model call: a fork of the environment, and the number of rewards."""
        turns = {
            name: (*self.before.get(name, ()), *each.own_turns)
            for name, each in sessions.items()
            if name in self.before or each.own_turns
        }
        inherited = 0 if self.point is None else self.point.rewards
        self.points.append(BranchPoint(env, len(self.answers), self.before | turns, inherited + rewards, session))

    def settle(self, sessions: Mapping[str, Session]) -> None:
        """Name the turn of each point, once the episode is over; the last of several for one turn is kept."""
        for point in self.points:
            path = (*self.before.get(point.session, ()), *sessions[point.session].own_turns)
            at = len(point.turns.get(point.session, ()))
            point.turn = path[at] if at < len(path) else None


_REMEDY = (
    "an agent whose episodes are forked must repeat itself when it sees the same answers (no clock, no randomness of "
    "its own, nothing done to the environment or its sandbox but through episode.step and episode.call)"
)


def _given(argument: Message | ToolCall) -> str:
    """Return what identifies an argument: a message by its turn, else by what it says."""
    if isinstance(argument, ToolCall):
        return f"{argument.id} {argument.name} {json.dumps(argument.arguments, sort_keys=True, default=repr)}"
    turn = argument.get("turn_id")
    return turn or json.dumps([argument.get("content"), argument.get("tool_calls")], default=repr)


def _copy(result: Any) -> Any:
    """Return a copy of an answer: agents edit messages in place, and an episode cuts texts of tools."""
    if isinstance(result, StepResult):
        seen: Sequence[Message] | str = result.observation
        return result._replace(observation=snapshot(seen), info=copy.copy(result.info))
    return copy.copy(result)
