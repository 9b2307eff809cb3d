"""Where the doctor runs an environment: a thread with an event loop of its own.

Owns: :class:`Worker` and :class:`Stalled`. An environment that never returns, be it in a coroutine or in plain code,
holds that loop and nothing else, so whoever waits can give up. Refuses: killing threads; one that is held is left.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

from turnwise.errors import TurnwiseError

T = TypeVar("T")
_GRACE_S: Final = 1.0


class Stalled(TurnwiseError):
    """An operation did not return in time."""


class Worker:
    """A daemon thread that runs an event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="turnwise-doctor", daemon=True)
        self._thread.start()

    async def run(self, work: Coroutine[Any, Any, T], timeout: float, what: str) -> T:
        """Run a coroutine on the thread's loop.

        Args:
            work: The coroutine.
            timeout: Seconds after which it is given up.
            what: Its name, for the error.

        Raises:
            Stalled: It did not return in time.
        """
        running = asyncio.run_coroutine_threadsafe(work, self._loop)
        waiting = asyncio.wrap_future(running)
        try:
            done, _ = await asyncio.wait([waiting], timeout=timeout)
        except asyncio.CancelledError:
            running.cancel()
            raise
        if not done:
            running.cancel()
            waiting.cancel()
            raise Stalled(f"{what} took longer than {timeout:g} s")
        return waiting.result()

    async def close(self) -> None:
        """Cancel what still runs, and end the thread; one that plain code holds is left behind."""
        self._loop.call_soon_threadsafe(lambda: self._loop.create_task(self._finish()))
        ending = asyncio.get_running_loop().run_in_executor(None, self._thread.join, 2 * _GRACE_S)
        await asyncio.shield(ending)

    async def _finish(self) -> None:
        rest = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in rest:
            task.cancel()
        if rest:
            await asyncio.wait(rest, timeout=_GRACE_S)
        await self._loop.shutdown_asyncgens()
        self._loop.stop()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()
