"""A limit of time that costs nothing where there is nothing to wait for.

Owns: :func:`within`. Nearly every body is there before it is asked for, and nearly every answer is taken at once:
:func:`asyncio.timeout` alone would take longer than either.
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
