"""Small sequence classifiers with random weights, as a reward model is one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForSequenceClassification


def make_classifier(
    folder: Path, labels: int, padding: int | None = None, **settings: Any
) -> Qwen2ForSequenceClassification:
    """Write a classifier beside the tokenizer of a folder; the same weights for the same settings."""
    torch.manual_seed(labels)
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "vocab_size": 1000,
        "max_position_embeddings": 128,
        "initializer_range": 0.3,
    }
    config = Qwen2Config(**sizes | settings, num_labels=labels, pad_token_id=padding)
    model = Qwen2ForSequenceClassification(config).eval().requires_grad_(False)
    model.save_pretrained(folder)
    return model
