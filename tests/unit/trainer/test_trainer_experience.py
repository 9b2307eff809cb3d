from __future__ import annotations

import numpy as np
import pytest

from turnwise.trainer.algorithms.config import AlgorithmConfig
from turnwise.trainer.algorithms.losses.core import weigh
from turnwise.trainer.batch.experience import build_experience, collect
from turnwise.trainer.observe.metrics import meaning
from turnwise.trajectory import Segment, Trajectory, TrajectoryGroup
from turnwise.types import StopReason


def trajectory(
    name: str,
    reward: float,
    *,
    group: str = "g",
    branches: int = 1,
    tokens: int = 4,
    error: str | None = None,
    policy: str = "main",
    frozen: bool = False,
) -> Trajectory:
    """A root context, a sampled turn, and so many continuations of it (each a context and a turn)."""

    def context(index: int, parent: int) -> Segment:
        return Segment(index, parent, "context", np.arange(3, dtype=np.int32))

    def sampled(index: int, parent: int) -> Segment:
        ids = np.arange(10, 10 + tokens, dtype=np.int32)
        return Segment(
            index, parent, "sampled", ids, turn_id=f"{name}{index}", logprobs=-np.ones(tokens, np.float32),
            weight_versions=((0, 0, tokens),), finish_reason="stop",
        )  # fmt: skip

    segments = [context(0, -1), sampled(1, 0)]
    for _ in range(branches if branches > 1 else 0):
        index = len(segments)
        segments += [context(index, 1), sampled(index + 1, index)]
    return Trajectory(
        name,
        name,
        group,
        "task",
        policy=policy,
        frozen=frozen,
        segments=segments,
        rewards=[(None, "score", reward)],
        stop_reason=StopReason.ERROR if error else StopReason.COMPLETED,
        error=error,
    )


def build(members: list[Trajectory], failed: int = 0, **config: object):
    algorithm = AlgorithmConfig.model_validate({"advantage_options": {"norm_by_std": False}, **config})
    return build_experience(collect([TrajectoryGroup("g", "task", members, failed=failed)]), algorithm, temperature=0.7)


def test_branches_share_the_advantage_of_one_member() -> None:
    result = build([trajectory("a", 1.0, branches=3), trajectory("b", 0.0)])
    # Mean 0.5, whatever the number of branches.
    assert [row.advantage for row in result.rows] == [0.5, 0.5, 0.5, -0.5]
    assert {row.temperature for row in result.rows} == {0.7}
    assert result.metrics["batch/trajectories"] == 2
    assert result.metrics["batch/rows"] == 4
    # The first turn of a is shared by three rows and trained in one: 4 + 3 * 4, and 4 of b.
    assert result.metrics["batch/trained_tokens"] == 20
    assert result.metrics["batch/cut_tokens"] == 0
    for mode, expected in (("trajectory_mean", 2.0), ("trajectory_sum", 2.0), ("token_mean", 20.0)):
        weighed, normalizer = weigh(result.rows, mode)  # type: ignore[arg-type]
        assert normalizer == expected
        totals: dict[str, float] = {}
        for row in weighed:
            totals.setdefault(row.sample.trajectory_id, 0.0)
            totals[row.sample.trajectory_id] += row.weight * row.sample.trained_tokens
        if mode == "trajectory_mean":
            assert totals == pytest.approx({"a": 1.0, "b": 1.0})


def test_failed_trajectories_are_not_rewarded() -> None:
    result = build([trajectory("a", 1.0), trajectory("b", 0.0), trajectory("c", 0.0, error="EnvError: x")], failed=1)
    assert [row.advantage for row in result.rows] == [0.5, -0.5]
    assert result.metrics["batch/failed"] == 2
    assert result.metrics["reward/mean"] == 0.5
    assert result.metrics["stop/completed"] == 1.0


