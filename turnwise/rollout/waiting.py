"""How code waits for a buffer to change, on the event loop or in a thread of its own.

Owns: :class:`Waiting`, which a buffer is besides. Refuses: what is waited for.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import threading
from collections.abc import Callable
from typing import TypeVar

from turnwise.errors import TrainError, TurnwiseError

T = TypeVar("T")

# Up to which change the code that runs has seen the buffer: what came since then ends its wait at once.
_SEEN: contextvars.ContextVar[int | None] = contextvars.ContextVar("turnwise_seen_change", default=None)


class _Call:
    """Blocking code in a thread, and whether anybody still wants its result."""

    def __init__(self) -> None:
        self.given_up = False


_CALL: contextvars.ContextVar[_Call | None] = contextvars.ContextVar("turnwise_blocking_call", default=None)


class Waiting:
    """Counts changes, and wakes who waits for the next one."""

    def __init__(self) -> None:
        self._error: BaseException | None = None
        # Set and replaced at every change: each waiter wakes once per change.
        self._changed = asyncio.Event()
        self._changes = 0
        self._reissued = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._blocked: set[concurrent.futures.Future[bool]] = set()
        self._lock = threading.Lock()

    async def changed(self, seconds: float | None = None) -> bool:
        """Wait until something has changed since this code last asked what is ``ready`` or ``flying``.

        Args:
            seconds: How long to wait at most; None waits for as long as it takes.

        Returns:
            Whether something has changed.

        Raises:
            TurnwiseError: No further group will come: the producer ended with this error.
        """
        seen = _SEEN.get()
        before = self._changes if seen is None else seen
        self._check()
        if before == self._changes:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._changed.wait()
            self._check()
        came = self._changes != before
        # Whoever waits twice without looking waits for two changes.
        self._see()
        return came

    def wait(self, seconds: float | None = None) -> bool:
        """Wait as :meth:`changed` does, in a thread: what a plain ``def sample`` calls.

        Args:
            seconds: How long to wait at most; None waits for as long as it takes.

        Returns:
            Whether something has changed.

        Raises:
            TrainError: It would block the event loop.
            TurnwiseError: As :meth:`changed`.
        """
        loop = self._loop
        if loop is None or _running() is loop:
            raise TrainError("wait() would block the run for ever: in an async def, await self.changed() instead")
        with self._lock:
            # Who was cancelled while this computed has looked for what waits already.
            if (call := _CALL.get()) is not None and call.given_up:
                raise concurrent.futures.CancelledError
            blocked = asyncio.run_coroutine_threadsafe(self.changed(seconds), loop)
            self._blocked.add(blocked)
        try:
            came = blocked.result()
            self._see()
        finally:
            with self._lock:
                self._blocked.discard(blocked)
        return came

    def reissued(self) -> None:
        """Count what is played anew because whoever had it was lost."""
        self._reissued += 1

    async def in_thread(self, call: Callable[[], T]) -> T:
        """Run blocking code in a thread. When this is cancelled its wait ends, and it changes nothing any more."""
        self._loop = asyncio.get_running_loop()
        mine = _Call()
        token = _CALL.set(mine)
        try:
            return await asyncio.to_thread(call)
        except asyncio.CancelledError:
            with self._lock:
                mine.given_up = True
                blocked = list(self._blocked)
            for each in blocked:
                each.cancel()
            raise
        finally:
            _CALL.reset(token)

    def _on_loop(self, act: Callable[[], T]) -> T:
        """Do something on the event loop, whoever asks: a buffer is changed nowhere else."""
        loop = self._loop
        if loop is None or _running() is loop:
            return act()

        call = _CALL.get()

        async def acting() -> tuple[T] | None:
            return None if call is not None and call.given_up else (act(),)

        done = asyncio.run_coroutine_threadsafe(acting(), loop).result()
        if done is None:
            raise concurrent.futures.CancelledError
        return done[0]

    def _see(self) -> None:
        _SEEN.set(self._changes)

    def _notify(self) -> None:
        self._changes += 1
        self._changed.set()
        self._changed = asyncio.Event()

    def _counted_reissues(self) -> int:
        """Return how many there were since this was last asked."""
        count, self._reissued = self._reissued, 0
        return count

    def _check(self) -> None:
        error = self._error
        if isinstance(error, TurnwiseError):
            raise error
        if error is not None:
            raise TrainError(f"rollouts ended: {type(error).__name__}: {error}") from error


def _running() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
