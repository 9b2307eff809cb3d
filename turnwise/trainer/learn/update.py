"""The optimizer steps of one train step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from turnwise.seeding import stable_hash
from turnwise.trainer.algorithms.config import AlgorithmConfig
from turnwise.trainer.algorithms.correction import CorrectedRows, correct
from turnwise.trainer.algorithms.gap import GapWatch
from turnwise.trainer.algorithms.kl import KLTerm
from turnwise.trainer.algorithms.losses.core import weigh
from turnwise.trainer.algorithms.registry import ConfiguredFunction
from turnwise.trainer.batch.packing import pack, recompute_logprobs
from turnwise.trainer.config.train import BatchConfig
from turnwise.trainer.core import MicroBatch, RowKey, TrainRow
from turnwise.trainer.learn.critic import Critic
from turnwise.trainer.learn.learner import Learner, Stats, StepResult
from turnwise.trainer.learn.objectives import PolicyObjective


def update_policy(
    learner: Learner,
    rows: Sequence[TrainRow],
    algorithm: AlgorithmConfig,
    batch: BatchConfig,
    *,
    seed: int,
    kl: KLTerm | None = None,
    critic: Critic | None = None,
    critic_alone: bool = False,
    watch: GapWatch | None = None,
    changing: Callable[[], object] = lambda: None,
) -> dict[str, float]:
    """Train on the rows of a step: ``epochs`` passes of ``minibatches`` optimizer steps each.

    Rows may be empty, where no group has a gradient. A critic learns in the same steps, or alone with ``critic_alone``.
    ``watch`` records the tokens of the first update, whose weights are those that sampled; ``changing`` is called
    before each optimizer step; ``seed`` decides the split into minibatches.

    Returns:
        Metrics of :func:`update_metrics`.
    """
    objective = PolicyObjective.of(algorithm, kl)
    select = algorithm.chosen_selection()
    corrected, old = _correct_rows(learner, rows, algorithm, batch)
    reference = None if kl is None else corrected.of_kept_tokens(kl.ref_logprobs)
    updates: list[tuple[Stats, StepResult]] = []
    replay: dict[str, float] = {}
    computed = 0
    for epoch in range(algorithm.epochs):
        parts = minibatches(corrected.rows, algorithm.minibatches, stable_hash("minibatches", seed, epoch))
        for number, part in enumerate(parts):
            weighed, normalizer = weigh(part, algorithm.aggregation, scale=algorithm.loss_scale)
            selected: dict[RowKey, Tensor] = {}
            if select is not None and old is not None:
                selected = select_tokens(weighed, old, select, seed=stable_hash("selection", seed, epoch, number))
            if algorithm.idle_at_zero and critic is None:
                # Rows without advantage count in the normaliser, but no forward pass is spent on them.
                weighed = [row for row in weighed if np.any(row.advantage)]
            batches = pack(weighed, batch.micro_batch, share_prefixes=batch.share_prefixes)
            computed += sum(micro.tokens for micro in batches)
            for micro in batches:
                _add_row_tensors(micro, weighed, old, reference, selected)
            if not updates:
                replay = replay_gap(learner, batches)
            watched = _with_watch(objective, watch, weighed)
            if critic is None:
                stats = learner.forward_backward(batches, watched, normalizer)
                changing()
                updates.append((stats, learner.optim_step()))
            elif done := critic.update(learner, batches, watched, normalizer, alone=critic_alone, changing=changing):
                updates.append(done)
    metrics = update_metrics(updates) | corrected.metrics | replay | {"batch/packed_tokens": float(computed)}
    return metrics | ({} if critic is None else critic.metrics())


def replay_gap(learner: Learner, batches: Sequence[MicroBatch]) -> dict[str, float]:
    """Return the mean gap to the rollout with the servers' experts and with the trainer's own, of one micro-batch."""
    routed = next((batch for batch in batches if batch.routes is not None), None)
    if routed is None:
        return {}
    replayed, free = learner.logprobs([routed, routed.freely_routed()])
    gaps = {"gap/replayed": replayed, "gap/freely_routed": free}
    return {name: float((scores.cpu() - routed.rollout_logprobs).abs().mean()) for name, scores in gaps.items()}


def _with_watch(objective: PolicyObjective, watch: GapWatch | None, rows: Sequence[TrainRow]) -> PolicyObjective:
    if watch is None or watch.has_tokens:
        return objective
    watch.set_rows(rows)
    return replace(objective, watch=watch)


def _add_row_tensors(
    micro: MicroBatch,
    rows: Sequence[TrainRow],
    old: Mapping[RowKey, Tensor] | None,
    reference: Mapping[RowKey, Tensor] | None,
    selected: Mapping[RowKey, Tensor],
) -> None:
    """Add the tensors that are known by row to a micro-batch."""
    keys = [rows[index].sample.key for index in micro.rows]
    if old is not None:
        micro.old_logprobs = torch.cat([old[key] for key in keys])
    if reference is not None:
        micro.ref_logprobs = torch.cat([reference[key] for key in keys])
    if selected:
        micro.selected = torch.cat([selected[key] for key in keys])


def _correct_rows(
    learner: Learner, rows: Sequence[TrainRow], algorithm: AlgorithmConfig, batch: BatchConfig
) -> tuple[CorrectedRows, Mapping[RowKey, Tensor] | None]:
    """Return the rows before the first update, corrected, and the old policy's log-probabilities.

    They are None for a single update, whose own forward pass gives them (ratio 1).
    """
    several = algorithm.epochs > 1 or algorithm.minibatches > 1 or algorithm.chosen_selection() is not None
    old: Mapping[RowKey, Tensor] | None = None
    if algorithm.correction is not None or (several and algorithm.old_logprobs == "recompute"):
        old = recompute_logprobs(learner.logprobs, rows, batch)
    corrected = CorrectedRows(list(rows), {}, {})
    if algorithm.correction is not None and old is not None:
        corrected = correct(rows, old, algorithm.correction)
        old = corrected.of_kept_tokens(old)
    if algorithm.old_logprobs == "rollout":
        samples = [row.sample for row in corrected.rows]
        old = {sample.key: torch.from_numpy(sample.rollout_logprobs[sample.loss_mask]) for sample in samples}
    return corrected, old


def select_tokens(
    rows: Sequence[TrainRow], old: Mapping[RowKey, Tensor], select: ConfiguredFunction, *, seed: int
) -> dict[RowKey, Tensor]:
    """Return by row the trained tokens that a loss selects among all rows of an optimizer step."""
    trained = [row for row in rows if row.sample.trained_tokens]
    if not trained:
        return {}
    advantages = []
    for row in trained:
        mask = row.sample.loss_mask
        advantages.append(np.broadcast_to(np.asarray(row.advantage, np.float32), mask.shape)[mask])
    logprobs = torch.cat([old[row.sample.key] for row in trained])
    selected: Tensor = select(logprobs, torch.from_numpy(np.concatenate(advantages)), seed=seed)
    parts = torch.split(selected, [row.sample.trained_tokens for row in trained])
    return {row.sample.key: part for row, part in zip(trained, parts, strict=True)}


def minibatches(rows: Sequence[TrainRow], count: int, seed: int) -> list[list[TrainRow]]:
    """Split the rows of a step into ``count`` minibatches, at most one per trajectory.

    Rows of a trajectory stay together; trajectories are shuffled by ``seed`` and dealt round-robin. With ``count`` 1
    the order is unchanged. No part is empty unless ``rows`` is.
    """
    if count == 1:
        return [list(rows)]
    by_trajectory: dict[str, list[TrainRow]] = {}
    for row in rows:
        by_trajectory.setdefault(row.sample.trajectory_id, []).append(row)
    names = list(by_trajectory)
    np.random.default_rng(seed).shuffle(names)
    parts: list[list[TrainRow]] = [[] for _ in range(min(count, len(names)))]
    for number, name in enumerate(names):
        parts[number % len(parts)].extend(by_trajectory[name])
    return parts


_NAMED = {"kl": "kl/value"}
"""Means over the updates that bear another name than ``train/NAME``."""

_GAP = {"gap_abs": "gap/mean", "gap_max": "gap/max", "gap_kl": "gap/kl", "gap_rerouted": "gap/rerouted"}


def update_metrics(updates: Sequence[tuple[Stats, StepResult]]) -> dict[str, float]:
    """Combine the statistics of a step's updates, in order.

    Means (the loss among them) are weighted by trained tokens, maxima maximised. The gap between trainer and rollout is
    that of the first update, the only one with the weights that sampled.
    """
    done = [result for _, result in updates if result.skipped is None]
    tokens = sum(stats.tokens for stats, _ in updates)
    metrics = {
        "train/tokens": float(tokens),
        "train/updates": float(len(done)),
        "train/skipped_updates": float(len(updates) - len(done)),
    }
    non_finite = sum(result.skipped == "non_finite" for _, result in updates)
    if non_finite:
        metrics["train/non_finite_updates"] = float(non_finite)
    if done:
        metrics["train/grad_norm"] = math.fsum(result.grad_norm for result in done) / len(done)
    if ratios := [result.update_ratio for result in done if result.update_ratio is not None]:
        metrics["train/update_ratio"] = math.fsum(ratios) / len(ratios)
    if updates:
        metrics |= {f"lr/{name}": rate for name, rate in updates[-1][1].learning_rates.items()}
    trained = [stats for stats, _ in updates if stats.tokens]
    for number, stats in enumerate(trained):
        for name, value in {"loss": stats.loss, **stats.means}.items():
            if name not in _GAP:
                metric = _NAMED.get(name, f"train/{name}")
                metrics[metric] = metrics.get(metric, 0.0) + value * stats.tokens / tokens
        for name, value in stats.maxima.items():
            if name not in _GAP:
                metrics[f"train/{name}"] = max(metrics.get(f"train/{name}", value), value)
        if number == 0:
            figures = {**stats.means, **stats.maxima}
            metrics |= {metric: figures[name] for name, metric in _GAP.items() if name in figures}
    return metrics
