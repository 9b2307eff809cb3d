"""Custom rollout managers, written against the public contract only."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from turnwise.rollout import EpisodeRunner, EpisodeSpec, RolloutManager, RolloutRequest
from turnwise.seeding import stable_hash
from turnwise.trajectory import TrajectoryGroup


class Settings(BaseModel):
    model_config = ConfigDict(extra="forbid")

    at_once: int = 64


class PlainManager(RolloutManager):
    """One task for each group, one after the other for each member; its own concurrency from ``custom``."""

    custom_model = Settings

    def __init__(self, runner, buffer, parts):
        self.runner, self.buffer, self.parts = runner, buffer, parts
        self.room = asyncio.Semaphore(parts.settings.at_once)
        self.running: set[asyncio.Task[None]] = set()

    @classmethod
    async def create(cls, config, client, buffer, parts):
        info = await client.model_info()
        runner = EpisodeRunner(config, client, parts.renderer, context_length=info.context_length, write=parts.write)
        await runner.prepare()
        return cls(runner, buffer, parts)

    def generate_sequences(self, requests: Sequence[RolloutRequest]) -> None:
        for request in requests:
            task = asyncio.create_task(self.group(request))
            self.running.add(task)
            task.add_done_callback(self.running.discard)

    async def group(self, request: RolloutRequest) -> None:
        name = f"{self.parts.run_part}-{request.partition}-{request.task.id}-{request.epoch}-{request.tag}"
        count = request.group_size + request.greedy_baseline
        outcomes = await asyncio.gather(*[self.member(request, name, n) for n in range(count)])
        greedy = outcomes.pop() if request.greedy_baseline else None
        baselines = greedy.trajectories if greedy is not None and greedy.error is None else []
        members = [each for outcome in outcomes if outcome.error is None for each in outcome.trajectories]
        failed = sum(outcome.error is not None for outcome in outcomes)
        group = TrajectoryGroup(name, request.task.id, members, request.partition, failed, baselines=baselines)
        await self.buffer.put(group)

    async def member(self, request: RolloutRequest, name: str, member: int):
        seed = 0 if request.partition == "val" else self.parts.run_seed
        baseline = member == request.group_size
        spec = EpisodeSpec(
            request.task,
            name,
            member=member,
            partition=request.partition,
            env_seed=stable_hash("reset", seed, request.task.id, request.epoch),
            sampling_seed=stable_hash("sampling", seed, request.task.id, request.epoch, request.tag, member),
            temperature=0.0 if baseline else request.temperature,
            baseline=baseline,
        )
        async with self.room:
            return await self.runner.run(spec)

    async def close(self) -> None:
        for task in self.running:
            task.cancel()
        await asyncio.gather(*self.running, return_exceptions=True)
        await self.runner.close()


class Dying(PlainManager):
    """Starts, and dies with the third group."""

    groups = 0

    async def group(self, request):
        self.groups += 1
        if self.groups == 3:
            raise RuntimeError("the scheduler lost its cluster")
        await super().group(request)


class Forgetful(PlainManager):
    """Loses the first group that it is asked for, without a word."""

    lost = False

    async def group(self, request):
        if not self.lost:
            self.lost = True
            return
        await super().group(request)
