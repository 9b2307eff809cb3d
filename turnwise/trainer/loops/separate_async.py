"""The asynchronous loop for devices of their own: servers sample all the time, training streams what has finished.

Owns: :func:`train_separate_async`. Refuses: what a step is made of (``steps.py``), and how old a group may be when it
is trained (``rollout/strategies.py``).

    rollouts  ====================================================     servers change weights between two tokens
    trainer     [1: part a][part b]  [2: part a]   [part b]            each part as soon as its groups are there
    weights                        v1                     v2           a completion may have tokens of several
"""

from __future__ import annotations

import time

from turnwise.errors import DiskError, TrainError
from turnwise.trainer.apart import Apart
from turnwise.trainer.loops.cut_short import Trained, give_back
from turnwise.trainer.loops.parts import shares
from turnwise.trainer.loops.steps import Learned, ask_ahead, finish_step, learn, measured, publish, wait_for
from turnwise.trainer.run import TrainRun


async def train_separate_async(run: TrainRun) -> None:
    """Train until the budget is spent, while servers sample without a pause.

    A batch comes in ``overlap.stream`` parts, each trained by one optimizer step as soon as the replay strategy has
    groups for it. The servers get the weights after the last part.

    Raises:
        TrainError: Every episode of a step failed.
        InferenceError: A server died more often than ``inference.max_restarts``.
    """
    with Apart() as apart:
        while not run.ended:
            learned = await _stream(run, apart)
            await publish(run, learned)
            ask_ahead(run, run.state.step + 1)
            await finish_step(run)


async def _stream(run: TrainRun, apart: Apart) -> list[Learned]:
    """Train a batch, part by part as it arrives.

    An interrupt between two parts, or an error before the next one changed any weights, ends the step with the parts
    that are trained: it is a short one, and nothing that was learned is lost. What the next part was given is there
    again for the process that goes on. A step whose weights an error left half changed is not kept.
    """
    step, learned, taken = run.state.step + 1, list[Learned](), 0
    trained = Trained.now(run)
    sizes = shares(run.config.batch.groups, run.config.overlap.stream)
    try:
        for size in sizes:
            ask_ahead(run, step, taken)
            batch = await wait_for(run, size, settles=taken + size == run.config.batch.groups)
            taken += size
            ask_ahead(run, *((step, taken) if taken < run.config.batch.groups else (step + 1, 0)))
            learned.append(await learn(run, batch, apart, part=len(sizes) > 1))
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
        give_back(run, trained)
        run.advance()
        run.log(measured(run, learned, time.monotonic()))
    except DiskError:
        # What ended the step is told, not what followed from it.
        run.torn = True


def _any(learned: list[Learned]) -> bool:
    """Return whether a part had a trajectory to learn from."""
    return any(each.metrics["batch/trajectories"] for each in learned)
