r"""A rollout manager that runs whole groups: so many at a time, and a failed member again before the group is given up.

    rollout:
      agent_loop_manager_class: rollout_manager.py:WholeGroups
    custom: {groups: {at_once: 8, attempts: 2}}

The package's own manager keeps ``rollout.concurrency`` episodes busy, so that many groups are half done at any time.
Here the members of a group run side by side, and a group that has begun ends early.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field

from turnwise.errors import InferenceError
from turnwise.model.core import LLMClient
from turnwise.rollout import EpisodeRunner, EpisodeSpec, RolloutManager, RolloutRequest
from turnwise.rollout.config import RolloutConfig
from turnwise.rollout.core import EpisodeOutcome, ReplayBuffer, RolloutParts
from turnwise.rollout.managers import register_manager
from turnwise.seeding import stable_hash
from turnwise.trajectory import TrajectoryGroup


class GroupSettings(BaseModel):
    """``custom.groups``.

    Attributes:
        at_once: Groups that run at the same time.
        attempts: How often a member is tried that ends in an error.
    """

    model_config = ConfigDict(extra="forbid")

    at_once: Annotated[int, Field(ge=1)] = 8
    attempts: Annotated[int, Field(ge=1)] = 2


class Settings(BaseModel):
    """The section ``custom``; other keys are for other extensions."""

    model_config = ConfigDict(extra="allow")

    groups: GroupSettings = GroupSettings()


@register_manager("whole_groups")
class WholeGroups(RolloutManager):
    """Runs ``custom.groups.at_once`` groups, all members of each side by side."""

    custom_model = Settings

    def __init__(self, runner: EpisodeRunner, buffer: ReplayBuffer, parts: RolloutParts) -> None:
        assert isinstance(parts.settings, Settings)
        self._runner, self._buffer, self._parts, self._settings = runner, buffer, parts, parts.settings.groups
        self._room = asyncio.Semaphore(self._settings.at_once)
        self._running: dict[str, asyncio.Task[None]] = {}

    @classmethod
    async def create(cls, config: RolloutConfig, client: LLMClient, buffer: Any, parts: RolloutParts) -> Self:
        """Make the manager, and prepare agent, tools and sandboxes."""
        info = await client.model_info()
        runner = EpisodeRunner(config, client, parts.renderer, context_length=info.context_length, write=parts.write)
        await runner.prepare()
        return cls(runner, buffer, parts)

    def generate_sequences(self, requests: Sequence[RolloutRequest]) -> None:
        """Start the groups, each in a task that waits for its turn."""
        for request in requests:
            task = asyncio.create_task(self._group(request))
            self._running[request.key] = task
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running = {key: running_task for key, running_task in self._running.items() if running_task is not task}

    async def _group(self, request: RolloutRequest) -> None:
        name = f"{self._parts.run_part}-{request.key}"
        count = request.group_size + request.greedy_baseline
        async with self._room:
            outcomes = await asyncio.gather(*[self._member(request, name, member) for member in range(count)])
        greedy = outcomes.pop() if request.greedy_baseline else None
        finished = [outcome for outcome in outcomes if outcome.error is None]
        group = TrajectoryGroup(
            name,
            request.task.id,
            [trajectory for outcome in finished for trajectory in outcome.trajectories],
            request.partition,
            failed=len(outcomes) - len(finished),
            baselines=[] if greedy is None or greedy.error is not None else greedy.trajectories,
        )
        # It has ended: there is nothing left to cancel.
        self._running.pop(request.key, None)
        await self._buffer.put(group)

    async def _member(self, request: RolloutRequest, name: str, member: int) -> EpisodeOutcome:
        """Run an episode, again where it failed; a server that failed is restarted before."""
        attempt = 0
        while True:
            outcome = await self._runner.run(self._spec(request, name, member, attempt))
            attempt += 1
            if outcome.error is None or attempt >= self._settings.attempts:
                return outcome
            if isinstance(outcome.error, InferenceError) and self._parts.recover is not None:
                await self._parts.recover(outcome.error)

    def _spec(self, request: RolloutRequest, name: str, member: int, attempt: int) -> EpisodeSpec:
        """Return the episode: members begin with one seed, and sample with seeds of their own."""
        seed = self._parts.run_seed if request.partition == "train" else 0
        key = (seed, request.task.id, request.epoch)
        baseline = member == request.group_size
        return EpisodeSpec(
            request.task,
            name,
            member=member,
            attempt=attempt,
            partition=request.partition,
            env_seed=stable_hash("reset", *key),
            sampling_seed=stable_hash("sampling", *key, request.tag, member),
            temperature=0.0 if baseline else request.temperature,
            baseline=baseline,
        )

    async def cancel(self, keys: Collection[str]) -> frozenset[str]:
        """End groups, and return the keys of those that had not ended."""
        cancelled = {key: task for key in keys if (task := self._running.get(key)) is not None}
        await self._end(cancelled.values())
        return frozenset(cancelled)

    async def close(self) -> None:
        """End all groups."""
        await self._end(list(self._running.values()))
        await self._runner.close()

    async def _end(self, tasks: Collection[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
