"""From finished groups to the rows of a train step.

Owns: :func:`collect` (who is compared, and their rows) and :func:`build_experience` (their advantages). In between, a
caller may ask the model about the rows. Refuses: the weights of rows in a loss (``packing.py``), and updating anything.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from turnwise.agents.roles import role_of
from turnwise.trainer.algorithm import AlgorithmConfig
from turnwise.trainer.baselines import greedy_rewards, without_baseline
from turnwise.trainer.credit import assign, credit_metrics
from turnwise.trainer.expectations import Expectation, critic_rows
from turnwise.trainer.kl import penalised
from turnwise.trainer.packing import TrainRow
from turnwise.trajectory import TrainSample, Trajectory, TrajectoryGroup, to_samples


@dataclass(frozen=True, slots=True)
class Collected:
    """What the groups of a step hold for one policy, before anything is compared.

    Attributes:
        members: Trajectories that are compared with each other: no error ended them, and something was sampled.
        samples: For each member its rows, in the order of leaves; none without a trained token.
        metrics: What went in (names in ``metrics.py``).
        baselines: By the group that members are compared within: what its greedy rollout earned, where there was one.
        penalties: By row, what each of its trained tokens pays in the reward, shape [N] (``kl.py``); empty where
            nothing is taken from rewards.
    """

    members: list[Trajectory]
    samples: list[list[TrainSample]]
    metrics: dict[str, float]
    baselines: dict[str, float] = field(default_factory=dict)
    penalties: Mapping[tuple[str, int], Tensor] = field(default_factory=dict)


@dataclass(slots=True)
class Experience:
    """What a train step learns from.

    Attributes:
        rows: The rows, in the order of groups, members and leaves; none without a trained token.
        metrics: What went in and what was left out (names in ``metrics.py``).
    """

    rows: list[TrainRow]
    metrics: dict[str, float] = field(default_factory=dict)


def collect(
    groups: Sequence[TrajectoryGroup], *, policy: str = "main", max_tokens_per_row: int | None = None
) -> Collected:
    """Find what can be learned from in groups.

    Trajectories that an error ended are no members: a failure is not a reward. Neither are those in which nothing was
    sampled (the game ended before it was their turn): their reward says nothing of the policy. What other policies did
    is compared with nothing.

    Args:
        groups: Finished groups.
        policy: Only trajectories of this policy are trained.
        max_tokens_per_row: Rows are cut after this many tokens.
    """
    mine = [each for group in groups for each in group.trajectories if each.policy == policy]
    whole = [each for each in mine if each.error is None]
    members = [each for each in whole if each.sampled_tokens]
    found = [to_samples(each, max_tokens=max_tokens_per_row) for each in members]
    metrics = _trajectory_metrics(whole) | _source_metrics(groups, policy) | _role_metrics(groups, policy)
    metrics |= {
        "batch/trajectories": float(len(whole)),
        "batch/silent": float(len(whole) - len(members)),
        "batch/failed": float(len(mine) - len(whole) + sum(group.failed for group in groups)),
        "batch/cut_tokens": float(sum(each.unowned_tokens for each in found)),
        "batch/empty_leaves": float(sum(each.empty_leaves for each in found)),
    }
    baselines = greedy_rewards(groups, policy)
    if baselines:
        metrics["reward/greedy"] = sum(baselines.values()) / len(baselines)
    return Collected(members, [each.rows for each in found], metrics, baselines)


def build_experience(
    collected: Collected,
    config: AlgorithmConfig,
    *,
    temperature: float,
    expected: Sequence[Expectation] | None = None,
) -> Experience:
    """Turn members into rows with advantages.

    A trajectory is one member of its group, however many branches (rows) it has: all of them carry its advantage, or
    that of their turns, as ``config.credit`` says. Who is compared with whom is decided by ``Trajectory.group_id``:
    sessions of different roles within an episode are compared apart, unless the run says otherwise.

    Args:
        collected: Who is compared, and their rows.
        config: Which estimator, and whether groups without differences are left out.
        temperature: What the rollouts were sampled with.
        expected: What the critic expects of each member, where the estimator asks one; then nobody is compared.

    Raises:
        RegistryError: No such estimator.
        ConfigError: The credit's function cannot be loaded.
        TrainError: A reward, or what a turn is worth, is not finite.
    """
    if expected is not None:
        return _from_critic(collected, expected, config, temperature)
    collected = _comparable(collected, config)
    members = collected.members
    if collected.penalties:
        pairs = zip(members, collected.samples, strict=True)
        members = [penalised(each, samples, collected.penalties) for each, samples in pairs]
    result = assign(members, config, collected.baselines)
    rows: list[TrainRow] = []
    for number, (samples, dead) in enumerate(zip(collected.samples, result.dead, strict=True)):
        if not (dead and config.leaves_out_dead):
            rows += [TrainRow(each, result.of_row(number, each), temperature=temperature) for each in samples]
    metrics = (
        collected.metrics
        | credit_metrics(result)
        | {
            "reward/informative": (len(result.dead) - sum(result.dead)) / max(1, len(result.dead)),
            "batch/groups": float(result.groups),
            "batch/dead_groups": float(result.dead_groups),
        }
        | _row_metrics(rows)
    )
    return Experience(rows, metrics)


def _comparable(collected: Collected, config: AlgorithmConfig) -> Collected:
    """Return what is collected without members that the estimator has no baseline for."""
    if not config.greedy_baseline:
        return collected
    missing = without_baseline(collected.members, collected.baselines)
    kept = [number for number in range(len(collected.members)) if number not in missing]
    return replace(
        collected,
        members=[collected.members[number] for number in kept],
        samples=[collected.samples[number] for number in kept],
        metrics=collected.metrics | {"batch/no_baseline": float(len(missing))},
    )


def _from_critic(
    collected: Collected, expected: Sequence[Expectation], config: AlgorithmConfig, temperature: float
) -> Experience:
    """Return all rows of the members: whether rewards of a group are equal is nothing to a critic."""
    rows, worth = critic_rows(
        collected.members, collected.samples, expected, config, temperature=temperature, penalties=collected.penalties
    )
    groups = {"batch/groups": float(len({each.group_id for each in collected.members}))}
    return Experience(rows, collected.metrics | groups | _row_metrics(rows) | worth)


def _row_metrics(rows: Sequence[TrainRow]) -> dict[str, float]:
    return {
        "batch/rows": float(len(rows)),
        "batch/trained_tokens": float(sum(row.sample.trained_tokens for row in rows)),
        "batch/tokens": float(sum(len(row.sample.input_ids) for row in rows)),
    }


def _source_metrics(groups: Sequence[TrajectoryGroup], policy: str) -> dict[str, float]:
    """Return mean rewards by the source of the task, where tasks say which one they are from."""
    rewards: defaultdict[str, list[float]] = defaultdict(list)
    for group in groups:
        if group.source is not None:
            mine = [each for each in group.trajectories if each.policy == policy and each.error is None]
            rewards[group.source] += [each.reward for each in mine]
    means = {name: sum(found) / len(found) for name, found in sorted(rewards.items()) if found}
    # A slash would be a level of the metric's name.
    return {f"reward/by_source/{name.replace('/', '_')}": mean for name, mean in means.items()}


def _role_metrics(groups: Sequence[TrajectoryGroup], policy: str) -> dict[str, float]:
    """Return mean rewards and turns by role, where episodes have several; a frozen policy's name stands behind its."""
    roles: defaultdict[str, list[Trajectory]] = defaultdict(list)
    for trajectory in (each for group in groups for each in group.trajectories if each.error is None):
        name = role_of(trajectory.agent)
        roles[name if trajectory.policy == policy else f"{name}@{trajectory.policy}"].append(trajectory)
    metrics: dict[str, float] = {}
    for name, found in sorted(roles.items()) if len(roles) > 1 else ():
        metrics[f"reward/by_role/{name}"] = sum(each.reward for each in found) / len(found)
        metrics[f"rollout/turns_by_role/{name}"] = sum(sum(1 for _ in each.turns()) for each in found) / len(found)
    return metrics


