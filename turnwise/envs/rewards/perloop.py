"""What belongs to an event loop: opened when it is first needed there, closed when the loop ends.

Owns: :class:`PerLoop`. Reward functions that a configuration describes live as long as the process, and nobody closes
them; what they hold (connections, processes) must not outlive the loop that it was made on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Held(Generic[T]):
    """One loop's value: what opens it, and whether its end has begun."""

    opened: asyncio.Future[T]
    keeper: AsyncGenerator[None, None] | None = None
    ended: bool = False


class PerLoop(Generic[T]):
    """A value for each event loop that asks.

    ``asyncio.run`` ends the asynchronous generators that were begun on its loop: such a one sees to the value's end.

    Args:
        open_value: Makes a value.
        close_value: Ends it.
    """

    def __init__(self, open_value: Callable[[], Awaitable[T]], close_value: Callable[[T], Awaitable[None]]) -> None:
        self._open = open_value
        self._close = close_value
        self._held: dict[asyncio.AbstractEventLoop, _Held[T]] = {}

    async def get(self) -> T:
        """Return this loop's value. Raises what opening it raised; the next call tries again."""
        loop = asyncio.get_running_loop()
        held = self._held.get(loop)
        if held is None:
            for ended in [other for other in self._held if other.is_closed()]:
                del self._held[ended]
            held = self._held[loop] = _Held(asyncio.ensure_future(self._opened()))
            held.keeper = self._keep(loop, held)
            await anext(held.keeper)
        try:
            # Shielded: who waits may be cancelled, others wait for the same value.
            return await asyncio.shield(held.opened)
        except BaseException:  # also a cancellation: what could not be opened is opened anew
            if held.opened.done() and self._held.get(loop) is held:
                del self._held[loop]
            raise

    async def close(self) -> None:
        """Close this loop's value; the next call of :meth:`get` opens another. Closing twice is no error."""
        loop = asyncio.get_running_loop()
        held = self._held.get(loop)
        if held is not None:
            await self._end(loop, held)

    async def drop(self, value: T) -> bool:
        """Close this loop's value where it still is this one, and return whether it was: of several who found it dead,
        the first drops it.
        """
        loop = asyncio.get_running_loop()
        held = self._held.get(loop)
        if held is None or not held.opened.done() or held.opened.cancelled() or held.opened.exception() is not None:
            return False
        if held.ended or held.opened.result() is not value:
            return False
        await self._end(loop, held)
        return True

    async def _opened(self) -> T:
        return await self._open()

    async def _keep(self, loop: asyncio.AbstractEventLoop, held: _Held[T]) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            await self._end(loop, held)

    async def _end(self, loop: asyncio.AbstractEventLoop, held: _Held[T]) -> None:
        # Whoever comes first: a loop that ends closes all that it keeps at the same time, and one may hold another.
        if held.ended:
            return
        held.ended = True
        if self._held.get(loop) is held:
            del self._held[loop]
        await asyncio.wait([held.opened])
        if not held.opened.cancelled() and held.opened.exception() is None:
            await self._close(held.opened.result())
