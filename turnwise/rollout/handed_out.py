"""Requests in the hands of a rollout manager that was written elsewhere, under a lease.

Owns: :class:`HandedOut`: which requests are out, which lease ran out, and which group comes too late. Refuses: asking
again (``managers.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from turnwise.rollout.core import RolloutRequest
from turnwise.rollout.leases import Clock, Leases
from turnwise.trajectory import TrajectoryGroup


class HandedOut:
    """Watches over requests until their groups arrive.

    Args:
        seconds: How long a request may go without a beat.
        say: Told what a person should know.
        clock: By default the running event loop.
    """

    def __init__(self, seconds: float, say: Callable[[str], None], clock: Clock | None = None) -> None:
        self._out: dict[str, RolloutRequest] = {}
        self._seconds = seconds
        self._say = say
        self._again: Callable[[RolloutRequest], None] | None = None
        self._leases = Leases(seconds, self._lost, clock)

    def reissue_by(self, again: Callable[[RolloutRequest], None]) -> None:
        """Set who has a request rolled out anew whose lease ran out."""
        self._again = again

    def give(self, requests: Iterable[RolloutRequest]) -> None:
        """Note that requests were handed out."""
        for request in requests:
            self._out[request.key] = request
            self._leases.grant(request.key)

    def beat(self, request: RolloutRequest) -> bool:
        """Note that somebody works on a request; False where nobody waits for it."""
        return self._leases.beat(request.key)

    def arrived(self, group: TrajectoryGroup) -> bool:
        """Note that a group is there; False where nobody waits for it: another attempt was faster."""
        asked = (
            key
            for key, each in self._out.items()
            if each.task.id == group.task_id and each.partition == group.partition
        )
        key = next(asked, None)
        if key is None:
            self._say(f"group {group.id} of task {group.task_id} came too late: another attempt was faster")
            return False
        self.forget([key])
        return True

    def forget(self, keys: Collection[str]) -> None:
        """Wait for requests no longer."""
        for key in keys:
            self._out.pop(key, None)
            self._leases.done(key)

    def close(self) -> None:
        """Watch no longer."""
        self._leases.close()

    def _lost(self, key: str) -> None:
        request = self._out[key]
        self._say(f"task {request.task.id}: no sign of life for {self._seconds:g} s, so it is given out again")
        if self._again is not None:
            self._again(request)
