from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise.errors import TrainError
from turnwise.trainer.batch.packing import pack
from turnwise.trainer.core import TrainRow
from turnwise.trajectory import TrainSample


def simple_row(length: int, trained: int, number: int, advantage: float = 1.0) -> TrainRow:
    mask = np.zeros(length, np.bool_)
    if trained:
        mask[-trained:] = True
    return TrainRow(
        TrainSample(
            np.arange(number * 1000, number * 1000 + length, dtype=np.int32),
            mask,
            np.where(mask, -0.5 - number, 0).astype(np.float32),
            np.zeros(length, np.int32),
            np.zeros(length, np.int32),
            f"t{number}",
            "g",
            0,
        ),
        advantage,
        weight=number + 1.0,
        temperature=0.5 + number,
    )


lengths = st.lists(st.tuples(st.integers(2, 30), st.integers(0, 30)), min_size=0, max_size=25)


@given(sizes=lengths, budget=st.integers(1, 64))
def test_every_row_is_whole_in_exactly_one_micro_batch(sizes: list[tuple[int, int]], budget: int) -> None:
    rows = [simple_row(length, min(trained, length - 1), n) for n, (length, trained) in enumerate(sizes)]
    batches = pack(rows, budget)
    seen: list[int] = []
    for batch in batches:
        assert batch.tokens <= budget or len(batch.segments) == 1
        assert sum(length for _, length, _ in batch.segments) == batch.tokens
        expected_start = 0
        for (start, length, parent), number in zip(batch.segments, batch.rows, strict=True):
            row, part = rows[number], slice(start, start + length)
            assert (start, parent) == (expected_start, -1)
            expected_start += length
            assert batch.input_ids[0, part].tolist() == row.sample.input_ids.tolist()
            assert batch.position_ids[0, part].tolist() == list(range(length))
            mask, own_tokens = row.sample.loss_mask, batch.sequences == batch.rows.index(number)
            assert batch.target_ids[own_tokens].tolist() == row.sample.input_ids[mask].tolist()
            assert (batch.predictors[own_tokens] - start).tolist() == (np.flatnonzero(mask) - 1).tolist()
            assert batch.rollout_logprobs[own_tokens].tolist() == row.sample.rollout_logprobs[mask].tolist()
            assert batch.weights[own_tokens].tolist() == [row.weight] * int(mask.sum())
            assert batch.temperatures[own_tokens].tolist() == [row.temperature] * int(mask.sum())
        assert batch.sequences.tolist() == sorted(batch.sequences.tolist())
        seen += batch.rows
    assert sorted(seen) == [n for n, row in enumerate(rows) if row.sample.trained_tokens]
    repacked = pack(rows, budget)
    assert [batch.rows for batch in repacked] == [batch.rows for batch in batches]


def test_turns_of_packed_rows_have_numbers_of_their_own(row: Callable[..., TrainRow]) -> None:
    """The n-th turn of one trajectory is another turn than the n-th of the next."""
    rows = [row(8, [2, 3, 5, 6]) for _ in range(2)]
    for sample in (packed.sample for packed in rows):
        sample.turn_ids[:] = [-1, -1, 4, 4, -1, 7, 7, -1]
    [batch] = pack(rows, 16)
    assert batch.turns.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_first_fit_fills_gaps_with_short_rows() -> None:
    rows = [simple_row(length, 1, n) for n, length in enumerate((6, 3, 7, 4))]
    # Longest first: 7 opens a bin of 10, 6 another; 4 fits beside 6, 3 beside 7.
    assert [batch.rows for batch in pack(rows, 10)] == [(2, 1), (0, 3)]


def test_advantages_per_token_and_greedy_temperature(row: Callable[..., TrainRow]) -> None:
    values = np.arange(6, dtype=np.float32)
    (batch,) = pack([row(6, [2, 5], advantage=values, temperature=0.0)], 10)
    assert batch.advantages.tolist() == [2, 5]
    assert batch.temperatures.tolist() == [1.0, 1.0]
    assert batch.predictors.tolist() == [1, 4]
    assert batch.trained_tokens == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"trained": [0]}, "loss_mask\\[0\\] is true"),
        ({"advantage": float("nan")}, "not finite"),
        ({"weight": float("inf")}, "not finite"),
    ],
)
def test_invalid_rows_raise_train_error(row: Callable[..., TrainRow], change: dict[str, object], message: str) -> None:
    with pytest.raises(TrainError, match=f"row 1 .*{message}"):
        pack([row(6), row(6, **change)], 10)
