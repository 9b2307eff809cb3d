"""Rows as padded rectangles, by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import turnwise
from turnwise.errors import TrainError
from turnwise.trajectory import TrainSample
from turnwise.types import Media


def sample(ids: list[int], mask: list[int], name: str = "t") -> TrainSample:
    on = np.array(mask, np.bool_)
    return TrainSample(
        input_ids=np.array(ids, np.int32),
        loss_mask=on,
        rollout_logprobs=np.where(on, np.array(ids) / -10, 0).astype(np.float32),
        weight_versions=np.where(on, 4, -1).astype(np.int32),
        turn_ids=np.where(on, 0, -1).astype(np.int32),
        trajectory_id=name,
        group_id="g",
        leaf=0,
    )


# A prompt of two ids, two sampled, a tool's answer, one sampled; and a prompt of one with one sampled.
LONG = sample([11, 12, 13, 14, 15, 16], [0, 0, 1, 1, 0, 1], "a")
SHORT = sample([21, 22], [0, 1], "b")


def test_rows_are_padded_on_the_right() -> None:
    batch = turnwise.collate_padded([LONG, SHORT], pad_id=9, advantages=[0.5, -1.0])
    assert batch.input_ids.tolist() == [[11, 12, 13, 14, 15, 16], [21, 22, 9, 9, 9, 9]]
    assert batch.attention_mask.tolist() == [[1] * 6, [1, 1, 0, 0, 0, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 5], [0, 1, 0, 0, 0, 0]]
    assert batch.loss_mask.int().tolist() == [[0, 0, 1, 1, 0, 1], [0, 1, 0, 0, 0, 0]]
    assert batch.labels.tolist() == [[-100, -100, 13, 14, -100, 16], [-100, 22, -100, -100, -100, -100]]
    assert batch.advantages is not None
    assert batch.advantages.tolist() == [[0, 0, 0.5, 0.5, 0, 0.5], [0, -1.0, 0, 0, 0, 0]]
    assert batch.weight_versions.tolist() == [[-1, -1, 4, 4, -1, 4], [-1, 4, -1, -1, -1, -1]]
    assert batch.turn_ids[1].tolist() == [-1, 0, -1, -1, -1, -1]
    assert (batch.trajectory_ids, batch.group_ids) == (("a", "b"), ("g", "g"))


def test_rows_are_padded_on_the_left() -> None:
    batch = turnwise.collate_padded([LONG, SHORT], "left", pad_id=9)
    assert batch.input_ids[1].tolist() == [9, 9, 9, 9, 21, 22]
    assert batch.attention_mask[1].tolist() == [0, 0, 0, 0, 1, 1]
    assert batch.position_ids[1].tolist() == [0, 0, 0, 0, 0, 1]
    assert batch.labels[1].tolist() == [-100] * 5 + [22]
    assert batch.rollout_logprobs[1].tolist() == pytest.approx([0, 0, 0, 0, 0, -2.2])
    assert batch.advantages is None
    assert "advantages" not in batch.tensors()


def test_prompts_are_padded_left_and_completions_right() -> None:
    batch = turnwise.collate_padded([LONG, SHORT], pad_id=9)
    assert batch.prompt_ids.tolist() == [[11, 12], [9, 21]]
    assert batch.prompt_mask.tolist() == [[1, 1], [0, 1]]
    assert batch.completion_ids.tolist() == [[13, 14, 15, 16], [22, 9, 9, 9]]
    assert batch.completion_mask.tolist() == [[1, 1, 1, 1], [1, 0, 0, 0]]
    # What the tool answered is there, and is not trained.
    assert batch.completion_loss_mask.int().tolist() == [[1, 1, 0, 1], [1, 0, 0, 0]]
    assert batch.completion_logprobs[0].tolist() == pytest.approx([-1.3, -1.4, 0, -1.6])


def test_lengths_are_rounded_up_and_advantages_may_be_per_token() -> None:
    batch = turnwise.collate_padded([SHORT], pad_id=9, advantages=[[5.0, 7.0]], pad_to_multiple_of=4)
    assert [t.shape[1] for t in (batch.input_ids, batch.prompt_ids, batch.completion_ids)] == [4, 4, 4]
    assert batch.prompt_ids.tolist() == [[9, 9, 9, 21]]
    assert batch.advantages is not None
    assert batch.advantages.tolist() == [[0.0, 7.0, 0.0, 0.0]]


def test_a_row_that_trains_nothing_is_all_prompt() -> None:
    batch = turnwise.collate_padded([sample([1, 2], [0, 0]), SHORT])
    assert batch.prompt_ids.tolist() == [[1, 2], [0, 21]]
    assert batch.completion_mask.tolist() == [[0], [1]]


@pytest.mark.parametrize(
    ("samples", "options", "message"),
    [
        ([], {}, "samples is empty"),
        ([SHORT], {"side": "middle"}, "side is 'middle'"),
        ([SHORT], {"advantages": [1.0, 2.0]}, "2 elements for 1 samples"),
        ([SHORT], {"advantages": [[1.0]]}, r"shape \(1,\).* each of its 2 tokens"),
        ([SHORT], {"pad_to_multiple_of": 0}, "pad_to_multiple_of is 0"),
        ([replace(SHORT, media=(Media("image", b"", 0, 1),))], {}, "holds media"),
    ],
)
def test_invalid_samples_raise_train_error(samples: list[TrainSample], options: dict[str, Any], message: str) -> None:
    with pytest.raises(TrainError, match=message):
        turnwise.collate_padded(samples, **options)
