"""The samples and the model of the shared-prefix benchmark: the same on all sides, made from seeds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from harness.measure import cached

END, PAD, SPECIAL = 0, 1, 2


@dataclass(frozen=True)
class Group:
    """A prompt, its completions and their rewards.

    Attributes:
        name: What the prompt is called in text.
        prompt: Ids.
        completions: Ids, each with an end.
        rewards: One number per completion.
    """

    name: str
    prompt: list[int]
    completions: list[list[int]]
    rewards: list[float]

    def advantages(self) -> list[float]:
        """GRPO's, divided by the standard deviation (unbiased, plus 1e-4, as TRL has it)."""
        rewards = np.asarray(self.rewards)
        return ((rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)).tolist()


def groups(step: int, settings: Mapping[str, Any]) -> list[Group]:
    """Return the groups of a step: random ids, completions of random lengths around the mean."""
    random = np.random.default_rng([7, step])
    low, high = settings["completion_tokens"]
    made = []
    for number in range(settings["groups"]):
        prompt = random.integers(SPECIAL, settings["vocabulary"], settings["prompt_tokens"]).tolist()
        completions = [
            [*random.integers(SPECIAL, settings["vocabulary"], length - 1).tolist(), END]
            for length in random.integers(low, high + 1, settings["group_size"]).tolist()
        ]
        rewards = random.normal(size=settings["group_size"]).tolist()
        made.append(Group(f"s{step}g{number}", prompt, completions, rewards))
    return made


def model(settings: Mapping[str, Any]) -> Path:
    """Return the directory of a random Qwen3 with a tokenizer of one word per id."""
    inputs = {
        "model": settings["model"],
        "vocabulary": settings["vocabulary"],
        "versions": {name: version(name) for name in ("torch", "transformers", "tokenizers")},
    }
    return cached("shared-prefix", inputs, lambda directory: _build(directory, settings))


def _build(directory: Path, settings: Mapping[str, Any]) -> None:
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    words = {"<end>": END, "<pad>": PAD} | {f"w{n}": n for n in range(SPECIAL, settings["vocabulary"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>").save_pretrained(directory)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=settings["vocabulary"], eos_token_id=END, pad_token_id=PAD, dtype="float32", **settings["model"]
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
