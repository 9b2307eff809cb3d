"""From finished groups to updated weights: one train step, without the loop around it.

Owns: :func:`training_rows` (groups to rows with advantages) and :func:`update_policy` (rows to optimizer steps).
Refuses: waiting for groups, logging and weight sync; those are the loops'.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from turnwise.trainer.advantages import advantage_fn
from turnwise.trainer.config import AlgorithmConfig, BatchConfig
from turnwise.trainer.learner import Learner, Stats
from turnwise.trainer.losses import loss_weights
from turnwise.trainer.objectives import PolicyObjective
from turnwise.trainer.packing import MicroBatch, TrainRow, minibatches, pack
from turnwise.trajectory import Trajectory, TrajectoryGroup, to_samples

RowKey = tuple[str, int]
OldLogprobs = Mapping[RowKey, Tensor]


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    """What a step trains.

    Attributes:
        rows: Rows with their advantages; those of dead groups are left out where the configuration says so.
        metrics: Rewards, groups, lengths, ends and what was dropped.
    """

    rows: list[TrainRow]
    metrics: dict[str, float]


def training_rows(
    groups: Sequence[TrajectoryGroup], algorithm: AlgorithmConfig, batch: BatchConfig, *, temperature: float
) -> PreparedBatch:
    """Compute advantages and cut trajectories into rows.

    Trajectories are compared with those of equal ``group_id``. All rows of a trajectory share its advantage, so one
    with many branches counts as one member of its group.

    Args:
        groups: Finished groups, ragged or empty where members failed.
        algorithm: Which advantage.
        batch: Where rows are cut.
        temperature: What the rollout's logits were divided by.
    """
    trajectories = [member for group in groups for member in group.trajectories]
    numbers: defaultdict[str, int] = defaultdict(lambda: len(numbers))
    rewards = torch.tensor([member.reward for member in trajectories], dtype=torch.float64)
    members = torch.tensor([numbers[member.group_id] for member in trajectories], dtype=torch.int64)
    estimate = advantage_fn(algorithm.advantage)
    advantages = estimate(rewards, members, norm_by_std=algorithm.norm_by_std, eps=algorithm.std_eps)
    rows: list[TrainRow] = []
    unowned = 0
    for number, trajectory in enumerate(trajectories):
        samples = to_samples(trajectory, max_tokens=batch.max_tokens_per_row)
        unowned += samples.unowned_tokens
        if algorithm.drop_zero_variance and bool(advantages.dead[number]):
            continue
        value = float(advantages.values[number])
        rows += [TrainRow(sample, value, 1.0, temperature) for sample in samples.rows]
    metrics = {
        **trajectory_metrics(trajectories),
        "groups/count": float(advantages.groups),
        "groups/dead": float(advantages.dead_groups),
        "groups/failed_members": float(sum(group.failed for group in groups)),
        "rows/trained": float(len(rows)),
        "rows/cut_tokens": float(unowned),
    }
    return PreparedBatch(rows, metrics)


def trajectory_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return means over trajectories: reward, turns, tokens, tool calls, forks, and the share of each stop reason."""
    count = max(1, len(trajectories))
    sums: Counter[str] = Counter()
    for trajectory in trajectories:
        sums["rollout/reward"] += trajectory.reward
        sums["rollout/sampled_tokens"] += trajectory.sampled_tokens
        sums[f"stop/{trajectory.stop_reason}"] += 1
        for name in ("turns", "forks", "tool_calls", "tool_errors", "prompt_tokens", "encoded_tokens"):
            sums[f"rollout/{name}"] += trajectory.metrics.get(name, 0.0)
    return {"rollout/trajectories": float(len(trajectories)), **{name: sums[name] / count for name in sorted(sums)}}


