"""Moves the clock of the running event loop on: time limits pass when a test says so, however slow the machine is.

Owns: :func:`pass_time`. Refuses: ``time.monotonic``, which goes on as it does.
"""

from __future__ import annotations

import asyncio


def pass_time(seconds: float) -> None:
    """Let so many seconds pass at once for all that waits in this event loop, for as long as the loop lives."""
    loop = asyncio.get_running_loop()
    earlier = loop.time
    loop.time = lambda: earlier() + seconds  # type: ignore[method-assign]
