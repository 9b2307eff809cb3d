"""From finished groups to the training rows of a step, with advantages and metrics."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from turnwise.agents.roles import JUDGES, role_of
from turnwise.errors import TrainError
from turnwise.trainer.algorithms.advantages import estimate_advantages
from turnwise.trainer.algorithms.config import AlgorithmConfig
from turnwise.trainer.algorithms.credit import assign_credit
from turnwise.trainer.algorithms.losses.core import MAX_LOG_RATIO
from turnwise.trainer.algorithms.rewards import step_rewards, with_penalties
from turnwise.trainer.batch.guided_masks import resolve_guided
from turnwise.trainer.batch.value_targets import TrajectoryValues, value_rows
from turnwise.trainer.core import RowKey, TrainRow, consistently_routed
from turnwise.trajectory import TrainSample, Trajectory, TrajectoryGroup, to_samples

Scores = npt.NDArray[np.float32]
"""Log-probabilities of a row's tokens, shape [tokens]."""


@dataclass(frozen=True, slots=True)
class StepTrajectories:
    """The trajectories of a step that a policy learns from, before advantages.

    Attributes:
        trajectories: Those without an error and with sampled tokens.
        samples: Per trajectory its rows, in the order of leaves; each has a trained token.
        metrics: Input metrics by name.
        baselines: Reward of the greedy rollout by group id, of groups that had one.
        penalties: By row, the KL penalty of each trained token in the reward, shape [N]; may be empty.
    """

    trajectories: list[Trajectory]
    samples: list[list[TrainSample]]
    metrics: dict[str, float]
    baselines: dict[str, float] = field(default_factory=dict)
    penalties: Mapping[RowKey, Tensor] = field(default_factory=dict)

    def with_baseline(self) -> StepTrajectories:
        """Drop trajectories whose group has no greedy rollout.

        Raises:
            TrainError: No trajectory has one.
        """
        compared = [
            number for number, trajectory in enumerate(self.trajectories) if trajectory.group_id in self.baselines
        ]
        if self.trajectories and not compared:
            raise TrainError(
                f"algorithm.advantage reads the reward of a greedy rollout, but none of {len(self.trajectories)} "
                "trajectories has one: every greedy rollout failed (trajectories.twz holds them, with baseline true), "
                "or the rollout manager does not make what RolloutRequest.greedy_baseline asks for"
            )
        return replace(
            self,
            trajectories=[self.trajectories[number] for number in compared],
            samples=[self.samples[number] for number in compared],
            metrics=self.metrics | {"batch/no_baseline": float(len(self.trajectories) - len(compared))},
        )


@dataclass(slots=True)
class Experience:
    """The training data of a step.

    Attributes:
        rows: In the order of groups, trajectories and leaves; each has a trained token.
        metrics: Metrics of the input and of what was dropped.
        contexts: What a teacher was told of turns, by the id of a trajectory and the number of the turn.
    """

    rows: list[TrainRow]
    metrics: dict[str, float] = field(default_factory=dict)
    contexts: Mapping[tuple[str, int], str] = field(default_factory=dict)


def collect(
    groups: Sequence[TrajectoryGroup],
    *,
    policy: str = "main",
    max_tokens_per_row: int | None = None,
    exact: bool = False,
    model: Path | None = None,
) -> StepTrajectories:
    """Return the trainable trajectories of groups, with their rows, truncated to ``max_tokens_per_row``.

    With ``exact`` numerics rows of several weight versions are routed freely, by which the present version's tokens get
    their log-probabilities to the last bit.

    Dropped are trajectories that ended with an error (an infrastructure failure is not a reward), those without sampled
    tokens, and those of other policies. ``model`` is the directory of the model that sampled, for masks of grammars.
    """
    of_policy = [trajectory for group in groups for trajectory in group.trajectories if trajectory.policy == policy]
    complete = [trajectory for trajectory in of_policy if trajectory.error is None]
    trajectories = [trajectory for trajectory in complete if trajectory.sampled_tokens]
    baselines = _greedy_rewards(groups, policy)
    metrics = _source_metrics(groups, policy) | _role_metrics(groups, policy) | _trajectory_metrics(complete)
    samples = []
    for trajectory in trajectories:
        segments = [s if model is None else resolve_guided(s, trajectory.id, model) for s in trajectory.segments]
        masked = replace(trajectory, segments=segments)
        samples.append(to_samples(masked, max_tokens=max_tokens_per_row, reported=True))
    metrics |= {
        "batch/trajectories": float(len(complete)),
        "batch/silent": float(len(complete) - len(trajectories)),
        "batch/failed": float(len(of_policy) - len(complete) + sum(group.failed for group in groups)),
        "batch/cut_tokens": float(sum(rows.unowned_tokens for rows in samples)),
        "batch/empty_leaves": float(sum(rows.empty_leaves for rows in samples)),
    }
    if baselines:
        metrics["reward/greedy"] = sum(baselines.values()) / len(baselines)
    rows = [[consistently_routed(row) if exact else row for row in part.rows] for part in samples]
    return StepTrajectories(trajectories, rows, metrics, baselines)