def test_dead_groups_are_left_out_or_kept_with_zero() -> None:
    members = [trajectory("a", 1.0), trajectory("b", 1.0), trajectory("c", 2.0, group="g/judge")]
    dropped = build(members)
    assert dropped.rows == []
    assert dropped.metrics["batch/dead_groups"] == 2
    assert dropped.metrics["batch/groups"] == 2
    assert dropped.metrics["reward/informative"] == 0.0
    undropped = build(members, drop_zero_variance=False)
    assert [row.advantage for row in undropped.rows] == [0.0, 0.0, 0.0]


def test_sessions_of_other_roles_and_policies_are_compared_separately() -> None:
    members = [
        trajectory("a", 1.0),
        trajectory("a/judge", 10.0, group="g/judge"),
        trajectory("b", 0.0),
        trajectory("b/judge", 20.0, group="g/judge"),
        trajectory("b/other", 5.0, policy="frozen", frozen=True),
    ]
    result = build(members)
    assert [(row.sample.trajectory_id, row.advantage) for row in result.rows] == [
        ("a", 0.5), ("a/judge", -5.0), ("b", -0.5), ("b/judge", 5.0),
    ]  # fmt: skip


def test_several_sessions_of_a_role_are_one_ragged_group() -> None:
    members = [
        *(trajectory(f"a/solver/{n}", float(n), group="g/solver") for n in range(3)),
        trajectory("b/solver/0", 5.0, group="g/solver"),
        trajectory("a/proposer", 1.0, group="g/proposer"),
        trajectory("b/proposer", 1.0, group="g/proposer", error="EnvError: x"),
    ]
    for member in members:
        member.agent = member.id.partition("/")[2]
    result = build(members)
    # Mean of the solvers (0 + 1 + 2 + 5) / 4; the proposer's group has one member left, which teaches nothing.
    assert [row.advantage for row in result.rows] == [-2.0, -1.0, 0.0, 3.0]
    assert (result.metrics["batch/groups"], result.metrics["batch/dead_groups"]) == (2, 1)
    assert result.metrics["reward/by_role/solver"] == 2.0
    assert result.metrics["reward/by_role/proposer"] == 1.0
    assert result.metrics["rollout/turns_by_role/solver"] == 1.0


def test_frozen_policies_are_reported_by_role_only() -> None:
    members = [
        trajectory("a", 1.0),
        trajectory("b", 0.0),
        trajectory("b/x", 100.0, group="g", policy="old", frozen=True),
    ]
    members[-1].agent = "x"
    result = build(members)
    assert [(row.sample.trajectory_id, row.advantage) for row in result.rows] == [("a", 0.5), ("b", -0.5)]
    assert result.metrics["reward/mean"] == 0.5
    assert result.metrics["reward/by_role/x@old"] == 100.0


def test_silent_trajectories_are_not_compared() -> None:
    silent = trajectory("c", 1.0)
    silent.segments = []
    result = build([trajectory("a", 1.0), trajectory("b", 0.0), silent])
    assert [row.advantage for row in result.rows] == [0.5, -0.5]
    assert (result.metrics["batch/trajectories"], result.metrics["batch/silent"]) == (3, 1)


def test_cut_rows_are_counted() -> None:
    algorithm = AlgorithmConfig()
    group = TrajectoryGroup("g", "task", [trajectory("a", 1.0), trajectory("b", 0.0)])
    result = build_experience(collect([group], max_tokens_per_row=5), algorithm, temperature=1.0)
    assert result.metrics["batch/cut_tokens"] == 4
    assert result.metrics["batch/trained_tokens"] == 4


def test_a_batch_of_failures_has_no_rows() -> None:
    result = build([], failed=8)
    assert result.rows == []
    assert result.metrics["batch/failed"] == 8
    assert result.metrics["batch/trajectories"] == 0


def test_every_metric_is_documented() -> None:
    result = build([trajectory("a", 1.0), trajectory("b", 0.0), trajectory("c", 0.0, policy="old", frozen=True)])
    assert [name for name in result.metrics if meaning(name) is None] == []
