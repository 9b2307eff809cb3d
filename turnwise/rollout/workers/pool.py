"""The pool of rollout workers: least-loaded episodes, replacement of lost workers, and their number by the queue."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from turnwise.errors import PlacementError, RunnerDisconnected, TurnwiseError
from turnwise.rollout.core import EpisodeOutcome, EpisodeSpec
from turnwise.rollout.remote.protocol import read_error
from turnwise.trajectory import Trajectory
from turnwise.types import StopReason


@dataclass(frozen=True, slots=True)
class WorkerAnswer:
    """What a worker returns of an episode.

    Attributes:
        trajectories: All that the episode wrote, failed and cancelled ones included.
        error: The error that ended it, as a record; None without one.
        cancelled: Whether it was cancelled.
        lost_threads: Threads of the worker that tools have blocked for good, so far.
    """

    trajectories: list[Trajectory]
    error: dict[str, Any] | None
    cancelled: bool
    lost_threads: int


class WorkerHandle(Protocol):
    """A started worker: a :class:`~turnwise.rollout.workers.worker.RolloutWorker` that may be on another node."""

    name: str

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the worker. Raises PlacementError if it is lost, and what the method raises."""

    async def close(self) -> None:
        """Close the worker, and end its process. Idempotent."""


StartWorker = Callable[[], Awaitable[WorkerHandle]]


@dataclass(frozen=True, slots=True)
class PoolSize:
    """How many workers a pool has.

    Attributes:
        least: Workers that are always kept.
        most: Workers at most, which are started while episodes wait.
        episodes: Episodes of one worker at the same time.
        idle: Seconds without an episode after which a worker beyond ``least`` is closed.
        failures: Starts in a row that may fail before the run ends.
    """

    least: int = 1
    most: int = 1
    episodes: int = 32
    idle: float = 60.0
    failures: int = 5


@dataclass(slots=True, eq=False)
class _Place:
    """A worker in the pool; ``idle_since`` is on the loop's clock."""

    handle: WorkerHandle
    busy: int = 0
    idle_since: float = 0.0
    lost_threads: int = 0


