"""The parts of a train step in any mode: wait for groups, learn from them, publish the weights, finish."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from turnwise.engine.lora import model_under
from turnwise.errors import TrainError
from turnwise.placement.usage import return_freed_memory
from turnwise.rollout.core import RolloutRequest
from turnwise.rollout.replay.config import make_admission
from turnwise.trainer.algorithms.gap import Gaps, GapWatch
from turnwise.trainer.batch.experience import Experience, add_teacher_advantages, build_experience, collect
from turnwise.trainer.batch.self_distill import SelfTeacher
from turnwise.trainer.config.train import Mode
from turnwise.trainer.core import TrainRow
from turnwise.trainer.learn.critic import critic_values
from turnwise.trainer.learn.update import update_policy
from turnwise.trainer.observe.metrics import dropped_tokens, split_policy, tool_metrics
from turnwise.trainer.observe.timeline import SYNC, UPDATE, WAIT
from turnwise.trainer.run.policies import TrainedPolicy
from turnwise.trainer.run.task_scheduler import task_metrics
from turnwise.trainer.train_thread import TrainThread, uninterrupted
from turnwise.trajectory import Trajectory, TrajectoryGroup

if TYPE_CHECKING:
    from turnwise.trainer.run.run import TrainRun

# Freed blocks of a real model's step would lie idle during the next rollout; to find those of a small one again costs
# more than they are worth.
_MOST_IDLE = 1 << 29


# Of several samplings or parts of a step these are added up.
_SUMS = (
    "batch/",
    "distill/unscored_tokens",
    "dropped/",
    "straggler/cut_groups",
    "straggler/wait_s",
    "straggler/cancelled",
    "rollout/cancelled_episodes",
    "rollout/wasted_tokens",
    "replay/dropped/",
    "replay/failed",
    "replay/reissued",
    "replay/short",
    "replay/wait_s",
    "train/tokens",
    "train/updates",
    "train/skipped_updates",
    "train/non_finite_updates",
)


async def sample_groups(
    run: TrainRun, size: int, *, refill: bool = True, settles: bool = True
) -> tuple[list[TrajectoryGroup], dict[str, float]]:
    """Wait for the groups of the next train step, replacing those that the strategy or hooks drop.

    Args:
        run: The run.
        size: Number of groups.
        refill: Whether groups dropped by hooks are replaced by those of the next tasks.
        settles: Whether the step needs no further groups, so that leftovers are carried or cancelled.

    Returns:
        The groups, and metrics of the wait.

    Raises:
        TrainError: Hooks left nothing, or one of them raised.
        InferenceError: A server died more often than ``inference.max_restarts``.
    """
    step = run.state.step + 1
    # Only hooks, custom credit and the contexts of a teacher read messages.
    reads_messages = bool(run.config.hooks) or any(
        algorithm.credit.custom or algorithm.self_distill for algorithm in run.config.algorithms.values()
    )
    fields = ("tokens", "rewards", "metrics", *(("messages",) if reads_messages else ()))
    await run.hooks.step_begin()
    groups: list[TrajectoryGroup] = []
    metrics: dict[str, float] = {}
    missing, refills = size, 0
    while missing:
        await run.hooks.sample_begin()
        ref, wait_metrics = await run.scheduler.next_batch(step, missing)
        # A batch that the buffer returned is trained, even if the run is interrupted from here on.
        fetched = await uninterrupted(run.buffer.fetch(ref, fields))
        await uninterrupted(run.buffer.release(ref))
        run.scheduler.hand_out(ref, fetched)
        for name, value in wait_metrics.items():
            metrics[name] = value + (metrics.get(name, 0.0) if name.startswith(_SUMS) else 0.0)
        run.hooks.timing_raw["rollout_s"] = metrics["replay/wait_s"]
        groups = await run.hooks.sample_end([*groups, *fetched])
        missing = run.hooks.refills if refill and refills < run.hooks.max_refills else 0
        refills += 1
        if missing:
            run.scheduler.issue(run.scheduler.next(missing))
    if settles:
        metrics |= await uninterrupted(run.scheduler.settle_leftovers(step))
    if not groups:
        raise TrainError(
            f"step {step}: the hooks dropped every group of {size}, after {refills - 1} refills: a step needs at "
            "least one; keep some, or raise max_refills"
        )
    if len(groups) < size:
        metrics["replay/short"] = float(size - len(groups))
    for why, count in run.hooks.dropped.items():
        name = f"replay/dropped/{why.replace('/', '_')}"
        metrics[name] = metrics.get(name, 0.0) + count
    return groups, metrics


_LAST = ("lr/", "critic/lr", "kl/coef", "replay/ready", "replay/in_flight", "straggler/carried")
_MAXIMA = ("_max", "/max", "/worst_turn")
_OF_TOKENS = ("train/", "gap/", "lag/", "critic/", "correction/", "kl/", "distill/")


def split_evenly(groups: int, parts: int) -> list[int]:
    """Return the number of groups of each part of a batch, larger parts first."""
    quotient, remainder = divmod(groups, parts)
    return [quotient + (number < remainder) for number in range(parts)]


def merge_metrics(parts: Sequence[Mapping[str, float]], *, first: tuple[str, ...] = ("gap/",)) -> dict[str, float]:
    """Return the metrics of a step from those of its parts, in training order.

    Counts are summed, maxima maximised; of rates and remainders the last counts, of those that begin with ``first`` the
    first. All others are means, weighted by trained tokens where they concern tokens, else by trajectories.
    """
    if len(parts) == 1:
        return dict(parts[0])
    merged: dict[str, float] = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        policy, bare = split_policy(name)
        having = [part for part in parts if name in part]
        values = [part[name] for part in having]
        if bare.startswith(first):
            # Later parts are trained by other weights than those that the step began with.
            merged[name] = values[0]
        elif bare.startswith(_SUMS):
            merged[name] = sum(values)
        elif bare.endswith(_MAXIMA):
            merged[name] = max(values)
        elif bare.startswith(_LAST):
            merged[name] = values[-1]
        else:
            by = policy + ("batch/trained_tokens" if bare.startswith(_OF_TOKENS) else "batch/trajectories")
            weights = [part.get(by, 0.0) for part in having]
            total = sum(weights)
            pairs = zip(values, weights, strict=True)
            merged[name] = sum(value * weight for value, weight in pairs) / total if total else values[-1]
    return merged


def policy_metrics(metrics_by_policy: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return the metrics of a step from those of its policies: merged, and of several each under ``policy/NAME/``.

    A learning rate or coefficient belongs to one policy, and is not merged.
    """
    if len(metrics_by_policy) == 1:
        return dict(next(iter(metrics_by_policy.values())))
    shared = [
        {key: value for key, value in metrics.items() if not key.startswith(_LAST)}
        for metrics in metrics_by_policy.values()
    ]
    prefixed = {
        f"policy/{name}/{key}": value for name, metrics in metrics_by_policy.items() for key, value in metrics.items()
    }
    return merge_metrics(shared, first=()) | prefixed


