"""The loop that the configuration names.

rollouts  ====================|  |====================|  |=====     groups, replay.ahead batches of them
trainer        [update step 1]          [update step 2]             each as soon as a batch of groups is there
weights                        v1                      v2           what is being sampled is answered as it is,
and gone on with under the new weights

rollouts  ====================================================     servers change weights between two tokens
trainer     [1: part a][part b]  [2: part a]   [part b]            each part as soon as its groups are there
weights                        v1                     v2           a completion may have tokens of several
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Final, Self

from turnwise.errors import DiskError, TrainError
from turnwise.trainer.config.train import Mode
from turnwise.trainer.loops.steps import (
    Learned,
    TrainThread,
    ask_ahead,
    finish_step,
    learn,
    measured,
    publish,
    roll_out,
    split_evenly,
    train_on,
    wait_for,
)
from turnwise.trainer.run.run import TrainRun


async def train_sync(run: TrainRun) -> None:
    """Train until the budget is spent: its steps, tokens or time, whichever is first.

    Tasks -> groups of trajectories -> advantages and rows -> packed micro-batches -> loss -> new weights -> server.

    Raises:
        TrainError: Every episode of a step failed.
        InferenceError: A server died more often than ``inference.max_restarts``.
    """
    while not run.ended:
        batch = await roll_out(run)
        await train_on(run, batch)
        await finish_step(run)


async def train_colocate_async(run: TrainRun) -> None:
    """Train until the budget is spent, while further groups are on their way.

    A batch is what the replay strategy takes of the groups that have finished. With ``overlap.sampling: pause`` the
    servers stand still during an update; tools and environments of the episodes go on.

    Raises:
        TrainError: Every episode of a step failed.
        InferenceError: A server died more often than ``inference.max_restarts``.
    """
    pauses = run.config.overlap.sampling == "pause"
    with TrainThread() as train_thread:
        while not run.ended:
            step = run.state.step + 1
            ask_ahead(run, step)
            batch = await wait_for(run, run.config.batch.groups)
            ask_ahead(run, step + 1)
            if pauses:
                await run.pause_servers()
            learned = await learn(run, batch, train_thread)
            run.advance()
            await publish(run, [learned], still=True)
            ask_ahead(run, step + 1)
            await finish_step(run)


@dataclass(frozen=True, slots=True)
class Trained:
    """How far the step that is made is trained.

    Attributes:
        step: The step.
        groups: How many groups of those that it was given.
        records: How many records of what this process trained stand in ``batches.jsonl``.
        sampled_tokens: What the run had spent of them.
    """

    step: int
    groups: int
    records: int
    sampled_tokens: float

    @classmethod
    def now(cls, run: TrainRun) -> Self:
        """Return how far it is where everything that it was given is trained."""
        step = run.state.step + 1
        groups = len(run.journal.given) if run.journal.given_to == step else 0
        return cls(step, groups, run.batches.records, run.budget.spent.get("sampled_tokens", 0.0))


def requeue_untrained(run: TrainRun, trained: Trained) -> None:
    """Give back what a step was given and did not train, as if it had not been asked for yet.

    Args:
        run: The run; its weights are those of the parts that are trained.
        trained: How far they reach.

    Raises:
        DiskError: The disk refuses; nothing may be saved then.
    """
    kept, keys = run.journal.given[: trained.groups], run.journal.given[trained.groups :]
    if keys:
        run.journal.take(trained.step, keys, back=True)
    run.batches.undo(trained.step, run.batches.records - trained.records)
    # A stored group that an earlier part of the step trained is on its way no more.
    run.feed.take_back(set(keys).difference(kept))
    run.budget.spend(sampled_tokens=trained.sampled_tokens - run.budget.spent.get("sampled_tokens", 0.0))


async def train_separate_async(run: TrainRun) -> None:
    """Train until the budget is spent, while servers sample without a pause.

    A batch comes in ``overlap.stream`` parts, each trained by one optimizer step as soon as the replay strategy has
    groups for it. The servers get the weights after the last part.

    Raises:
        TrainError: Every episode of a step failed.
        InferenceError: A server died more often than ``inference.max_restarts``.
    """
    with TrainThread() as train_thread:
        while not run.ended:
            learned = await _stream(run, train_thread)
            await publish(run, learned)
            ask_ahead(run, run.state.step + 1)
            await finish_step(run)


async def _stream(run: TrainRun, train_thread: TrainThread) -> list[Learned]:
    """Train a batch, part by part as it arrives.

    An interrupt between two parts, or an error before the next one changed any weights, ends the step with the parts
    that are trained: it is a short one, and nothing that was learned is lost. What the next part was given is there
    again for the process that goes on. A step whose weights an error left half changed is not kept.
    """
    step, learned, taken = run.state.step + 1, list[Learned](), 0
    trained = Trained.now(run)
    sizes = split_evenly(run.config.batch.groups, run.config.overlap.stream)
    try:
        for size in sizes:
            ask_ahead(run, step, taken)
            batch = await wait_for(run, size, settles=taken + size == run.config.batch.groups)
            taken += size
            ask_ahead(run, *((step, taken) if taken < run.config.batch.groups else (step + 1, 0)))
            learned.append(await learn(run, batch, train_thread, part=len(sizes) > 1))
            trained = Trained.now(run)
    except BaseException:  # also a cancellation: what was learned is kept
        if _any(learned) and not run.torn:
            _end_here(run, learned, trained)
        raise
    if not _any(learned):
        raise TrainError(f"step {step}: every episode ended in an error; the last one: {run.last_error}")
    run.advance()
    return learned


def _end_here(run: TrainRun, learned: list[Learned], trained: Trained) -> None:
    """Count a step that ends with the parts that are trained; where the disk refuses, it is not kept."""
    try:
        requeue_untrained(run, trained)
        run.advance()
        run.log(measured(run, learned, time.monotonic()))
    except DiskError:
        # What ended the step is told, not what followed from it.
        run.torn = True


def _any(learned: list[Learned]) -> bool:
    """Return whether a part had a trajectory to learn from."""
    return any(each.metrics["batch/trajectories"] for each in learned)


LOOPS: Final[Mapping[Mode, Callable[[TrainRun], Awaitable[None]]]] = {
    "sync": train_sync,
    "colocate_async": train_colocate_async,
    "separate_async": train_separate_async,
}


async def train_as_configured(run: TrainRun) -> None:
    """Train by the loop of ``mode`` until the budget is spent.

    Raises:
        TrainError: Every episode of a step failed.
        InferenceError: A server died more often than ``inference.max_restarts``.
    """
    await LOOPS[run.config.mode](run)
