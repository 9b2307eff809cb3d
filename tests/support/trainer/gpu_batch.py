"""A small model and rows for tests of the trainer on a GPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import transformers

from turnwise.trainer.core import TrainRow
from turnwise.trajectory import TrainSample

VOCABULARY = 512


def save_small_model(directory: Path) -> Path:
    """Save a random Qwen3 of two layers."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        initializer_range=0.1,
        tie_word_embeddings=True,
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory


def rows(lengths: tuple[int, ...] = (40, 33, 18, 9, 40, 7)) -> list[TrainRow]:
    """Return rows of these lengths with seeded ids."""
    random = np.random.default_rng(0)
    samples = []
    for number, length in enumerate(lengths):
        mask = np.arange(length) >= length // 2
        sample = TrainSample(
            input_ids=random.integers(0, VOCABULARY, length).astype(np.int32),
            loss_mask=mask,
            rollout_logprobs=np.where(mask, -6.0, 0).astype(np.float32),
            weight_versions=np.where(mask, 0, -1).astype(np.int32),
            turn_ids=np.where(mask, 0, -1).astype(np.int32),
            trajectory_id=f"t{number}",
            group_id="g",
            leaf=0,
        )
        samples.append(TrainRow(sample, advantage=1.0 if number % 2 else -1.0, temperature=0.9))
    return samples