def update_policy(
    learner: Learner, rows: Sequence[TrainRow], algorithm: AlgorithmConfig, batch: BatchConfig, *, seed: int
) -> dict[str, float]:
    """Take the optimizer steps of one train step.

    Args:
        learner: Whose weights change.
        rows: What is trained. May be empty: every group taught nothing.
        algorithm: The loss, epochs and minibatches.
        batch: The token budget of a micro-batch.
        seed: Decides how rows are dealt to minibatches.

    Returns:
        Metrics under ``train/``: those of all minibatches averaged over tokens, maxima over all of them.
    """
    objective = PolicyObjective.of(algorithm)
    budget = batch.max_tokens_per_micro_batch
    # One update on the policy's own forward pass has ratio 1 by definition: nothing to recompute.
    one_update = algorithm.epochs == 1 and algorithm.minibatches == 1
    old: OldLogprobs | None = None
    if algorithm.old_logprobs == "recompute" and not one_update:
        old = recompute_logprobs(learner, rows, budget)
    stats: list[Stats] = []
    norms: list[float] = []
    rates: dict[str, float] = {}
    for epoch in range(algorithm.epochs):
        for part in minibatches(rows, algorithm.minibatches, seed + epoch):
            weights, normalizer = loss_weights(
                [row.sample.trained_tokens for row in part],
                [row.sample.trajectory_id for row in part],
                algorithm.loss_aggregation,
            )
            weighted = [replace(row, weight=weight) for row, weight in zip(part, weights, strict=True)]
            batches = pack(weighted, budget)
            for micro in batches:
                micro.old_logprobs = _old(micro, weighted, old, algorithm)
            stats.append(learner.forward_backward(batches, objective, normalizer))
            result = learner.optim_step()
            norms.append(result.grad_norm)
            rates = result.learning_rates
    metrics = {f"train/lr_{name}": rate for name, rate in rates.items()}
    metrics["train/grad_norm"] = sum(norms) / max(1, len(norms))
    metrics["train/optimizer_steps"] = float(learner.steps)
    metrics |= {f"train/skipped_{reason}": float(count) for reason, count in learner.skipped.items()}
    return metrics | _averaged(stats)


def recompute_logprobs(learner: Learner, rows: Sequence[TrainRow], budget: int) -> dict[RowKey, Tensor]:
    """Return the log-probabilities of each row's trained tokens under the weights as they are now."""
    batches = pack(rows, budget)
    found: dict[RowKey, Tensor] = {}
    for micro, scores in zip(batches, learner.logprobs(batches), strict=True):
        counts = [rows[index].sample.trained_tokens for index in micro.rows]
        for index, piece in zip(micro.rows, scores.cpu().split(counts), strict=True):
            found[_key(rows[index])] = piece
    return found


def _old(
    micro: MicroBatch, rows: Sequence[TrainRow], old: OldLogprobs | None, algorithm: AlgorithmConfig
) -> Tensor | None:
    if algorithm.old_logprobs == "rollout":
        return micro.at_targets(micro.rollout_logprobs)
    return None if old is None else torch.cat([old[_key(rows[index])] for index in micro.rows])


def _key(row: TrainRow) -> RowKey:
    return row.sample.trajectory_id, row.sample.leaf


def _averaged(stats: Sequence[Stats]) -> dict[str, float]:
    tokens = sum(each.tokens for each in stats)
    metrics: dict[str, float] = {"train/tokens": float(tokens)}
    for number, each in enumerate(stats):
        share = each.tokens / max(1, tokens)
        for name, value in {"loss": each.loss, **each.means}.items():
            # The gap to the rollout is one of equal weights only before the first update.
            if name.startswith("gap_"):
                if number == 0:
                    metrics[f"train/{name}"] = value
            else:
                metrics[f"train/{name}"] = metrics.get(f"train/{name}", 0.0) + share * value
        for name, value in each.maxima.items():
            if name.startswith("gap_") and number > 0:
                continue
            metrics[f"train/{name}"] = max(metrics.get(f"train/{name}", value), value)
    return metrics
