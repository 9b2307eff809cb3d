"""The replay buffer of one process.

Owns: :class:`LocalReplayBuffer`. Nothing polls: whoever waits is woken by the event it waits for. Refuses: staleness
and filters, which belong to loops that need them.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from turnwise.errors import TrainError, TurnwiseError
from turnwise.rollout.core import BatchRef, ReplayBuffer
from turnwise.trajectory import Trajectory, TrajectoryGroup

PARTITIONS = ("train", "val")
FIELDS = ("tokens", "rewards", "metrics", "messages")


class LocalReplayBuffer(ReplayBuffer):
    """Keeps finished groups in memory, per partition, in the order in which they arrive.

    Args:
        order: How the groups of one batch are ordered: ``arrival``, or ``id`` for an order that does not depend on
            which episode ended first, so that a synchronous run is repeatable.
    """

    def __init__(self, *, order: Literal["arrival", "id"] = "arrival") -> None:
        self._order = order
        self._waiting: dict[str, deque[TrajectoryGroup]] = {name: deque() for name in PARTITIONS}
        self._batches: dict[int, list[TrajectoryGroup]] = {}
        self._next_batch = 0
        self._error: BaseException | None = None
        # Set and replaced at every change: each waiter wakes once per change.
        self._changed = asyncio.Event()

    async def put(self, group: TrajectoryGroup) -> None:
        """Take a finished group.

        Raises:
            TrainError: Its partition is unknown.
        """
        self._partition(group.partition).append(group)
        self._notify()

    async def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[BatchRef, dict[str, float]]:
        """Wait for and hand out the ``batch_size`` groups of a partition that arrived first.

        Returns:
            The batch, and ``replay/wait_s`` (seconds waited), ``replay/left`` (groups of the partition that remain),
            ``replay/failed`` (members of the batch's groups that ended in an error).

        Raises:
            TurnwiseError: What :meth:`fail` was given.
            TrainError: An unknown partition or a batch size below 1.
        """
        if batch_size < 1:
            raise TrainError(f"step {global_steps} asks for {batch_size} groups; a batch has at least 1")
        waiting = self._partition(partition_id)
        started = time.monotonic()
        while self._error is None and len(waiting) < batch_size:
            await self._changed.wait()
        if self._error is not None:
            if isinstance(self._error, TurnwiseError):
                raise self._error
            raise TrainError(
                f"rollouts ended at step {global_steps}: {type(self._error).__name__}: {self._error}"
            ) from self._error
        groups = [waiting.popleft() for _ in range(batch_size)]
        if self._order == "id":
            groups.sort(key=lambda group: group.id)
        ref = BatchRef(self._next_batch, tuple(group.id for group in groups))
        self._next_batch += 1
        self._batches[ref.id] = groups
        return ref, {
            "replay/wait_s": time.monotonic() - started,
            "replay/left": float(len(waiting)),
            "replay/failed": float(sum(group.failed for group in groups)),
        }

    async def fetch(self, ref: BatchRef, fields: Sequence[str] | None = None) -> list[TrajectoryGroup]:
        """Return the groups of a batch, in its order.

        Args:
            ref: The batch.
            fields: Which of ``tokens``, ``rewards``, ``metrics`` and ``messages`` the trajectories keep; None keeps
                all. Without ``tokens`` they have no segments.

        Raises:
            TrainError: The batch is unknown or released, or a field is unknown.
        """
        if ref.id not in self._batches:
            raise TrainError(f"batch {ref.id} is not in the buffer: it was released or never handed out")
        groups = self._batches[ref.id]
        if fields is None:
            return list(groups)
        if unknown := [name for name in fields if name not in FIELDS]:
            raise TrainError(f"fields holds {unknown[0]!r}; allowed: {', '.join(FIELDS)}")
        wanted = frozenset(fields)
        return [
            replace(
                group,
                trajectories=[_reduce(member, wanted) for member in group.trajectories],
                baselines=[_reduce(member, wanted) for member in group.baselines],
            )
            for group in groups
        ]

    async def release(self, ref: BatchRef) -> None:
        """Forget a batch. Releasing twice is no error."""
        self._batches.pop(ref.id, None)

    def fail(self, error: BaseException) -> None:
        """Make every waiting and later ``sample`` raise; the first error counts. From the loop's thread only."""
        if self._error is None:
            self._error = error
        self._notify()

    def _partition(self, name: str) -> deque[TrajectoryGroup]:
        if name not in self._waiting:
            raise TrainError(f"partition is {name!r}; allowed: {', '.join(PARTITIONS)}")
        return self._waiting[name]

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _reduce(trajectory: Trajectory, fields: frozenset[str]) -> Trajectory:
    segments = trajectory.segments if "tokens" in fields else []
    if "messages" not in fields:
        segments = [replace(segment, messages=(), tools=None) for segment in segments]
    return replace(
        trajectory,
        segments=segments,
        rewards=trajectory.rewards if "rewards" in fields else [],
        metrics=trajectory.metrics if "metrics" in fields else {},
    )
