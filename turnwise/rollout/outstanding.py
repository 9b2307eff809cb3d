"""Leases on requests that a custom rollout manager works on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable
from typing import Protocol

from turnwise.rollout.core import RolloutRequest
from turnwise.trajectory import TrajectoryGroup


class Timer(Protocol):
    """A scheduled call."""

    def when(self) -> float:
        """Time of the call."""

    def cancel(self) -> None:
        """Cancel the call."""


class Clock(Protocol):
    """The clock of an event loop."""

    def time(self) -> float:
        """Return seconds."""

    def call_at(self, when: float, callback: Callable[[], None]) -> Timer:
        """Schedule a call."""


class LeaseTable:
    """Leases by name, with their expiry."""

    def __init__(self) -> None:
        # Name -> (how long it is good for without a beat, when it runs out).
        self._held: dict[str, tuple[float, float]] = {}

    def grant(self, name: str, now: float, seconds: float) -> None:
        """Grant or replace a lease."""
        self._held[name] = (seconds, now + seconds)

    def heartbeat(self, name: str, now: float) -> bool:
        """Renew a lease; False where it expired or never existed."""
        if name not in self._held or self._held[name][1] <= now:
            return False
        seconds, _ = self._held[name]
        self._held[name] = (seconds, now + seconds)
        return True

    def done(self, name: str) -> bool:
        """End a lease; False where there is none."""
        return self._held.pop(name, None) is not None

    def renew(self, now: float) -> None:
        """Renew all leases."""
        self._held = {name: (seconds, now + seconds) for name, (seconds, _) in self._held.items()}

    def expired(self, now: float) -> list[str]:
        """Remove expired leases; return their names in the order of expiry."""
        over = sorted((until, name) for name, (_, until) in self._held.items() if until <= now)
        for _, name in over:
            del self._held[name]
        return [name for _, name in over]

    @property
    def next_expiry(self) -> float | None:
        """The earliest expiry."""
        return min((until for _, until in self._held.values()), default=None)


class Leases:
    """Leases with a timer that reports each expiry.

    Args:
        seconds: Duration of a lease without a heartbeat.
        lost: Called with the name of an expired lease.
        clock: By default the running event loop.
    """

    def __init__(self, seconds: float, lost: Callable[[str], None], clock: Clock | None = None) -> None:
        self._seconds = seconds
        self._lost = lost
        self._clock = clock
        self._table = LeaseTable()
        self._timer: Timer | None = None
        self._due = 0.0

    def grant(self, name: str) -> None:
        """Grant a lease."""
        clock = self._time()
        self._table.grant(name, clock.time(), self._seconds)
        # All leases are equally long: the newest is the last to run out.
        if self._timer is None:
            self._arm()

    def heartbeat(self, name: str) -> bool:
        """Renew a lease; False where it expired or never existed."""
        return self._table.heartbeat(name, self._time().time())

    def done(self, name: str) -> bool:
        """End a lease; False where there is none."""
        return self._table.done(name)

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _time(self) -> Clock:
        if self._clock is None:
            self._clock = asyncio.get_running_loop()
        return self._clock

    def _arm(self) -> None:
        when = self._table.next_expiry
        if when is not None:
            self._due = when
            self._timer = self._time().call_at(when, self._fire)

    def _fire(self) -> None:
        """Report expired leases and set the timer anew."""
        self._timer = None
        now = self._time().time()
        if now - self._due > self._seconds / 10:
            # This process was blocked, so no heartbeat could arrive in the meantime.
            self._table.renew(now)
        over = self._table.expired(now)
        self._arm()
        for name in over:
            self._lost(name)


class OutstandingRequests:
    """Requests whose groups have not arrived, under leases.

    Args:
        seconds: Duration of a lease without a heartbeat.
        say: Called with messages for the user.
        clock: By default the running event loop.
    """

    def __init__(self, seconds: float, say: Callable[[str], None], clock: Clock | None = None) -> None:
        self._out: dict[str, RolloutRequest] = {}
        self._seconds = seconds
        self._say = say
        self._again: Callable[[RolloutRequest], None] | None = None
        self._leases = Leases(seconds, self._lost, clock)

    def reissue_by(self, again: Callable[[RolloutRequest], None]) -> None:
        """Set the callback that rolls out a request whose lease expired."""
        self._again = again

    def add(self, requests: Iterable[RolloutRequest]) -> None:
        """Add requests."""
        for request in requests:
            self._out[request.key] = request
            self._leases.grant(request.key)

    def heartbeat(self, request: RolloutRequest) -> bool:
        """Renew the lease of a request; False where its group is not expected."""
        return self._leases.heartbeat(request.key)

    def arrived(self, group: TrajectoryGroup) -> bool:
        """Note an arrived group; False where it is not expected: another attempt was faster."""
        asked = (
            key
            for key, each in self._out.items()
            if each.task.id == group.task_id and each.partition == group.partition
        )
        key = next(asked, None)
        if key is None:
            self._say(f"group {group.id} of task {group.task_id} arrived late: another attempt finished first")
            return False
        self.remove([key])
        return True

    def remove(self, keys: Collection[str]) -> None:
        """Remove requests."""
        for key in keys:
            self._out.pop(key, None)
            self._leases.done(key)

    def close(self) -> None:
        """Stop all leases."""
        self._leases.close()

    def _lost(self, key: str) -> None:
        request = self._out[key]
        self._say(f"task {request.task.id}: no heartbeat for {self._seconds:g} s, so it is issued again")
        if self._again is not None:
            self._again(request)
