"""LocalReplayBuffer: the replay buffer of one process."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import time
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from turnwise.errors import TrainError, TurnwiseError, shown, user_code
from turnwise.rollout.core import BatchRef, GroupFacts, ReplayBuffer, RolloutRequest
from turnwise.rollout.journal.journal import Journal
from turnwise.rollout.replay.group_store import GroupStore, group_facts
from turnwise.rollout.replay.strategies import (
    FAILED,
    STALE,
    Fifo,
    InFlight,
    StragglerCutoff,
    StragglerDeadline,
    Strategy,
    lacks_members,
    why_filtered,
)
from turnwise.trajectory import Trajectory, TrajectoryGroup

T = TypeVar("T")

# Up to which change the code that runs has seen the buffer: what came since then ends its wait at once.
_SEEN_CHANGE: contextvars.ContextVar[int | None] = contextvars.ContextVar("turnwise_seen_change", default=None)


class _ThreadCall:
    """Blocking code in a thread, which acts on the event loop. Once cancelled its waits end, and it changes nothing."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._cancelled = False

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Await a coroutine, from the thread."""
        return asyncio.run_coroutine_threadsafe(self._run(coroutine), self._loop).result()

    async def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        # What runs here is no longer in the thread.
        _CALL.set(None)
        if self._cancelled:
            coroutine.close()
            raise asyncio.CancelledError
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        try:
            return await task
        finally:
            self._tasks.discard(task)

    def cancel(self) -> None:
        """End its waits, from the event loop."""
        self._cancelled = True
        for task in self._tasks:
            task.cancel()


_CALL: contextvars.ContextVar[_ThreadCall | None] = contextvars.ContextVar("turnwise_thread_call", default=None)


class NotifyingBuffer(ReplayBuffer):
    """Counts changes, wakes waiters, and calls a ``sample`` that a user may have written."""

    def __init__(self) -> None:
        self._error: BaseException | None = None
        # Set and replaced at every change: each waiter wakes once per change.
        self._changed = asyncio.Event()
        self._changes = 0
        self._reissued = 0
        # Step and batch size of the ``sample`` of groups to train that runs.
        self._requested: tuple[int, int] | None = None

    def reissued(self) -> None:
        """Count what is rolled out again after a loss."""
        self._reissued += 1

    async def next_batch(
        self, global_steps: int, partition_id: str, batch_size: int
    ) -> tuple[BatchRef, dict[str, float]]:
        """Return the batch of ``sample``, which runs in a thread where it is no ``async def``.

        While it waits for groups to train, others are requested in the place of discarded ones.

        Raises:
            TurnwiseError: No further group will come, or ``sample`` raised it.
            TrainError: ``sample`` raised something else, or returned no batch with metrics.
        """
        started, name = time.monotonic(), type(self).__qualname__
        with user_code(TrainError, f"step {global_steps}: {name}.sample raised"):
            result = await self._call_sample(global_steps, partition_id, batch_size)
        match result:
            case (BatchRef() as ref, Mapping() as metrics):
                pass
            case _:
                raise TrainError(
                    f"{name}.sample returned {shown(result)}: return self.take(ids, global_steps), which is a batch "
                    "and its metrics"
                )
        for key, value in metrics.items():
            if not isinstance(key, str) or isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TrainError(f"{name}.sample returned the metric {key!r}: {shown(value)}; metrics are numbers")
        figures = {key: float(value) for key, value in metrics.items()}
        return ref, {"replay/wait_s": time.monotonic() - started, **figures}

    async def _call_sample(self, global_steps: int, partition_id: str, batch_size: int) -> Any:
        sample: Callable[..., Any] = self.sample
        if partition_id == "train":
            self._requested = global_steps, batch_size
        call = None if inspect.iscoroutinefunction(sample) else _ThreadCall()
        token = _CALL.set(call)
        try:
            if call is None:
                return await sample(global_steps, partition_id, batch_size)
            return await asyncio.to_thread(sample, global_steps, partition_id, batch_size)
        except asyncio.CancelledError:
            if call is not None:
                call.cancel()
            raise
        finally:
            _CALL.reset(token)
            if partition_id == "train":
                self._requested = None

    async def changed(self, seconds: float | None = None) -> bool:
        """Wait for a change since the caller last read ``ready`` or ``in_flight``.

        Args:
            seconds: Timeout; None waits without limit.

        Returns:
            Whether something has changed.

        Raises:
            TurnwiseError: No further group will come: the producer ended with this error.
        """
        seen = _SEEN_CHANGE.get()
        last_seen = self._changes if seen is None else seen
        self._check()
        if last_seen == self._changes:
            self._request_missing()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._changed.wait()
            self._check()
        came = self._changes != last_seen
        # Whoever waits twice without looking waits for two changes.
        self._see()
        return came

    def wait(self, seconds: float | None = None) -> bool:
        """Wait as :meth:`changed` does, from the thread of a plain ``def sample``.

        Args:
            seconds: Timeout; None waits without limit.

        Returns:
            Whether something has changed.

        Raises:
            TrainError: It would block the event loop.
            TurnwiseError: As :meth:`changed`.
        """
        call = _CALL.get()
        if call is None:
            raise TrainError("wait() would block the run forever: in an async def, await self.changed() instead")
        came = call.run(self.changed(seconds))
        self._see()
        return came

    def _on_loop(self, act: Callable[[], T]) -> T:
        """Run on the event loop, also from the thread of a plain ``def sample``: a buffer changes nowhere else."""
        call = _CALL.get()
        if call is None:
            return act()

        async def acting() -> T:
            return act()

        return call.run(acting())

    def _request_missing(self) -> None:
        """Request groups in the place of discarded ones, before a wait."""

    def _see(self) -> None:
        _SEEN_CHANGE.set(self._changes)

    def _notify(self) -> None:
        self._changes += 1
        self._changed.set()
        self._changed = asyncio.Event()

    def _check(self) -> None:
        error = self._error
        if isinstance(error, TurnwiseError):
            raise error
        if error is not None:
            raise TrainError(f"rollouts ended: {type(error).__name__}: {error}") from error


PARTITIONS = ("train", "val")
_EVALUATED = Fifo()
"""Groups of an evaluation are neither weighed nor dropped."""
# So many batches of groups that came back too old in one step mean that none will ever be new enough.
_MAX_STALE_BATCHES = 16

FIELDS = ("tokens", "rewards", "metrics", "messages")


class LocalReplayBuffer(NotifyingBuffer):
    """Keeps finished groups by partition, in the order of arrival.

    Args:
        strategy: Chooses the groups of a batch; by default the first to arrive.
        journal: Records groups to train and batches; None keeps everything in memory only.
        min_members: Fewest members without an error; groups with fewer are dropped.
        filter_metric: Reward by which groups without a learning signal are dropped; None drops none.
        tail: How long a batch waits for its last groups; by default without limit.
        memory_mb: Memory for journaled groups, in units of 2**20 bytes on disk.
    """

    def __init__(
        self,
        strategy: Strategy | None = None,
        journal: Journal | None = None,
        *,
        min_members: int = 1,
        filter_metric: str | None = None,
        tail: StragglerDeadline | None = None,
        memory_mb: int = 1024,
    ) -> None:
        super().__init__()
        self._min_members = min_members
        self._filter_metric = filter_metric
        self._tail = tail
        self._strategy = strategy or Fifo()
        self._store = GroupStore(journal, memory_mb)
        self._ready: dict[str, dict[str, GroupFacts]] = {name: {} for name in PARTITIONS}
        self._in_flight: dict[str, list[InFlight]] = {name: [] for name in PARTITIONS}
        self._batches: dict[int, list[GroupFacts]] = {}
        # The last step that asked for groups to train, before that the next one: what is dropped is dropped by it.
        self._step = self._store.next_step
        # How many groups were handed out, by partition and step; of the newest step only.
        self._taken: dict[tuple[str, int], int] = {}
        self._next_batch = 0
        self._arrived = 0
        self._refill: Callable[[int], bool] | None = None
        self._on_drop: Callable[[GroupFacts, str], None] | None = None
        self._dropped: Counter[str] = Counter()

    def expect(self, request: RolloutRequest, version: int) -> bool:
        """Note a request as in flight, or restore what earlier processes finished of its group."""
        ready = self._partition(request.partition)
        if request.partition == "train":
            if (facts := self._store.restore(request.key, self._arrived)) is not None:
                self._arrived += 1
                ready[facts.id] = facts
                # That it was dropped may be undone, with its step.
                self._drop_unusable(facts, self._store.get(facts.id))
                self._notify()
                return True
            version = self._store.begun_by(request.key, version)
        flight = InFlight(request.key, request.task.id, request.partition, version)
        self._in_flight[request.partition].append(flight)
        return False

    def refill_by(self, refill: Callable[[int], bool]) -> None:
        """Set the callback that requests further groups."""
        self._refill = refill

    def drops_to(self, callback: Callable[[GroupFacts, str], None]) -> None:
        """Set the callback for groups that will never be trained."""
        self._on_drop = callback

    def discard(self, keys: Collection[str], why: str) -> None:
        """Forget requests, in flight or finished."""

        def act() -> None:
            for ready, in_flight in zip(self._ready.values(), self._in_flight.values(), strict=True):
                flights = [flight for flight in in_flight if flight.key in keys]
                finished = [facts for facts in ready.values() if facts.key in keys]
                for flight in flights:
                    in_flight.remove(flight)
                    self._store.drop_key(self._step, flight.key, why)
                for facts in finished:
                    self._drop(facts.partition, facts.id, why)
                if flights or finished:
                    self._notify()

        self._on_loop(act)

    async def put(self, group: TrajectoryGroup) -> None:
        """Store a finished group, in the journal before any waiter wakes.

        Raises:
            FormatError: A trajectory cannot be written as JSON.
            TrainError: Its partition is unknown, or the disk refuses.
        """
        ready, in_flight = self._partition(group.partition), self._in_flight[group.partition]
        # Our group ids end with the request's key, as a task may be in flight in two epochs at once. A custom manager
        # names groups as it likes: there the task id decides.
        of_task = [flight for flight in in_flight if flight.task_id == group.task_id]
        flight = next(
            (flight for flight in of_task if group.id.endswith(f"-{flight.key}")), of_task[0] if of_task else None
        )
        if flight is not None:
            in_flight.remove(flight)
        # It may give two of them one name, too.
        name = group.id if group.id not in ready else f"{group.id}#{self._arrived}"
        facts = replace(group_facts(group, name if flight is None else flight.key, self._arrived), id=name)
        if facts.oldest_version is None and flight is not None:
            facts = replace(facts, oldest_version=flight.version)
        self._store.put(group, facts)
        ready[name] = facts
        self._arrived += 1
        self._drop_unusable(facts, group)
        self._notify()

    async def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[BatchRef, dict[str, float]]:
        """Wait for ``batch_size`` groups of a partition, chosen by the strategy, and hand them out.

        Returns:
            As :meth:`take`, and ``replay/wait_s`` (seconds waited). With cut stragglers the batch has fewer groups:
            ``straggler/cut_groups`` (number cut) and ``straggler/wait_s`` (seconds waited for them).

        Raises:
            TurnwiseError: The error of :meth:`fail`.
            TrainError: The partition is unknown, the batch size below 1, all groups were dropped without refill, or
                requested groups keep arriving stale.
        """
        if batch_size < 1:
            raise TrainError(f"step {global_steps} asks for {batch_size} groups; a batch has at least 1")
        started = time.monotonic()
        if partition_id == "train":
            self._step = global_steps
        strategy, tail = (self._strategy, self._tail) if partition_id == "train" else (_EVALUATED, None)
        cut, stale = StragglerCutoff(), 0
        while True:
            # Taken before the choice: a group that comes while others are asked for wakes this one, too.
            changed = self._changed
            if partition_id == "train":
                self._drop_filtered()
            ready, in_flight = self.ready(partition_id), self.in_flight(partition_id)
            self._check()
            handed_out = self._taken.get((partition_id, global_steps), 0)
            choice = strategy.choose(ready, in_flight, global_steps, batch_size, handed_out)
            for group_id, why in choice.drop:
                self._drop(partition_id, group_id, why)
                stale += why == STALE
            if stale > _MAX_STALE_BATCHES * batch_size:
                raise TrainError(
                    f"step {global_steps}: {stale} requested groups came back too stale for replay.strategy, "
                    f"{_MAX_STALE_BATCHES} batches of them: their weight versions do not follow those of the run. "
                    "Raise replay.max_staleness, or make sure that the sampling server gets the new weights"
                )
            if choice.take is None and tail is not None:
                # The groups in flight are no longer waited for: choose as if there were none.
                smaller = partial(strategy.choose, ready, (), global_steps, taken=handed_out)
                cut = tail.look(smaller, len(ready), batch_size, cut.since, time.monotonic())
            if (take := choice.take or cut.take) is not None:
                ref, metrics = self.take(take, global_steps)
                if tail is not None:
                    metrics |= cut.metrics(batch_size - len(take), time.monotonic())
                return ref, {"replay/wait_s": time.monotonic() - started, **metrics}
            missing = strategy.lacks(self.ready(partition_id), in_flight, global_steps, batch_size)
            refill = self._refill if partition_id == "train" else None
            if missing > 0 and refill is not None and not refill(missing):
                batch_size -= missing
                if batch_size < 1:
                    raise TrainError(
                        f"step {global_steps}: all requested groups were dropped ({', '.join(sorted(self._dropped))}), "
                        "and no more are requested: choose other tasks, or relax what drops them (replay.filter_groups "
                        "...)"
                    )
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if cut.due is None else max(0.0, cut.due - time.monotonic())):
                    await changed.wait()

    def _request_missing(self) -> None:
        if self._requested is None or self._refill is None:
            return
        step, batch_size = self._requested
        missing = self._strategy.lacks(self.ready("train"), self.in_flight("train"), step, batch_size)
        if missing > 0 and not self._refill(missing):
            raise TrainError(f"step {step}: groups were discarded, and no others were requested in their place")

    def ready(self, partition_id: str) -> list[GroupFacts]:
        """Return the facts of a partition's finished groups, in the order of arrival."""
        self._see()
        return list(self._partition(partition_id).values())

    def in_flight(self, partition_id: str) -> list[InFlight]:
        """Return a partition's groups in flight."""
        self._partition(partition_id)
        self._see()
        return list(self._in_flight[partition_id])

    def take(self, group_ids: Sequence[str], step: int) -> tuple[BatchRef, dict[str, float]]:
        """Hand out finished groups of one partition as a batch, in this order.

        Args:
            group_ids: Their ids.
            step: The requesting step.

        Returns:
            The batch, and ``replay/ready`` (finished groups that remain), ``replay/in_flight`` (requested, unfinished
            groups), ``replay/failed`` (failed members of the batch's groups), ``replay/staleness_mean`` and ``_max``
            (train steps between the sampling weights and the step's), ``replay/reissued`` and ``replay/dropped/WHY``
            (since the batch before).

        Raises:
            TrainError: An id is unknown, or the groups are of two partitions.
        """
        return self._on_loop(lambda: self._take(group_ids, step))

    def _take(self, group_ids: Sequence[str], step: int) -> tuple[BatchRef, dict[str, float]]:
        partition = next((name for name, groups in self._ready.items() if groups.keys() >= set(group_ids)), None)
        if partition is None or len(set(group_ids)) < len(group_ids):
            raise TrainError(
                f"step {step} takes {', '.join(group_ids)}: not finished groups of one partition, each once"
            )
        groups = self._ready[partition]
        if partition == "train":
            self._step = step
        self._store.take(step, group_ids)
        facts = [groups.pop(group_id) for group_id in group_ids]
        ref = BatchRef(self._next_batch, tuple(group_ids), tuple(group.key for group in facts))
        self._next_batch += 1
        self._batches[ref.id] = facts
        # Counts of finished steps are not read again.
        already_taken = self._taken.get((partition, step), 0)
        self._taken = {key: count for key, count in self._taken.items() if key[0] != partition}
        self._taken[partition, step] = already_taken + len(facts)
        dropped, self._dropped = self._dropped, Counter()
        reissued, self._reissued = self._reissued, 0
        ages = [group.staleness(step) for group in facts]
        return ref, {
            "replay/ready": float(len(self.ready(partition))),
            "replay/in_flight": float(len(self._in_flight[partition])),
            "replay/failed": float(sum(group.failed for group in facts)),
            "replay/staleness_mean": sum(ages) / max(1, len(ages)),
            "replay/staleness_max": float(max(ages, default=0)),
            "replay/reissued": float(reissued),
            **{f"replay/dropped/{why}": float(count) for why, count in dropped.items()},
        }

    async def fetch(self, ref: BatchRef, fields: Sequence[str] | None = None) -> list[TrajectoryGroup]:
        """Return the groups of a batch, in its order.

        Args:
            ref: The batch.
            fields: Which of ``tokens``, ``rewards``, ``metrics`` and ``messages`` the trajectories keep; None keeps
                all. Without ``tokens`` they have no segments.

        Raises:
            TrainError: The batch is unknown or released, or a field is unknown.
            FormatError: A group on disk is damaged.
        """
        if ref.id not in self._batches:
            raise TrainError(f"batch {ref.id} is not in the buffer: it was released or never handed out")
        if unknown := [name for name in fields or () if name not in FIELDS]:
            raise TrainError(f"fields holds {unknown[0]!r}; allowed: {', '.join(FIELDS)}")
        groups = []
        for facts in self._batches[ref.id]:
            groups.append(self._store.get(facts.id))
            # Reading is slow: let rollouts run in between.
            await asyncio.sleep(0)
        if fields is None:
            return groups
        return [
            replace(
                group,
                trajectories=[_reduce(member, fields) for member in group.trajectories],
                baselines=[_reduce(member, fields) for member in group.baselines],
            )
            for group in groups
        ]

    async def release(self, ref: BatchRef) -> None:
        """Forget a batch after training. Idempotent."""
        for facts in self._batches.pop(ref.id, ()):
            self._store.forget(facts.id)

    def fail(self, error: BaseException) -> None:
        """Make every waiting and later ``sample`` raise; the first error counts. Call it on the loop's thread."""
        if self._error is None:
            self._error = error
        self._notify()

    def _drop_unusable(self, facts: GroupFacts, group: TrajectoryGroup) -> None:
        """Drop a group to train that lost too many members, or has no learning signal for the step that waits."""
        if facts.partition != "train":
            return
        if lacks_members(group, self._min_members):
            self._drop("train", facts.id, FAILED)
        elif self._requested is not None:
            self._drop_filtered()

    async def _call_sample(self, global_steps: int, partition_id: str, batch_size: int) -> Any:
        if partition_id == "train":
            self._drop_filtered()
        return await super()._call_sample(global_steps, partition_id, batch_size)

    def _drop_filtered(self) -> None:
        """Drop groups without a learning signal. Called while a step waits: what it drops is in its checkpoint."""
        if self._filter_metric is None:
            return
        for facts in self.ready("train"):
            if (why := why_filtered(facts, self._filter_metric)) is not None:
                self._drop("train", facts.id, why)

    def _drop(self, partition: str, group_id: str, why: str) -> None:
        facts = self._ready[partition].pop(group_id)
        self._store.drop(self._step, group_id, why)
        self._dropped[why] += 1
        if self._on_drop is not None:
            self._on_drop(facts, why)

    def _partition(self, name: str) -> dict[str, GroupFacts]:
        if name not in self._ready:
            raise TrainError(f"partition is {name!r}; allowed: {', '.join(PARTITIONS)}")
        return self._ready[name]


def _reduce(trajectory: Trajectory, fields: Sequence[str]) -> Trajectory:
    segments = trajectory.segments if "tokens" in fields else []
    if "messages" not in fields:
        segments = [replace(segment, messages=(), tools=None) for segment in segments]
    return replace(
        trajectory,
        segments=segments,
        rewards=trajectory.rewards if "rewards" in fields else [],
        metrics=trajectory.metrics if "metrics" in fields else {},
    )
