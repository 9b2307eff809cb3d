"""The pool of rollout workers: least loaded, in order, replaced when lost, more while episodes wait."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.event_loop import pass_time
from support.property_tests import examples
from turnwise.errors import ConfigError, EnvError, PlacementError, RunnerDisconnected
from turnwise.rollout.core import EpisodeSpec
from turnwise.rollout.remote.protocol import error_record
from turnwise.rollout.workers.pool import PoolSize, WorkerAnswer, WorkerPool
from turnwise.tasks.core import Task
from turnwise.trajectory import Trajectory
from turnwise.types import StopReason


def spec(number: int) -> EpisodeSpec:
    return EpisodeSpec(Task(f"t{number}", "a prompt"), f"g{number}")


def trajectory(spec: EpisodeSpec, stop: StopReason = StopReason.COMPLETED) -> Trajectory:
    return Trajectory(spec.episode_id, spec.episode_id, spec.group_id, spec.task.id, stop_reason=stop)


class Worker:
    """A worker in this process, whose episodes end when they are let go."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.running: dict[str, asyncio.Future[WorkerAnswer]] = {}
        self.specs: dict[str, EpisodeSpec] = {}
        self.most = 0
        self.moved: list[tuple[str, str]] = []
        self.closed = self.ended = self.stopped = False
        self.slow_end = 0

    async def call(self, method: str, *arguments: Any) -> Any:
        if self.closed:
            raise PlacementError(f"{self.name} is gone")
        if method == "run":
            (spec,) = arguments
            self.specs[spec.episode_id] = spec
            self.running[spec.episode_id] = future = asyncio.get_running_loop().create_future()
            self.most = max(self.most, len(self.running))
            try:
                return await future
            finally:
                del self.running[spec.episode_id]
        if method == "ping" and self.stopped:
            await asyncio.Event().wait()
        if method == "cancel":
            (name,) = arguments
            if name in self.running and not self.running[name].done():
                self.end(name, cancelled=True)
        if method == "move":
            self.moved.append(arguments)
        return None

    def end(self, name: str, *, error: Exception | None = None, cancelled: bool = False, lost: int = 0) -> None:
        stop = StopReason.CANCELLED if cancelled else StopReason.COMPLETED
        record = None if error is None else error_record(error)
        answer = WorkerAnswer([trajectory(self.specs[name], stop)], record, cancelled, lost)
        self.running[name].set_result(answer)

    def die(self) -> None:
        self.closed = True
        for future in list(self.running.values()):
            future.set_exception(PlacementError(f"the node of {self.name} is gone"))

    async def close(self) -> None:
        self.closed = True
        for _ in range(self.slow_end):
            await asyncio.sleep(0)
        self.ended = True


class Cluster:
    """Starts workers; ``refuse`` makes the next starts fail."""

    def __init__(self) -> None:
        self.workers: list[Worker] = []
        self.refuse: list[Exception] = []

    async def start(self) -> Worker:
        if self.refuse:
            raise self.refuse.pop(0)
        self.workers.append(Worker(f"worker-{len(self.workers)}"))
        return self.workers[-1]

    @property
    def busy(self) -> list[int]:
        return [len(worker.running) for worker in self.workers]


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def with_pool(size: PoolSize, act: Callable[[Cluster, WorkerPool, list[Trajectory]], Awaitable[None]]) -> None:
    cluster, written = Cluster(), []
    pool = await WorkerPool(cluster.start, size, written.append).open()
    try:
        await act(cluster, pool, written)
    finally:
        await pool.close()
    assert all(worker.closed for worker in cluster.workers)


