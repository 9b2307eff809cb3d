"""What ``engine_vs_generate`` asks of every side: models, requests, and how ``generate`` does each workload fastest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

MODELS: dict[str, dict[str, int]] = {
    "tiny64": {"hidden": 256, "layers": 4, "vocabulary": 4096, "intermediate": 768, "heads": 4, "kv_heads": 2},
    # Pretrained: only what requests need is named here.
    "smollm2": {"vocabulary": 49152},
    "m100": {"hidden": 768, "layers": 12, "vocabulary": 16384, "intermediate": 2048, "heads": 12, "kv_heads": 4},
}
_PROMPT, _NEW = 64, 64
_RAGGED_PROMPT, _RAGGED_NEW = (16, 128), (16, 129)


@dataclass(frozen=True, slots=True)
class Workload:
    """One row of the result.

    Attributes:
        name: The result's key is ``ratio_NAME``.
        model: Which of :data:`MODELS`.
        prompts: Different prompts.
        prompt: Tokens of each.
        samples: Completions of each prompt.
        ragged: Whether prompts and completions differ in length.
        setting: Of ``generate``, the fastest that was found; see ``generate_side``.
        others: Further settings of ``generate``, measured with ``--settings``.
        quick: Repeats with ``--quick``; 0 leaves the workload out.
        scale: Calls of each side in one repeat.
    """

    name: str
    model: str
    prompts: int
    prompt: int = _PROMPT
    samples: int = 1
    ragged: bool = False
    setting: Mapping[str, Any] = field(default_factory=dict)
    others: tuple[Mapping[str, Any], ...] = ({"logprobs": "processor"}, {"cache": "static"})
    quick: int = 1
    scale: int = 1

    def draw(self, repeat: int) -> dict[str, Any]:
        """Return the prompts of a repeat, and how many ids each gets; the same for every side."""
        # Prompts differ between repeats: nothing of an earlier one may serve a later one.
        rng = np.random.default_rng([repeat + 1, *self.name.encode()])
        if self.ragged:
            sizes = rng.integers(*_RAGGED_PROMPT, self.prompts)
            new = rng.integers(*_RAGGED_NEW, self.prompts).tolist()
        else:
            sizes, new = np.full(self.prompts, self.prompt), [_NEW] * self.prompts
        vocabulary = MODELS[self.model]["vocabulary"]
        prompts = [rng.integers(0, vocabulary, int(size)).tolist() for size in sizes]
        return {"prompts": prompts, "new": new, "samples": self.samples, "greedy": False}


_CHUNKED = (
    {},
    {"logprobs": "processor"},
    {"chunks": 2, "order": "prompt"},
    {"chunks": 2, "order": "new"},
    {"chunks": 8, "order": "new"},
)
WORKLOADS = (
    Workload("n1", "tiny64", 1, scale=4, quick=0),
    Workload("n8", "tiny64", 8, quick=0),
    Workload("equal", "tiny64", 32, quick=2),
    Workload("ragged", "tiny64", 64, ragged=True, setting={"chunks": 4, "order": "new"}, others=_CHUNKED),
    Workload(
        "group",
        "tiny64",
        8,
        prompt=256,
        samples=8,
        setting={"expand": "rows"},
        others=({}, {"logprobs": "processor"}, {"cache": "static"}),
    ),
    Workload("m100_equal", "m100", 32, others=({"logprobs": "processor"},), quick=0),
)
REAL_WORKLOADS = (
    Workload("1", "smollm2", 1, prompt=128),
    Workload("8", "smollm2", 8, prompt=128),
    Workload("32", "smollm2", 32, prompt=128, quick=0),
    Workload("shared", "smollm2", 4, prompt=256, samples=8, setting={"expand": "rows"}, quick=0),
)
SHARED = {"share": True}
"""The setting of ``generate`` that reads a group's prompt once, by hand."""


def build(model: str, directory: Path) -> None:
    """Write a checkpoint with random weights. It names no end: completions have the length that is asked for."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape = MODELS[model]
    torch.manual_seed(0)
    config = Qwen3Config(
        # Wider than the default, so that greedy completions do not fall into the same few ids.
        initializer_range=0.1,
        hidden_size=shape["hidden"],
        num_hidden_layers=shape["layers"],
        vocab_size=shape["vocabulary"],
        intermediate_size=shape["intermediate"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv_heads"],
        head_dim=64,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
