"""A chat model's folder without weights: a template that trl ships, and a tokenizer trained in place.

The template is read from the installed trl package (which is not imported); the tokenizer is a byte-level BPE with the
split of the Qwen family, trained on the sources of Python's standard library, so its tokens are as long as those of a
real one on such text. The folder is made once (``.cache/benchmarks``) and not measured.
"""

from __future__ import annotations

import importlib.util
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from harness.measure import cached

SPLIT = "|".join(
    [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PLAIN = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
VOCABULARY = 8192
_SOURCES = ("argparse.py", "asyncio/base_events.py", "typing.py", "pathlib.py", "unittest/mock.py", "tarfile.py")


def corpus() -> str:
    """Return some 600,000 characters of text: sources of the standard library."""
    folder = Path(sysconfig.get_path("stdlib"))
    return "\n".join((folder / name).read_text(encoding="utf-8") for name in _SOURCES)


def template(name: str = "qwen2_5") -> str:
    """Return a chat template that trl ships."""
    spec = importlib.util.find_spec("trl")
    if spec is None or spec.origin is None:
        raise RuntimeError("trl is needed for its chat templates: pip install 'turnwise-rl[bench]'")
    return (Path(spec.origin).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


def chat_dir(name: str = "qwen2_5") -> Path:
    """Return the folder of a chat model of the Qwen 2.5 kind, made when it is first asked for."""
    text, source = corpus(), template(name)
    inputs = {"text": text, "template": source, "split": SPLIT, "vocabulary": VOCABULARY, "added": [*SPECIAL, *PLAIN]}
    return cached(f"chat-{name}", inputs, lambda directory: _write(directory, text, source))


def _write(directory: Path, text: str, source: str) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(_lines(text), trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in PLAIN])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (directory / "chat_template.jinja").write_text(source, encoding="utf-8")
    stop = [tokenizer.token_to_id(token) for token in ("<|im_end|>", "<|endoftext|>")]
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": stop}), encoding="utf-8")


def _lines(text: str) -> Iterator[str]:
    yield from text.splitlines(keepends=True)
