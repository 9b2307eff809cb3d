"""Groups of episodes, many at the same time: the rollout manager of one process.

Owns: :class:`RolloutProducer`: members and seeds of a group, bounded concurrency, retries after infrastructure
failures. One failed member never discards its group.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Self

from turnwise.errors import EnvError, InferenceError, RunnerLost, TurnwiseError
from turnwise.inference.core import LLMClient, Renderer
from turnwise.rollout.config import RolloutConfig
from turnwise.rollout.core import ReplayBuffer, RolloutManager, RolloutParts, RolloutRequest
from turnwise.rollout.group_reward import GroupRewarder
from turnwise.rollout.members import FailureWatch
from turnwise.rollout.remote.service import RemoteRunners
from turnwise.rollout.runner import EpisodeOutcome, EpisodeRunner, EpisodeSpec
from turnwise.seeding import stable_hash
from turnwise.tools.threads import ToolThreads
from turnwise.trajectory import Trajectory, TrajectoryGroup
from turnwise.types import StopReason

# How long a train step waits for the environments of what it cancelled: long enough for all that close at once.
_CLOSING_S = 1.0


class RolloutProducer(RolloutManager):
    """Rolls out groups in this process; made by :meth:`create`."""

    def __init__(
        self,
        config: RolloutConfig,
        runner: EpisodeRunner,
        buffer: ReplayBuffer | None,
        parts: RolloutParts,
        threads: ToolThreads,
        rewarder: GroupRewarder | None = None,
        remote: RemoteRunners | None = None,
    ) -> None:
        self._rewarder = rewarder
        self._remote = remote
        self._config = config
        self._runner = runner
        self._buffer = buffer
        self._parts = parts
        self._threads = threads
        self._slots = asyncio.Semaphore(config.concurrency)
        self._running: dict[str, asyncio.Task[None]] = {}
        self._given: set[str] = set()
        self._failures = FailureWatch(config.max_failed_groups)

    @classmethod
    async def create(
        cls, config: RolloutConfig, client: LLMClient, buffer: ReplayBuffer | None, parts: RolloutParts
    ) -> Self:
        """Make a producer; asks the client what the model can take.

        Raises:
            InferenceError: The server does not answer.
            ConfigError: The configured tools cannot be loaded, or the environment's answer with media that the renderer
                cannot place.
            EnvError: An MCP server of the configured tools cannot be reached.
        """
        info = await client.model_info()
        # Threads are made on demand: a run whose tools are all async has none.
        # One more than may be lost: when so many are, the run ends, and until it has no call waits for nothing.
        threads = ToolThreads(config.concurrency, max_lost=config.max_lost_threads + 1)
        runner_config, write, rewarder = config, parts.write, None
        if config.group_reward is not None:
            rewarder = GroupRewarder(
                config.group_reward, write=parts.write, save_messages=config.save_messages, executor=threads
            )
            # What trajectories say is read once more before they are written.
            runner_config, write = config.model_copy(update={"save_messages": True}), rewarder.take
        runner = EpisodeRunner(
            runner_config,
            client,
            parts.renderer,
            context_length=info.context_length,
            guides=info.guides,
            executor=threads,
            write=write,
            frozen=parts.frozen,
        )
        await runner.prepare()
        remote = None
        if config.remote is not None:
            try:
                remote = await RemoteRunners.start(config.remote, runner.gateway, parts.notify)
            except BaseException:
                await runner.close()
                raise
        return cls(config, runner, buffer, parts, threads, rewarder, remote)

    @property
    def config(self) -> RolloutConfig:
        """What is rolled out, and how."""
        return self._config

    @property
    def renderer(self) -> Renderer:
        """Messages to ids and back."""
        return self._parts.renderer

    def generate_sequences(self, requests: Sequence[RolloutRequest]) -> None:
        """Start rolling out; finished groups arrive in the buffer in the order in which they end.

        Raises:
            TurnwiseError: There is no buffer, or a request repeats an earlier one (see :meth:`gather`).
        """
        if self._buffer is None:
            raise TurnwiseError("this producer was made without a buffer: use gather()")
        for request, group_id in zip(requests, self._claim(requests), strict=True):
            task = asyncio.create_task(self._produce(request, group_id, self._buffer))
            self._running[request.key] = task
            task.add_done_callback(partial(self._ended, request.key))

    async def gather(
        self,
        requests: Sequence[RolloutRequest],
        on_group: Callable[[TrajectoryGroup], None] | None = None,
    ) -> list[TrajectoryGroup]:
        """Roll out and return the groups in the order of the requests, past the buffer (evaluation).

        Raises:
            TurnwiseError: A request repeats an earlier one: ids and seeds come from the task's id, the partition, the
                epoch and the tag, so its episodes would be the same ones again.
        """

        async def one(request: RolloutRequest, group_id: str) -> TrajectoryGroup:
            group = await self._group(request, group_id)
            if on_group is not None:
                on_group(group)
            return group

        claimed = zip(requests, self._claim(requests), strict=True)
        try:
            async with asyncio.TaskGroup() as tasks:
                groups = [tasks.create_task(one(request, group_id)) for request, group_id in claimed]
        except ExceptionGroup as errors:
            raise _first(errors) from errors
        return [group.result() for group in groups]

    async def cancel(self, keys: Collection[str]) -> frozenset[str]:
        """End groups before they are finished. What does not close its environment at once goes on doing so when this
        has returned; ``rollout.close_timeout`` bounds it.
        """
        # In the order in which they were asked for, whatever order the keys have.
        ended = {key: task for key, task in self._running.items() if key in keys}
        for task in ended.values():
            task.cancel()
        if ended:
            await asyncio.wait(ended.values(), timeout=_CLOSING_S)
        return frozenset(key for key, task in ended.items() if not task.done() or task.cancelled())

    async def close(self) -> None:
        """Cancel what runs, wait until its environments are closed, and release the threads."""
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        if self._remote is not None:
            await self._remote.close()
        await self._runner.close()
        # A thread that was lost to a time-out cannot be joined.
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _ended(self, key: str, task: asyncio.Task[None]) -> None:
        del task
        self._running.pop(key, None)

    def _claim(self, requests: Sequence[RolloutRequest]) -> list[str]:
        """Return the group ids of requests; either all are new and taken now, or none is."""
        claimed: dict[str, RolloutRequest] = {}
        for request in requests:
            group_id = self._group_id(request)
            if group_id in self._given or group_id in claimed:
                raise TurnwiseError(
                    f"task {request.task.id!r} was requested before in this run (partition {request.partition!r}, "
                    f"epoch {request.epoch}, tag {request.tag!r}): its episodes would have the same ids and seeds. "
                    "Give the task another id, or the request another epoch or tag"
                )
            claimed[group_id] = request
        self._given |= claimed.keys()
        return list(claimed)

    def _group_id(self, request: RolloutRequest) -> str:
        return f"{self._parts.run_part}-{request.key}"

    async def _produce(self, request: RolloutRequest, group_id: str, buffer: ReplayBuffer) -> None:
        try:
            rolling = self._parts.rolling
            with contextlib.nullcontext() if rolling is None else rolling(group_id):
                group = await self._group(request, group_id)
            await buffer.put(group)
            if (error := self._failures.arrived(group)) is not None:
                raise error
        except Exception as error:  # noqa: BLE001 - a task's outermost boundary: who waits for groups must hear of it
            buffer.fail(_first(error))

    async def _group(self, request: RolloutRequest, group_id: str) -> TrajectoryGroup:
        rewarder = self._rewarder
        if rewarder is None:
            return await self._members(request, group_id)
        try:
            # The members' slots are free: other groups go on while this one is compared.
            return await rewarder.reward(request.task, await self._members(request, group_id))
        finally:
            rewarder.abandon(group_id, "the group was cancelled before its group reward", StopReason.CANCELLED)

    async def _members(self, request: RolloutRequest, group_id: str) -> TrajectoryGroup:
        async with asyncio.TaskGroup() as members:
            running = [
                members.create_task(self._member(request, group_id, member))
                for member in range(request.group_size + request.greedy_baseline)
            ]
        finished = [task.result() for task in running]
        greedy = finished.pop() if request.greedy_baseline else None
        trajectories = [trajectory for member in finished if member is not None for trajectory in member]
        failed = sum(member is None for member in finished)
        return TrajectoryGroup(
            group_id, request.task.id, trajectories, request.partition, failed, request.task.source, greedy or []
        )

    async def _member(self, request: RolloutRequest, group_id: str, member: int) -> list[Trajectory] | None:
        """Run one member, again after infrastructure failures. None: its last attempt failed too.

        The one behind the last member is the greedy baseline.
        """
        baseline = member == request.group_size
        seed = 0 if request.partition == "val" else self._parts.run_seed
        spec = EpisodeSpec(
            task=request.task,
            group_id=group_id,
            member=member,
            partition=request.partition,
            env_seed=stable_hash("reset", seed, request.task.id, request.epoch),
            sampling_seed=stable_hash("sampling", seed, request.task.id, request.epoch, request.tag, member),
            temperature=0.0 if baseline else request.temperature,
            baseline=baseline,
        )
        # A lost runner says nothing against the episode: it is counted apart from what fails.
        left, lost = self._config.retries, 0 if self._config.remote is None else self._config.remote.reissues
        for attempt in itertools.count():
            async with self._slots:
                outcome = await self._attempt(replace(spec, attempt=attempt))
            error = outcome.error
            self._count_lost(error)
            if error is None:
                return outcome.trajectories
            if isinstance(error, InferenceError) and self._parts.recover is not None:
                await self._parts.recover(error)
            if isinstance(error, RunnerLost) and lost > 0:
                lost -= 1
                if self._buffer is not None and request.partition == "train":
                    self._buffer.reissued()
                continue
            if left == 0 or not (isinstance(error, TurnwiseError) and error.retryable):
                break
            left -= 1
        self._failures.failed(f"{type(error).__name__}: {error}")
        return None

    async def _attempt(self, spec: EpisodeSpec) -> EpisodeOutcome:
        if self._remote is None:
            return await self._runner.run(spec)
        # The episode begins when somebody is there to play it: nobody's absence counts against its time.
        async with self._remote.seat() as agent:
            return await self._runner.run(spec, agent)

    def _count_lost(self, error: Exception | None) -> None:
        if self._threads.lost > self._config.max_lost_threads:
            raise EnvError(
                f"{self._threads.lost} threads run code of tools or environments that was given up, and cannot be "
                f"stopped; rollout.max_lost_threads is {self._config.max_lost_threads}. Give what that code waits for "
                f"a time-out of its own, or make it async. The last error: {error or 'none'}"
            ) from error


def _first(error: Exception) -> Exception:
    """Return the first error of a group of errors: the others followed from it, or say the same."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error
