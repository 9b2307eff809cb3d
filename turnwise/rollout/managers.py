"""Creation of a run's rollout manager, and the adapter around custom ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any, TypeAlias, TypeVar

from pydantic import BaseModel

from turnwise.config import load_config
from turnwise.errors import ConfigError, TrainError, TurnwiseError, shown, user_code
from turnwise.model.core import LLMClient, Renderer
from turnwise.plugins import check_contract, find_class, registering
from turnwise.rollout.config import RolloutConfig
from turnwise.rollout.core import BatchRef, OnGroup, ReplayBuffer, RolloutManager, RolloutParts, RolloutRequest
from turnwise.rollout.producer import FailureWatch, RolloutProducer
from turnwise.rollout.replay.buffer import LocalReplayBuffer
from turnwise.trajectory import Trajectory, TrajectoryGroup


class ValidatingBuffer(ReplayBuffer):
    """A buffer that validates the groups of a custom manager, and writes trajectories that it did not write.

    Args:
        write: Called with every trajectory that is put unwritten.
        unclaimed: Called with trajectories that were written and are in no group.
    """

    def __init__(
        self,
        inner: ReplayBuffer,
        write: Callable[[Trajectory], None] | None,
        unclaimed: Callable[[Collection[str]], object] | None = None,
    ) -> None:
        self._inner = inner
        self._unclaimed = unclaimed
        self._write = write
        self._failures = FailureWatch()
        # Only of groups that have not been put yet.
        self._written: set[str] = set()

    def write(self, trajectory: Trajectory) -> None:
        """Write a trajectory and remember it."""
        self._written.add(trajectory.id)
        if trajectory.error is not None:
            self._failures.failed(trajectory.error)
        if self._write is not None:
            self._write(trajectory)

    async def put(self, group: TrajectoryGroup) -> None:
        """Validate and store a finished group."""
        for value, kind in [(group, TrajectoryGroup), *((trajectory, Trajectory) for trajectory in _members(group))]:
            if not isinstance(value, kind):
                raise TrainError(
                    f"the replay buffer got {shown(value)} instead of a {kind.__name__}: put TrajectoryGroups "
                    "of Trajectories, whose segments a Session recorded"
                )
        for trajectory in _members(group):
            if trajectory.id not in self._written:
                self.write(trajectory)
            self._written.discard(trajectory.id)
        await self._inner.put(group)
        if (error := self._failures.arrived(group)) is not None:
            self.fail(error)

    def close(self) -> None:
        """Report trajectories that were written and put into no group."""
        if self._unclaimed is not None:
            self._unclaimed(self._written)

    async def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[BatchRef, dict[str, float]]:
        """Wait for and hand out groups."""
        return await self._inner.next_batch(global_steps, partition_id, batch_size)

    async def fetch(self, ref: BatchRef, fields: Sequence[str] | None = None) -> list[TrajectoryGroup]:
        """Return the groups of a batch."""
        return await self._inner.fetch(ref, fields)

    async def release(self, ref: BatchRef) -> None:
        """Forget a batch."""
        await self._inner.release(ref)

    def fail(self, error: BaseException) -> None:
        """Make every waiting and later ``sample`` raise."""
        self._inner.fail(error)

    def discard(self, keys: Collection[str], why: str) -> None:
        """Forget requests."""
        self._inner.discard(keys, why)


def _members(group: Any) -> Iterator[Any]:
    if isinstance(group, TrajectoryGroup):
        yield from group.trajectories
        yield from group.baselines


KEY = "rollout.agent_loop_manager_class"


def check_manager(config: RolloutConfig, custom: Mapping[str, Any]) -> type[RolloutManager] | None:
    """Check the configured manager and its ``custom`` section; return its class, if one is named."""
    reference = config.agent_loop_manager_class
    if reference is None:
        return None
    manager_class = check_contract(RolloutManager, f"{KEY} {reference!r}", find_class(reference, MANAGERS, KEY))
    if asyncio.iscoroutinefunction(manager_class.generate_sequences):
        raise ConfigError(f"{KEY} {reference!r}: generate_sequences is async: start tasks in it and return at once")
    _settings(manager_class, reference, custom)
    return manager_class


MANAGERS: dict[str, type[Any]] = {}
"""Custom rollout managers by the name that ``rollout.agent_loop_manager_class`` uses."""

M = TypeVar("M", bound=type[Any])


def register_manager(name: str) -> Callable[[M], M]:
    """Register a rollout manager's class for ``rollout.agent_loop_manager_class``.

    Raises:
        RegistryError: The name is taken, or the class is no rollout manager.
    """
    check = partial(check_contract, RolloutManager, f"the rollout manager {name!r}")
    return registering(name, MANAGERS, "rollout manager", check)


async def create_manager(
    config: RolloutConfig, client: LLMClient, buffer: ReplayBuffer | None, parts: RolloutParts
) -> Rollouts:
    """Make the rollout manager of a run: the package's own, or the configured one.

    Args:
        config: The rollout configuration; may name the class.
        client: The inference client.
        buffer: Destination of finished groups; None where the run only gathers.
        parts: Further parts of the run.
    """
    manager_class = check_manager(config, parts.custom)
    if manager_class is None:
        return await RolloutProducer.create(config, client, buffer, parts)
    reference = str(config.agent_loop_manager_class)
    unclaimed = None if parts.journal is None else parts.journal.unclaimed.update
    checked = ValidatingBuffer(buffer or LocalReplayBuffer(), parts.write, unclaimed)
    parts = replace(parts, write=checked.write, settings=_settings(manager_class, reference, parts.custom))
    with user_code(ConfigError, f"{KEY} {reference!r}: create failed:"):
        inner = await manager_class.create(config, client, checked, parts)
    if not isinstance(inner, manager_class):
        raise ConfigError(f"{KEY} {reference!r}: create returned {shown(inner)}, not a {manager_class.__qualname__}")
    return CustomManager(inner, config, checked, parts.renderer)


class CustomManager:
    """Adapter around a custom rollout manager.

    Validates its groups and writes trajectories that it did not write itself. A task started by its
    ``generate_sequences`` that fails ends the run, and is cancelled at the end. Evaluation goes through the buffer.

    Attributes:
        config: The rollout configuration.
        renderer: Messages to ids and back.
    """

    def __init__(
        self, inner: RolloutManager, config: RolloutConfig, buffer: ValidatingBuffer, renderer: Renderer
    ) -> None:
        self.config = config
        self.renderer = renderer
        self._inner = inner
        self._buffer = buffer
        self._started: set[asyncio.Task[Any]] = set()

    def generate_sequences(self, requests: Sequence[RolloutRequest]) -> None:
        """Have the manager start rolling out."""
        tasks_before = asyncio.all_tasks()
        with user_code(TrainError, f"{self._name}.generate_sequences raised"):
            self._inner.generate_sequences(list(requests))
        for task in asyncio.all_tasks() - tasks_before:
            self._started.add(task)
            task.add_done_callback(self._ended)

    async def gather(
        self, requests: Sequence[RolloutRequest], on_group: OnGroup | None = None
    ) -> list[TrajectoryGroup]:
        """Roll out through the buffer and return the groups in the order of the requests.

        Requests of one tag and epoch are one batch, in which groups are matched by task.
        """
        groups: list[TrajectoryGroup] = []
        for _, batch in groupby(requests, key=lambda request: (request.partition, request.epoch, request.tag)):
            groups += await self._batch(list(batch), on_group)
        return groups

    async def _batch(self, requests: list[RolloutRequest], on_group: OnGroup | None) -> list[TrajectoryGroup]:
        task_ids = {request.task.id for request in requests}
        if len(task_ids) < len(requests):
            raise TurnwiseError(
                f"{len(requests) - len(task_ids)} tasks have the id of another task: their groups could not be told "
                "apart"
            )
        buffer, partition = self._buffer, requests[0].partition
        by_task: dict[str, TrajectoryGroup] = {}
        self.generate_sequences(requests)
        while len(by_task) < len(requests):
            ref, _ = await buffer.sample(0, partition, 1)
            [group] = await buffer.fetch(ref)
            await buffer.release(ref)
            if group.task_id not in task_ids or group.task_id in by_task:
                what = "a second time" if group.task_id in by_task else "that was not requested"
                raise TrainError(
                    f"{self._name} put a group of task {group.task_id!r} into partition {partition!r} {what}: each "
                    "request has exactly one group, with the request's task id"
                )
            by_task[group.task_id] = group
            if on_group is not None:
                on_group(group)
        return [by_task[request.task.id] for request in requests]

    async def cancel(self, keys: Collection[str]) -> frozenset[str]:
        """Cancel unfinished groups, where the manager can; return their keys."""
        with user_code(TrainError, f"{self._name}.cancel raised"):
            return await self._inner.cancel(keys)

    async def close(self) -> None:
        """Close the manager, and cancel its tasks."""
        for task in self._started:
            task.remove_done_callback(self._ended)
        try:
            await self._inner.close()
        finally:
            unfinished = [task for task in self._started if not task.done()]
            for task in unfinished:
                task.cancel()
            await asyncio.gather(*unfinished, return_exceptions=True)
            self._started.clear()
            self._buffer.close()

    @property
    def _name(self) -> str:
        return type(self._inner).__qualname__

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._started.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if isinstance(error, TurnwiseError):
            self._buffer.fail(error)
        elif error is not None:
            failure = TrainError(f"{self._name}: a task that it started raised {type(error).__name__}: {error}")
            failure.__cause__ = error
            self._buffer.fail(failure)


Rollouts: TypeAlias = RolloutProducer | CustomManager
"""A rollout manager as training and evaluation use it, which also rolls out groups of an evaluation."""


def _settings(cls: type[RolloutManager], reference: str, custom: Mapping[str, Any]) -> BaseModel | None:
    model = cls.custom_model
    if model is None:
        return None
    if not (isinstance(model, type) and issubclass(model, BaseModel)):
        raise ConfigError(f"{KEY} {reference!r}: custom_model is {shown(model)}, not a pydantic model")
    try:
        return load_config(model, defaults=custom)
    except ConfigError as error:
        raise ConfigError(f"custom, as {reference} reads it: {error}") from error
