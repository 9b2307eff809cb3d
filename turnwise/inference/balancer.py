"""Which of several servers gets a request.

Owns: :class:`Balancer`. Refuses: connections (``client.py``).
"""

from __future__ import annotations

from collections import OrderedDict

_REMEMBERED_SESSIONS = 65536


class Balancer:
    """Which of several servers gets a request: the one that holds the session's prefix, else the least busy."""

    def __init__(self, count: int, *, remembered: int = _REMEMBERED_SESSIONS) -> None:
        self._busy = [0] * count
        self._home: OrderedDict[str, int] = OrderedDict()
        self._remembered = remembered

    def take(self, session_id: str, *, avoid: int | None = None) -> int:
        """Choose a server and count a request on it.

        Args:
            session_id: Requests of one session go to one server while it is remembered.
            avoid: A server that has just failed.
        """
        index = self._home.get(session_id) if session_id else None
        if index is None or (index == avoid and len(self._busy) > 1):
            choices = [place for place in range(len(self._busy)) if place != avoid or len(self._busy) == 1]
            index = min(choices, key=self._busy.__getitem__)
        if session_id:
            self._home[session_id] = index
            self._home.move_to_end(session_id)
            if len(self._home) > self._remembered:
                self._home.popitem(last=False)
        self._busy[index] += 1
        return index

    def give_back(self, index: int) -> None:
        """Count a request as ended."""
        self._busy[index] -= 1