async def test_episodes_go_to_the_least_loaded_and_wait_in_order() -> None:
    async def act(cluster: Cluster, pool: WorkerPool, written: list[Trajectory]) -> None:
        runs = [asyncio.create_task(pool.run(spec(number))) for number in range(7)]
        await turns()
        assert cluster.busy == [3, 3]
        [first, *_] = cluster.workers[1].running
        cluster.workers[1].end(first)
        await turns()
        assert "g6/0.0" in cluster.workers[1].running
        for worker in cluster.workers:
            for name in list(worker.running):
                worker.end(name)
        outcomes = await asyncio.gather(*runs)
        assert [outcome.error for outcome in outcomes] == [None] * 7
        assert sorted(trajectory.id for trajectory in written) == [f"g{number}/0.0" for number in range(7)]
        assert len(cluster.workers) == 2

    await with_pool(PoolSize(2, 2, episodes=3), act)


async def test_a_lost_worker_is_replaced_and_its_episodes_disconnect() -> None:
    async def act(cluster: Cluster, pool: WorkerPool, written: list[Trajectory]) -> None:
        runs = [asyncio.create_task(pool.run(spec(number))) for number in range(4)]
        await turns()
        cluster.workers[0].die()
        await turns()
        done = [run.result() for run in runs if run.done()]
        assert [type(outcome.error) for outcome in done] == [RunnerDisconnected] * 2
        assert all(outcome.error.retryable for outcome in done)
        assert (pool.size, pool.losses, len(cluster.workers)) == (2, 1, 3)
        next_run = asyncio.create_task(pool.run(spec(9)))
        await turns()
        assert list(cluster.workers[2].running) == ["g9/0.0"]
        for worker in cluster.workers[1:]:
            for name in list(worker.running):
                worker.end(name)
        assert (await next_run).error is None
        await asyncio.gather(*runs)
        assert len(written) == 3

    await with_pool(PoolSize(2, 2, episodes=2), act)


async def test_a_replacement_starts_after_the_lost_worker_is_closed() -> None:
    async def act(cluster: Cluster, pool: WorkerPool, written: list[Trajectory]) -> None:
        [first] = cluster.workers
        first.slow_end = 50
        run = asyncio.create_task(pool.run(spec(0)))
        await turns()
        first.die()
        while len(cluster.workers) == 1:
            await turns(1)
        assert first.ended
        assert isinstance((await run).error, RunnerDisconnected)

    await with_pool(PoolSize(1, 1), act)


async def test_a_cancelled_episode_is_written_before_the_cancellation_goes_on() -> None:
    async def act(cluster: Cluster, pool: WorkerPool, written: list[Trajectory]) -> None:
        run = asyncio.create_task(pool.run(spec(0)))
        await turns()
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        assert [trajectory.stop_reason for trajectory in written] == [StopReason.CANCELLED]
        # One that waits for a place has written nothing.
        full = [asyncio.create_task(pool.run(spec(number))) for number in (1, 2)]
        await turns()
        full[1].cancel()
        await turns()
        cluster.workers[0].end("g1/0.0")
        assert (await full[0]).error is None
        assert cluster.busy == [0]
        assert len(written) == 2

    await with_pool(PoolSize(1, 1, episodes=1), act)


async def test_an_episode_that_ends_during_its_cancellation_is_cancelled() -> None:
    async def act(cluster: Cluster, pool: WorkerPool, written: list[Trajectory]) -> None:
        run = asyncio.create_task(pool.run(spec(0)))
        await turns()
        cluster.workers[0].end("g0/0.0")
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        # Else an audit would look for it in the journal, which notes the outcomes of episodes alone.
        assert [trajectory.stop_reason for trajectory in written] == [StopReason.CANCELLED]

    await with_pool(PoolSize(1, 1), act)


async def test_there_are_more_workers_while_episodes_wait_and_fewer_when_idle() -> None:
    async def act(cluster: Cluster, pool: WorkerPool, written: list[Trajectory]) -> None:
        runs = [asyncio.create_task(pool.run(spec(number))) for number in range(5)]
        await turns(60)
        assert cluster.busy == [2, 2, 1]
        for worker in cluster.workers:
            for name in list(worker.running):
                worker.end(name)
        await asyncio.gather(*runs)
        async with asyncio.timeout(10):
            while pool.size > 1:  # noqa: ASYNC110 - a pool has no event for it
                await asyncio.sleep(0.01)
        assert [worker.closed for worker in cluster.workers].count(False) == 1

    await with_pool(PoolSize(1, 3, episodes=2, idle=0.1), act)


