"""Limits of time for what is done with every request.

Owns: :func:`within` and :class:`Deadline`. Nearly every body is there before it is asked for, and nearly every answer
is taken at once: ``asyncio.timeout`` alone would take longer than either.
"""

from __future__ import annotations

import asyncio
import types
from collections.abc import Coroutine, Generator
from typing import Any, TypeVar

_T = TypeVar("_T")


async def within(seconds: float, work: Coroutine[Any, Any, _T]) -> _T:
    """Await a coroutine, at most so many seconds from where it first waits for something.

    Raises:
        TimeoutError: It took longer, and was cancelled.
    """
    try:
        awaited = work.send(None)
    except StopIteration as done:
        result: _T = done.value
        return result
    async with asyncio.timeout(seconds):
        return await _rest(work, awaited)


class Deadline:
    """Cancels a task when its time is over, until closed.

    Args:
        task: The task.
        seconds: From now on.
    """

    __slots__ = ("_passed", "_task", "_timer")

    def __init__(self, task: asyncio.Task[Any], seconds: float) -> None:
        self._task = task
        self._passed = False
        self._timer = task.get_loop().call_later(seconds, self._pass)

    def close(self) -> None:
        """Cancel nothing any more."""
        self._timer.cancel()

    def ended(self) -> bool:
        """Return whether this, and nobody else, cancelled the task, which then goes on as if nobody had."""
        passed, self._passed = self._passed, False
        return passed and self._task.uncancel() == 0

    def _pass(self) -> None:
        self._passed = True
        self._task.cancel()


@types.coroutine
def _rest(work: Coroutine[Any, Any, _T], awaited: Any) -> Generator[Any, Any, _T]:
    """Go on with a coroutine that has begun, and waits for something."""
    while True:
        failed: BaseException | None = None
        sent = None
        try:
            sent = yield awaited
        except BaseException as error:  # noqa: BLE001 - it is the coroutine's, whatever it is
            failed = error
        try:
            awaited = work.send(sent) if failed is None else work.throw(failed)
        except StopIteration as done:
            result: _T = done.value
            return result
