"""Small models with their own tokenizers, made from demonstrations of an environment: nothing is downloaded."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import Qwen3Config, Qwen3ForCausalLM

from turnwise.chat.template import ChatTemplate
from turnwise.images import texts_of

TEMPLATE = Path(__file__).with_name("small_model.jinja")
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKERS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]


def make_model(
    directory: Path,
    conversations: list[dict[str, Any]],
    seed: int,
    *,
    width: int = 128,
    layers: int = 4,
    context: int = 512,
    words: str | None = None,
) -> int:
    """Write a new model with random weights to a directory in Hugging Face format; return its number of parameters.

    Args:
        directory: The directory, created if missing.
        conversations: Demonstrations in OpenAI's form, ``{"messages": [...], "tools": [...]}``: the tokenizer's text.
        seed: Of the weights.
        width: Hidden size.
        layers: Number of layers.
        context: Maximum number of tokens of a sequence.
        words: A regular expression of what stands alone for the tokenizer; by default the words of the data.
    """
    directory.mkdir(parents=True, exist_ok=True)
    template = TEMPLATE.read_text()
    tokenizer = train_tokenizer(rendered(conversations, template), words or words_of(conversations))
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    (directory / "chat_template.jinja").write_text(template)

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        # Serving engines have no kernels for smaller heads.
        head_dim=max(32, width // 4),
        max_position_embeddings=context,
        initializer_range=0.04,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.token_to_id("<|im_end|>"),
        pad_token_id=tokenizer.token_to_id("<|endoftext|>"),
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(directory)
    return sum(parameter.numel() for parameter in model.parameters())


def rendered(conversations: list[dict[str, Any]], template: str) -> list[str]:
    """Return the conversations as the model will see them: the tokenizer's training text."""
    chat = ChatTemplate(template)
    texts = []
    for conversation in conversations:
        messages = [with_objects(message) for message in conversation["messages"]]
        texts.append(chat.render(messages, conversation["tools"], generate=False))
    return texts


def with_objects(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose call arguments are objects, as chat templates expect them."""
    calls = [
        {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
        for call in message.get("tool_calls", [])
    ]
    return {**message, "tool_calls": calls} if calls else message


def words_of(conversations: list[dict[str, Any]], longest: int | None = None) -> str:
    """Return an expression for the words that are data: arguments of calls and answers of tools.

    Numbers are not words: each digit is a token. Nor is what has more than ``longest`` characters: long texts do not
    occur twice.
    """
    words: set[str] = set()
    for conversation in conversations:
        for message in map(with_objects, conversation["messages"]):
            words.update(
                str(v) for call in message.get("tool_calls", []) for v in call["function"]["arguments"].values()
            )
            if message["role"] == "tool":
                words.update(texts_of(message))
    short = (word for word in words if word and (longest is None or len(word) <= longest))
    data = sorted(word for word in short if not any(character.isdigit() for character in word))
    return rf"\b(?:{'|'.join(map(re.escape, data))})\b" if data else ""


def train_tokenizer(texts: Iterable[str], words: str) -> Tokenizer:
    """Train a byte-level BPE whose merges cross spaces and punctuation, so that fixed text is a few tokens.

    Digits are never merged, and nothing is merged into what ``words`` matches: the same name is the same token wherever
    it stands, so it can be copied from one place to another.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *([pre_tokenizers.Split(Regex(words), "isolated")] if words else []),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        min_frequency=2,
        special_tokens=SPECIAL + MARKERS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
