"""Credit of tokens, of turns from the same state, and of whole groups, against numbers worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from support.trainer.credited import build, trajectory, turn_advantages
from turnwise.agents.notes import first_state, note_state
from turnwise.errors import ConfigError, TrainError
from turnwise.trainer.algorithms.credit import anchor_states, token_returns
from turnwise.trajectory import Segment, Trajectory


def of_tokens(result) -> dict[str, list[list[float]]]:
    """The advantages of the trained tokens of each row, by trajectory."""
    by_name: dict[str, list[list[float]]] = {}
    for row in result.rows:
        values = np.broadcast_to(row.advantage, row.sample.input_ids.shape)
        by_name.setdefault(row.sample.trajectory_id, []).append(values[row.sample.loss_mask].tolist())
    return by_name


def test_token_returns() -> None:
    # 2 at the last token of the last turn: 2, 1, 1/2 (gamma 1/2). The turn before it ends with 1 + 1/2 * 1/2 = 5/4.
    assert token_returns([1.0, 2.0], [2, 3], 0.5).tolist() == [0.625, 1.25, 0.5, 1.0, 2.0]
    # A turn without a token: its reward comes with the token before it, undiscounted; 1 + 2 there.
    assert token_returns([1.0, 2.0, 4.0], [1, 0, 1], 0.5).tolist() == [1 + 2 + 0.5 * 4, 4.0]
    assert token_returns([], [], 0.5).tolist() == []


def test_tokens_are_compared_by_their_discounted_returns() -> None:
    # a, 3 tokens a turn, gamma 1/2: 2, 1, 1/2 backwards in the last turn; 1 + 1/4, then its halves, in the first.
    a = trajectory("a", 2, [(0, 1.0), (None, 2.0)])
    b = trajectory("b", 1, [])
    returns = [0.3125, 0.625, 1.25, 0.5, 1.0, 2.0]
    # Their mean is 5.6875 / 6; b's is 0: together half of it.
    mean = 5.6875 / 12
    by_name = of_tokens(build([a, b], {"name": "tokens", "gamma": 0.5}))
    assert by_name["a"] == [pytest.approx([reward - mean for reward in returns])]
    assert by_name["b"] == [pytest.approx([-mean] * 3)]


def test_undiscounted_token_credit_of_episode_rewards_equals_same() -> None:
    members = [trajectory("a", 3, [(None, 1.0)]), trajectory("b", 2, []), trajectory("c", 1, [(None, 0.5)], fork=True)]
    for advantage in ("grpo", "dr_grpo", "reinforce_plus_plus"):
        options = {"advantage": advantage, "norm_by_std": True}
        plain = of_tokens(build(members, "same", **options))
        for credit in ("tokens", "turns"):
            by_name = of_tokens(build(members, credit, **options))
            for name, rows in plain.items():
                assert by_name[name] == [pytest.approx(row, abs=1e-3) for row in rows]


def test_tokens_of_a_fork_get_the_returns_of_their_branch() -> None:
    # Three turns of three tokens; the third stands beside the second. The second earns 8, nothing else does.
    a, b = trajectory("a", 3, [(1, 8.0)], fork=True), trajectory("b", 1, [])
    result = build([a, b], {"name": "tokens", "gamma": 0.5}, advantage="dr_grpo", norm_by_std=True)
    # 8, 4, 2 in the second turn, 1, 1/2, 1/4 in the first, 0 in the third: mean 15.75 / 9, with b's 0 half of it.
    mean = 15.75 / 18
    first, second = of_tokens(result)["a"]
    assert first == pytest.approx([reward - mean for reward in (0.25, 0.5, 1, 2, 4, 8)])
    assert second == pytest.approx([-mean] * 3)


def stepped(name: str, states: list[str], rewards: list[tuple[int | None, float]]) -> Trajectory:
    """A trajectory whose turn n began in the state ``states[n]``."""
    member = trajectory(name, len(states), rewards)
    return replace(member, states={("" if n == 0 else f"{name}{n - 1}"): state for n, state in enumerate(states)})


def test_turns_from_the_same_state_are_compared() -> None:
    members = [stepped("a", ["s", "x"], [(0, 1.0)]), stepped("b", ["s", "y"], [])]
    # Episodes: 1 and 0, advantages +-1/2. In s the returns are 1 and 0: +-1/2. x and y were met once: 0.
    assert turn_advantages(build(members, "gigpo")) == {"a": [1.0, 0.5], "b": [-1.0, -0.5]}


def test_each_visit_of_a_repeated_state_is_compared() -> None:
    # Later rewards count half. a: 0 + 1/2, 1. b: 0, 0. All four begin in s: mean 3/8. Episodes: +-1/2.
    members = [stepped("a", ["s", "s"], [(1, 1.0)]), stepped("b", ["s", "s"], [])]
    by_name = turn_advantages(build(members, {"name": "gigpo", "gamma": 0.5}))
    assert by_name == {"a": [0.5 + 0.125, 0.5 + 0.625], "b": [-0.875, -0.875]}
    # Divided by their spreads: episodes 1/sqrt(2); in s squares of 1/64, 25/64 and twice 9/64, over n - 1 = 3: 44/192.
    by_name = turn_advantages(build(members, {"name": "gigpo", "gamma": 0.5}, advantage_options={"eps": 1e-9}))
    spread = math.sqrt(44 / 192)
    assert by_name["a"] == pytest.approx([math.sqrt(0.5) + 0.125 / spread, math.sqrt(0.5) + 0.625 / spread])


def test_equal_episodes_have_advantages_at_shared_states_only() -> None:
    early, late = stepped("a", ["s", "t"], [(0, 1.0)]), stepped("b", ["s", "t"], [(1, 1.0)])
    result = build([early, late], {"name": "gigpo", "gamma": 0.5})
    # In s: 1 and 1/2; in t: 0 and 1.
    assert turn_advantages(result) == {"a": [0.25, -0.5], "b": [-0.25, 0.5]}
    assert result.metrics["batch/dead_groups"] == 0
    for members in ([early], [early, stepped("b", ["s", "t"], [(0, 1.0)])]):
        result = build(members, "gigpo", drop_zero_variance=False)
        assert result.metrics["batch/dead_groups"] == 1
        assert {value for advantages in turn_advantages(result).values() for value in advantages} == {0.0}


def test_ragged_groups_are_compared_apart() -> None:
    first = [stepped("a", ["s"], [(0, 2.0)]), stepped("b", ["s", "s", "s"], [])]
    other = replace(stepped("c", ["s", "s"], [(0, 9.0)]), group_id="other")
    by_name = turn_advantages(build([*first, other], "gigpo", drop_zero_variance=False))
    # Episodes 2 and 0: +-1. In s: 2, 0, 0, 0, mean 1/2. The one of the other group came back to s, but is alone.
    assert by_name == {"a": [2.5], "b": [-1.5, -1.5, -1.5], "c": [0.0, 0.0]}


def branch(ids: list[list[int]], states: dict[str, str] | None = None) -> Trajectory:
    """Contexts and sampled turns by turns, in one branch."""
    segments = []
    for number, segment_ids in enumerate(ids):
        token_ids = np.array(segment_ids, np.int32)
        if number % 2 == 0:
            segments.append(Segment(number, number - 1, "context", token_ids))
        else:
            segments.append(
                Segment(
                    number, number - 1, "sampled", token_ids, turn_id=f"t{number // 2}",
                    logprobs=np.zeros(len(segment_ids), np.float32),
                )
            )  # fmt: skip
    return Trajectory("a", "e", "g", "task", segments=segments, states=states or {})


def test_states_are_the_seen_or_the_shown_token_ids() -> None:
    a, b = branch([[1, 2], [7], [3], [8]]), branch([[1, 2], [9], [3], [8]])
    seen_a, seen_b = anchor_states(a, "seen"), anchor_states(b, "seen")
    assert seen_a[0] == seen_b[0]
    assert seen_a[1] != seen_b[1], "they said different things before"
    assert anchor_states(a, "shown") == anchor_states(b, "shown")
    assert len({*anchor_states(a, "shown")}) == 2
    # How the ids were cut into segments says nothing.
    cut = replace(a, segments=[])
    cut.segments = [
        Segment(0, -1, "context", np.array([1], np.int32)),
        Segment(1, 0, "context", np.array([2], np.int32)),
        replace(a.segments[1], index=2, parent=1),
    ]
    assert anchor_states(cut, "seen") == seen_a[:1]
    assert anchor_states(cut, "shown") == anchor_states(a, "shown")[:1]


def test_named_states_take_precedence_over_seen_ids() -> None:
    half = branch([[1], [7], [3], [8]], {"t0": "room 2"})
    assert anchor_states(half, None) == [anchor_states(half, "seen")[0], ("named", "room 2")]
    assert anchor_states(replace(half, states={"": "room 1", "t0": "room 2"}), "named") == [
        ("named", "room 1"), ("named", "room 2"),
    ]  # fmt: skip
    with pytest.raises(TrainError, match=r"credit\.state is named, but the environment gave none before turn 0"):
        anchor_states(half, "named")


def test_the_state_before_a_turn_is_that_of_its_own_branch() -> None:
    member = trajectory("a", 3, [], fork=True)
    states = anchor_states(replace(member, states={"": "s", "a0": "x", "a1": "y"}), "named")
    # The third turn goes on from the first, not from the second.
    assert states == [("named", "s"), ("named", "x"), ("named", "x")]


def test_states_are_kept_by_who_moves_next() -> None:
    states = first_state({"state": 3, "turn": "left"})
    assert states == {("left", None): "3"}
    note_state(states, {"state": "after", "turn": "right"}, "left", "t0", lambda name: None)
    note_state(states, {"state": "again", "turn": "left"}, "right", "t1", lambda name: {"left": "t0"}[name])
    note_state(states, {"state": "end"}, "left", "t2", lambda name: None)
    note_state(states, {"state": [1, 2]}, "left", "t3", lambda name: None)
    note_state(states, {"state": "lost"}, "left", None, lambda name: None)
    assert states == {("left", None): "3", ("right", None): "after", ("left", "t0"): "again", ("left", "t2"): "end"}
    assert first_state({"state": True}) == first_state({}) == {}


def against_the_best(group: list[Trajectory]) -> list[list[float]]:
    best = max(member.reward for member in group)
    return [[member.reward - best] * sum(1 for _ in member.turns()) for member in group]


ANSWERS: dict[str, object] = {}


def answering(group: list[Trajectory]) -> object:
    return ANSWERS["now"]


def test_a_function_of_the_group_returns_advantages() -> None:
    members = [trajectory("a", 2, [(None, 1.0)]), trajectory("b", 1, [(None, 3.0)])]
    alone = trajectory("c", 2, [(None, 5.0)], group="alone")
    result = build([*members, alone], f"{__name__}:against_the_best", drop_zero_variance=False)
    assert turn_advantages(result) == {"a": [-2.0, -2.0], "b": [0.0], "c": [0.0, 0.0]}
    assert (result.metrics["batch/groups"], result.metrics["batch/dead_groups"]) == (2, 1)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([[1.0, 1.0]], "for group g: it must be a list of 2 lists"),
        (None, "returned None for group g"),
        ([[1.0], [1.0]], "for trajectory a: it must be a list of 2 numbers"),
        ([[1.0, math.inf], [1.0]], "returned inf for a turn of trajectory a"),
    ],
)
def test_invalid_advantages_of_a_group_function_raise_train_error(answer: object, message: str) -> None:
    ANSWERS["now"] = answer
    with pytest.raises(TrainError, match=r"algorithm\.credit") as error:
        build([trajectory("a", 2, []), trajectory("b", 1, [])], f"{__name__}:answering")
    assert message in str(error.value)


def test_turns_may_be_compared_over_the_batch() -> None:
    # Groups of one. What follows: 2, 2 and 0: means 2 and 0, mean 1, squares 1 + 1 over n - 1 = 1.
    members = [trajectory("a", 2, [(1, 2.0)], group="g1"), trajectory("b", 1, [], group="g2")]
    result = build(members, "turns", advantage="reinforce_plus_plus", norm_by_std=True)
    assert turn_advantages(result) == {
        "a": pytest.approx([math.sqrt(0.5)] * 2, rel=1e-3),
        "b": pytest.approx([-math.sqrt(0.5)], rel=1e-3),
    }
    assert (result.metrics["batch/groups"], result.metrics["batch/dead_groups"]) == (2, 0)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"credit": {"name": "same", "state": "seen"}}, "no state: 'same'"),
        ({"credit": {"name": "gigpo", "state": "heard"}}, "named"),
        ({"credit": "gigpo", "advantage": "rloo"}, "choose grpo, dr_grpo, or credit same, last or discounted"),
        ({"credit": "tokens", "advantage": "rloo"}, "choose grpo, dr_grpo, reinforce_plus_plus"),
    ],
)
def test_incompatible_credit_options_raise(config: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        build([], norm_by_std=True, **config)
    assert message in str(error.value)
