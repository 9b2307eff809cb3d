"""Advances the clock of the running event loop, so that a timeout passes when a test says so.

``time.monotonic`` is not changed.
"""

from __future__ import annotations

import asyncio


def pass_time(seconds: float) -> None:
    """Let so many seconds pass at once for all that waits in this event loop, for as long as the loop lives."""
    loop = asyncio.get_running_loop()
    earlier = loop.time
    loop.time = lambda: earlier() + seconds  # type: ignore[method-assign]
