"""From finished groups to the training rows of a step, with advantages and metrics."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from turnwise.agents.roles import role_of
from turnwise.trainer.algorithms.advantages import estimate_advantages
from turnwise.trainer.algorithms.config import AlgorithmConfig
from turnwise.trainer.algorithms.credit import assign_credit
from turnwise.trainer.algorithms.rewards import greedy_rewards, step_rewards, with_penalties, without_baseline
from turnwise.trainer.batch.value_targets import TrajectoryValues, value_rows
from turnwise.trainer.core import RowKey, TrainRow
from turnwise.trajectory import TrainSample, Trajectory, TrajectoryGroup, to_samples


@dataclass(frozen=True, slots=True)
class Collected:
    """The trajectories of a step that a policy learns from, before advantages.

    Attributes:
        trajectories: Those without an error and with sampled tokens.
        samples: Per trajectory its rows, in the order of leaves; each has a trained token.
        metrics: Input metrics by name.
        baselines: Reward of the greedy rollout by group id, where there was one.
        penalties: By row, the KL penalty of each trained token in the reward, shape [N]; may be empty.
    """

    trajectories: list[Trajectory]
    samples: list[list[TrainSample]]
    metrics: dict[str, float]
    baselines: dict[str, float] = field(default_factory=dict)
    penalties: Mapping[RowKey, Tensor] = field(default_factory=dict)

    def with_baseline(self) -> Collected:
        """Drop trajectories whose group has no greedy rollout.

        Raises:
            TrainError: No trajectory has one.
        """
        missing = without_baseline(self.trajectories, self.baselines)
        kept = [number for number in range(len(self.trajectories)) if number not in missing]
        return replace(
            self,
            trajectories=[self.trajectories[number] for number in kept],
            samples=[self.samples[number] for number in kept],
            metrics=self.metrics | {"batch/no_baseline": float(len(missing))},
        )


@dataclass(slots=True)
class Experience:
    """The training data of a step.

    Attributes:
        rows: In the order of groups, trajectories and leaves; each has a trained token.
        metrics: Metrics of the input and of what was dropped.
    """

    rows: list[TrainRow]
    metrics: dict[str, float] = field(default_factory=dict)


def collect(
    groups: Sequence[TrajectoryGroup], *, policy: str = "main", max_tokens_per_row: int | None = None
) -> Collected:
    """Return the trainable trajectories of groups, with their rows, truncated to ``max_tokens_per_row``.

    Dropped are trajectories that ended with an error (an infrastructure failure is not a reward), those without sampled
    tokens, and those of other policies.
    """
    of_policy = [each for group in groups for each in group.trajectories if each.policy == policy]
    whole = [each for each in of_policy if each.error is None]
    trajectories = [each for each in whole if each.sampled_tokens]
    samples = [to_samples(each, max_tokens=max_tokens_per_row) for each in trajectories]
    metrics = _trajectory_metrics(whole) | _source_metrics(groups, policy) | _role_metrics(groups, policy)
    metrics |= {
        "batch/trajectories": float(len(whole)),
        "batch/silent": float(len(whole) - len(trajectories)),
        "batch/failed": float(len(of_policy) - len(whole) + sum(group.failed for group in groups)),
        "batch/cut_tokens": float(sum(each.unowned_tokens for each in samples)),
        "batch/empty_leaves": float(sum(each.empty_leaves for each in samples)),
    }
    baselines = greedy_rewards(groups, policy)
    if baselines:
        metrics["reward/greedy"] = sum(baselines.values()) / len(baselines)
    return Collected(trajectories, [each.rows for each in samples], metrics, baselines)


def build_experience(
    collected: Collected,
    config: AlgorithmConfig,
    *,
    temperature: float,
    values: Sequence[TrajectoryValues] | None = None,
) -> Experience:
    """Turn trajectories into rows with advantages: rewards, credit, advantages, rows.

    The data flow by file; each step is a pure function of the one before it:

    1. ``trajectory.py``: ``Trajectory.rewards``, events on turns or on the episode.
    2. ``trainer/batch/experience.py``: this function.
    3. ``trainer/algorithms/rewards.py``: ``step_rewards``, rewards in total, by turn and by name.
    4. ``trainer/algorithms/credit.py``: ``assign_credit``, the quantities to compare.
    5. ``trainer/algorithms/advantages.py``: ``estimate_advantages``, comparison within groups or over the batch.
    6. ``trainer/core.py``: ``TrainRow``, a row with its advantage.

    With a critic, ``trainer/batch/value_targets.py`` replaces 4 and 5, and reads its ``values`` per trajectory. A
    trajectory counts once in its group (``Trajectory.group_id``), whatever its number of branches (rows).

    Raises:
        RegistryError: No such estimator.
        ConfigError: The credit's function cannot be loaded.
        TrainError: A reward or a return is not finite.
    """
    estimator = config.chosen_advantage()
    if config.greedy_baseline:
        collected = collected.with_baseline()
    trajectories, samples, penalties = collected.trajectories, collected.samples, collected.penalties
    if values is None:
        trajectories = with_penalties(trajectories, samples, penalties)
    rewards = step_rewards(trajectories, collected.baselines)
    if values is None:
        credit = assign_credit(trajectories, rewards, config.credit)
        advantages = estimate_advantages(rewards, credit, estimator)
        metrics = advantages.group_metrics()
        rows = [
            TrainRow(sample, advantages.of_row(number, sample), temperature=temperature)
            for number, (own, dead) in enumerate(zip(samples, advantages.dead, strict=True))
            for sample in own
            if not (dead and config.leaves_out_dead)
        ]
    else:
        rows, metrics = value_rows(rewards, samples, penalties, values, estimator, temperature=temperature)
    metrics |= {
        "batch/rows": float(len(rows)),
        "batch/trained_tokens": float(sum(row.sample.trained_tokens for row in rows)),
        "batch/tokens": float(sum(len(row.sample.input_ids) for row in rows)),
    }
    return Experience(rows, collected.metrics | metrics)


def _source_metrics(groups: Sequence[TrajectoryGroup], policy: str) -> dict[str, float]:
    rewards: defaultdict[str, list[float]] = defaultdict(list)
    for group in groups:
        if group.source is not None:
            trajectories = [each for each in group.trajectories if each.policy == policy and each.error is None]
            rewards[group.source] += [each.reward for each in trajectories]
    means = {name: sum(each) / len(each) for name, each in sorted(rewards.items()) if each}
    # A slash would be a level of the metric's name.
    return {f"reward/by_source/{name.replace('/', '_')}": mean for name, mean in means.items()}


def _role_metrics(groups: Sequence[TrajectoryGroup], policy: str) -> dict[str, float]:
    """Return mean rewards and turns by role, where there are several; a frozen policy's name is appended."""
    roles: defaultdict[str, list[Trajectory]] = defaultdict(list)
    for trajectory in (each for group in groups for each in group.trajectories if each.error is None):
        name = role_of(trajectory.agent)
        roles[name if trajectory.policy == policy else f"{name}@{trajectory.policy}"].append(trajectory)
    metrics: dict[str, float] = {}
    for name, trajectories in sorted(roles.items()) if len(roles) > 1 else ():
        metrics[f"reward/by_role/{name}"] = sum(each.reward for each in trajectories) / len(trajectories)
        turns = sum(sum(1 for _ in each.turns()) for each in trajectories)
        metrics[f"rollout/turns_by_role/{name}"] = turns / len(trajectories)
    return metrics


def _trajectory_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    count = max(1, len(trajectories))
    rewards = torch.tensor([each.reward for each in trajectories], dtype=torch.float64)
    named: defaultdict[str, float] = defaultdict(float)
    counted: defaultdict[str, float] = defaultdict(float)
    for trajectory in trajectories:
        for name, value in trajectory.named_rewards().items():
            named[name] += value
        for name, value in trajectory.metrics.items():
            if name.startswith(("context/", "tree/")):
                counted[name] += value
    stops = Counter(trajectory.stop_reason.value for trajectory in trajectories)
    metrics = {
        "rollout/turns": sum(sum(1 for _ in each.turns()) for each in trajectories) / count,
        "rollout/sampled_tokens": sum(each.sampled_tokens for each in trajectories) / count,
        "rollout/forks": sum(each.forks().total() for each in trajectories) / count,
    }
    if trajectories:
        metrics |= {"reward/mean": float(rewards.mean()), "reward/std": float(rewards.std(correction=0))}
    metrics |= {f"reward/by_name/{name}": total / count for name, total in sorted(named.items())}
    metrics |= {name: total / count for name, total in sorted(counted.items())}
    return metrics | {f"stop/{name}": number / count for name, number in sorted(stops.items())}