async def test_starts_that_fail_end_the_run_after_some() -> None:
    cluster = Cluster()
    cluster.refuse = [ConfigError("no such environment on this node")]
    with pytest.raises(ConfigError, match="on this node"):
        await WorkerPool(cluster.start, PoolSize(2, 2), None).open()
    assert all(worker.closed for worker in cluster.workers)

    async def act(cluster: Cluster, pool: WorkerPool, written: list[Trajectory]) -> None:
        cluster.refuse = [PlacementError("no node has room")] * 3
        run = asyncio.create_task(pool.run(spec(0)))
        await turns()
        cluster.workers[0].die()
        assert isinstance((await run).error, RunnerDisconnected)
        with pytest.raises(PlacementError, match="no node has room"):
            async with asyncio.timeout(10):
                await pool.run(spec(1))

    await with_pool(PoolSize(1, 1, failures=3, idle=0.2), act)


async def test_errors_lost_threads_and_moves_travel() -> None:
    async def act(cluster: Cluster, pool: WorkerPool, written: list[Trajectory]) -> None:
        run = asyncio.create_task(pool.run(spec(0)))
        await turns()
        cluster.workers[0].end("g0/0.0", error=EnvError("broken"), lost=2)
        outcome = await run
        assert isinstance(outcome.error, EnvError)
        assert str(outcome.error) == "broken"
        assert pool.lost_threads == 2
        await pool.move("http://a:1", "http://a:2")
        assert cluster.workers[0].moved == [("http://a:1", "http://a:2")]

    await with_pool(PoolSize(1, 1), act)


async def test_a_worker_that_leaves_pings_unanswered_is_lost() -> None:
    async def act(cluster: Cluster, pool: WorkerPool, written: list[Trajectory]) -> None:
        run = asyncio.create_task(pool.run(spec(0)))
        await turns()
        for cluster.workers[0].stopped in (False, True):
            for _ in range(6):
                assert not run.done()
                pass_time(30.0)
                await turns()
        outcome = await run
        assert isinstance(outcome.error, RunnerDisconnected)
        assert "left 3 pings in a row unanswered" in str(outcome.error)
        assert cluster.workers[0].closed
        assert pool.losses == 1

    await with_pool(PoolSize(1, 1), act)


@settings(max_examples=examples(60))
@given(st.lists(st.sampled_from(["ask", "end", "die", "cancel"]), max_size=40), st.integers(1, 3), st.integers(1, 3))
async def test_workers_stay_bounded_and_every_episode_ends(events: list[str], minimum: int, episodes: int) -> None:
    async def act(cluster: Cluster, pool: WorkerPool, written: list[Trajectory]) -> None:
        runs: list[asyncio.Task[Any]] = []
        for number, event in enumerate(events):
            alive = [worker for worker in cluster.workers if not worker.closed]
            busy = [worker for worker in alive if worker.running]
            if event == "ask":
                runs.append(asyncio.create_task(pool.run(spec(number))))
            elif event == "end" and busy:
                busy[number % len(busy)].end(next(iter(busy[number % len(busy)].running)))
            elif event == "die" and alive:
                alive[number % len(alive)].die()
            elif event == "cancel" and runs:
                runs[number % len(runs)].cancel()
            await turns()
            assert all(worker.most <= episodes for worker in cluster.workers)
        while not all(run.done() for run in runs):
            for worker in cluster.workers:
                for name in list(worker.running):
                    worker.end(name)
            await turns()
        results = [run.result() for run in runs if not run.cancelled()]
        assert len({trajectory.id for trajectory in written}) == len(written)
        assert sum(outcome.error is None for outcome in results) <= len(written)

    await with_pool(PoolSize(minimum, minimum + 1, episodes=episodes), act)
