"""The optimizer steps of one train step.

Owns: :func:`update_policy`, which takes rows with advantages to changed weights, and :func:`minibatches`. Refuses:
making rows (``experience.py``), waiting for groups, logging and weight sync (the loops).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from turnwise.errors import TrainError
from turnwise.seeding import stable_hash
from turnwise.trainer.aggregation import weigh
from turnwise.trainer.config import AlgorithmConfig, BatchConfig
from turnwise.trainer.learner import Learner, Stats, StepResult
from turnwise.trainer.metrics import update_metrics
from turnwise.trainer.objectives import PolicyObjective
from turnwise.trainer.packing import MicroBatch, TrainRow, pack

RowKey = tuple[str, int]


def update_policy(
    learner: Learner, rows: Sequence[TrainRow], algorithm: AlgorithmConfig, batch: BatchConfig, *, seed: int
) -> dict[str, float]:
    """Go through the rows of a train step: ``epochs`` times, in ``minibatches`` optimizer steps each.

    Args:
        learner: Whose weights change.
        rows: What is trained. May be empty: every group taught nothing, and nothing changes.
        algorithm: The loss, epochs and minibatches.
        batch: The token budget of a micro-batch.
        seed: Decides how rows are dealt to minibatches.

    Returns:
        Metrics as ``metrics.update_metrics`` names them.
    """
    objective = PolicyObjective.of(algorithm)
    budget = batch.max_tokens_per_micro_batch
    # With one update the policy's own forward pass is the old policy: its ratio is 1 without recomputing anything.
    several = algorithm.epochs > 1 or algorithm.minibatches > 1
    old: Mapping[RowKey, Tensor] = {}
    if algorithm.old_logprobs == "recompute" and several:
        old = recompute_logprobs(learner, rows, budget)
    updates: list[tuple[Stats, StepResult]] = []
    for epoch in range(algorithm.epochs):
        for part in minibatches(rows, algorithm.minibatches, stable_hash("minibatches", seed, epoch)):
            weighed, normalizer = weigh(part, algorithm.loss_aggregation)
            # Rows without advantage count in the normaliser, but have no gradient: no forward pass is spent on them.
            weighed = [row for row in weighed if algorithm.entropy_coef or np.any(row.advantage)]
            batches = pack(weighed, budget)
            for micro in batches:
                if algorithm.old_logprobs == "rollout":
                    micro.old_logprobs = micro.at_targets(micro.rollout_logprobs)
                elif several:
                    micro.old_logprobs = torch.cat([old[_key(weighed[index])] for index in micro.rows])
            stats = learner.forward_backward(batches, objective, normalizer)
            updates.append((stats, learner.optim_step()))
    return update_metrics(updates)


def minibatches(rows: Sequence[TrainRow], count: int, seed: int) -> list[list[TrainRow]]:
    """Split the rows of a step into ``count`` parts for as many optimizer steps.

    Rows of one trajectory stay together. Trajectories are shuffled by ``seed`` and dealt out one after the other;
    with ``count`` 1 the rows come back in their order.

    Args:
        rows: The rows of a step.
        count: How many parts; never more than there are trajectories.
        seed: Decides which trajectories meet.

    Returns:
        The parts, none of them empty unless ``rows`` is.

    Raises:
        TrainError: ``count`` is below 1.
    """
    if count < 1:
        raise TrainError(f"minibatches is {count}; it must be at least 1")
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


def recompute_logprobs(learner: Learner, rows: Sequence[TrainRow], budget: int) -> dict[RowKey, Tensor]:
    """Return the log-probabilities of each row's trained tokens under the weights as they are now, by row."""
    batches: list[MicroBatch] = pack(rows, budget)
    found: dict[RowKey, Tensor] = {}
    for micro, scores in zip(batches, learner.logprobs(batches), strict=True):
        start = 0
        for index in micro.rows:
            end = start + rows[index].sample.trained_tokens
            found[_key(rows[index])] = scores[start:end].cpu()
            start = end
    return found


def _key(row: TrainRow) -> RowKey:
    return row.sample.trajectory_id, row.sample.leaf
