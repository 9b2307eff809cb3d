"""What a rollout manager that was written elsewhere puts its groups into.

Owns: :class:`CheckedBuffer`, which looks at them before they count. Refuses: keeping them (``replay.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from turnwise.errors import TrainError, shown
from turnwise.rollout.core import BatchRef, ReplayBuffer, RolloutRequest
from turnwise.rollout.members import FailureWatch
from turnwise.rollout.strategies import GroupFacts
from turnwise.trajectory import Trajectory, TrajectoryGroup


class CheckedBuffer(ReplayBuffer):
    """A buffer that looks at what a manager from elsewhere puts into it, and writes what that did not write.

    Args:
        inner: Keeps the groups.
        write: Called with every trajectory that is put and was not written before.
        most: How many groups in a row without a member end the run.
        waited_for: Whether somebody waits for a group; of one that comes too late nothing is taken.
        unclaimed: Told which trajectories were written and are in no group that was taken.
    """

    def __init__(
        self,
        inner: ReplayBuffer,
        write: Callable[[Trajectory], None] | None,
        *,
        most: int,
        waited_for: Callable[[TrajectoryGroup], bool] | None = None,
        unclaimed: Callable[[Collection[str]], object] | None = None,
    ) -> None:
        self._inner = inner
        self._waited_for = waited_for
        self._unclaimed = unclaimed
        self._write = write
        self._failures = FailureWatch(most)
        # Only of groups that have not been put yet.
        self._written: set[str] = set()

    def write(self, trajectory: Trajectory) -> None:
        """Write a trajectory, and remember that it is written."""
        self._written.add(trajectory.id)
        if trajectory.error is not None:
            self._failures.failed(trajectory.error)
        if self._write is not None:
            self._write(trajectory)

    async def put(self, group: TrajectoryGroup) -> None:
        """Take a finished group.

        Raises:
            TrainError: It is none, or its trajectories are.
        """
        for value, kind in [(group, TrajectoryGroup), *((each, Trajectory) for each in _members(group))]:
            if not isinstance(value, kind):
                raise TrainError(
                    f"the replay buffer was given {shown(value)} where a {kind.__name__} belongs: put TrajectoryGroups "
                    "of Trajectories, whose segments a Session recorded"
                )
        if self._waited_for is not None and not self._waited_for(group):
            self._forget({each.id for each in _members(group)} & self._written)
            return
        for trajectory in _members(group):
            if trajectory.id not in self._written:
                self.write(trajectory)
            self._written.discard(trajectory.id)
        await self._inner.put(group)
        if (error := self._failures.arrived(group)) is not None:
            self.fail(error)

    def close(self) -> None:
        """Tell what was written and put into no group."""
        self._forget(set(self._written))

    def _forget(self, names: set[str]) -> None:
        self._written -= names
        if self._unclaimed is not None:
            self._unclaimed(names)

    async def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[BatchRef, dict[str, float]]:
        """Wait for and hand out groups."""
        return await self._inner.sample(global_steps, partition_id, batch_size)

    async def fetch(self, ref: BatchRef, fields: Sequence[str] | None = None) -> list[TrajectoryGroup]:
        """Return the groups of a batch."""
        return await self._inner.fetch(ref, fields)

    async def release(self, ref: BatchRef) -> None:
        """Forget a batch."""
        await self._inner.release(ref)

    def fail(self, error: BaseException) -> None:
        """Make every waiting and later ``sample`` raise."""
        self._inner.fail(error)

    def expect(self, request: RolloutRequest, version: int) -> bool:
        """Learn that a group was asked for."""
        return self._inner.expect(request, version)

    def refill_by(self, refill: Callable[[int], bool]) -> None:
        """Set who asks for further groups."""
        self._inner.refill_by(refill)

    def drops_to(self, told: Callable[[GroupFacts, str], None]) -> None:
        """Set who is told of groups that will never be trained."""
        self._inner.drops_to(told)

    def reissued(self) -> None:
        """Count what is played anew."""
        self._inner.reissued()

    def discard(self, keys: Collection[str], why: str) -> None:
        """Forget groups that were asked for."""
        self._inner.discard(keys, why)


def _members(group: Any) -> Iterator[Any]:
    if isinstance(group, TrajectoryGroup):
        yield from group.trajectories
        yield from group.baselines
