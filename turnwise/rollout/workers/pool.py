"""The pool of rollout workers: least-loaded episodes, replacement of lost workers, and their number by the queue."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

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
        min_workers: Workers that are always kept.
        max_workers: Workers at most, which are started while episodes wait.
        episodes: Episodes of one worker at the same time.
        idle: Seconds without an episode after which a worker beyond ``min_workers`` is closed.
        failures: Starts in a row that may fail before the run ends.
    """

    min_workers: int = 1
    max_workers: int = 1
    episodes: int = 32
    idle: float = 60.0
    failures: int = 5


_PING_SECONDS = 20.0
_SILENT_PINGS = 3


@dataclass(slots=True, eq=False)
class _PooledWorker:
    """A worker in the pool; ``idle_since`` is on the loop's clock."""

    handle: WorkerHandle
    busy: int = 0
    idle_since: float = 0.0
    lost_threads: int = 0


class WorkerPool:
    """Plays episodes on workers, after :meth:`open`.

    Args:
        start: Starts one worker, ready for episodes.
        size: Bounds of their number.
        write: Called with every trajectory, failed and cancelled ones included.

    Attributes:
        losses: Workers lost so far.
    """

    def __init__(self, start: StartWorker, size: PoolSize, write: Callable[[Trajectory], None] | None) -> None:
        self.losses = 0
        self._start = start
        self._size = size
        self._write = write
        self._workers: list[_PooledWorker] = []
        self._waiting: deque[asyncio.Future[_PooledWorker]] = deque()
        self._starting: set[asyncio.Task[None]] = set()
        # Lost workers that still hold their resources, which the ones in their place need.
        self._ending: set[asyncio.Task[None]] = set()
        self._failed_starts = 0
        self._failure: TurnwiseError | None = None
        self._tidying: asyncio.Task[None] | None = None
        self._closed = False

    async def open(self) -> Self:
        """Start the least number of workers.

        Raises:
            TurnwiseError: One cannot be started, or lacks what the configuration names.
        """
        starts = [asyncio.ensure_future(self._start()) for _ in range(self._size.min_workers)]
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
        self._workers = [_PooledWorker(handle, idle_since=now) for handle in handles]
        self._tidying = asyncio.create_task(self._tidy())
        return self

    @property
    def size(self) -> int:
        """Workers that take episodes."""
        return len(self._workers)

    @property
    def lost_threads(self) -> int:
        """Threads of present workers that tools have blocked for good."""
        return sum(worker.lost_threads for worker in self._workers)

    async def run(self, spec: EpisodeSpec) -> EpisodeOutcome:
        """Run one episode on the worker with the most free places; wait for one if there is none.

        Returns:
            The outcome; its error is RunnerDisconnected if the worker was lost before it ended.

        Raises:
            CancelledError: The caller was cancelled; raised after the worker returned what the episode wrote.
            TurnwiseError: No further worker can be started.
        """
        worker = await self._acquire()
        call = asyncio.create_task(worker.handle.call("run", spec))
        try:
            return self._outcome(worker, await _answer_of(worker.handle, call))
        except asyncio.CancelledError:
            await self._abandon(worker, spec, call)
            raise
        except PlacementError as error:
            call.cancel()
            if worker in self._workers:
                self._workers.remove(worker)
                self.losses += 1
                ending = asyncio.create_task(worker.handle.close())
                self._ending.add(ending)
                ending.add_done_callback(self._ended)
            self._assign_workers()
            name = worker.handle.name
            return EpisodeOutcome([], RunnerDisconnected(f"rollout worker {name} was lost with its episode: {error}"))
        finally:
            self._release(worker)

    async def move(self, old_url: str, new_url: str) -> None:
        """Have all workers send requests for one server to another."""
        moves = [worker.handle.call("move", old_url, new_url) for worker in self._workers]
        await asyncio.gather(*moves, return_exceptions=True)

    async def close(self) -> None:
        """Close all workers. Idempotent."""
        self._closed = True
        await asyncio.gather(*self._ending, return_exceptions=True)
        tasks = [*self._starting, *([self._tidying] if self._tidying is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        workers, self._workers = self._workers, []
        await asyncio.gather(*(worker.handle.close() for worker in workers), return_exceptions=True)

    def _outcome(self, worker: _PooledWorker, answer: WorkerAnswer) -> EpisodeOutcome:
        worker.lost_threads = answer.lost_threads
        if self._write is not None:
            for trajectory in answer.trajectories:
                self._write(trajectory)
        error = None if answer.error is None else read_error(answer.error)
        if answer.cancelled and error is None:
            error = RunnerDisconnected(f"rollout worker {worker.handle.name} cancelled an episode, for it closes")
        return EpisodeOutcome(answer.trajectories, error)

    async def _abandon(self, worker: _PooledWorker, spec: EpisodeSpec, call: asyncio.Task[WorkerAnswer]) -> None:
        """Cancel an episode on its worker, and write what it returns, as cancelled also where it had just ended."""
        with contextlib.suppress(PlacementError):
            await worker.handle.call("cancel", spec.episode_id)
            answer = await call
            # The outcome reaches no journal, where an audit would miss what was written as finished.
            written = [
                trajectory if trajectory.error is not None else replace(trajectory, stop_reason=StopReason.CANCELLED)
                for trajectory in answer.trajectories
            ]
            self._outcome(worker, replace(answer, trajectories=written))

    async def _acquire(self) -> _PooledWorker:
        """Wait for a free place, in the order of the calls."""
        if self._failure is not None:
            raise self._failure
        assigned: asyncio.Future[_PooledWorker] = asyncio.get_running_loop().create_future()
        self._waiting.append(assigned)
        self._assign_workers()
        try:
            return await assigned
        except asyncio.CancelledError:
            if assigned.done() and not assigned.cancelled() and assigned.exception() is None:
                self._release(assigned.result())
            raise
        finally:
            with contextlib.suppress(ValueError):
                self._waiting.remove(assigned)

    def _assign_workers(self) -> None:
        while self._waiting:
            free = [worker for worker in self._workers if worker.busy < self._size.episodes]
            if not free:
                break
            worker = min(free, key=lambda candidate: candidate.busy)
            assigned = self._waiting.popleft()
            if not assigned.done():
                worker.busy += 1
                assigned.set_result(worker)
        target = self._size.min_workers if not self._waiting else self._size.max_workers
        while not self._closed and self._failure is None and self._present < target:
            # One more for each full worker's worth of waiting episodes, and always the least number.
            extra = self._present - self._size.min_workers
            if extra >= 0 and len(self._waiting) <= len(self._starting) * self._size.episodes:
                break
            task = asyncio.create_task(self._start_one())
            self._starting.add(task)
            task.add_done_callback(self._starting.discard)

    @property
    def _present(self) -> int:
        return len(self._workers) + len(self._starting) + len(self._ending)

    async def _start_one(self) -> None:
        try:
            handle = await self._start()
        except TurnwiseError as error:
            self._failed_starts += 1
            if self._failed_starts >= self._size.failures and len(self._workers) < self._size.min_workers:
                self._failure = error
                for assigned in self._waiting:
                    if not assigned.done():
                        assigned.set_exception(error)
            # A lower bound is kept: another one is started at the next turn of the clock (_tidy).
            return
        self._failed_starts = 0
        self._workers.append(_PooledWorker(handle, idle_since=asyncio.get_running_loop().time()))
        self._assign_workers()

    def _ended(self, ending: asyncio.Task[None]) -> None:
        self._ending.discard(ending)
        if not ending.cancelled():
            # Retrieved, or asyncio would log it: the worker is lost already.
            ending.exception()
        self._assign_workers()

    def _release(self, worker: _PooledWorker) -> None:
        worker.busy -= 1
        worker.idle_since = asyncio.get_running_loop().time()
        self._assign_workers()

    async def _tidy(self) -> None:
        """Close idle workers beyond the least number, and keep that number."""
        while True:
            await asyncio.sleep(max(0.05, min(1.0, self._size.idle / 4)))
            now = asyncio.get_running_loop().time()
            for worker in [
                candidate
                for candidate in self._workers
                if not candidate.busy and now - candidate.idle_since > self._size.idle
            ]:
                if len(self._workers) > self._size.min_workers:
                    self._workers.remove(worker)
                    await worker.handle.close()
            self._assign_workers()


async def _answer_of(handle: WorkerHandle, call: asyncio.Task[WorkerAnswer]) -> WorkerAnswer:
    """Await an episode's answer. Raises PlacementError if its worker is lost, or stays silent (stopped by a signal)."""
    silent = 0
    while not (await asyncio.wait([call], timeout=_PING_SECONDS))[0]:
        try:
            async with asyncio.timeout(_PING_SECONDS):
                await handle.call("ping")
            silent = 0
        except TimeoutError:
            silent += 1
            if silent == _SILENT_PINGS:
                raise PlacementError(f"it left {silent} pings in a row unanswered: it is stopped, or hangs") from None
    return call.result()
