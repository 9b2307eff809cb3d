"""The checkpoint that both sides start from: a tokenizer of a chosen size and a warm start by our own ``sft``.

The chat template is Qwen2.5's as TRL ships it: TRL parses tool calls of templates that it knows by their text only.
How many tokens a prompt has is decided by the tokenizer: one with many entries holds the fixed text of the prompt
in a few of them.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from harness.measure import ROOT, cached, contents
from harness.trl_lookup import TOOLS

EXAMPLE = ROOT / "examples" / "lookup"
SMALL_MODEL = ROOT / "turnwise" / "trainer" / "offline" / "small_model.py"
DEMONSTRATIONS = 4480
SFT: dict[str, Any] = {
    "steps": 160,
    "conversations": 32,
    "optim": {"name": "muon", "lr": 4.0e-3, "muon": {"lr": 0.02}},
    "schedule": {"kind": "wsd", "warmup_steps": 20, "decay_fraction": 0.4},
}
MODEL: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.04,
    "tie_word_embeddings": True,
}


def checkpoint(vocabulary: int) -> Path:
    """Return the directory of the warm-started model whose tokenizer has at most so many entries."""
    template = trl_template("qwen2_5.jinja")
    inputs = {
        "vocabulary": vocabulary,
        "demonstrations": DEMONSTRATIONS,
        "sft": SFT,
        "model": MODEL,
        "tools": TOOLS,
        "files": contents(template, EXAMPLE / "teacher.py", SMALL_MODEL, Path(__file__)),
        "versions": {name: version(name) for name in ("torch", "transformers", "tokenizers")},
    }
    return cached("trl-lookup", inputs, lambda directory: _build(directory, vocabulary, template)) / "sft" / "model"


def trl_template(name: str) -> Path:
    """Return a chat template of the installed TRL, without importing it."""
    found = find_spec("trl")
    if found is None or found.origin is None:
        raise SystemExit("this benchmark needs TRL: pip install 'turnwise-rl[bench]'")
    return Path(found.origin).parent / "chat_templates" / name


def _build(directory: Path, vocabulary: int, template: Path) -> None:
    sys.path.insert(0, str(EXAMPLE))
    import torch
    from rich.console import Console
    from teacher import demonstrations
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from turnwise.trainer.config.offline import SFTConfig
    from turnwise.trainer.offline.sft import run_sft
    from turnwise.trainer.offline.small_model import rendered, words_of

    rows = [{**row, "tools": TOOLS} for row in asyncio.run(demonstrations(DEMONSTRATIONS, 0))]
    data = directory / "demonstrations.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = _tokenizer(rendered(rows, template.read_text()), words_of(rows), vocabulary)
    initial = directory / "initial"
    initial.mkdir()
    tokenizer.save(str(initial / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
    }
    (initial / "tokenizer_config.json").write_text(json.dumps(settings))
    (initial / "chat_template.jinja").write_text(template.read_text())
    torch.manual_seed(0)
    ids = {"eos_token_id": tokenizer.token_to_id("<|im_end|>"), "pad_token_id": tokenizer.token_to_id("<|endoftext|>")}
    config = Qwen3Config(vocab_size=tokenizer.get_vocab_size(), dtype="float32", **MODEL, **ids)
    Qwen3ForCausalLM(config).save_pretrained(initial)
    given = {"name": "sft", "runs": directory, "data": data, "model": {"path": initial, "threads": 1}, **SFT}
    run_sft(SFTConfig.model_validate(given), console=Console(stderr=True, quiet=True))


def _tokenizer(texts: list[str], words: str, vocabulary: int) -> Any:
    """Train a byte-level BPE whose merges cross spaces; digits and the words that are data stay apart."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    special += ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            # Training does not cut at special tokens by itself: merges across them would never be used.
            pre_tokenizers.Split(Regex("|".join(map(re.escape, special))), "isolated"),
            pre_tokenizers.Split(Regex(words), "isolated"),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        min_frequency=2,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