class WorkerPool:
    """Plays episodes on workers. Use :meth:`open`.

    Attributes:
        losses: Workers lost so far.
    """

    def __init__(
        self,
        start: StartWorker,
        size: PoolSize,
        *,
        write: Callable[[Trajectory], None] | None,
        notify: Callable[[str], None] | None = None,
    ) -> None:
        self.losses = 0
        self._start = start
        self._size = size
        self._write = write
        self._notify = notify or (lambda _: None)
        self._places: list[_Place] = []
        self._waiting: deque[asyncio.Future[_Place]] = deque()
        self._starting: set[asyncio.Task[None]] = set()
        # Lost workers that still hold their resources, which the ones in their place need.
        self._ending: set[asyncio.Task[None]] = set()
        self._failed_starts = 0
        self._failure: TurnwiseError | None = None
        self._tidying: asyncio.Task[None] | None = None
        self._closed = False

    @classmethod
    async def open(
        cls,
        start: StartWorker,
        size: PoolSize,
        *,
        write: Callable[[Trajectory], None] | None,
        notify: Callable[[str], None] | None = None,
    ) -> WorkerPool:
        """Start the least number of workers.

        Args:
            start: Starts one worker, ready for episodes.
            size: Bounds of their number.
            write: Called with every trajectory, failed and cancelled ones included.
            notify: Called with messages about workers that come and go.

        Raises:
            TurnwiseError: One cannot be started, or lacks what the configuration names.
        """
        pool = cls(start, size, write=write, notify=notify)
        starts = [asyncio.create_task(_started(start)) for _ in range(size.least)]
        try:
            handles = await asyncio.gather(*starts)
        except BaseException:  # raised again: what did start is closed
            for task in starts:
                task.cancel()
            for done in await asyncio.gather(*starts, return_exceptions=True):
                if not isinstance(done, BaseException):
                    await done.close()
            raise
        now = asyncio.get_running_loop().time()
        pool._places = [_Place(handle, idle_since=now) for handle in handles]
        pool._tidying = asyncio.create_task(pool._tidy())
        return pool

    @property
    def size(self) -> int:
        """Workers that take episodes."""
        return len(self._places)

    @property
    def lost_threads(self) -> int:
        """Threads of present workers that tools have blocked for good."""
        return sum(place.lost_threads for place in self._places)

    async def run(self, spec: EpisodeSpec) -> EpisodeOutcome:
        """Run one episode on the worker with the most free places; wait for one if there is none.

        Returns:
            The outcome; its error is RunnerDisconnected if the worker was lost before it ended.

        Raises:
            CancelledError: The caller was cancelled; raised after the worker returned what the episode wrote.
            TurnwiseError: No further worker can be started.
        """
        place = await self._acquire()
        call = asyncio.create_task(place.handle.call("run", spec))
        try:
            return self._outcome(place, await asyncio.shield(call))
        except asyncio.CancelledError:
            await self._abandon(place, spec, call)
            raise
        except PlacementError as error:
            self._lose(place, error)
            name = place.handle.name
            return EpisodeOutcome([], RunnerDisconnected(f"rollout worker {name} was lost with its episode: {error}"))
        finally:
            self._free(place)

    async def move(self, before: str, after: str) -> None:
        """Have all workers send requests for one server to another."""
        moves = [place.handle.call("move", before, after) for place in self._places]
        await asyncio.gather(*moves, return_exceptions=True)

    async def close(self) -> None:
        """Close all workers. Idempotent."""
        self._closed = True
        await asyncio.gather(*self._ending, return_exceptions=True)
        tasks = [*self._starting, *([self._tidying] if self._tidying is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        places, self._places = self._places, []
        await asyncio.gather(*(place.handle.close() for place in places), return_exceptions=True)

    def _outcome(self, place: _Place, answer: WorkerAnswer) -> EpisodeOutcome:
        place.lost_threads = answer.lost_threads
        if self._write is not None:
            for trajectory in answer.trajectories:
                self._write(trajectory)
        error = None if answer.error is None else read_error(answer.error)
        if answer.cancelled and error is None:
            error = RunnerDisconnected(f"rollout worker {place.handle.name} cancelled an episode, for it closes")
        return EpisodeOutcome(answer.trajectories, error)

    async def _abandon(self, place: _Place, spec: EpisodeSpec, call: asyncio.Task[WorkerAnswer]) -> None:
        """Cancel an episode on its worker, and write what it returns, as cancelled also where it had just ended."""
        with contextlib.suppress(PlacementError):
            await place.handle.call("cancel", spec.episode_id)
            answer = await call
            # The outcome reaches no journal, where an audit would miss what was written as finished.
            written = [
                each if each.error is not None else replace(each, stop_reason=StopReason.CANCELLED)
                for each in answer.trajectories
            ]
            self._outcome(place, replace(answer, trajectories=written))

    async def _acquire(self) -> _Place:
        """Wait for a free place, in the order of the calls."""
        if self._failure is not None:
            raise self._failure
        found: asyncio.Future[_Place] = asyncio.get_running_loop().create_future()
        self._waiting.append(found)
        self._match()
        try:
            return await found
        except asyncio.CancelledError:
            if found.done() and not found.cancelled() and found.exception() is None:
                self._free(found.result())
            raise
        finally:
            with contextlib.suppress(ValueError):
                self._waiting.remove(found)

    def _match(self) -> None:
        while self._waiting:
            free = [place for place in self._places if place.busy < self._size.episodes]
            if not free:
                break
            place = min(free, key=lambda each: each.busy)
            found = self._waiting.popleft()
            if not found.done():
                place.busy += 1
                found.set_result(place)
        wanted = self._size.least if not self._waiting else self._size.most
        while not self._closed and self._failure is None and self._present < wanted:
            # One more for each full worker's worth of waiting episodes, and always the least number.
            extra = self._present - self._size.least
            if extra >= 0 and len(self._waiting) <= len(self._starting) * self._size.episodes:
                break
            task = asyncio.create_task(self._start_one())
            self._starting.add(task)
            task.add_done_callback(self._starting.discard)

    @property
    def _present(self) -> int:
        return len(self._places) + len(self._starting) + len(self._ending)

    async def _start_one(self) -> None:
        try:
            handle = await _started(self._start)
        except TurnwiseError as error:
            self._failed_starts += 1
            self._notify(f"a rollout worker could not be started: {error}")
            if self._failed_starts >= self._size.failures and len(self._places) < self._size.least:
                self._fail(error)
            # A lower bound is kept: another one is started at the next turn of the clock (_tidy).
            return
        self._failed_starts = 0
        self._add(handle)
        self._notify(f"rollout worker {handle.name} joined ({len(self._places)} in all)")

    def _fail(self, error: TurnwiseError) -> None:
        self._failure = error
        for found in self._waiting:
            if not found.done():
                found.set_exception(error)

    def _add(self, handle: WorkerHandle) -> None:
        self._places.append(_Place(handle, idle_since=asyncio.get_running_loop().time()))
        self._match()

    def _lose(self, place: _Place, error: PlacementError) -> None:
        if place in self._places:
            self._places.remove(place)
            self.losses += 1
            self._notify(f"rollout worker {place.handle.name} was lost: {error} ({len(self._places)} left)")
            ending = asyncio.create_task(place.handle.close())
            self._ending.add(ending)
            ending.add_done_callback(self._ended)
        self._match()

    def _ended(self, ending: asyncio.Task[None]) -> None:
        self._ending.discard(ending)
        if not ending.cancelled():
            # Retrieved, or asyncio would log it: the worker is lost already.
            ending.exception()
        self._match()

    def _free(self, place: _Place) -> None:
        place.busy -= 1
        place.idle_since = asyncio.get_running_loop().time()
        self._match()

    async def _tidy(self) -> None:
        """Close idle workers beyond the least number, and keep that number."""
        while True:
            await asyncio.sleep(max(0.05, min(1.0, self._size.idle / 4)))
            now = asyncio.get_running_loop().time()
            for place in [each for each in self._places if not each.busy and now - each.idle_since > self._size.idle]:
                if len(self._places) > self._size.least:
                    self._places.remove(place)
                    self._notify(f"rollout worker {place.handle.name} was idle and is closed ({self.size} left)")
                    await place.handle.close()
            self._match()


async def _started(start: StartWorker) -> WorkerHandle:
    return await start()
