"""Trajectories: bytes in and out, and rows in which each sampled token is trained once."""

from __future__ import annotations

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise.errors import FormatError
from turnwise.trajectory import Segment, Trajectory, to_samples
from turnwise.types import StopReason


def context(index: int, parent: int, *ids: int) -> Segment:
    return Segment(index, parent, "context", np.array(ids, np.int32))


def sampled(index: int, parent: int, *ids: int, version: int = 0) -> Segment:
    logprobs = -np.array(ids, np.float32) / 7
    return Segment(
        index,
        parent,
        "sampled",
        np.array(ids, np.int32),
        ({"role": "assistant", "content": "é\n"},),
        f"t{index}",
        logprobs,
        ((version, 0, len(ids)),),
        "stop",
    )


def forked() -> Trajectory:
    """Two branches that share a context and a turn."""
    return Trajectory(
        "a",
        "e",
        "g",
        "t",
        segments=[
            context(0, -1, 1, 2),
            sampled(1, 0, 3, 4),
            context(2, 1, 5),
            sampled(3, 2, 6),
            context(4, 1, 7, 8),
            sampled(5, 4, 9, 10, version=3),
        ],
        rewards=[("t3", "tool", 0.25), (None, "score", 1.0)],
        stop_reason=StopReason.MAX_TURNS,
        metrics={"turns": 3.0},
    )


def test_a_shared_turn_is_trained_in_the_first_leaf_only() -> None:
    samples = to_samples(forked())
    first, second = samples.rows
    assert first.input_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert first.loss_mask.tolist() == [False, False, True, True, False, True]
    assert first.turn_ids.tolist() == [-1, -1, 0, 0, -1, 1]
    assert second.input_ids.tolist() == [1, 2, 3, 4, 7, 8, 9, 10]
    assert second.loss_mask.tolist() == [False] * 6 + [True, True]
    assert second.weight_versions.tolist() == [-1, -1, 0, 0, -1, -1, 3, 3]
    # Logprobs stand on every sampled id, whether this row trains it or not.
    np.testing.assert_array_equal(second.rollout_logprobs[2:4], -np.array([3, 4], np.float32) / 7)
    assert (samples.empty_leaves, samples.unowned_tokens) == (0, 0)


def test_owners_are_chosen_after_filtering() -> None:
    samples = to_samples(forked(), keep=lambda path: path[-1].index == 5)
    [row] = samples.rows
    assert row.loss_mask.tolist() == [False, False, True, True, False, False, True, True]
    # The one id of the dropped branch has no owner.
    assert samples.unowned_tokens == 1


def test_rows_are_cut_and_cut_tokens_counted() -> None:
    samples = to_samples(forked(), max_tokens=3)
    [row] = samples.rows
    assert row.input_ids.tolist() == [1, 2, 3]
    assert samples.empty_leaves == 1
    assert samples.unowned_tokens == 4


def test_versions_are_read_from_spans() -> None:
    segment = sampled(1, 0, 3, 4, 5)
    segment = Segment(1, 0, "sampled", segment.token_ids, (), "t", segment.logprobs, ((1, 0, 2), (2, 2, 3)), "stop")
    [row] = to_samples(Trajectory("a", "e", "g", "t", segments=[context(0, -1, 9), segment])).rows
    assert row.weight_versions.tolist() == [-1, 1, 1, 2]


def test_the_reward_is_the_sum_of_its_events() -> None:
    assert forked().reward == 1.25


def test_bytes_hold_everything_exactly() -> None:
    data = forked().to_bytes()
    assert b"\n" not in data
    copy = Trajectory.from_bytes(data)
    assert copy.to_bytes() == data
    assert copy.rewards == forked().rewards
    for original, theirs in zip(forked().segments, copy.segments, strict=True):
        np.testing.assert_array_equal(original.token_ids, theirs.token_ids)
        assert original.token_ids.dtype == theirs.token_ids.dtype
        if original.logprobs is not None:
            np.testing.assert_array_equal(original.logprobs, theirs.logprobs)
        assert (original.weight_versions, original.finish_reason) == (theirs.weight_versions, theirs.finish_reason)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=20))
def test_every_logprob_survives_bit_for_bit(values: list[float]) -> None:
    logprobs = np.array(values, np.float32)
    ids = np.arange(len(values), dtype=np.int32)
    segment = Segment(1, 0, "sampled", ids, (), "t0", logprobs, ((0, 0, len(ids)),), "stop")
    trajectory = Trajectory("a", "e", "g", "t", segments=[context(0, -1, 1), segment])
    decoded = Trajectory.from_bytes(trajectory.to_bytes()).segments[1].logprobs
    assert decoded is not None
    np.testing.assert_array_equal(decoded.view(np.int32) & 0x7FFFFFFF, logprobs.view(np.int32) & 0x7FFFFFFF)


def test_numbers_that_are_not_finite_are_refused() -> None:
    trajectory = forked()
    trajectory.rewards.append((None, "bad", float("nan")))
    with pytest.raises(FormatError, match="reward is not finite"):
        trajectory.to_bytes()
    trajectory = forked()
    segment = sampled(5, 4, 1)
    trajectory.segments[5] = Segment(5, 4, "sampled", segment.token_ids, (), "t", np.array([np.inf], np.float32))
    with pytest.raises(FormatError, match="segment 5"):
        trajectory.to_bytes()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda record: record.update(schema_version=99), "schema version 99"),
        (lambda record: record.pop("task_id"), "malformed"),
        (lambda record: record["segments"][0].pop("token_ids"), "malformed"),
        (lambda record: record.update(stop_reason="bored"), "malformed"),
    ],
)
def test_damaged_records_are_named(damage, words) -> None:
    record = orjson.loads(forked().to_bytes())
    damage(record)
    with pytest.raises(FormatError, match=words):
        Trajectory.from_bytes(orjson.dumps(record))
    with pytest.raises(FormatError, match="not JSON"):
        Trajectory.from_bytes(b'{"id": ')
