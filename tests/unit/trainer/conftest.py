"""Small random models on disk, and rows to train them with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from turnwise.trainer.core import TrainRow
from turnwise.trajectory import TrainSample

VOCABULARY = 61

_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    # Large enough that a wrong mask or scale shows in the logits.
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"class": "Qwen2", "tie_word_embeddings": True},
    "qwen3": {"class": "Qwen3", "head_dim": 16, "tie_word_embeddings": True},
    "llama": {"class": "Llama", "tie_word_embeddings": False},
    "mistral_window": {"class": "Mistral", "sliding_window": 4},
    "gemma2": {"class": "Gemma2", "head_dim": 8, "sliding_window": 4},
    "granite": {"class": "Granite", "logits_scaling": 3.0},
    "cohere": {"class": "Cohere", "logit_scale": 0.25},
    "longrope": {
        "class": "Phi3",
        "original_max_position_embeddings": 16,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0, 1.0, 1.1, 1.2],
            "long_factor": [1.0, 1.5, 3.0, 6.0],
        },
    },
    "dynamic": {
        "class": "Llama",
        "max_position_embeddings": 16,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    },
    "gpt_oss": {"class": "GptOss", "head_dim": 8, "num_local_experts": 4, "sliding_window": 4},
}


def build_model(family: str, seed: int = 0) -> Any:
    options = {**_SIZES, **FAMILIES[family]}
    name = options.pop("class")
    torch.manual_seed(seed)
    config = getattr(transformers, f"{name}Config")(**options)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    for parameter_name, parameter in model.named_parameters():
        if "sinks" in parameter_name or "bias" in parameter_name:
            torch.nn.init.normal_(parameter, std=0.5)
    return model.float().eval()


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return the directory of a random model of a family, made once."""
    directories: dict[tuple[str, int], Path] = {}

    def make(family: str = "qwen3", seed: int = 0) -> Path:
        if (family, seed) not in directories:
            directory = tmp_path_factory.mktemp(f"{family}-{seed}")
            build_model(family, seed).save_pretrained(directory)
            directories[family, seed] = directory
        return directories[family, seed]

    return make


def make_row(
    length: int,
    trained: int | list[int] | None = None,
    *,
    seed: int = 0,
    name: str = "t0",
    advantage: Any = 1.0,
    weight: float = 1.0,
    temperature: float = 1.0,
    leaf: int = 0,
    ids: list[int] | None = None,
) -> TrainRow:
    """A row of random ids; ``trained`` says how many at the end, or which, are trained."""
    random = np.random.default_rng(seed)
    mask = np.zeros(length, np.bool_)
    if isinstance(trained, list):
        mask[trained] = True
    else:
        mask[length - (length // 2 if trained is None else trained) :] = True
    values = random.integers(0, VOCABULARY, length) if ids is None else ids
    return TrainRow(
        TrainSample(
            input_ids=np.asarray(values, np.int32),
            loss_mask=mask,
            rollout_logprobs=np.where(mask, -random.random(length) - 2.0, 0).astype(np.float32),
            weight_versions=np.where(mask, 0, -1).astype(np.int32),
            turn_ids=np.where(mask, 0, -1).astype(np.int32),
            trajectory_id=name,
            group_id="g",
            leaf=leaf,
        ),
        advantage,
        weight,
        temperature,
    )


@pytest.fixture
def row() -> Callable[..., TrainRow]:
    return make_row