def build_experience(
    collected: StepTrajectories,
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
            for number, (branches, dead) in enumerate(zip(samples, advantages.dead, strict=True))
            for sample in branches
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


def reverse_kl(student: Scores, teacher: Scores, clip: float = MAX_LOG_RATIO) -> Scores:
    """Return the advantage of sampled tokens, ``log p_teacher - log p_student``, clamped to +-``clip``, shape [N].

    Its expectation under the student is -KL(student || teacher) of the next token: that reverse divergence is what Gu
    et al. 2023, MiniLLM (arXiv:2306.08543), eq. 2, and Agarwal et al. 2023, GKD (arXiv:2306.13649), section 3.1,
    minimise on the student's own samples. Later tokens are discounted by 0, as in Lu and Thinking Machines Lab 2025,
    "On-Policy Distillation".
    """
    bounded: Scores = np.clip(teacher - student, -clip, clip)
    return bounded


def add_teacher_advantages(
    experience: Experience,
    scores: Sequence[Scores],
    *,
    reward_coef: float,
    coef: float = 1.0,
    clip: float = MAX_LOG_RATIO,
) -> Experience:
    """Combine the advantages of the rewards with those of a teacher.

    Args:
        experience: The rows of a step.
        scores: By row the teacher's log-probabilities, float32 of shape [tokens]; NaN where it scores none.
        reward_coef: Weight of the rewards' advantages.
        coef: Weight of the teacher's.
        clip: Bound of a token's log-ratio.
    """
    rows = []
    gaps: list[Scores] = []
    for row, teacher in zip(experience.rows, scores, strict=True):
        scored = row.sample.loss_mask & np.isfinite(teacher)
        reverse = reverse_kl(row.sample.rollout_logprobs, np.nan_to_num(teacher), clip)
        gaps.append(-reverse[scored])
        rewards = reward_coef * np.asarray(row.advantage, np.float32)
        advantage = np.where(scored, coef * reverse, np.float32(0)) + rewards
        rows.append(replace(row, advantage=np.where(row.sample.loss_mask, advantage, 0).astype(np.float32)))
    gap = np.concatenate(gaps) if gaps else np.zeros(0, np.float32)
    trained = sum(row.sample.trained_tokens for row in rows)
    metrics = {"distill/unscored_tokens": float(trained - len(gap))}
    if len(gap):
        metrics |= {"distill/reverse_kl": float(gap.mean()), "distill/gap_max": float(np.abs(gap).max())}
    return replace(experience, rows=rows, metrics=experience.metrics | metrics)


def _greedy_rewards(groups: Sequence[TrajectoryGroup], policy: str) -> dict[str, float]:
    """Return the greedy rollout's reward of a policy by group id, averaged over a role's sessions."""
    baselines = [trajectory for group in groups for trajectory in group.baselines if trajectory.error is None]
    return _means((baseline.group_id, baseline.reward) for baseline in baselines if baseline.policy == policy)


def _source_metrics(groups: Sequence[TrajectoryGroup], policy: str) -> dict[str, float]:
    rewards = _means(
        (group.source, trajectory.reward)
        for group in groups
        for trajectory in group.trajectories
        if group.source is not None and trajectory.policy == policy and trajectory.error is None
    )
    # A slash would be a level of the metric's name.
    return {f"reward/by_source/{source.replace('/', '_')}": mean for source, mean in sorted(rewards.items())}


def _role_metrics(groups: Sequence[TrajectoryGroup], policy: str) -> dict[str, float]:
    """Return mean rewards and turns by role, if several; a frozen policy's name is appended."""
    roles: list[tuple[str, Trajectory]] = []
    for trajectory in (trajectory for group in groups for trajectory in group.trajectories):
        role = role_of(trajectory.agent)
        if trajectory.error is None and not (trajectory.frozen and role == JUDGES):
            roles.append((role if trajectory.policy == policy else f"{role}@{trajectory.policy}", trajectory))
    rewards = _means((role, trajectory.reward) for role, trajectory in roles)
    turns = _means((role, _turn_count(trajectory)) for role, trajectory in roles)
    metrics: dict[str, float] = {}
    for role in sorted(rewards) if len(rewards) > 1 else ():
        metrics |= {f"reward/by_role/{role}": rewards[role], f"rollout/turns_by_role/{role}": turns[role]}
    return metrics


def _trajectory_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    count = max(1, len(trajectories))
    rewards = torch.tensor([trajectory.reward for trajectory in trajectories], dtype=torch.float64)
    metrics = {
        "rollout/turns": sum(_turn_count(trajectory) for trajectory in trajectories) / count,
        "rollout/sampled_tokens": sum(trajectory.sampled_tokens for trajectory in trajectories) / count,
        "rollout/forks": sum(trajectory.forks().total() for trajectory in trajectories) / count,
    }
    if trajectories:
        metrics |= {"reward/mean": float(rewards.mean()), "reward/std": float(rewards.std(correction=0))}
    by_name: defaultdict[str, float] = defaultdict(float)
    reported: defaultdict[str, float] = defaultdict(float)
    for trajectory in trajectories:
        for name, reward in trajectory.named_rewards().items():
            by_name[name] += reward
        for name, figure in trajectory.metrics.items():
            if name.startswith(("context/", "tree/", "ignored_")):
                reported[name] += figure
    stops = Counter(trajectory.stop_reason.value for trajectory in trajectories)
    metrics |= {f"reward/by_name/{name}": total / count for name, total in sorted(by_name.items())}
    metrics |= {name: total / count for name, total in sorted(reported.items())}
    return metrics | {f"stop/{reason}": stopped / count for reason, stopped in sorted(stops.items())}


def _turn_count(trajectory: Trajectory) -> int:
    return sum(segment.turn_id is not None for segment in trajectory.segments)


def _means(numbers: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return the mean of the numbers of each name."""
    by_name: defaultdict[str, list[float]] = defaultdict(list)
    for name, number in numbers:
        by_name[name].append(number)
    return {name: sum(of_name) / len(of_name) for name, of_name in by_name.items()}
