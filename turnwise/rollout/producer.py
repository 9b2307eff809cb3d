"""Groups of episodes, many at the same time: the rollout manager of one process.

Trajectories are written when their group is complete, so that what stands on disk holds its rewards. What a
cancellation or a failure leaves of a group is written as it is, with an error; at the end of a run, what its journal
keeps for the next process is left to that.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

from turnwise.envs.core import Env
from turnwise.envs.results import named_numbers
from turnwise.envs.rewards.core import call_function, is_async
from turnwise.envs.rewards.registry import describe, load_function
from turnwise.errors import (
    INTERRUPTS,
    ConfigError,
    DiskError,
    EndpointUnusable,
    EnvError,
    InferenceError,
    RequestRefused,
    RunnerDisconnected,
    TrainError,
    TurnwiseError,
    first_of,
    shown,
    undo_on_error_async,
)
from turnwise.model.canonical import clean
from turnwise.model.core import LLMClient, ModelInfo, Renderer
from turnwise.rollout.config import GroupRewardConfig, RolloutConfig
from turnwise.rollout.core import (
    MAX_FAILED_GROUPS,
    MAX_LOST_THREADS,
    REISSUES,
    EpisodeOutcome,
    EpisodePlayer,
    EpisodeSpec,
    MemberJournal,
    ReplayBuffer,
    RolloutManager,
    RolloutParts,
    RolloutRequest,
)
from turnwise.rollout.remote.service import RunnerHub, start_hub
from turnwise.rollout.replay.strategies import lacks_members
from turnwise.rollout.runner import EpisodeRunner
from turnwise.seeding import stable_hash
from turnwise.tasks.core import Task
from turnwise.tools.execute import ToolThreads
from turnwise.tools.response import finite
from turnwise.trajectory import Trajectory, TrajectoryGroup
from turnwise.types import StopReason

Write = Callable[[Trajectory], None]
GROUP_REWARD_TIMEOUT_S = 600.0
"""Seconds for the reward of one group."""


class GroupRewarder:
    """Applies one group reward function; concurrent calls are safe."""

    def __init__(self, config: GroupRewardConfig, *, write: Write | None, executor: Executor | None) -> None:
        """Load the function.

        Args:
            config: The function.
            write: Called with every final trajectory.
            executor: Runs a plain function.
        """
        where = "rollout.group_reward"
        self._function = load_function(config.function, config.arguments, where)
        try:
            inspect.signature(self._function).bind(None, [])
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{where}: {describe(self._function)} cannot be called as f(task, trajectories): {error}"
            ) from error
        self._config = config
        self._label = f"group reward {describe(self._function)}"
        self._write = write or (lambda _: None)
        # An environment of no episode, which lends its threads.
        self._lender = Env()
        self._lender.executor = executor
        self._waiting: defaultdict[str, list[Trajectory]] = defaultdict(list)
        self._journaled: defaultdict[str, list[Trajectory]] = defaultdict(list)

    def take(self, trajectory: Trajectory) -> None:
        """Hold a trajectory until its group is complete; write it at once if it failed."""
        if trajectory.error is not None or trajectory.stop_reason in (StopReason.ERROR, StopReason.CANCELLED):
            self._write(trajectory)
        else:
            self._waiting[trajectory.episode_id.rpartition("/")[0]].append(trajectory)

    def note_journaled(self, name: str, trajectories: Sequence[Trajectory]) -> None:
        """Note that these trajectories are in the journal."""
        ids = {trajectory.id for trajectory in trajectories}
        self._waiting[name] = [trajectory for trajectory in self._waiting[name] if trajectory.id not in ids]
        self._journaled[name] += trajectories

    async def reward(self, task: Task, group: TrajectoryGroup, name: str) -> TrajectoryGroup:
        """Add the function's rewards to the members' main trajectories, and write the group.

        Without main sessions the function is called for each set of trajectories that are compared.

        Returns:
            The group; without trajectories where the function failed.
        """
        skipped = group.partition == "val" and not self._config.in_evaluation
        for members in _comparison_groups(group.trajectories) if not skipped else ():
            began = time.monotonic()
            try:
                values = await self._values(task, members)
            except (EnvError, InferenceError) as error:
                self.abandon(name, f"{type(error).__name__}: {error}", StopReason.ERROR)
                episodes = {trajectory.episode_id for trajectory in group.trajectories}
                return replace(group, trajectories=[], failed=group.failed + len(episodes))
            for member, rewards in zip(members, values, strict=True):
                weight = self._config.weight
                member.metrics |= {f"group/{reward}": value for reward, value in rewards.items()}
                member.metrics["group/seconds"] = time.monotonic() - began
                member.rewards += [(None, reward, weight * value) for reward, value in rewards.items() if weight]
        for trajectory in (*self._journaled.pop(name, ()), *self._waiting.pop(name, ())):
            self._write(trajectory)
        return group

    def abandon(self, name: str, error: str, reason: StopReason, *, but_journaled: bool = False) -> None:
        """Write the held trajectories of a group that gets no reward.

        Args:
            name: Prefix of the group's episode ids in this process.
            error: Why.
            reason: Stop reason of its trajectories.
            but_journaled: Whether to skip those in the journal, which a later process continues with.
        """
        journaled = self._journaled.pop(name, [])
        for trajectory in (*([] if but_journaled else journaled), *self._waiting.pop(name, ())):
            trajectory.error, trajectory.stop_reason = clean(error), reason
            self._write(trajectory)

    async def _values(self, task: Task, members: Sequence[Trajectory]) -> list[dict[str, float]]:
        values: Any = await call_function(
            self._function,
            (task, list(members)),
            {},
            env=self._lender,
            what=self._label,
            timeout=GROUP_REWARD_TIMEOUT_S,
            inline=is_async(self._function),
        )
        if not isinstance(values, (list, tuple)) or len(values) != len(members):
            raise EnvError(
                f"{self._label} returned {shown(values)}: it must be a list with one entry for each of the "
                f"{len(members)} trajectories"
            )
        where = f"{self._label} returned"
        return [
            {name: finite(number, f"{where} {name!r}:") for name, number in named_numbers(value, where).items()}
            if isinstance(value, Mapping)
            else {"group": finite(value, where)}
            for value in values
        ]


def _comparison_groups(trajectories: Sequence[Trajectory]) -> list[list[Trajectory]]:
    """Return the trained policies' main trajectories as one list; without any, theirs by comparison group.

    Frozen policies are compared with nothing, even one that plays ``main``.
    """
    trained = [trajectory for trajectory in trajectories if not trajectory.frozen]
    main = [trajectory for trajectory in trained if trajectory.agent == "main"]
    if main:
        return [main]
    groups: defaultdict[str, list[Trajectory]] = defaultdict(list)
    for trajectory in trained:
        groups[trajectory.group_id].append(trajectory)
    return list(groups.values())


class FailureWatch:
    """Counts consecutive groups without any member left, and attempts in which the agent did not even begin."""

    def __init__(self) -> None:
        self._streak = 0
        self._unbegun: int | None = 0
        self._last_error = "unknown"

    def failed(self, error: str) -> None:
        """Note the error of an episode."""
        self._last_error = error

    def check_began(self, error: Exception | None, attempts: int) -> None:
        """Note how an attempt ended; raise TrainError where the first ``attempts`` all failed at the agent's start."""
        if self._unbegun is None or not (isinstance(error, TurnwiseError) and error.at_start):
            self._unbegun = None
            return
        self._unbegun += 1
        if self._unbegun >= attempts:
            raise TrainError(
                f"the agent began in no episode: the first {self._unbegun} attempts, as many as a group has with its "
                f"retries, all failed at its start, and the others would, too; the last one: {error}"
            ) from error

    def arrived(self, group: TrajectoryGroup) -> TrainError | None:
        """Note a finished group; return the error that ends the run, if any."""
        if group.partition != "train":
            return None
        self._streak = self._streak + 1 if lacks_members(group) else 0
        if self._streak < MAX_FAILED_GROUPS:
            return None
        return TrainError(
            f"every episode of {self._streak} groups in a row ended in an error; the last one: {self._last_error}"
        )


