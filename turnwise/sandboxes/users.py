"""The kernel's users of sandboxes: one for each, since the kernel counts some of what a process holds by its user."""

from __future__ import annotations

import os
from collections import Counter
from typing import Final

FIRST_USER: Final = 60_600
USERS: Final = 512
"""The users up to 61,183 are assigned by no distribution, and exist where a container has the lowest 65,536."""


class SandboxUsers:
    """Users of one backend's sandboxes, from ``first`` on: different ones for up to ``count`` sandboxes."""

    def __init__(self, first: int = FIRST_USER, count: int = USERS) -> None:
        # Host processes on one machine begin at different ones.
        start = os.getpid() * 61
        self._users = [first + (start + number) % count for number in range(count)]
        self._user_by_sandbox: dict[str, int] = {}

    def take(self, sandbox: str, user: int | None = None) -> int:
        """Return a sandbox's user: ``user``, else one that no other has, or that the fewest have."""
        counts = Counter(self._user_by_sandbox.values())
        self._user_by_sandbox[sandbox] = user or min(self._users, key=lambda candidate: counts[candidate])
        return self._user_by_sandbox[sandbox]

    def release(self, sandbox: str) -> None:
        """Release the user of a sandbox that has ended."""
        self._user_by_sandbox.pop(sandbox, None)