def staleness_metrics(rows: Sequence[TrainRow], step: int) -> dict[str, float]:
    """Return mean and maximum staleness of the rows, in weight versions; a step starts at version ``step - 1``."""
    versions = [row.sample.weight_versions[row.sample.loss_mask] for row in rows]
    if not any(len(policy_versions) for policy_versions in versions):
        return {}
    staleness = step - 1 - np.concatenate(versions)
    return {"lag/mean": float(staleness.mean()), "lag/max": float(staleness.max())}


@dataclass(frozen=True, slots=True)
class Batch:
    """Groups that were rolled out for a train step.

    Attributes:
        groups: The groups.
        metrics: Metrics of the rollout.
        started: Start of the rollout or of the wait, by ``time.monotonic``.
        sampled: End of it.
    """

    groups: Sequence[TrajectoryGroup]
    metrics: dict[str, float]
    started: float
    sampled: float

    def trajectories(self) -> Iterator[Trajectory]:
        """Yield the trajectories that trained policies sampled, those of baselines included."""
        for group in self.groups:
            yield from (member for member in (*group.trajectories, *group.baselines) if not member.frozen)


@dataclass(frozen=True, slots=True)
class TrainedBatch:
    """A trained batch, or part of one.

    Attributes:
        batch: The batch.
        metrics: Metrics of the update.
        gaps: Differences between trainer and server, by policy that was trained.
        updated: End of the update, by ``time.monotonic``.
        overlap: Seconds of the update with groups in flight.
    """

    batch: Batch
    metrics: dict[str, float]
    gaps: dict[str, Gaps]
    updated: float
    overlap: float


def request_ahead(run: TrainRun, step: int, received: int = 0) -> None:
    """Request as many groups as the staleness bound allows; ``received`` ones of ``step`` have finished."""
    admission = make_admission(run.config.replay, run.config.replay_facts)
    outstanding = len(run.scheduler.outstanding)
    room = admission.room(outstanding=outstanding, version=run.state.weight_version, step=step, taken=received)
    run.scheduler.top_up(outstanding + room)


async def roll_out(
    run: TrainRun, requests: Sequence[RolloutRequest] | None = None, *, group_size: int | None = None
) -> Batch:
    """Roll out ``requests``, or by default as many of the next tasks as ``batch`` says, and wait for their groups.

    Dropped groups of ``requests`` are not replaced. ``group_size`` overrides ``rollout.group_size`` for the next tasks.

    Raises:
        TrainError: All groups of ``requests`` were dropped.
        InferenceError: A server died more often than ``inference.max_restarts``.
    """
    await run.wake_servers()
    await run.hooks.step_begin()
    if requests is None:
        run.scheduler.request_step(group_size=group_size)
        return await wait_for(run, run.config.batch.groups)
    run.scheduler.issue(requests, by_caller=True)
    return await wait_for(run, len(requests), refill=False)


