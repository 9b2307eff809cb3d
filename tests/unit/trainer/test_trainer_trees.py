"""Advantages of trees: against literals, and what must hold for all of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from turnwise.errors import TrainError
from turnwise.trainer.algorithms.advantages import estimate_advantages, grpo
from turnwise.trainer.algorithms.config import AlgorithmConfig
from turnwise.trainer.algorithms.credit import ReturnCredit, StateCredit, TrajectoryCredit, assign_credit
from turnwise.trainer.algorithms.rewards import step_rewards
from turnwise.trainer.algorithms.trees import TREE_CREDITS, Tree, tree_grpo, tree_value
from turnwise.trainer.batch.value_targets import TrajectoryValues, value_rows
from turnwise.trajectory import Segment, Trajectory, to_samples
from turnwise.types import Branch

# Turns 0 1 2; forked before turn 1 (turns 0 3 4); that one forked before turn 4 (turns 0 3 5).
FORKED = Tree((1.0, 0.0, 0.5), ((0, 1, 2), (0, 3, 4), (0, 3, 5)), 6)
CHAIN = Tree((0.0,), ((0, 1),), 2)


def test_tree_value_is_the_gain_of_each_stretch() -> None:
    # Means: 0.5 and 0, so the state that both begin in is worth 0.25. Turn 0 is worth 0.5, turns 1 and 2 are worth 1,
    # turn 3 0.25, turn 4 0 and turn 5 0.5.
    forked, chain = tree_value([FORKED, CHAIN], norm_by_std=False)
    assert forked.tolist() == [0.25, 0.5, 0.5, -0.25, -0.25, 0.25]
    assert chain.tolist() == [-0.25, -0.25]
    # Branches 1, 0, 0.5 and 0: sample variance ((5/8)^2 + 2 (3/8)^2 + (1/8)^2) / 3 = 0.6875 / 3.
    scaled, _ = tree_value([FORKED, CHAIN], eps=0.5)
    np.testing.assert_allclose(scaled, forked / ((0.6875 / 3) ** 0.5 + 0.5))


def test_tree_grpo_is_the_mean_over_branches_of_both_comparisons() -> None:
    # Between: branches less 0.375. Within the first tree: less 0.5; the chain has nothing to be compared with.
    forked, chain = tree_grpo([FORKED, CHAIN], norm_by_std=False)
    leaves = [1 - 0.375 + 0.5, 0 - 0.375 - 0.5, 0.5 - 0.375 + 0.0]
    assert forked.tolist() == pytest.approx(
        [sum(leaves) / 3, leaves[0], leaves[0], (leaves[1] + leaves[2]) / 2, leaves[1], leaves[2]]
    )
    assert chain.tolist() == [-0.375, -0.375]


REWARDS = st.lists(st.floats(-3, 3, width=32), min_size=1, max_size=6)


@given(rewards=REWARDS, turns=st.integers(1, 4), norm=st.booleans())
@pytest.mark.parametrize("name", sorted(TREE_CREDITS))
def test_trees_without_branches_are_compared_as_grpo_does(
    name: str, rewards: list[float], turns: int, norm: bool
) -> None:
    trees = [Tree((reward,), (tuple(range(turns)),), turns) for reward in rewards]
    by_tree = TREE_CREDITS[name](trees, norm_by_std=norm)
    by_group = grpo(torch.tensor(rewards, dtype=torch.float64), torch.zeros(len(rewards)), norm_by_std=norm).values
    for advantages, expected in zip(by_tree, by_group.tolist(), strict=True):
        np.testing.assert_allclose(advantages, [expected] * turns, rtol=1e-5, atol=1e-6)


@st.composite
def grown(draw: st.DrawFn) -> Tree:
    """Draw a tree: each branch shares a beginning of an earlier one."""
    paths = [tuple(range(draw(st.integers(1, 4))))]
    turns = len(paths[0])
    for _ in range(draw(st.integers(0, 4))):
        parent = draw(st.sampled_from(paths))
        added = draw(st.integers(1, 3))
        paths.append((*parent[: draw(st.integers(0, len(parent) - 1))], *range(turns, turns + added)))
        turns += added
    rewards = draw(st.lists(st.floats(-3, 3, width=32), min_size=len(paths), max_size=len(paths)))
    return Tree(tuple(rewards), tuple(paths), turns)


@given(trees=st.lists(grown(), min_size=1, max_size=3), shift=st.floats(-2, 2, width=32), norm=st.booleans())
def test_tree_value_telescopes_and_ignores_common_rewards(trees: list[Tree], shift: float, norm: bool) -> None:
    by_tree = tree_value(trees, norm_by_std=False)
    root = sum(tree.mean for tree in trees) / len(trees)
    for tree, advantages in zip(trees, by_tree, strict=True):
        leaves = tree.leaves
        for reward, path in zip(tree.returns, tree.paths, strict=True):
            # One advantage of each stretch of a branch adds up to what the branch earned over the common state.
            stretches = [
                turn for number, turn in enumerate(path) if not number or leaves[turn] != leaves[path[number - 1]]
            ]
            assert sum(advantages[turn] for turn in stretches) == pytest.approx(reward - root, abs=1e-5)
    # No scaling: a spread of rounding errors would be divided by itself.
    more = [Tree(tuple(reward + shift for reward in tree.returns), tree.paths, tree.turns) for tree in trees]
    for name in sorted(TREE_CREDITS):
        unshifted = TREE_CREDITS[name](trees, norm_by_std=False)
        for one, other in zip(unshifted, TREE_CREDITS[name](more, norm_by_std=False), strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5)
    assert all(np.isfinite(advantages).all() for advantages in tree_value(trees, norm_by_std=norm))


def segment(index: int, parent: int, turn: str | None = None) -> Segment:
    ids = np.array([index, index], np.int32)
    if turn is None:
        return Segment(index, parent, "context", ids)
    return Segment(index, parent, "sampled", ids, turn_id=turn, logprobs=np.zeros(2, np.float32))


def forked(group: str = "g") -> Trajectory:
    """Two turns, the second one sampled twice; a third sample of it failed and is in no branch."""
    return Trajectory(
        f"{group}/0",
        f"{group}/0",
        group,
        "task",
        segments=[
            segment(0, -1),
            segment(1, 0, "t0"),
            segment(2, 1),
            *(segment(3 + n, 2, f"t{1 + n}") for n in range(3)),
        ],
        rewards=[("t0", "step", 0.25), ("t1", "right", 1.0)],
        branches=[Branch(turns=("t0", "t1")), Branch(0, "t0", "t1", ("t3",), ((None, "bonus", 0.5),))],
    )


def test_the_credit_of_trajectories_is_that_of_their_trees() -> None:
    config = AlgorithmConfig.model_validate({"credit": "tree_value", "advantage_options": {"norm_by_std": False}})
    trajectories = [forked(), Trajectory("g/1", "g/1", "g", "task", segments=[segment(0, -1), segment(1, 0, "t0")])]
    assert trajectories[0].returns() == [1.25, 0.75]
    rewards = step_rewards(trajectories, {})
    assert rewards.components["right"].tolist() == [0.5, 0.0]
    estimate = estimate_advantages(
        rewards, assign_credit(trajectories, rewards, config.credit), config.chosen_advantage()
    )
    # Means 1 and 0: the common state is worth 0.5. What failed is worth nothing and costs nothing.
    assert [list(advantages) for advantages in estimate.advantages] == [[0.5, 0.25, 0.0, -0.25], [-0.5]]
    assert estimate.dead == [False, False]
    [alone] = tree_value([Tree.of(forked())], norm_by_std=False)
    assert alone.tolist() == [0.0, 0.25, 0.0, -0.25]


@pytest.mark.parametrize(
    ("credit", "expected"),
    [
        # Along t0 t1: 0.25 and 1; along t0 t3: 0.25 and 0.5. What both hold has the mean, what failed nothing.
        ("turns", [1.0, 1.0, 0.0, 0.5]),
        ({"name": "turns", "gamma": 0.5}, [(0.75 + 0.5) / 2, 1.0, 0.0, 0.5]),
        # Two tokens a turn, the reward on the second.
        ({"name": "tokens", "gamma": 0.5}, [0.21875, 0.4375, 0.5, 1.0, 0.0, 0.0, 0.25, 0.5]),
        ({"name": "gigpo", "gamma": 0.5}, [(0.75 + 0.5) / 2, 1.0, 0.0, 0.5]),
    ],
)
def test_returns_of_a_forked_episode_are_those_of_its_branches(credit: Any, expected: list[float]) -> None:
    config = AlgorithmConfig.model_validate({"credit": credit})
    credit_of_turns = assign_credit([forked()], step_rewards([forked()], {}), config.credit)
    assert isinstance(credit_of_turns, (ReturnCredit, StateCredit))
    assert credit_of_turns.returns[0].tolist() == expected


def test_the_last_turn_of_each_branch_has_its_share() -> None:
    for credit, expected in (("last", [0.0, 1.0, 0.0, 1.0]), ({"name": "discounted", "gamma": 0.5}, [0.5, 1, 0, 1])):
        config = AlgorithmConfig.model_validate({"credit": credit})
        shares = assign_credit([forked()], step_rewards([forked()], {}), config.credit)
        assert isinstance(shares, TrajectoryCredit)
        assert shares.shares is not None
        assert shares.shares[0].tolist() == expected


def test_a_critic_refuses_an_episode_that_its_agent_forked() -> None:
    config = AlgorithmConfig.model_validate({"advantage": "gae"})
    samples = [to_samples(forked()).rows]
    values = [TrajectoryValues([np.zeros(row.trained_tokens, np.float32) for row in samples[0]])]
    with pytest.raises(
        TrainError, match=r"g/0 was forked by its agent .* into 2 branches.*set algorithm.advantage to grpo"
    ):
        value_rows(step_rewards([forked()], {}), samples, {}, values, config.chosen_advantage(), temperature=1.0)


def test_a_non_finite_reward_raises_train_error() -> None:
    for function in TREE_CREDITS.values():
        with pytest.raises(TrainError, match=r"branches are \[nan\]"):
            function([Tree((float("nan"),), ((0,),), 1)])


@pytest.mark.parametrize(
    "options", [{"credit": "tree_value", "advantage": "rloo"}, {"credit": {"name": "tree_grpo", "gamma": 1}}]
)
def test_options_that_trees_do_not_read_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="tree_"):
        AlgorithmConfig.model_validate(options)
