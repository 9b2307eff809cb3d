"""Concurrency adapted to what an endpoint or servers can take: additive increase, multiplicative decrease."""

from __future__ import annotations

import asyncio
import contextlib
import re
import statistics
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Final

import orjson

from turnwise.errors import InferenceError
from turnwise.inference.replica import ControlRoutes

_DECREASE: Final = 0.75
_WINDOW: Final = 20
"""Requests whose median time is compared with the least such median before."""
_SLOWER: Final = 3.0
_POLL_S: Final = 0.5
_QUEUED: Final = 0.1
"""Share of the episodes whose requests may wait at servers: some always do, between two steps of a server."""
_GAUGES: Final = re.compile(r"^(?:vllm:num_requests_waiting|sglang:num_queue_reqs)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


class Gate(AbstractAsyncContextManager[None]):
    """A semaphore whose size may change while it is held; in order of arrival.

    Attributes:
        count: Number of holders.
    """

    def __init__(self, size: Callable[[], int], opens_at: Callable[[], float] = lambda: 0.0) -> None:
        """Admit ``size()`` holders, none before the loop's time ``opens_at()``."""
        self._size = size
        self._opens_at = opens_at
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self.count = 0

    async def __aenter__(self) -> None:
        """Wait for a turn."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self.admit()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._leave()
            else:
                self._waiting.remove(turn)
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let the next one enter."""
        self._leave()

    def admit(self) -> None:
        """Admit waiting holders up to the current size."""
        loop = asyncio.get_running_loop()
        if self._waiting and (opens := self._opens_at()) > loop.time():
            if self._timer is None or self._timer.when() < opens:
                if self._timer is not None:
                    self._timer.cancel()
                self._timer = loop.call_at(opens, self.admit)
            return
        while self._waiting and self.count < self._size():
            self.count += 1
            self._waiting.popleft().set_result(None)

    def _leave(self) -> None:
        self.count -= 1
        self.admit()


class SentRequest:
    """A request in flight.

    Attributes:
        began: When it was sent (``time.monotonic``).
        refused: Whether it was rejected.
    """

    __slots__ = ("_limit", "began", "refused")

    def __init__(self, limit: AdaptiveLimit) -> None:
        self._limit, self.began, self.refused = limit, time.monotonic(), False

    def reject(self, retry_after: float | None = None) -> None:
        """Count it as rejected; no further request is sent for ``retry_after`` seconds."""
        self.refused = True
        self._limit.note_rejection(self.began, retry_after)


class AdaptiveLimit:
    """How many episodes, and requests of theirs, are in flight at the same time.

    It begins with a few and doubles with every round of answers until the first overload: a rejection (HTTP 429 or
    5xx) or a queue at the servers. That cuts it by a quarter, and from then on it grows by one with every round. It
    grows only while it is fully used, and not while answers take three times as long as before.

    Attributes:
        maximum: Its upper bound.
        episodes: Held by every episode that runs.
        rejections: Number of rejected requests.
    """

    def __init__(self, maximum: int, *, first: int = 4) -> None:
        self.maximum = maximum
        self.rejections = 0
        self._value = float(min(first, maximum))
        self._rising = True
        self._cut_at = -1.0
        self._opens_at = 0.0
        self._seconds: deque[float] = deque(maxlen=_WINDOW)
        self._fastest: float | None = None
        self.episodes = Gate(lambda: self.limit)
        self._requests = Gate(lambda: self.limit, lambda: self._opens_at)

    @property
    def limit(self) -> int:
        """The number that may be in flight now."""
        return int(self._value)

    def __str__(self) -> str:
        rejected = f", {self.rejections} rejected" if self.rejections else ""
        return f"{self.limit} at a time{rejected}"

    @contextlib.asynccontextmanager
    async def request(self) -> AsyncIterator[SentRequest]:
        """Hold one slot for a request, whose outcome adapts the limit."""
        async with self._requests:
            sent = SentRequest(self)
            yield sent
            if not sent.refused:
                self.note_answer(time.monotonic() - sent.began)

    def note_answer(self, seconds: float) -> None:
        """Count an answer that took ``seconds``."""
        slow = self._is_slow(seconds)
        if max(self.episodes.count, self._requests.count) < self.limit or slow:
            return
        self._set(self._value + (1.0 if self._rising else 1.0 / self._value))

    def note_rejection(self, began: float, retry_after: float | None = None) -> None:
        """Count the rejection of a request that was sent at ``began`` (``time.monotonic``)."""
        self.rejections += 1
        if retry_after is not None:
            self._opens_at = max(self._opens_at, asyncio.get_running_loop().time() + retry_after)
        # A request sent before the last cut is no evidence about the limit after it.
        if began >= self._cut_at:
            self._cut(min(self._value, float(self._requests.count)) * _DECREASE)

    def note_queue(self, waiting: int) -> None:
        """Adapt to the number of requests waiting at the servers: none lets it grow, too many cut it."""
        running = self.episodes.count
        if waiting > max(1.0, _QUEUED * running):
            self._cut(min(self._value, float(running)) - waiting)
        elif waiting == 0 and running >= self.limit:
            self._set(self._value * 2 if self._rising else self._value + max(1.0, self._value / 20))

    def lift(self) -> None:
        """Lift the limit to its maximum: nothing reports an overload."""
        self._set(float(self.maximum))

    def _cut(self, value: float) -> None:
        self._rising, self._cut_at = False, time.monotonic()
        self._set(value)

    def _set(self, value: float) -> None:
        self._value = min(max(value, 1.0), float(self.maximum))
        self.episodes.admit()
        self._requests.admit()

    def _is_slow(self, seconds: float) -> bool:
        self._seconds.append(seconds)
        if len(self._seconds) < _WINDOW:
            return False
        middle = statistics.median(self._seconds)
        self._fastest = middle if self._fastest is None else min(self._fastest, middle)
        return middle > _SLOWER * self._fastest


async def follow_queues(
    limit: AdaptiveLimit, urls: Callable[[], Sequence[str]], say: Callable[[str], None], *, every: float = _POLL_S
) -> None:
    """Adapt a limit to the queues of servers until cancelled.

    Args:
        limit: The limit.
        urls: Returns the servers' URLs; a server that was restarted has another one.
        say: Called once if the servers report no queue: the limit is then lifted.
        every: Seconds between two polls.
    """
    control = ControlRoutes()
    try:
        while True:
            try:
                queues = await asyncio.gather(*(waiting_at(control, url) for url in urls()))
            except InferenceError:
                # A server that restarts has no queue.
                queues = []
            lengths = [queue for queue in queues if queue is not None]
            if queues and not lengths:
                limit.lift()
                say(f"concurrency: auto is {limit.maximum} (rollout.concurrency): the server does not report its queue")
                return
            if lengths:
                limit.note_queue(sum(lengths))
            await asyncio.sleep(every)
    finally:
        await control.close()


async def waiting_at(control: ControlRoutes, url: str) -> int | None:
    """Return the number of requests that wait at a server (the built-in one, vLLM, SGLang); None if it reports none.

    Raises:
        InferenceError: The server does not answer.
    """
    for path in ("/stats", "/metrics"):
        try:
            raw = await control.raw(url, "GET", path)
        except InferenceError as error:
            if error.retryable:
                raise
            continue
        if path == "/metrics":
            values = [float(gauge) for gauge in _GAUGES.findall(raw.decode("utf-8", "replace"))]
            return int(sum(values)) if values else None
        try:
            return int(orjson.loads(raw)["waiting"])
        except (ValueError, KeyError, TypeError):
            continue
    return None
