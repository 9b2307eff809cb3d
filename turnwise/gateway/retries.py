"""Requests that a client sends again, by the count of its SDK: the turn of a lost answer is sent, not sampled anew.

Without that the first turn would stay in the tree, and be trained, as a branch that no agent has seen.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, defaultdict
from collections.abc import AsyncIterator

from turnwise.recorder.session import Session


class RetriedRequests:
    """The requests of a session whose client counts its retries, by what an attempt and its retries have in common."""

    def __init__(self) -> None:
        self._first_attempts: Counter[str] = Counter()
        self._running: defaultdict[str, list[asyncio.Task[None]]] = defaultdict(list)

    @contextlib.asynccontextmanager
    async def attempt(
        self, session: Session, task: asyncio.Task[None], key: str, *, is_retry: bool, count: int
    ) -> AsyncIterator[list[str]]:
        """Yield the turns that answer a retry; none for a request that samples.

        As many turns as requests answer all of them: a retry then is one whose answer was lost, the last by default. An
        attempt that still runs is awaited.

        Args:
            session: The recorder.
            task: The request's task.
            key: Of the request; "" if its client counts nothing.
            is_retry: Whether the client sends it again.
            count: Number of turns that answer the request.
        """
        if not key:
            yield []
            return
        if not is_retry:
            self._first_attempts[key] += 1
        turns = session.turns_by_request[key]
        expected = max(1, self._first_attempts[key]) * count
        running = list(self._running[key])
        if is_retry and len(turns) < expected and running:
            await asyncio.wait(running)
        self._running[key].append(task)
        try:
            yield turns[-count:] if is_retry and len(turns) >= expected else []
        finally:
            self._running[key].remove(task)
