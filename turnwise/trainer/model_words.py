"""Whether two models mean the same by the same ids, as far as their folders say it.

Owns: :func:`check_words`. Refuses: reading tokenizers (``inference/model_dir.py``); models alone are compared here.
"""

from __future__ import annotations

from pathlib import Path

import orjson

from turnwise.errors import ConfigError


def check_words(directory: Path, model: Path, key: str) -> None:
    """Refuse a model that would read the trained model's ids as other words.

    Args:
        directory: The folder of that model.
        model: The folder of the trained one.
        key: The configuration key that names ``directory``.

    Raises:
        ConfigError: Both have a ``tokenizer.json``, and these differ in their vocabulary.
    """
    mine, theirs = _vocabulary(model), _vocabulary(directory)
    if mine is not None and theirs is not None and mine != theirs:
        raise ConfigError(
            f"{key} is {directory}, whose tokenizer.json has another vocabulary than that of {model}: it would score "
            "other words; name a model with the same tokenizer"
        )


def _vocabulary(directory: Path) -> object:
    """Return what a tokenizer's ids stand for, or None where no tokenizer.json says it."""
    file = directory / "tokenizer.json"
    try:
        record = orjson.loads(file.read_bytes())
        added = {each["content"]: each["id"] for each in record.get("added_tokens", ())}
        return record["model"]["vocab"], added
    except (OSError, orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        return None
