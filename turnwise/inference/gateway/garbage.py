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
_FEW = 10_000
_MANY = 200_000
_OLD = 100_000


class GarbageCollector:
    """Collects in place of Python, from :meth:`start` to :meth:`stop`.

    Args:
        busy: Whether somebody waits for an answer.
        few: So many new objects are looked at when nobody waits.
        many: So many new objects are looked at in any case.
        old: So many objects must have outlived that before all objects are looked at again.
    """

    def __init__(self, busy: Callable[[], bool], *, few: int = _FEW, many: int = _MANY, old: int = _OLD) -> None:
        self._busy = busy
        self._few = few
        self._many = many
        self._least_old = old
        # Objects that were left when all were looked at last, and those that have outlived a look since then.
        self._old = 0
        self._grown = 0

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
        """Look every second, until cancelled."""
        while True:
            await asyncio.sleep(_SECONDS)
            self.look()

    def look(self) -> None:
        """Look for garbage if it is time.

        A look takes about half a microsecond for each object that is looked at. All objects are looked at only once as
        many have come as there were, so that each costs the same however many there are; at four times as many also
        while somebody waits.
        """
        new = gc.get_count()[0]
        if new < self._few:
            return
        busy = self._busy()
        if busy and new < self._many:
            return
        self._grown += max(0, new - gc.collect(1))
        due = max(self._old, self._least_old)
        if self._grown > (4 * due if busy else due):
            found = gc.collect()
            self._old, self._grown = len(gc.get_objects()), 0
            _log.debug("%d objects were garbage, %d are left", found, self._old)
