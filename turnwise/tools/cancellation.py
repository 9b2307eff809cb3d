"""Cancellation of a user's code, which may swallow it: such code is waited for within a bound, then abandoned."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final

CANCEL_GRACE_S: Final = 5.0
"""How long cancelled code may take to end."""


async def run_bounded(work: Coroutine[Any, Any, None], timeout: float | None, abandoned: Callable[[], None]) -> None:
    """Run a coroutine that ends by itself within ``timeout`` seconds, unless its code swallows the cancellation.

    Args:
        work: The coroutine, run in a task of its own.
        timeout: Its own time-out in seconds; None for none.
        abandoned: Called if it is abandoned: after its time-out, or after the cancellation of the caller.

    Raises:
        CancelledError: The caller was cancelled.
    """

    async def settle() -> SystemExit | None:
        # A task that raises it ends the event loop.
        try:
            await work
        except SystemExit as error:
            return error
        return None

    task = asyncio.ensure_future(settle())
    try:
        await asyncio.wait({task}, timeout=None if timeout is None else timeout + CANCEL_GRACE_S)
    except asyncio.CancelledError:
        if not await cancel(task):
            abandoned()
        raise
    if task.done():
        if (error := task.result()) is not None:
            raise error
    elif not await cancel(task):
        abandoned()


async def cancel(task: asyncio.Future[Any]) -> bool:
    """Cancel a task and return whether it ended within :data:`CANCEL_GRACE_S`; if not, it is abandoned."""
    task.cancel()
    try:
        await asyncio.wait({task}, timeout=CANCEL_GRACE_S)
    finally:
        if not task.done():
            abandon(task)
    if not task.done():
        return False
    if not task.cancelled():
        task.exception()  # retrieved, so that it is not reported as never retrieved
    return True


def abandon(task: asyncio.Future[Any]) -> None:
    """Let the event loop end without a task that swallows its cancellation: ``asyncio.run`` would wait for it."""
    if isinstance(task, asyncio.Task):
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        asyncio.tasks._unregister_task(task)