# How long a train step waits for the environments of what it cancelled: long enough for all that close at once.
_CLOSING_S = 1.0


@dataclass(frozen=True, slots=True)
class _GroupRollout:
    """A group that is rolled out.

    Attributes:
        group_id: The group; an earlier process may have begun it.
        name: Prefix of its episode ids in this process.
        restored: Trajectories of members that an earlier process finished.
        journal: The journal of its members, or None.
        rewarded: Whether an earlier process finished the whole group, its reward included.
    """

    request: RolloutRequest
    group_id: str
    name: str
    restored: dict[int, list[Trajectory]]
    journal: MemberJournal | None
    rewarded: bool = False


class _SettledObjects:
    """What was imported and loaded before the first producer: collections pass over it until the last one is closed.

    A full collection of a process with torch and transformers takes 0.1 s, in which every episode waits.
    """

    def __init__(self) -> None:
        self._producers = 0
        self._froze = False
        self._program_froze = False

    def enter(self) -> None:
        if not self._producers and not self._program_froze:
            # To count frozen objects takes as long as to collect them, so once suffices.
            self._program_froze = bool(gc.get_freeze_count())
            self._froze = not self._program_froze
            if self._froze:
                gc.collect()
                gc.freeze()
        self._producers += 1

    def leave(self) -> None:
        self._producers -= 1
        if not self._producers and self._froze:
            gc.unfreeze()
            self._froze = False


