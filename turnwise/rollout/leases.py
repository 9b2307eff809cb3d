"""Leases: what others work on, and is taken from them when their heartbeat stays out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Leases(Generic[T]):
    """Leases of equal duration by name, with one timer that reports each expiry.

    Args:
        seconds: Duration of a lease without a heartbeat.
        expired: Called with the subject of an expired lease, which is no longer leased.
        clock: By default the running event loop.

    Attributes:
        seconds: Duration of a lease without a heartbeat.
        expired: As given; may be set later.
    """

    def __init__(
        self, seconds: float, expired: Callable[[T], None], clock: asyncio.AbstractEventLoop | None = None
    ) -> None:
        self.seconds = seconds
        self.expired = expired
        self._clock = clock
        self._subjects: dict[str, T] = {}
        self._expiry: dict[str, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def subjects(self) -> list[T]:
        """What is leased, in the order of the grants."""
        return list(self._subjects.values())

    def grant(self, name: str, subject: T) -> None:
        """Grant or replace a lease."""
        self._subjects[name] = subject
        self._expiry[name] = self._loop().time() + self.seconds
        # All leases are equally long: the newest is the last to expire.
        if self._timer is None:
            self._arm()

    def heartbeat(self, name: str) -> bool:
        """Renew a lease; False where it expired or never existed."""
        now = self._loop().time()
        if self._expiry.get(name, now) <= now:
            return False
        self._expiry[name] = now + self.seconds
        return True

    def end(self, name: str) -> bool:
        """End a lease; False where there is none."""
        self._expiry.pop(name, None)
        return self._subjects.pop(name, None) is not None

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _loop(self) -> asyncio.AbstractEventLoop:
        if self._clock is None:
            self._clock = asyncio.get_running_loop()
        return self._clock

    def _arm(self) -> None:
        if self._expiry:
            self._timer = self._loop().call_at(min(self._expiry.values()), self._report)

    def _report(self) -> None:
        """Report expired leases and set the timer again."""
        now = self._loop().time()
        if self._timer is not None and now - self._timer.when() > self.seconds / 10:
            # This process was blocked, so no heartbeat could arrive in the meantime.
            self._expiry = dict.fromkeys(self._expiry, now + self.seconds)
        self._timer = None
        names = sorted((name for name, until in self._expiry.items() if until <= now), key=self._expiry.__getitem__)
        subjects = [self._subjects.pop(name) for name in names]
        for name in names:
            del self._expiry[name]
        self._arm()
        for subject in subjects:
            self.expired(subject)
