"""Cancellation of a user's code, which may swallow it: such code is waited for within a bound, then abandoned."""

from __future__ import annotations

import asyncio
from typing import Any, Final

CANCEL_GRACE_S: Final = 5.0
"""How long cancelled code may take to end."""


async def wait_bounded(task: asyncio.Future[Any], timeout: float | None) -> None:
    """Wait for a task that ends by itself within ``timeout`` seconds, unless its code swallows the cancellation.

    A task that is not done afterwards was abandoned: after its time-out, or after the cancellation of the caller.

    Args:
        task: The task.
        timeout: Its own time-out in seconds; None for none.

    Raises:
        CancelledError: The caller was cancelled.
    """
    try:
        await asyncio.wait({task}, timeout=None if timeout is None else timeout + CANCEL_GRACE_S)
    finally:
        if not task.done():
            await cancel(task)


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
