"""Feedback that functions derive when a session ends: of the user's next messages, and by a reward.

It is written to ``feedback.jsonl`` like a user's, so that no restart derives it again. What a function failed to
derive is derived at the next start; until then the session waits for other feedback.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

from turnwise.agents.roles import check_judge
from turnwise.envs.core import Env
from turnwise.envs.rewards.core import DEFAULT_TIMEOUT, Rubric, as_rubric, call_function, is_async
from turnwise.envs.rewards.judge import named_policies
from turnwise.errors import ConfigError, EnvError, InferenceError, TaskError, TurnwiseError
from turnwise.ext.live.feedback import MOST_SCORE, Feedback, FeedbackLog
from turnwise.gateway.errors import ApiError
from turnwise.plugins import load_object
from turnwise.recorder.ledger import LedgerClient
from turnwise.rollout.sessions import EpisodeSessions, Sampler
from turnwise.seeding import stable_hash
from turnwise.tasks.core import Task
from turnwise.tools.response import finite
from turnwise.trainer.algorithms.teacher_contexts import recorded_turns
from turnwise.trajectory import Trajectory, messages_of
from turnwise.types import Message, ToolCall, text_of

if TYPE_CHECKING:
    from turnwise.trainer.run.run import TrainRun

_MOST_AT_ONCE: Final = 32


Source: TypeAlias = Callable[[Trajectory, Task | None, Sequence[int | None]], AsyncIterator[tuple[int | None, float]]]
"""From an ended session, its task, and the turns that have a score, to the turns and scores that it lacks."""


class Judges:
    """The frozen policies of a run, which judge users' sessions.

    No file has what they read and write: it quotes users, and the score that comes of it is written as feedback.
    """

    def __init__(self, run: TrainRun) -> None:
        self._config, self._frozen = run.config, run.frozen
        self._samplers = {}
        for name, served in run.frozen.policies.items():
            client = served.client
            unlogged = replace(served, client=client.inner) if isinstance(client, LedgerClient) else served
            self._samplers[name] = Sampler.of(unlogged, run.config.rollout)

    async def score(self, rubric: Rubric, env: Env, task: Task | None, session: str) -> Mapping[str, float]:
        """Return the parts of a session's score; where a judge's server died, they are computed once more.

        Raises:
            EnvError: A function raised, or a judge gave no verdict.
            InferenceError: A server failed twice.
        """
        if self._samplers:
            seed, rollout = stable_hash("judge", self._config.seed, session), self._config.rollout
            env.open_judge = EpisodeSessions(
                self._samplers, rollout, episode_id=session, seed=seed, temperature=rollout.temperature, trained=False
            ).open_judge
        try:
            return await rubric.score(env, task, env.conversation[-1])
        except InferenceError as error:
            await self._frozen.recover(error)
            return await rubric.score(env, task, env.conversation[-1])


async def _next_messages(
    name: str, function: Callable[[str], Any], trajectory: Trajectory, _task: Task | None, scored: Sequence[int | None]
) -> AsyncIterator[tuple[int | None, float]]:
    what, env, inline = f"custom.live.next_message {name}", Env(), is_async(function)
    for turn in recorded_turns([trajectory]):
        replies = [text_of(message) for message in turn.following if message["role"] == "user"]
        if not replies or turn.number in scored:
            continue
        texts = ("\n".join(replies),)
        score = await call_function(function, texts, {}, env=env, what=what, timeout=DEFAULT_TIMEOUT, inline=inline)
        if score is not None:
            yield turn.number, finite(score, f"{what} returned")


async def _session_reward(
    rubric: Rubric, judges: Judges | None, trajectory: Trajectory, task: Task | None, scored: Sequence[int | None]
) -> AsyncIterator[tuple[int | None, float]]:
    if not scored and judges is not None:
        env, last = Env(), max(segment.index for segment in trajectory.segments if segment.sampled)
        records = [message for segment in trajectory.path(last) for message in messages_of(segment)]
        env.conversation = [_read_message(record) for record in records]
        parts = await judges.score(rubric, env, task, trajectory.id)
        yield None, sum(parts.values())


def _read_message(record: Mapping[str, Any]) -> Message:
    """Return a recorded message in the form that reward functions read."""
    message = dict(record)
    if record.get("tool_calls"):
        calls = [(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in record["tool_calls"]]
        message["tool_calls"] = [
            ToolCall(name, tool, arguments) if isinstance(arguments, dict) else ToolCall(name, tool, {}, str(arguments))
            for name, tool, arguments in calls
        ]
    return cast("Message", message)


def load_sources(
    next_message: str | None,
    reward: str | Mapping[str, Any] | None,
    frozen: Collection[str],
    judges: Judges | None = None,
) -> dict[str, Source]:
    """Return the configured sources by the names of their keys. Raises ConfigError.

    Args:
        next_message: As in ``custom.live``.
        reward: As in ``custom.live``.
        frozen: The policies that may judge.
        judges: What asks them; None to check the configuration.
    """
    sources: dict[str, Source] = {}
    if next_message is not None:
        function = load_object(next_message, "custom.live.next_message")
        sources["next_message"] = partial(_next_messages, next_message, function)
    for key, policy in named_policies(reward, "custom.live.reward"):
        check_judge(policy, frozen, key)
    if reward is not None:
        try:
            sources["reward"] = partial(_session_reward, as_rubric(reward), judges)
        except ConfigError as error:
            raise ConfigError(f"custom.live.reward: {error}") from error
    return sources


def session_task(session: str, row: Mapping[str, Any]) -> Task:
    """Return the task of a row that a client gave, whose prompt may be missing. Raises TaskError."""
    if not isinstance(row, dict):
        raise TaskError(f"must be an object, not {type(row).__name__}")
    if code := row.keys() & {"env", "agent"}:
        raise TaskError(f"field {min(code)!r} names code, which a client may not: remove it")
    return Task.from_record({"prompt": "", **row}, where="the row", default_id=session)


class DerivedFeedback:
    """Derives the feedback of ended sessions, beside their service.

    Attributes:
        log: Where it is written.
        opened: What is closed when nothing is derived any more.
        pending: The sessions whose feedback is being derived.
        failures: How often a function failed.
    """

    def __init__(self, log: FeedbackLog, sources: Mapping[str, Source], report: Callable[[str], None]) -> None:
        self.log = log
        self.opened = contextlib.ExitStack()
        self.pending: dict[str, asyncio.Task[None]] = {}
        self.failures = 0
        self._sources, self._report = sources, report
        self._slots = asyncio.Semaphore(_MOST_AT_ONCE)

    def begin(self, session: str, read: Callable[[], Trajectory]) -> None:
        """Derive what an ended session lacks; it stays ``pending`` until then."""
        if self._sources:
            task = self.pending[session] = asyncio.create_task(self._derive(session, read))
            task.add_done_callback(lambda _: self._end(session))

    def _end(self, session: str) -> None:
        del self.pending[session]
        self.log.changed.set()

    async def _derive(self, session: str, read: Callable[[], Trajectory]) -> None:
        async with self._slots:
            for name, source in self._sources.items():
                try:
                    await self._add_scores(session, name, source, read())
                except (TurnwiseError, ApiError) as error:
                    self.failures += 1
                    if self.failures.bit_count() == 1:
                        self._report(f"session {session} waits for other feedback: {error} (failure {self.failures})")

    async def _add_scores(self, session: str, name: str, source: Source, trajectory: Trajectory) -> None:
        row = self.log.tasks.get(session)
        task = None if row is None else session_task(session, row)
        scored = [turn for turn, scorer, _ in self.log.scores(session) if scorer == name]
        async for turn, score in source(trajectory, task, scored):
            if abs(score) > MOST_SCORE:
                raise EnvError(
                    f"custom.live.{name} returned {score:g}: scores are from {-MOST_SCORE:g} to {MOST_SCORE:g}"
                )
            self.log.add(session, Feedback("", turn, score, "", name))

    async def close(self) -> None:
        """Cancel what is being derived; the next start derives it."""
        for task in self.pending.values():
            task.cancel()
        await asyncio.gather(*self.pending.values(), return_exceptions=True)
        self.opened.close()