_SETTLED = _SettledObjects()


class RolloutProducer(RolloutManager):
    """Rolls out groups in this process. Use :meth:`create`."""

    def __init__(
        self,
        config: RolloutConfig,
        runner: EpisodePlayer,
        buffer: ReplayBuffer | None,
        parts: RolloutParts,
        threads: ToolThreads,
        rewarder: GroupRewarder | None = None,
        remote: RunnerHub | None = None,
    ) -> None:
        self._rewarder = rewarder
        self._remote = remote
        self._config = config
        self._runner = runner
        self._buffer = buffer
        self._parts = parts
        self._threads = threads
        self._slots = parts.slots or asyncio.Semaphore(config.concurrency)
        self._running: dict[str, asyncio.Task[None]] = {}
        self._claimed: set[str] = set()
        self._failures = FailureWatch()
        self._closing = False
        # Runners and workers that are lost say nothing against the episode.
        self._reissues = REISSUES if parts.workers is not None or config.remote is not None else 0
        _SETTLED.enter()

    @classmethod
    async def create(
        cls, config: RolloutConfig, client: LLMClient, buffer: ReplayBuffer | None, parts: RolloutParts
    ) -> Self:
        """Make a producer; asks the server for its context length."""
        info = await _model_info(client, parts)
        # Threads are made on demand: a run whose tools are all async has none.
        # One more than may be lost: losing that many ends the run, and until then no call waits for a lost thread.
        threads = ToolThreads(config.concurrency, max_lost=MAX_LOST_THREADS + 1)
        write, rewarder = parts.write, None
        if config.group_reward is not None:
            rewarder = GroupRewarder(config.group_reward, write=parts.write, executor=threads)
            write = rewarder.take
        if parts.workers is not None:
            pool = await parts.workers.open(config, write)
            return cls(config, pool, buffer, parts, threads, rewarder)
        runner = EpisodeRunner(
            config,
            client,
            parts.renderer,
            context_length=info.context_length,
            guides=info.guides,
            executor=threads,
            write=write,
            policy=parts.policy,
            policies=parts.policies,
            search=parts.search,
            recover=parts.recover,
        )
        await runner.prepare()
        remote = None
        if config.remote is not None:
            async with undo_on_error_async(runner.close):
                remote = await start_hub(config.remote, runner.gateway, parts.notify)
        return cls(config, runner, buffer, parts, threads, rewarder, remote)

    @property
    def config(self) -> RolloutConfig:
        """The rollout configuration."""
        return self._config

    @property
    def renderer(self) -> Renderer:
        """Messages to ids and back."""
        return self._parts.renderer

    def generate_sequences(self, requests: Sequence[RolloutRequest]) -> None:
        """Start rolling out; groups arrive in the buffer as they finish."""
        if self._buffer is None:
            raise TurnwiseError("this producer was made without a buffer: use gather()")
        for request, name in zip(requests, self._claim(requests), strict=True):
            task = asyncio.create_task(self._produce(request, name, self._buffer))
            self._running[request.key] = task
            task.add_done_callback(partial(self._ended, request.key))

    async def gather(
        self, requests: Sequence[RolloutRequest], on_group: Callable[[TrajectoryGroup], None] | None = None
    ) -> list[TrajectoryGroup]:
        """Roll out and return the groups in the order of the requests, bypassing the buffer (evaluation).

        Raises:
            TurnwiseError: A request repeats an earlier one: ids and seeds derive from task id, partition, epoch and
                tag, so its episodes would be the same.
        """

        async def one(request: RolloutRequest, name: str) -> TrajectoryGroup:
            group = await self._group(request, name)
            if on_group is not None:
                on_group(group)
            return group

        claimed = zip(requests, self._claim(requests), strict=True)
        try:
            async with asyncio.TaskGroup() as tasks:
                groups = [tasks.create_task(one(request, name)) for request, name in claimed]
        except ExceptionGroup as errors:
            raise first_of(errors) from errors
        return [group.result() for group in groups]

    async def cancel(self, keys: Collection[str]) -> frozenset[str]:
        """Cancel unfinished groups. Environments may still be closing on return, within their time for it."""
        # In the order in which they were requested, whatever the order of the keys.
        cancelled = {key: task for key, task in self._running.items() if key in keys}
        for task in cancelled.values():
            task.cancel()
        if cancelled:
            await asyncio.wait(cancelled.values(), timeout=_CLOSING_S)
        return frozenset(key for key, task in cancelled.items() if not task.done() or task.cancelled())

    async def close(self) -> None:
        """Cancel running episodes, wait for their environments to close, and release the threads."""
        if not self._closing:
            _SETTLED.leave()
        self._closing = True
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
        """Return the episode id prefixes of requests, all new, or claim none."""
        claimed: dict[str, RolloutRequest] = {}
        for request in requests:
            name = f"{self._parts.run_part}-{request.key}"
            if name in self._claimed or name in claimed:
                raise TurnwiseError(
                    f"task {request.task.id!r} was requested before in this run (partition {request.partition!r}, "
                    f"epoch {request.epoch}, tag {request.tag!r}): its episodes would have the same ids and seeds. "
                    "Give the task another id, or the request another epoch or tag"
                )
            claimed[name] = request
        self._claimed |= claimed.keys()
        return list(claimed)

    async def _produce(self, request: RolloutRequest, name: str, buffer: ReplayBuffer) -> None:
        try:
            rolling = self._parts.rolling
            with contextlib.nullcontext() if rolling is None else rolling(name):
                group = await self._group(request, name)
            await buffer.put(group)
            if (error := self._failures.arrived(group)) is not None:
                raise error
        except INTERRUPTS:
            raise
        except BaseException as error:  # noqa: BLE001 - a task's outermost boundary: who waits for groups must hear of it
            buffer.fail(first_of(error))

    async def _group(self, request: RolloutRequest, name: str) -> TrajectoryGroup:
        rollout = self._begin(request, name)
        rewarder = self._rewarder
        if rewarder is None or rollout.rewarded:
            return await self._members(rollout)
        try:
            for trajectories in rollout.restored.values():
                rewarder.note_journaled(name, trajectories)
            # The members' slots are free: other groups continue while this one is compared.
            return await rewarder.reward(request.task, await self._members(rollout), name)
        finally:
            why = "the group was cancelled before its group reward"
            rewarder.abandon(name, why, StopReason.CANCELLED, but_journaled=self._closing)

    def _begin(self, request: RolloutRequest, name: str) -> _GroupRollout:
        held_out = request.partition != "train"
        journal = self._parts.finished if held_out else self._parts.journal
        restored = None if journal is None else journal.restore(request.key)
        complete = restored is not None and len(restored.members) == request.group_size
        # Written members of a held-out group have their rewards, which were compared with all of it.
        if restored is None or (held_out and self._rewarder is not None and not complete):
            return _GroupRollout(request, name, name, {}, journal)
        return _GroupRollout(request, restored.group_id, name, restored.members, journal, held_out and complete)

    async def _members(self, rollout: _GroupRollout) -> TrajectoryGroup:
        request = rollout.request
        async with asyncio.TaskGroup() as members:
            running = [
                members.create_task(self._member(rollout, member))
                for member in range(request.group_size + request.greedy_baseline)
            ]
        finished = [task.result() for task in running]
        greedy = finished.pop() if request.greedy_baseline else None
        trajectories = [trajectory for member in finished if member is not None for trajectory in member]
        failed = sum(member is None for member in finished)
        return TrajectoryGroup(
            rollout.group_id,
            request.task.id,
            trajectories,
            request.partition,
            failed,
            request.task.source,
            greedy or [],
        )

    async def _member(self, rollout: _GroupRollout, member: int) -> list[Trajectory] | None:
        """Run one member with retries; None after the last failure. The index after the last is the greedy baseline."""
        if member in rollout.restored:
            return rollout.restored[member]
        request = rollout.request
        baseline = member == request.group_size
        seed = 0 if request.partition == "val" else self._parts.run_seed
        spec = EpisodeSpec(
            task=request.task,
            group_id=rollout.group_id,
            member=member,
            partition=request.partition,
            env_seed=stable_hash("reset", seed, request.task.id, request.epoch),
            sampling_seed=stable_hash("sampling", seed, request.task.id, request.epoch, request.tag, member),
            temperature=0.0 if baseline else request.temperature,
            baseline=baseline,
            episodes=rollout.name,
        )
        # A lost runner says nothing against the episode: it is counted apart from what fails.
        retries, lost = self._config.retries, self._reissues
        for attempt in itertools.count():
            async with self._slots:
                outcome = await self._attempt(replace(spec, attempt=attempt) if attempt else spec)
            error = outcome.error
            if isinstance(error, (DiskError, EndpointUnusable)):
                # Nothing of the episode's: no other one could be written down, or answered, either.
                raise error
            self._count_lost(error)
            self._failures.check_began(error, request.group_size * (self._config.retries + 1))
            if error is None:
                self._note(rollout, member, outcome.trajectories)
                return outcome.trajectories
            if isinstance(error, InferenceError) and self._parts.recover is not None:
                await self._parts.recover(error)
            if isinstance(error, RunnerDisconnected) and lost > 0:
                lost -= 1
                if self._buffer is not None and request.partition == "train":
                    self._buffer.reissued()
                continue
            if retries == 0 or not (isinstance(error, TurnwiseError) and error.retryable):
                break
            retries -= 1
        self._failures.failed(f"{type(error).__name__}: {error}")
        return None

    def _note(self, rollout: _GroupRollout, member: int, trajectories: list[Trajectory]) -> None:
        """Journal a finished member: from here on a kill does not lose it."""
        if rollout.journal is not None:
            pending = self._rewarder is not None
            rollout.journal.member(rollout.request.key, rollout.group_id, member, trajectories, pending=pending)
            if self._rewarder is not None and rollout.request.partition == "train":
                self._rewarder.note_journaled(rollout.name, trajectories)

    async def _attempt(self, spec: EpisodeSpec) -> EpisodeOutcome:
        if self._remote is None or not isinstance(self._runner, EpisodeRunner):
            return await self._runner.run(spec)
        # The episode begins when a runner is connected: waiting for one does not count towards its timeout.
        async with self._remote.acquire_runner() as agent:
            return await self._runner.run(spec, agent)

    def _count_lost(self, error: Exception | None) -> None:
        lost = self._threads.lost + self._runner.lost_threads
        if lost > MAX_LOST_THREADS:
            raise EnvError(
                f"{lost} abandoned threads still run code of tools or environments and cannot be "
                f"stopped; a run bears {MAX_LOST_THREADS}. Add time-outs to that code, or "
                f"make it async. The last error: {error or 'none'}"
            ) from error


async def _model_info(client: LLMClient, parts: RolloutParts) -> ModelInfo:
    """Ask the servers for what they serve; where one died meanwhile, once more when it is back."""
    try:
        return await client.model_info()
    except RequestRefused:
        raise
    except InferenceError as error:
        if parts.recover is None:
            raise
        await parts.recover(error)
        return await client.model_info()