async def wait_for(run: TrainRun, groups: int, *, refill: bool = True, settles: bool = True) -> Batch:
    """Wait until the buffer returns a batch of groups; arguments as in :func:`sample_groups`.

    Raises:
        InferenceError: A server died more often than ``inference.max_restarts``.
    """
    started, step = time.monotonic(), run.state.step + 1
    run.display.status(f"step {step}: rolling out")
    with run.timeline.span(WAIT, step):
        received, metrics = await sample_groups(run, groups, refill=refill, settles=settles)
    batch = Batch(received, metrics, started, time.monotonic())
    run.budget.spend(sampled_tokens=sum(trajectory.sampled_tokens for trajectory in batch.trajectories()))
    return batch


async def learn(run: TrainRun, batch: Batch, *, part: bool = False) -> TrainedBatch:
    """Train each policy on its trajectories of a batch, in the train thread: advantages and rows, then updates.

    The run's step counter does not advance. One ``part`` of a step's batch may have nothing to train, and so may one of
    several policies.

    Raises:
        TrainError: Every episode failed.
    """
    step = run.state.step + 1
    run.display.status(f"step {step}: updating")
    overlap = run.timeline.overlap
    await run.phases.begin_training()
    with run.timeline.span(UPDATE, step):
        experiences = {
            name: await _prepare_experience(policy, batch, run.train_thread) for name, policy in run.policies.items()
        }
        by_policy = {name: experience.metrics for name, experience in experiences.items()}
        trained = {
            name: experience for name, experience in experiences.items() if experience.metrics["batch/trajectories"]
        }
        if not trained:
            if part:
                return TrainedBatch(batch, batch.metrics | policy_metrics(by_policy), {}, time.monotonic(), 0.0)
            raise TrainError(f"step {step}: every episode ended in an error; the last one: {run.last_error}")
        with run.updating() as changing:
            # All policies or none: an interrupt between two would leave weights of no step.
            updates = await uninterrupted(_train_all(run, trained, changing))
    metrics = batch.metrics | policy_metrics(by_policy | {name: figures for name, (figures, _) in updates.items()})
    gaps = {name: gaps for name, (_, gaps) in updates.items()}
    return TrainedBatch(batch, metrics, gaps, time.monotonic(), run.timeline.overlap - overlap)


async def _prepare_experience(policy: TrainedPolicy, batch: Batch, train_thread: TrainThread) -> Experience:
    """Return the rows that one policy learns from, with advantages."""
    experience = await train_thread(lambda: _compute_experience(policy, batch))
    distill = policy.config.algorithm.distill
    if policy.teacher is not None and distill is not None and experience.rows:
        scores = await uninterrupted(policy.teacher.score([row.sample for row in experience.rows]))
        return add_teacher_advantages(experience, scores, reward_coef=distill.reward_coef)
    return experience


def _compute_experience(policy: TrainedPolicy, batch: Batch) -> Experience:
    config = policy.config
    collected = collect(
        batch.groups,
        policy=policy.name,
        max_tokens_per_row=config.batch.max_tokens_per_row,
        exact=config.inference.exact,
        model=model_under(config.policy.model.path),
    )
    if not collected.metrics["batch/trajectories"]:
        return Experience([], collected.metrics)
    recorded = collected.trajectories
    if policy.kl is not None:
        collected = policy.kl.reward_penalties(collected, policy.learner)
    values = critic_values(policy.critic, collected.trajectories, collected.samples, config.batch)
    experience = build_experience(collected, config.algorithm, temperature=config.rollout.temperature, values=values)
    teacher = SelfTeacher.of(config, policy.renderer, policy.learner.logprobs)
    if teacher is not None and experience.rows:
        experience = teacher.teach(experience, recorded)
    experience.metrics |= tool_metrics(batch.groups, policy=policy.name)
    experience.metrics |= dropped_tokens(
        batch.groups, collected.trajectories, collected.samples, experience.rows, policy=policy.name
    )
    return experience


async def _train_all(
    run: TrainRun, experiences: Mapping[str, Experience], changing: Callable[[], object]
) -> dict[str, tuple[dict[str, float], Gaps]]:
    """Update the policies that have trajectories, in order; return metrics and gaps of each."""
    return {name: await _train(run, name, experience, changing) for name, experience in experiences.items()}


