"""What a train step is made of, in any mode: wait for groups, learn from them, publish the weights, finish.

Owns: the functions of a step, in its order: :func:`ask_ahead`, :func:`roll_out`, :func:`wait_for`, :func:`learn`,
:func:`publish`, :func:`measured`, :func:`train_on` and :func:`finish_step`. The loops, and an algorithm of the user's
(``training.py``), call them in an order of their own. Refuses: how metrics of parts become those of a step
(``parts.py``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from turnwise.agents.roles import TRAINED
from turnwise.errors import TrainError
from turnwise.rollout.core import RolloutRequest
from turnwise.rollout.replay_setup import make_admission
from turnwise.trainer.apart import Place, inline, uninterrupted
from turnwise.trainer.batch.experience import Collected, Experience, build_experience, collect
from turnwise.trainer.batch.value_targets import critic_values
from turnwise.trainer.diagnostics.counts import dropped_tokens, tool_metrics
from turnwise.trainer.diagnostics.gap import Gaps, GapWatch
from turnwise.trainer.distill import distilled
from turnwise.trainer.loops.parts import combined, lags
from turnwise.trainer.modes import Mode
from turnwise.trainer.run import TrainRun
from turnwise.trainer.sampling import sample_groups
from turnwise.trainer.timeline import SYNC, UPDATE, WAIT
from turnwise.trainer.update import update_policy
from turnwise.trajectory import TrajectoryGroup


@dataclass(frozen=True, slots=True)
class Batch:
    """Groups that were rolled out for a train step.

    Attributes:
        groups: The groups.
        metrics: What was measured while they were waited for.
        started: When their rollout began, or waiting for them, by ``time.monotonic``.
        sampled: When it ended.
    """

    groups: Sequence[TrajectoryGroup]
    metrics: dict[str, float]
    started: float
    sampled: float


@dataclass(frozen=True, slots=True)
class Learned:
    """A batch, or a part of one, that was trained.

    Attributes:
        batch: What was rolled out.
        metrics: What was measured.
        gaps: Where trainer and server differ.
        updated: When its update ended, by ``time.monotonic``.
        overlap: Seconds of the update in which groups were on their way.
    """

    batch: Batch
    metrics: dict[str, float]
    gaps: Gaps
    updated: float
    overlap: float


def ask_ahead(run: TrainRun, step: int, taken: int = 0) -> None:
    """Ask for as many groups as may be on their way, so that none is too old when it is trained.

    Args:
        run: The run.
        step: The step whose batch is waited for next.
        taken: Groups of that batch that are there.
    """
    admission = make_admission(run.config.replay, run.config.replay_facts)
    outstanding = len(run.feed.outstanding)
    room = admission.room(outstanding=outstanding, version=run.state.weight_version, step=step, taken=taken)
    run.feed.top_up(outstanding + room)


async def roll_out(
    run: TrainRun, requests: Sequence[RolloutRequest] | None = None, *, group_size: int | None = None
) -> Batch:
    """Have groups rolled out and wait for them.

    Args:
        run: The run.
        requests: What to roll out, where the caller chose the tasks: a group that is dropped is then not replaced by
            another one. By default the next tasks, as many as ``batch`` says.
        group_size: Members of a group of the next tasks; by default ``rollout.group_size``.

    Raises:
        TrainError: All groups of the caller's tasks were dropped.
        InferenceError: A server died more often than ``inference.max_restarts``.
    """
    await run.hooks.step_begin()
    if requests is None:
        run.feed.ask(group_size=group_size)
        return await wait_for(run, run.config.batch.groups)
    run.feed.issue(requests, given=True)
    return await wait_for(run, len(requests), refill=False)


async def wait_for(run: TrainRun, groups: int, *, refill: bool = True, settles: bool = True) -> Batch:
    """Wait until the buffer hands out a batch of groups.

    Args:
        run: The run.
        groups: How many.
        refill: Whether groups that hooks drop are replaced by those of the next tasks.
        settles: Whether the step waits for no further groups.

    Raises:
        InferenceError: A server died more often than ``inference.max_restarts``.
    """
    started, step = time.monotonic(), run.state.step + 1
    run.display.status(f"step {step}: rolling out")
    with run.timeline.span(WAIT, step):
        taken, metrics = await sample_groups(run, groups, refill=refill, settles=settles)
    rolled_out = (each for group in taken for each in (*group.trajectories, *group.baselines))
    mine = [each for each in rolled_out if each.policy == TRAINED]
    run.budget.spend(sampled_tokens=sum(each.sampled_tokens for each in mine))
    return Batch(taken, metrics, started, time.monotonic())


async def learn(run: TrainRun, batch: Batch, place: Place = inline, *, part: bool = False) -> Learned:
    """Train on a batch: advantages and rows, then updates. The weights change, the run stands where it stood.

    Args:
        run: The run.
        batch: What was rolled out.
        place: Where the blocking half runs.
        part: Whether other parts of the step may have what this one lacks.

    Raises:
        TrainError: Every episode failed.
    """
    config, step = run.config, run.state.step + 1
    run.display.status(f"step {step}: updating")
    overlap = run.timeline.overlap
    with run.timeline.span(UPDATE, step):
        collected, experience = await place(lambda: _experience(run, batch))
        if not collected.metrics["batch/trajectories"]:
            if part:
                return Learned(batch, batch.metrics | collected.metrics, Gaps(), time.monotonic(), 0.0)
            raise TrainError(f"step {step}: every episode ended in an error; the last one: {run.last_error}")
        if run.teacher is not None and config.algorithm.distill is not None:
            scores = await uninterrupted(run.teacher.score([row.sample for row in experience.rows]))
            experience = distilled(experience, scores, config.algorithm.distill)
        watch = GapWatch()
        with run.updating() as changing:
            metrics = await place(lambda: _update(run, experience, watch, changing))
            run.budget.spend(trained_tokens=experience.metrics["batch/trained_tokens"])
            gaps = watch.found()
            metrics |= gaps.metrics() | tool_metrics(batch.groups) | lags(experience.rows, step)
            metrics |= dropped_tokens(batch.groups, collected.trajectories, collected.samples, experience.rows)
            metrics = batch.metrics | experience.metrics | metrics
    return Learned(batch, metrics, gaps, time.monotonic(), run.timeline.overlap - overlap)


def _experience(run: TrainRun, batch: Batch) -> tuple[Collected, Experience]:
    """Return what a batch holds, and its rows with advantages."""
    config = run.config
    collected = collect(batch.groups, max_tokens_per_row=config.batch.max_tokens_per_row)
    if not collected.metrics["batch/trajectories"]:
        return collected, Experience([])
    if run.kl is not None:
        collected = run.kl.charge(collected, run.learner)
    values = critic_values(run.critic, collected.trajectories, collected.samples, config.batch)
    return collected, build_experience(
        collected, config.algorithm, temperature=config.rollout.temperature, values=values
    )


def _update(run: TrainRun, experience: Experience, watch: GapWatch, changing: Callable[[], object]) -> dict[str, float]:
    """Write down what is trained, and train it."""
    config, step = run.config, run.state.step + 1
    for epoch in range(config.algorithm.epochs):
        run.batches.write(step, [row.sample for row in experience.rows], epoch=epoch)
    metrics = update_policy(
        run.learner,
        experience.rows,
        config.algorithm,
        config.batch,
        seed=step,
        kl=None if run.kl is None else run.kl.term(experience.rows),
        critic=run.critic,
        critic_alone=run.critic is not None and run.critic.learns_alone(step),
        watch=watch,
        changing=changing,
    )
    if run.kl is not None:
        metrics |= run.kl.step(experience.metrics | metrics)
        run.state.kl_coef = run.kl.control.coef
    return metrics


async def publish(run: TrainRun, parts: Sequence[Learned], *, still: bool = False) -> dict[str, float]:
    """Bring the weights of the step that the run stands at to the servers, and log what was measured in it.

    Args:
        run: The run.
        parts: What the step trained, in order.
        still: Whether the servers answer what they are sampling with what there is, and wait for the weights; whoever
            asked goes on under the new ones.

    Raises:
        InferenceError: A server died more often than ``inference.max_restarts``.
    """
    began = time.monotonic()
    try:
        with run.timeline.span(SYNC, run.state.step):
            sent = await run.sync_weights(still=still)
    except BaseException:  # also a cancellation
        # The step is made, and is saved: the log must not lack it because its weights did not get further.
        run.log(measured(run, parts, began))
        raise
    synced = time.monotonic()
    metrics = measured(run, parts, synced) | sent | {"time/sync_s": synced - began}
    groups = [group for each in parts for group in each.batch.groups]
    try:
        metrics = await run.hooks.step_end(metrics, groups)
    finally:
        run.log(metrics)
    run.diagnose(parts[0].gaps, groups)
    return metrics


def measured(run: TrainRun, parts: Sequence[Learned], until: float) -> dict[str, float]:
    """Return what was measured in the parts of a step, of which one at least has a trajectory.

    Args:
        run: The run.
        parts: What the step trained, in order.
        until: When the step ended, by ``time.monotonic``.
    """
    metrics = combined([each.metrics for each in parts]) | run.tasks.metrics()
    return metrics | _times(run.config.mode, parts, until, metrics)


def _times(mode: Mode, parts: Sequence[Learned], synced: float, metrics: Mapping[str, float]) -> dict[str, float]:
    waited = sum(each.batch.sampled - each.batch.started for each in parts)
    whole = synced - parts[0].batch.started
    tokens = metrics["rollout/sampled_tokens"] * metrics["batch/trajectories"]
    times = {"time/update_s": sum(each.updated - each.batch.sampled for each in parts), "time/step_s": whole}
    if mode == "sync":
        return times | {"time/rollout_s": waited, "time/sampled_tokens_per_s": tokens / waited}
    overlap = sum(each.overlap for each in parts)
    return times | {"time/wait_s": waited, "time/overlap_s": overlap, "time/sampled_tokens_per_s": tokens / whole}


async def train_on(run: TrainRun, batch: Batch) -> dict[str, float]:
    """Take one whole train step on a batch; return its metrics, which are in the log.

    Raises:
        TrainError: Every episode failed.
        InferenceError: A server died more often than ``inference.max_restarts``.
    """
    learned = await learn(run, batch)
    run.advance()
    return await publish(run, [learned])


async def finish_step(run: TrainRun) -> None:
    """Evaluate and write a checkpoint where the configuration says so, and a checkpoint after the last step."""
    config, step, ended = run.config, run.state.step, run.ended
    if config.eval and config.eval.every and step % config.eval.every == 0 and not ended:
        await run.evaluate(f"step-{step}")
    # Weights that an evaluation found to be the best so far are kept, whatever the step.
    best = run.store.improves({name: value for name, value in run.found.items() if name.startswith("eval/")})
    if step % config.checkpoint.every == 0 or best or ended:
        run.save()
