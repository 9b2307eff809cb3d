"""Small random language models on disk, one of which spells tool calls, and what transformers computes with them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from support.chat.model_dirs import build_model_dir
from turnwise.types import ToolCall

VOCABULARY = 260
EOS = 257
_SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "initializer_range": 0.25,
    "eos_token_id": EOS,
    "bos_token_id": None,
    "pad_token_id": None,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
ARCHITECTURES = ("qwen2", "qwen3", "llama", "mistral")


def make_model(architecture: str, seed: int = 0, **changes: Any) -> torch.nn.Module:
    """Return a random model; its biases and norms are random too, so that dropping one shows."""
    torch.manual_seed(seed)
    if architecture == "qwen2":
        model: Any = Qwen2ForCausalLM(Qwen2Config(**{**_SHAPE, "tie_word_embeddings": False, **changes}))
    elif architecture == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**{**_SHAPE, "head_dim": 24, "tie_word_embeddings": True, **changes}))
    elif architecture == "granite":
        model = GraniteForCausalLM(GraniteConfig(**{**_SHAPE, "logits_scaling": 3.0, **changes}))
    elif architecture == "olmo2":
        model = Olmo2ForCausalLM(Olmo2Config(**{**_SHAPE, **changes}))
    elif architecture == "llama":
        model = LlamaForCausalLM(LlamaConfig(**{**_SHAPE, "rope_parameters": _LLAMA3_ROPE, **changes}))
    else:
        model = MistralForCausalLM(MistralConfig(**{**_SHAPE, "sliding_window": 16, **changes}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval().requires_grad_(False)


def make_tokenizer() -> Tokenizer:
    """Return a tokenizer of bytes, with three special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={character: index for index, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<|start|>", "<|end|>", "<|other|>")])
    return tokenizer


def save_model(model: Any, directory: Path) -> Path:
    """Write a checkpoint with its tokenizer; return the directory."""
    model.save_pretrained(directory)
    make_tokenizer().save(str(directory / "tokenizer.json"))
    return directory


def greedy(model: Any, prompt: np.ndarray, tokens: int, *, eos: bool = True) -> list[int]:
    """Return what ``model.generate`` samples greedily."""
    ids = torch.from_numpy(prompt.astype(np.int64)).unsqueeze(0)
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=tokens,
            min_new_tokens=None if eos else tokens,
            eos_token_id=EOS if eos else None,
            pad_token_id=0,
        )
    return out[0, len(prompt) :].tolist()


def logprobs(model: Any, ids: np.ndarray, start: int, temperature: float = 1.0) -> np.ndarray:
    """Return the log-probabilities of ids[start:] by one plain forward pass."""
    with torch.inference_mode():
        logits = model(input_ids=torch.from_numpy(ids.astype(np.int64)).unsqueeze(0)).logits[0].float()
    scaled = torch.log_softmax(logits / (temperature or 1.0), dim=-1)
    positions = torch.arange(start - 1, len(ids) - 1)
    return scaled[positions, torch.from_numpy(ids[start:].astype(np.int64))].numpy()


def random_prompt(rng: np.random.Generator, tokens: int) -> np.ndarray:
    """Return random ids that are no special tokens."""
    return rng.integers(0, 256, tokens).astype(np.int32)


BROKEN = '\n{"name": "team_of", "arguments": {"person": nobody}}\n'


def save_random_model(folder: Path, family: str = "qwen2_5") -> Path:
    """Write the checkpoint of a model with random weights and the chat template of a family.

    It says nothing sensible, and everything else is real.
    """
    home = build_model_dir(folder, family)
    tokenizer = Tokenizer.from_file(str(home / "tokenizer.json"))
    settings = (home / "generation_config.json").read_bytes()
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=tokenizer.get_vocab_size() + 32, hidden_size=128, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=False, max_position_embeddings=4096,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(home)
    (home / "generation_config.json").write_bytes(settings)
    return home


def spelled(call: ToolCall) -> str:
    """Return a call as the format of Qwen writes it between its markers."""
    return "\n" + json.dumps({"name": call.name, "arguments": call.arguments}) + "\n"


def save_calling_model(folder: Path, calls: Sequence[ToolCall], *, push: float = 2.0) -> Path:
    """Write the checkpoint of a model that makes these calls, in Qwen 3's format, or thinks, or says something else."""
    home = build_model_dir(folder, "qwen3")
    file = home / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    texts = [BROKEN, *map(spelled, calls)]
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in texts])
    tokenizer.save(str(file))
    spoken = [tokenizer.token_to_id(text) for text in texts]
    begin, think, thought, call, called, end = (
        tokenizer.encode(text, add_special_tokens=False).ids[-1]
        for text in ("\n", "<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_end|>")
    )
    words = [tokenizer.encode(text, add_special_tokens=False).ids[0] for text in ("Paris", "look", "done")]
    follows = {
        begin: [think, call],
        think: words,
        **{word: [*words, thought, call, end] for word in words},
        thought: [call, *words],
        call: spoken,
        **{word: [called] for word in spoken},
        called: [end, call],
    }
    settings = (home / "generation_config.json").read_bytes()
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=tokenizer.get_vocab_size() + 32, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.04, tie_word_embeddings=False,
        max_position_embeddings=4096,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        directions = torch.nn.functional.normalize(torch.randn_like(model.model.embed_tokens.weight), dim=1)
        # Those that are pushed are told apart for certain.
        directions[list(follows)] = torch.eye(len(directions[0]))[: len(follows)]
        model.model.embed_tokens.weight.copy_(directions * 4)
        for token, followers in follows.items():
            for follower in followers:
                model.lm_head.weight[follower] += push * directions[token]
    model.save_pretrained(home)
    (home / "generation_config.json").write_bytes(settings)
    return home
