"""When the process of a gateway looks for garbage in cycles.

Owns: :class:`GarbageCollector`. Refuses: knowing what a request is; it is told whether there are any.

Requests and sessions leave nothing in cycles, and what sessions hold lives long. Python looks for cycles whenever some
thousand objects were made, which with a thousand requests in flight is all the time, and finds next to nothing each
time. Connections do leave some objects in cycles, and foreign code (a chat template, a library) may leave others: they
are looked for when nobody waits for an answer, or when there may be many.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable

_log = logging.getLogger(__name__)
_SECONDS = 1.0
_LEAST = 200_000


class GarbageCollector:
    """Collects in place of Python, from :meth:`start` to :meth:`stop`.

    Args:
        busy: Whether somebody waits for an answer.
        least: So many objects at least must have come since the last look.
    """

    def __init__(self, busy: Callable[[], bool], *, least: int = _LEAST) -> None:
        self._busy = busy
        self._least = least
        self._left = 0

    def start(self) -> None:
        """Take over. What is there now is code and settings, and never looked at again."""
        gc.collect()
        gc.freeze()
        gc.disable()

    def stop(self) -> None:
        """Leave it to Python again."""
        gc.unfreeze()
        gc.enable()

    async def run(self) -> None:
        """Look every second, until cancelled: there may always be somebody who waits."""
        while True:
            await asyncio.sleep(_SECONDS)
            self.look()

    def look(self) -> None:
        """Look for garbage if it is time. To be called whenever nobody waits any more.

        A look takes about a microsecond for each object that is there. It is time once as many have come as the last
        look left, so that an object is looked at once or twice, however many there are; while somebody waits, once four
        times as many have.
        """
        come = gc.get_count()[0]
        due = max(self._left, self._least)
        if come < due or (come < 4 * due and self._busy()):
            return
        found = gc.collect()
        self._left = len(gc.get_objects())
        _log.debug("%d objects were garbage, %d are left", found, self._left)