def _trajectory_metrics(members: Sequence[Trajectory]) -> dict[str, float]:
    """Return means over trajectories, every trajectory counting once."""
    count = max(1, len(members))
    rewards = torch.tensor([each.reward for each in members], dtype=torch.float64)
    named: defaultdict[str, float] = defaultdict(float)
    context: defaultdict[str, float] = defaultdict(float)
    for trajectory in members:
        for _, name, value in trajectory.rewards:
            named[name] += value
        for name, value in trajectory.metrics.items():
            if name.startswith("context/"):
                context[name] += value
    stops = Counter(trajectory.stop_reason.value for trajectory in members)
    metrics = {
        "rollout/turns": sum(sum(1 for _ in each.turns()) for each in members) / count,
        "rollout/sampled_tokens": sum(each.sampled_tokens for each in members) / count,
        "rollout/forks": sum(each.forks().total() for each in members) / count,
    }
    if members:
        metrics |= {
            "reward/mean": float(rewards.mean()),
            "reward/std": float(rewards.std(correction=0)),
        }
    metrics |= {f"reward/by_name/{name}": total / count for name, total in sorted(named.items())}
    metrics |= {name: total / count for name, total in sorted(context.items())}
    return metrics | {f"stop/{name}": number / count for name, number in sorted(stops.items())}
