"""ReMax: the reward of a greedy rollout as the baseline, from the request to the rows."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from turnwise.errors import TrainError
from turnwise.trainer.algorithms.config import AlgorithmConfig
from turnwise.trainer.batch.experience import Experience, build_experience, collect
from turnwise.trainer.config.train import TrainConfig
from turnwise.trainer.observe.metrics import meaning
from turnwise.trajectory import Segment, Trajectory, TrajectoryGroup


def played(name: str, reward: float, group: str = "g", **options: Any) -> Trajectory:
    ids = np.arange(3, dtype=np.int32)
    sampled = Segment(
        1, 0, "sampled", ids, turn_id=f"{name}.1", logprobs=-np.ones(3, np.float32), weight_versions=((0, 0, 3),),
        finish_reason="stop",
    )  # fmt: skip
    segments = [Segment(0, -1, "context", ids), sampled]
    return Trajectory(name, name, group, "t", segments=segments, rewards=[(None, "score", reward)], **options)


def group(name: str, rewards: list[float], greedy: list[Trajectory]) -> TrajectoryGroup:
    members = [played(f"{name}/{number}", reward, name) for number, reward in enumerate(rewards)]
    return TrajectoryGroup(name, name, members, baselines=greedy)


def greedy(name: str, reward: float, **options: Any) -> Trajectory:
    return played(f"{name}/greedy", reward, name, baseline=True, **options)


def build(*groups: TrajectoryGroup, **config: Any) -> Experience:
    algorithm = AlgorithmConfig.model_validate({"advantage": "remax", **config})
    return build_experience(collect(groups), algorithm, temperature=1.0)


def test_remax_subtracts_the_greedy_reward_in_groups_of_one_too() -> None:
    experience = build(group("a", [1.0, 0.0], [greedy("a", 0.25)]), group("b", [2.0], [greedy("b", 0.5)]))
    assert [(row.sample.trajectory_id, row.advantage) for row in experience.rows] == [
        ("a/0", 0.75),
        ("a/1", -0.25),
        ("b/0", 1.5),
    ]
    assert experience.metrics["reward/greedy"] == 0.375
    # The greedy ones are counted nowhere else.
    assert (experience.metrics["reward/mean"], experience.metrics["batch/trajectories"]) == (1.0, 3.0)
    assert (experience.metrics["batch/groups"], experience.metrics["batch/no_baseline"]) == (2.0, 0.0)
    assert [name for name in experience.metrics if meaning(name) is None] == []


def test_rewards_equal_to_the_greedy_reward_have_no_gradient() -> None:
    same = group("a", [1.0, 1.0], [greedy("a", 1.0)])
    # Equal rewards that differ from the greedy one teach.
    other = group("b", [1.0, 1.0], [greedy("b", 0.0)])
    experience = build(same, other)
    assert {row.sample.trajectory_id for row in experience.rows} == {"b/0", "b/1"}
    assert experience.metrics["batch/dead_groups"] == 1.0


def test_groups_without_a_greedy_rollout_are_left_out_and_counted() -> None:
    experience = build(group("a", [1.0, 0.0], []), group("b", [1.0], [greedy("b", 0.0)]), drop_zero_variance=False)
    assert [row.sample.trajectory_id for row in experience.rows] == ["b/0"]
    assert (experience.metrics["batch/no_baseline"], experience.metrics["batch/groups"]) == (2.0, 1.0)
    with pytest.raises(TrainError, match="none of 2 trajectories has one: every greedy rollout failed"):
        build(group("a", [1.0, 0.0], [greedy("a", 0.0, error="InferenceError: gone")]))


def test_each_role_has_its_baseline() -> None:
    """Two solvers of the greedy episode are one baseline, their mean; a frozen policy's reward is none."""
    members = [
        replace(played("a/0", 1.0, "a/solver"), agent="solver"),
        replace(played("a/1", 3.0, "a/proposer"), agent="proposer"),
        replace(played("a/2", 5.0, "a/judge"), agent="judge"),
    ]
    baselines = [
        replace(greedy("a/solver", 0.0), agent="solver/0"),
        replace(greedy("a/solver", 1.0), agent="solver/1"),
        replace(greedy("a/proposer", 1.0), agent="proposer"),
        replace(greedy("a/judge", 9.0), agent="judge", policy="other"),
    ]
    experience = build(TrajectoryGroup("a", "a", members, baselines=baselines))
    assert {row.sample.trajectory_id: row.advantage for row in experience.rows} == {"a/0": 0.5, "a/1": 2.0}
    # The judge has no trained baseline.
    assert experience.metrics["batch/no_baseline"] == 1.0


def test_other_estimators_ask_for_no_greedy_rollout() -> None:
    assert AlgorithmConfig(advantage="remax").greedy_baseline
    assert not AlgorithmConfig().greedy_baseline
    assert "reward/greedy" not in build(group("a", [1.0, 0.0], []), advantage="grpo").metrics


BASE: dict[str, Any] = {
    "name": "run",
    "steps": 1,
    "tasks": "pkg.module:make",
    "policies": {"main": {"model": {"path": "models/start"}}},
}


def test_invalid_remax_configurations_raise() -> None:
    alone = {"env": {"name": "lookup"}, "group_size": 1}
    assert TrainConfig.model_validate({**BASE, "rollout": alone, "algorithm": {"advantage": "remax"}})
    with pytest.raises(
        ValidationError, match=re.escape("by algorithm.advantage rloo a group of one has advantage zero")
    ):
        TrainConfig.model_validate({**BASE, "rollout": alone, "algorithm": {"advantage": "rloo"}})
    compared = {"env": {"name": "lookup"}, "group_reward": "pkg.module:rank"}
    with pytest.raises(ValidationError, match=re.escape("no member of the group that rollout.group_reward compares")):
        TrainConfig.model_validate({**BASE, "rollout": compared, "algorithm": {"advantage": "remax"}})
