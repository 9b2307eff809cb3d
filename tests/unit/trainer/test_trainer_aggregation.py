from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise.trainer.algorithms.losses.core import loss_weights


def test_weights_of_each_aggregation() -> None:
    # Trajectory a has rows of 2 and 3 tokens, b one of 4, c none: it counts in no denominator.
    tokens, names = [2, 4, 3, 0], ["a", "b", "a", "c"]
    assert loss_weights(tokens, names, "token_mean") == ([1.0] * 4, 9.0)
    assert loss_weights(tokens, names, "trajectory_sum") == ([1.0] * 4, 2.0)
    weights, normalizer = loss_weights(tokens, names, "trajectory_mean")
    assert weights == pytest.approx([0.2, 0.25, 0.2, 0.0])
    assert normalizer == 2.0


@given(splits=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4), min_size=1, max_size=5))
def test_trajectory_mean_does_not_see_branches(splits: list[list[int]]) -> None:
    """Each trajectory with a trained token has total weight 1, over however many rows it is spread."""
    tokens = [count for rows in splits for count in rows]
    names = [str(number) for number, rows in enumerate(splits) for _ in rows]
    weights, normalizer = loss_weights(tokens, names, "trajectory_mean")
    for number in range(len(splits)):
        total = sum(w * t for w, t, name in zip(weights, tokens, names, strict=True) if name == str(number))
        assert total == pytest.approx(1.0 if sum(splits[number]) else 0.0)
    assert normalizer == max(1, sum(1 for rows in splits if sum(rows)))


def test_a_step_without_rows_has_normaliser_one() -> None:
    assert loss_weights([], [], "token_mean") == ([], 1.0)
