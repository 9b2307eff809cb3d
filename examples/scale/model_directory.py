"""A model directory without weights: the sizes of a Qwen3 model and a tokenizer made in place, for plans and dry runs.

    python examples/scale/model_directory.py Qwen3-8B models/Qwen3-8B

Nothing is downloaded. ``turnwise plan`` and ``turnwise train --dry-run --cluster FILE`` read nothing else of a model; a
run needs the published directory in its place. Ids of this tokenizer are not Qwen's: prompts are counted roughly.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from turnwise.chat.renderer import TEMPLATES

# Hidden size, layers, heads, heads of keys and values, inner size, tied embeddings: config.json of huggingface.co/Qwen.
SIZES = {
    "Qwen3-0.6B": (1024, 28, 16, 8, 3072, True),
    "Qwen3-1.7B": (2048, 28, 16, 8, 6144, True),
    "Qwen3-4B": (2560, 36, 32, 8, 9728, True),
    "Qwen3-8B": (4096, 36, 32, 8, 12288, False),
    "Qwen3-14B": (5120, 40, 40, 8, 17408, False),
    "Qwen3-32B": (5120, 64, 64, 8, 25600, False),
}
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKERS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]


def write(name: str, directory: Path) -> None:
    """Write the directory; what is there is replaced."""
    directory.mkdir(parents=True, exist_ok=True)
    template = (TEMPLATES / "hermes.jinja").read_text()
    tokenizer = train_tokenizer(template)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    (directory / "chat_template.jinja").write_text(template)
    (directory / "config.json").write_text(json.dumps(model_config(name, tokenizer), indent=2))


def model_config(name: str, tokenizer: Tokenizer) -> dict[str, object]:
    """Return the settings of a model of the family."""
    hidden, layers, heads, keys, inner, tied = SIZES[name]
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "head_dim": 128,
        "intermediate_size": inner,
        "vocab_size": 151_936,
        "max_position_embeddings": 40_960,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
    }


def train_tokenizer(text: str) -> Tokenizer:
    """Return a byte-level tokenizer with the family's special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        special_tokens=SPECIAL + MARKERS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    return tokenizer


def main() -> None:
    """Write the directory that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=SIZES)
    parser.add_argument("directory", type=Path)
    arguments = parser.parse_args()
    write(arguments.name, arguments.directory)
    print(f"{arguments.directory}: the shape of {arguments.name}, without weights")


if __name__ == "__main__":
    main()
