"""A random model that makes calls: its weights are random, and a push in its last layer makes it spell calls often.

What it says is drawn by the engine like what any model says: thoughts that it forgets to close, several calls, calls
that are no JSON, turns that a limit cuts. Calls are single tokens of its tokenizer, so that a random walk spells them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer
from transformers import Qwen2Config, Qwen2ForCausalLM

from support.chat_models import build_model_dir
from turnwise.types import ToolCall

BROKEN = '\n{"name": "team_of", "arguments": {"person": nobody}}\n'


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
        **{each: [called] for each in spoken},
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
        known = torch.nn.functional.normalize(torch.randn_like(model.model.embed_tokens.weight), dim=1)
        # Those that are pushed are told apart for certain.
        known[list(follows)] = torch.eye(len(known[0]))[: len(follows)]
        model.model.embed_tokens.weight.copy_(known * 4)
        for before, after in follows.items():
            for each in after:
                model.lm_head.weight[each] += push * known[before]
    model.save_pretrained(home)
    (home / "generation_config.json").write_bytes(settings)
    return home
