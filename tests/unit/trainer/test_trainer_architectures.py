"""Every architecture of transformers is exact, or refused before a rollout, as the docs say."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.trainer.architectures import ARCHITECTURES, examine, read_table, row_of_table, save_tiny
from turnwise.engine.causal_lm import CausalLM
from turnwise.errors import InferenceError, TrainError
from turnwise.trainer.model.policy import load_model

pytestmark = pytest.mark.long


def test_the_table_has_all_architectures() -> None:
    assert sorted(read_table()) == list(ARCHITECTURES)


@pytest.mark.alike("architectures")
@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_architecture_is_exact_or_refused_as_the_table_says(model_type: str, tmp_path: Path) -> None:
    assert row_of_table(examine(model_type, tmp_path)) == read_table()[model_type]


@pytest.mark.parametrize("model_type", ["moshi", "phimoe", "qwen2_moe"])
def test_windows_that_only_a_mask_has_are_refused_however_large(model_type: str, tmp_path: Path) -> None:
    """The rows by which a loaded model is checked are shorter than they are."""
    settings = {"sliding_window": 4096, "use_sliding_window": True, "layer_types": ["sliding_attention"] * 2}
    save_tiny(model_type, tmp_path, windows=False, **settings)
    with pytest.raises(TrainError, match=r"its attention to 4096 tokens \(sliding_window in config.json\) by a mask"):
        load_model(tmp_path)
    with pytest.raises(InferenceError, match="its sliding window of 4096 tokens is in its mask alone"):
        CausalLM(tmp_path)
