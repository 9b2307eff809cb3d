"""The training loops: synchronous, colocated asynchronous and separate asynchronous.

Colocated: each update starts as soon as a batch of groups has finished, up to ``replay.ahead`` batches ahead; new
weights abort running requests, which are resumed under them::

    rollouts  ====================|  |====================|  |=====
    trainer        [update step 1]          [update step 2]
    weights                        v1                      v2

Separate: each part of a batch is trained as soon as its groups have finished; servers change weights between two
tokens, so that a completion may mix versions::

    rollouts  ====================================================
    trainer     [1: part a][part b]  [2: part a]   [part b]
    weights                        v1                     v2
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

from turnwise.errors import DiskError, TrainError
from turnwise.trainer.config.train import Mode
from turnwise.trainer.loops.steps import (
    TrainedBatch,
    finish_step,
    learn,
    publish,
    request_ahead,
    roll_out,
    split_evenly,
    step_record,
    train_on,
    wait_for,
)

if TYPE_CHECKING:
    from turnwise.trainer.run.run import TrainRun


async def train_sync(run: TrainRun) -> None:
    """Alternate rollouts and updates until the budget (steps, tokens or time) is spent.

    Raises:
        TrainError: Every episode of a step failed.
        InferenceError: A server died more often than ``inference.max_restarts``.
    """
    while not run.ended:
        batch = await roll_out(run)
        await train_on(run, batch)
        await finish_step(run)


async def train_colocate_async(run: TrainRun) -> None:
    """Train until the budget is spent, overlapping updates with further rollouts on one device.

    The replay strategy forms batches from finished groups. With ``overlap.sampling: pause`` the servers pause during an
    update; tools and environments continue. Raises as :func:`train_sync`.
    """
    pauses = run.config.overlap.sampling == "pause"
    while not run.ended:
        step = run.state.step + 1
        request_ahead(run, step)
        batch = await wait_for(run, run.config.batch.groups)
        request_ahead(run, step + 1)
        if pauses:
            await run.pause_servers()
        learned = await learn(run, batch)
        run.advance()
        await publish(run, [learned], pause=True)
        request_ahead(run, step + 1)
        await finish_step(run)


@dataclass(frozen=True, slots=True)
class StepProgress:
    """How much of the current step is trained.

    Attributes:
        step: The step.
        groups: Number of its groups that are trained.
        records: Number of records of this process in ``batches.jsonl``.
        sampled_tokens: Tokens that the run had sampled.
    """

    step: int
    groups: int
    records: int
    sampled_tokens: float

    @classmethod
    def now(cls, run: TrainRun) -> Self:
        """Return the state in which all received groups are trained."""
        step = run.state.step + 1
        groups = len(run.journal.given) if run.journal.given_to == step else 0
        return cls(step, groups, run.batches.records, run.budget.spent.get("sampled_tokens", 0.0))


def requeue_untrained(run: TrainRun, progress: StepProgress) -> None:
    """Return the groups that a step received and did not train to the queue.

    Raises:
        DiskError: The disk refuses; nothing may be saved then.
    """
    trained_keys, keys = run.journal.given[: progress.groups], run.journal.given[progress.groups :]
    if keys:
        run.journal.take(progress.step, keys, back=True)
    run.batches.undo(progress.step, run.batches.records - progress.records)
    # A stored group that an earlier part of the step trained is no longer in flight.
    run.scheduler.requeue(set(keys).difference(trained_keys))
    run.budget.spend(sampled_tokens=progress.sampled_tokens - run.budget.spent.get("sampled_tokens", 0.0))


async def train_separate_async(run: TrainRun) -> None:
    """Train until the budget is spent, while servers sample without a pause.

    A batch has ``overlap.stream`` parts, each trained by one optimizer step as soon as the replay strategy has its
    groups. The servers get the weights after the last part. Raises as :func:`train_sync`.
    """
    while not run.ended:
        learned = await _stream(run)
        await publish(run, learned)
        request_ahead(run, run.state.step + 1)
        await finish_step(run)


async def _stream(run: TrainRun) -> list[TrainedBatch]:
    """Train a batch part by part.

    An interrupt between two parts, or an error before the next one changed any weights, ends the step early with the
    trained parts; the untrained groups are requeued. A step whose weights an error left half updated is discarded.
    """
    step, learned, received = run.state.step + 1, list[TrainedBatch](), 0
    progress = StepProgress.now(run)
    sizes = split_evenly(run.config.batch.groups, run.config.overlap.stream)
    try:
        for size in sizes:
            request_ahead(run, step, received)
            batch = await wait_for(run, size, settles=received + size == run.config.batch.groups)
            received += size
            request_ahead(run, *((step, received) if received < run.config.batch.groups else (step + 1, 0)))
            learned.append(await learn(run, batch, part=len(sizes) > 1))
            progress = StepProgress.now(run)
    except BaseException:  # also a cancellation: what was learned is kept
        if _any_updated(learned) and not run.torn:
            _end_partial_step(run, learned, progress)
        raise
    if not _any_updated(learned):
        raise TrainError(f"step {step}: every episode ended in an error; the last one: {run.last_error}")
    run.advance()
    return learned


def _end_partial_step(run: TrainRun, learned: list[TrainedBatch], progress: StepProgress) -> None:
    """Count a step that ends with its trained parts; on a disk error it is discarded."""
    try:
        requeue_untrained(run, progress)
        run.advance()
        run.log(step_record(run, learned, time.monotonic()))
    except DiskError:
        # Report the error that ended the step, not this one.
        run.torn = True


def _any_updated(learned: list[TrainedBatch]) -> bool:
    return any(part.metrics["batch/trajectories"] for part in learned)


LOOPS: Final[Mapping[Mode, Callable[[TrainRun], Awaitable[None]]]] = {
    "sync": train_sync,
    "colocate_async": train_colocate_async,
    "separate_async": train_separate_async,
}


async def train_as_configured(run: TrainRun) -> None:
    """Run the loop of ``mode`` until the budget is spent. Raises as :func:`train_sync`."""
    await LOOPS[run.config.mode](run)