async def _train(
    run: TrainRun, name: str, experience: Experience, changing: Callable[[], object]
) -> tuple[dict[str, float], Gaps]:
    """Update one policy; return the metrics of its step, and its gaps."""
    watch = GapWatch()
    metrics = await run.train_thread(lambda: _update(run, run.policies[name], experience, watch, changing))
    run.budget.spend(trained_tokens=experience.metrics["batch/trained_tokens"])
    gaps = watch.take_gaps()
    lag = staleness_metrics(experience.rows, run.state.step + 1)
    return experience.metrics | metrics | gaps.metrics() | lag, gaps


def _update(
    run: TrainRun, policy: TrainedPolicy, experience: Experience, watch: GapWatch, changing: Callable[[], object]
) -> dict[str, float]:
    config, step = policy.config, run.state.step + 1
    for epoch in range(config.algorithm.epochs):
        samples = [row.sample for row in experience.rows]
        run.batches.write(step, samples, epoch=epoch, policy=policy.name, contexts=experience.contexts)
    metrics = update_policy(
        policy.learner,
        experience.rows,
        config.algorithm,
        config.batch,
        seed=step,
        kl=None if policy.kl is None else policy.kl.term(experience.rows),
        critic=policy.critic,
        critic_alone=policy.critic is not None and policy.critic.learns_alone(step),
        watch=watch,
        changing=changing,
    )
    return_freed_memory(above=_MOST_IDLE)
    if policy.kl is not None:
        metrics |= policy.kl.step(experience.metrics | metrics)
        run.state.kl_coefs[policy.name] = policy.kl.coef
    return metrics


async def publish(run: TrainRun, parts: Sequence[TrainedBatch], *, pause: bool = False) -> dict[str, float]:
    """Send the weights of the current step to the servers, and log its metrics.

    With ``pause``, the servers abort running requests and wait for the weights; clients resume under the new ones.

    Raises:
        InferenceError: A server died more often than ``inference.max_restarts``.
    """
    began = time.monotonic()
    try:
        with run.timeline.span(SYNC, run.state.step):
            sent = await run.sync_weights(pause=pause)
    except BaseException:  # also a cancellation
        # The step is made, and is saved: the log must not lack it because its weights did not get further.
        run.log(step_record(run, parts, began))
        raise
    synced = time.monotonic()
    served = await run.memory() | await run.truncation()
    metrics = step_record(run, parts, synced) | sent | {"time/sync_s": synced - began} | served
    groups = [group for part in parts for group in part.batch.groups]
    try:
        metrics = await run.hooks.step_end(metrics, groups)
    finally:
        run.log(metrics)
    run.diagnose(parts[0].gaps, groups)
    return metrics


def step_record(run: TrainRun, parts: Sequence[TrainedBatch], until: float) -> dict[str, float]:
    """Return the metrics of a step that ended at ``until`` (``time.monotonic``).

    At least one of its parts has a trajectory.
    """
    metrics = merge_metrics([part.metrics for part in parts]) | task_metrics(run.tasks, run.config.curriculum)
    return metrics | _times(run.config.mode, parts, until, run.journal.restored)


def _times(mode: Mode, parts: Sequence[TrainedBatch], synced: float, restored: Collection[str]) -> dict[str, float]:
    waited = sum(part.batch.sampled - part.batch.started for part in parts)
    total = synced - parts[0].batch.started
    trajectories = (trajectory for part in parts for trajectory in part.batch.trajectories())
    # What an earlier process sampled is read from disk, at a speed that no server has.
    tokens = sum(trajectory.sampled_tokens for trajectory in trajectories if trajectory.id not in restored)
    times = {"time/update_s": sum(part.updated - part.batch.sampled for part in parts), "time/step_s": total}
    if mode == "sync":
        return times | {"time/rollout_s": waited, "time/sampled_tokens_per_s": tokens / waited}
    overlap = sum(part.overlap for part in parts)
    return times | {"time/wait_s": waited, "time/overlap_s": overlap, "time/sampled_tokens_per_s": tokens / total}


async def train_on(run: TrainRun, batch: Batch) -> dict[str, float]:
    """Take one whole train step on a batch; return its logged metrics.

    Raises:
        TrainError: Every episode failed.
        InferenceError: A server died more often than ``inference.max_restarts``.
    """
    learned = await learn(run, batch)
    run.advance()
    return await publish(run, [learned])


async def finish_step(run: TrainRun) -> None:
    """Evaluate and write a checkpoint where they are due, and a checkpoint after the last step."""
    config, step, limit = run.config, run.state.step, run.ended
    if config.eval and config.eval.every and step % config.eval.every == 0 and not limit:
        await run.evaluate(f"step-{step}")
    # Weights that an evaluation found to be the best so far are kept, whatever the step.
    best = run.store.improves({name: value for name, value in run.figures.items() if name.startswith("eval/")})
    if step % config.checkpoint.every == 0 or best or limit:
        await run.save()
