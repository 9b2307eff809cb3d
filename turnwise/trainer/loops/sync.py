"""The synchronous loop: roll out a batch, train on it, sync the weights, again. Strictly on-policy.

Owns: :func:`train_sync` and the parts of its step, :func:`roll_out`, :func:`train_on` and :func:`finish_step`, which an
algorithm of the user's calls in an order of its own (``training.py``).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from turnwise.agents.roles import TRAINED
from turnwise.errors import TrainError
from turnwise.rollout.core import RolloutRequest
from turnwise.trainer.diagnostics.counts import dropped_tokens, tool_metrics
from turnwise.trainer.diagnostics.gap import GapWatch
from turnwise.trainer.distill import distilled
from turnwise.trainer.expectations import expect
from turnwise.trainer.experience import build_experience, collect
from turnwise.trainer.run import TrainRun
from turnwise.trainer.update import update_policy
from turnwise.trajectory import TrajectoryGroup


@dataclass(frozen=True, slots=True)
class Batch:
    """Groups that were rolled out for a train step.

    Attributes:
        groups: The groups.
        metrics: What was measured while they were waited for.
        started: When their rollout began, by ``time.monotonic``.
        sampled: When it ended.
    """

    groups: Sequence[TrajectoryGroup]
    metrics: dict[str, float]
    started: float
    sampled: float


async def train_sync(run: TrainRun) -> None:
    """Train until the budget is spent: its steps, tokens or time, whichever is first.

    Tasks -> groups of trajectories -> advantages and rows -> packed micro-batches -> loss -> new weights -> server.

    Raises:
        TrainError: Every episode of a step failed.
        InferenceError: The inference server died twice.
    """
    while not run.ended:
        batch = await roll_out(run, run.feed.next(run.config.batch.groups))
        await train_on(run, batch)
        await finish_step(run)


async def roll_out(run: TrainRun, requests: Sequence[RolloutRequest], *, given: bool = False) -> Batch:
    """Have groups rolled out and wait for them.

    Args:
        run: The run.
        requests: What to roll out.
        given: Whether the caller chose the tasks: a group that is dropped is then not replaced by another one.

    Raises:
        TrainError: All of them were dropped, and ``given``.
        InferenceError: The inference server died twice.
    """
    started = time.monotonic()
    step = run.state.step + 1
    run.display.status(f"step {step}: rolling out")
    run.feed.issue(requests, given=given)
    ref, metrics = await run.buffer.sample(step, "train", len(requests))
    # Only a function of the user's may want to read what was said.
    fields = ("tokens", "rewards", "metrics", *(("messages",) if run.config.algorithm.credit.custom else ()))
    groups = await run.buffer.fetch(ref, fields)
    await run.buffer.release(ref)
    run.feed.done(ref, groups)
    rolled_out = (each for group in groups for each in (*group.trajectories, *group.baselines))
    mine = [each for each in rolled_out if each.policy == TRAINED]
    run.budget.spend(sampled_tokens=sum(each.sampled_tokens for each in mine))
    return Batch(groups, metrics, started, time.monotonic())


async def train_on(run: TrainRun, batch: Batch) -> dict[str, float]:
    """Take one train step: advantages and rows, updates, the new weights on the servers, and its metrics in the log.

    Raises:
        TrainError: Every episode failed.
        InferenceError: The inference server died twice.
    """
    config, step = run.config, run.state.step + 1
    run.display.status(f"step {step}: updating")
    collected = collect(batch.groups, max_tokens_per_row=config.batch.max_tokens_per_row)
    if not collected.metrics["batch/trajectories"]:
        raise TrainError(f"step {step}: every episode ended in an error; the last one: {run.last_error}")
    if run.kl is not None:
        collected = run.kl.charge(collected, run.learner)
    expected = expect(run.critic, collected.members, collected.samples, config.batch)
    alone = run.critic is not None and run.critic.learns_alone(step)
    experience = build_experience(
        collected, config.algorithm, temperature=config.rollout.temperature, expected=expected
    )
    if run.teacher is not None and config.algorithm.distill is not None:
        scores = await run.teacher.score([row.sample for row in experience.rows])
        experience = distilled(experience, scores, config.algorithm.distill)
    watch = GapWatch()
    with run.updating(step):
        for epoch in range(config.algorithm.epochs):
            run.batches.write(step, [row.sample for row in experience.rows], epoch=epoch)
        term = None if run.kl is None else run.kl.term(experience.rows)
        updates = update_policy(
            run.learner,
            experience.rows,
            config.algorithm,
            config.batch,
            seed=step,
            kl=term,
            critic=run.critic,
            critic_alone=alone,
            watch=watch,
        )
        metrics = batch.metrics | updates | experience.metrics
        if run.kl is not None:
            metrics |= run.kl.step(metrics)
            run.state.kl_coef = run.kl.control.coef
    run.budget.spend(trained_tokens=experience.metrics["batch/trained_tokens"])
    updated = time.monotonic()

    sent = await run.sync_weights()
    synced = time.monotonic()
    gaps = watch.found()
    metrics |= run.tasks.metrics() | sent | gaps.metrics() | tool_metrics(batch.groups)
    metrics |= dropped_tokens(batch.groups, collected.members, collected.samples, experience.rows)
    metrics |= _times(batch, updated, synced, metrics)
    run.log(metrics)
    run.diagnose(gaps, batch.groups)
    return metrics


def _times(batch: Batch, updated: float, synced: float, metrics: Mapping[str, float]) -> dict[str, float]:
    seconds = batch.sampled - batch.started
    return {
        "time/rollout_s": seconds,
        "time/update_s": updated - batch.sampled,
        "time/sync_s": synced - updated,
        "time/step_s": synced - batch.started,
        "time/sampled_tokens_per_s": metrics["rollout/sampled_tokens"] * metrics["batch/trajectories"] / seconds,
    }


async def finish_step(run: TrainRun) -> None:
    """Evaluate and write a checkpoint where the configuration says so, and a checkpoint after the last step."""
    config, step, ended = run.config, run.state.step, run.ended
    if config.eval and config.eval.every and step % config.eval.every == 0 and not ended:
        await run.evaluate(f"step-{step}")
    if step % config.checkpoint.every == 0 or ended:
        run.save()
