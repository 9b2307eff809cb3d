"""Re-execution by the schedule of an asynchronous run: its sampling, its requests and its batches."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from turnwise.errors import ReplayError
from turnwise.ext.checks.differences import segment_difference
from turnwise.model.core import LLMClient, ModelInfo
from turnwise.rollout.core import BatchRef, RolloutRequest
from turnwise.rollout.journal.schedule import Schedule
from turnwise.rollout.replay.buffer import LocalReplayBuffer
from turnwise.trainer.loops.modes import train_as_configured
from turnwise.trainer.run.task_scheduler import TaskScheduler
from turnwise.trajectory import Trajectory
from turnwise.types import Completion, Logprobs, SamplingParams, TokenIds, TokenPrompt

if TYPE_CHECKING:
    from turnwise.trainer.run.run import TrainRun


class ScheduledClient(LLMClient):
    """Samples each token of a recorded turn by the weights that sampled it, and compares it."""

    def __init__(self, inner: LLMClient, schedule: Schedule) -> None:
        self._inner = inner
        self._schedule = schedule

    async def generate(self, prompt: TokenPrompt, params: SamplingParams, *, session_id: str) -> Completion:
        """Sample a completion in as many parts as weights sampled it."""
        recorded = self._schedule.find(session_id, prompt.token_ids)
        if recorded is None:
            return await self._inner.generate(prompt, params, session_id=session_id)
        episode, turn = recorded
        parts: list[Completion] = []
        for version, start, end in turn.weight_versions:
            await self._schedule.reach(version)
            limit = params.max_tokens if end == len(turn.token_ids) else end
            part = await self._inner.generate(
                replace(prompt, token_ids=np.concatenate([prompt.token_ids, *(part.token_ids for part in parts)])),
                replace(params, max_tokens=None if limit is None else limit - start, continued=start),
                session_id=session_id,
            )
            parts.append(part)
            self._schedule.sampled(episode, version)
            if len(part.token_ids) != end - start or part.finish_reason != "length":
                break
        completion = _join(parts)
        again = replace(turn, token_ids=completion.token_ids, logprobs=completion.logprobs)
        if (difference := segment_difference(turn, again)) is not None:
            number = (turn.turn_id or "").removeprefix("t")
            self._schedule.differ(f"step {episode.step}, episode {session_id}, turn {number}, {difference}")
        return completion

    async def score(self, token_ids: TokenIds, *, session_id: str = "") -> Logprobs:
        """Forward the request."""
        return await self._inner.score(token_ids, session_id=session_id)

    async def model_info(self) -> ModelInfo:
        """Forward the request."""
        return await self._inner.model_info()

    async def close(self) -> None:
        """Close the inner client."""
        await self._inner.close()


def _join(parts: Sequence[Completion]) -> Completion:
    """Join the parts of a completion."""
    starts = np.cumsum([0, *(len(part.token_ids) for part in parts)]).tolist()
    return replace(
        parts[-1],
        token_ids=np.concatenate([part.token_ids for part in parts]),
        logprobs=np.concatenate([part.logprobs for part in parts]),
        weight_versions=tuple(
            (version, first + start, first + end)
            for first, part in zip(starts, parts, strict=False)
            for version, start, end in part.weight_versions
        ),
    )


class ScheduledTasks(TaskScheduler):
    """Requests each recorded group when the weights that began it are served, and hands out the recorded batches."""

    def __init__(self, run: TrainRun, schedule: Schedule) -> None:
        assert isinstance(run.buffer, LocalReplayBuffer), "runs have no other buffer"
        super().__init__(run.config, run.tasks, run.manager, run.buffer, lambda: run.state.weight_version)
        self._run, self._groups, self._schedule = run, run.buffer, schedule
        size, greedy = run.config.rollout.group_size, run.config.greedy_baseline
        epochs = {int(key.rpartition("-e")[2]) for key in schedule.groups}
        requests = [
            RolloutRequest(task, epoch, size, greedy_baseline=greedy) for task in run.tasks.ahead() for epoch in epochs
        ]
        self._requests = {request.key: request for request in requests}
        if missing := schedule.groups.keys() - self._requests.keys():
            raise ReplayError(f"no task in memory is that of {min(missing)}: its source is streamed, or is another one")

    def next(self, groups: int, *, group_size: int | None = None) -> list[RolloutRequest]:
        """Return no request: those of hooks are in the schedule."""
        del groups, group_size
        return []

    def top_up(self, groups: int, *, group_size: int | None = None) -> None:
        """Request the groups that begin by the served weights."""
        del groups, group_size
        self.issue([self._requests[key] for key in self._schedule.advance(self._run.state.weight_version)])

    async def next_batch(self, step: int, groups: int) -> tuple[BatchRef, dict[str, float]]:
        """Return the recorded batch, once the served weights have sampled all they have to.

        Raises:
            ReplayError: Something differs from the recording.
        """
        del groups
        keys = self._schedule.next_batch(step)
        while self._schedule.difference is None:
            ready = {facts.key: facts.id for facts in self._groups.ready("train")}
            if self._schedule.settled and ready.keys() >= set(keys):
                ref, metrics = self._groups.take([ready[key] for key in keys], step)
                return ref, {"replay/wait_s": 0.0, **metrics}
            changes = [asyncio.ensure_future(change) for change in (self._groups.changed(), self._schedule.changed())]
            try:
                done, _ = await asyncio.wait(changes, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for change in changes:
                    change.cancel()
            for change in done:
                change.result()
        raise ReplayError(self._schedule.difference)

    async def settle_leftovers(self, step: int) -> dict[str, float]:
        """Leave what later steps train."""
        del step
        return {}

    def count_episode(self, trajectory: Trajectory) -> None:
        """Count the sampled tokens of an episode, and note its end."""
        super().count_episode(trajectory)
        self._schedule.ended(trajectory)


async def follow_schedule(run: TrainRun, schedule: Schedule) -> None:
    """Train as the run's mode does, by a recorded schedule.

    Raises:
        ReplayError: Something differs from the recording, or a recorded task is missing.
        TurnwiseError: As :func:`~turnwise.trainer.loops.modes.train_sync`.
    """
    run.scheduler = ScheduledTasks(run, schedule)
    for policy in run.policies.values():
        policy.client.inner = ScheduledClient(policy.client.inner, schedule)
    await train_as_configured(run)
