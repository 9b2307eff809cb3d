"""Model directories in Hugging Face's layout: tokenizer, chat template, stop ids and saved format."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson
from tokenizers import Tokenizer

from turnwise.errors import ConfigError, RenderError, requires_extra

FORMAT_FILE = "turnwise_format.json"
TOOL_TEMPLATE_FILE = "additional_chat_templates/tool_use.jinja"
_TEMPLATE_FILE = "chat_template.jinja"
_OLD_TEMPLATE_FILE = "chat_template.json"
_TOKENIZER_CONFIG = "tokenizer_config.json"
_GENERATION_CONFIG = "generation_config.json"
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Contents of a model directory.

    Attributes:
        template: The chat template, or None.
        tool_template: A second one for prompts with tools, or None.
        special: Special tokens by their names in templates.
        eos_ids: Ids that end a turn, by the directory's configuration.
        saved_format: Contents of ``turnwise_format.json``, or None.
    """

    path: Path
    tokenizer: Tokenizer
    template: str | None
    tool_template: str | None
    special: dict[str, str]
    eos_ids: tuple[int, ...]
    saved_format: dict[str, Any] | None


def read_model_dir(model_dir: str | os.PathLike[str]) -> ModelFiles:
    """Read a model directory. Raises RenderError if it is broken, MissingExtraError if it needs transformers."""
    path = Path(model_dir)
    if not path.is_dir():
        raise RenderError(f"model {str(model_dir)!r} is not a folder on this machine; give the path of a local copy")
    if remedy := _gguf_only(path):
        raise RenderError(f"model {str(model_dir)!r} {remedy}")
    settings = read_json(path / _TOKENIZER_CONFIG) or {}
    special_map = read_json(path / "special_tokens_map.json") or {}
    special = {}
    for name in _SPECIAL:
        value = settings.get(name, special_map.get(name))
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            special[name] = text
    tokenizer = _tokenizer(path)
    template, tool_template = read_templates(path)
    return ModelFiles(
        path=path,
        tokenizer=tokenizer,
        template=template,
        tool_template=tool_template,
        special=special,
        eos_ids=_eos_ids(path, tokenizer, special),
        saved_format=read_json(path / FORMAT_FILE),
    )


def _gguf_only(path: Path) -> str | None:
    """Say what to do with a directory, or the file, of a model that is stored as GGUF alone; None for any other."""
    single = path.suffix == ".gguf" and path.is_file()
    if not single and ((path / "config.json").is_file() or not any(path.glob("*.gguf"))):
        return None
    return (
        "holds its weights as GGUF only, which is neither trained nor served: name a copy with safetensors, or "
        f"convert it once with python examples/smollm2/conversion.py {path} DIR, and name DIR"
    )


def model_settings(path: Path, key: str, *, weights: bool = True) -> dict[str, Any]:
    """Return ``config.json`` of a model directory; ``key`` is the configuration key, for messages.

    Args:
        path: The directory.
        key: Where it is configured.
        weights: Whether its weights have to be there too.

    Raises:
        ConfigError: It is no directory of a model in Hugging Face's format, or has no weights.
    """
    label = f"{key} is {path}"
    if remedy := _gguf_only(path):
        raise ConfigError(f"{label}, which {remedy}")
    if not path.is_dir():
        raise ConfigError(f"{label}: there is no such folder: download the model into it, or name another one")
    if not (path / "config.json").is_file():
        raise ConfigError(f"{label}: no config.json is in it: it must be a model in Hugging Face's format")
    try:
        settings = orjson.loads((path / "config.json").read_bytes())
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{label}: its config.json is not JSON: {error}") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{label}: its config.json holds no JSON object")
    if weights and not any(path.glob("*.safetensors")):
        raise ConfigError(f"{label}: no *.safetensors is in it: its weights are missing")
    return settings


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file; None where there is no file. Raises RenderError."""
    if not path.is_file():
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RenderError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise RenderError(f"{path} holds no JSON object")
    return value


def _tokenizer(path: Path) -> Tokenizer:
    file = path / "tokenizer.json"
    if not file.is_file():
        return _slow_tokenizer(path)
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises Exception itself
        raise RenderError(f"{file} is not a tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


_SLOW: Final = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "*.tiktoken", "tiktoken.model")
"""Files of a tokenizer that transformers converts."""


def _slow_tokenizer(path: Path) -> Tokenizer:
    if not any(file for pattern in _SLOW for file in path.glob(pattern)):
        raise RenderError(
            f"model {str(path)!r} holds no tokenizer (tokenizer.json, or one of {', '.join(_SLOW)}): name a whole "
            "model directory, or copy the files of its tokenizer into it"
        )
    with requires_extra("transformers", "serve", f"a model without tokenizer.json ({path})"):
        from transformers import AutoTokenizer
    try:
        converted = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError, ImportError) as error:
        raise RenderError(f"{path} has no tokenizer.json and none can be made: {error}") from error
    if not converted.is_fast:
        raise RenderError(f"{path} has no tokenizer.json and its tokenizer cannot be converted to one")
    tokenizer: Tokenizer = converted.backend_tokenizer
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def read_templates(path: Path) -> tuple[str | None, str | None]:
    """Return a directory's chat template, and the one for prompts with tools if there are two. Raises RenderError."""
    templates: dict[str, str] = {}
    configured = (read_json(path / _TOKENIZER_CONFIG) or {}).get("chat_template")
    if isinstance(configured, str):
        templates["default"] = configured
    elif isinstance(configured, list):
        templates = {str(item.get("name")): str(item.get("template")) for item in configured if isinstance(item, dict)}
    file = path / _TEMPLATE_FILE
    if file.is_file():
        templates["default"] = _text(file)
    elif (old := read_json(path / _OLD_TEMPLATE_FILE)) and isinstance(old.get("chat_template"), str):
        templates["default"] = old["chat_template"]
    more = path / TOOL_TEMPLATE_FILE
    if more.is_file():
        templates["tool_use"] = _text(more)
    return templates.get("default") or templates.get("tool_use"), templates.get("tool_use")


def _text(file: Path) -> str:
    try:
        # Not read_text: line ends are part of what the digest of a template is made of.
        return file.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise RenderError(f"{file} is not UTF-8: {error}") from error


def write_templates(path: Path, template: str, tool_template: str | None) -> None:
    """Write a chat template, and the one for prompts with tools, into a model directory; equal ones are kept."""
    if read_templates(path) == (template, tool_template):
        return
    (path / _TEMPLATE_FILE).write_bytes(template.encode())
    more = path / TOOL_TEMPLATE_FILE
    if tool_template is None:
        more.unlink(missing_ok=True)
    else:
        more.parent.mkdir(exist_ok=True)
        more.write_bytes(tool_template.encode())
    # The older places of a template: their content would contradict the files.
    (path / _OLD_TEMPLATE_FILE).unlink(missing_ok=True)
    settings = read_json(path / _TOKENIZER_CONFIG) or {}
    if settings.pop("chat_template", None) is not None:
        text = json.dumps(settings, ensure_ascii=False, indent=2)
        (path / _TOKENIZER_CONFIG).write_text(text + "\n", encoding="utf-8")


def trained_digest(path: Path) -> str | None:
    """Return the digest of the chat template that a model was trained with, None if unknown. Raises RenderError."""
    digest = (read_json(path / FORMAT_FILE) or {}).get("template")
    return digest if isinstance(digest, str) else None


def check_trained(path: Path, digest: str, chat_template: str | Path | None = None) -> None:
    """Check a template's digest against that of the model's training; ``chat_template`` is ``renderer.chat_template``.

    Raises RenderError, which names both remedies, if they differ.
    """
    trained = trained_digest(path)
    if trained is None or trained == digest:
        return
    saved, on_purpose = f"{FORMAT_FILE}: template: {trained[:12]}...", "renderer.check_template: false"
    if chat_template is None:
        raise RenderError(
            f"the chat template in {path} (SHA-256 {digest[:12]}...) is not the one that this model was trained with "
            f"({saved}): restore that one as {_TEMPLATE_FILE}, or set renderer.chat_template to it; to use this one "
            f"anyway, set {on_purpose}"
        )
    source = "a text" if isinstance(chat_template, str) and "{" in chat_template else chat_template
    raise RenderError(
        f"renderer.chat_template is {source} (SHA-256 {digest[:12]}...), but the model in {path} was trained with "
        f"another chat template ({saved}): remove renderer.chat_template to use the template that was saved with the "
        f"model; to use this one anyway, set {on_purpose}"
    )


def _eos_ids(path: Path, tokenizer: Tokenizer, special: dict[str, str]) -> tuple[int, ...]:
    added_tokens = {token.content: number for number, token in tokenizer.get_added_tokens_decoder().items()}
    ids: list[int] = [added_tokens[special["eos_token"]]] if special.get("eos_token") in added_tokens else []
    for name in (_GENERATION_CONFIG, "config.json"):
        value = (read_json(path / name) or {}).get("eos_token_id")
        eos_ids = value if isinstance(value, list) else [value]
        token_ids = [number for number in eos_ids if isinstance(number, int) and not isinstance(number, bool)]
        if token_ids:
            ids += token_ids
            break
    return tuple(dict.fromkeys(ids))


def max_new_tokens(path: Path) -> int | None:
    """Return ``max_new_tokens`` of ``generation_config.json``, the model's own limit of a completion; None without one.

    Raises:
        ConfigError: It is no positive integer.
    """
    try:
        limit = (read_json(path / _GENERATION_CONFIG) or {}).get("max_new_tokens")
    except RenderError as error:
        raise ConfigError(str(error)) from error
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
        raise ConfigError(
            f"max_new_tokens in {path / _GENERATION_CONFIG} is {limit!r}: it must be a positive integer, or absent"
        )
    return limit


def limit_new_tokens(path: Path, limit: int) -> None:
    """Write ``max_new_tokens`` into the ``generation_config.json`` of a model directory, beside what is in it."""
    settings = read_json(path / _GENERATION_CONFIG) or {}
    file = path / _GENERATION_CONFIG
    file.write_text(json.dumps({**settings, "max_new_tokens": limit}, indent=2) + "\n", encoding="utf-8")


def check_same_vocabulary(directory: Path, model: Path, key: str) -> None:
    """Check that a model has the trained one's vocabulary; ``key`` is the configuration key of ``directory``.

    Raises ConfigError if both have a ``tokenizer.json``, with different vocabularies.
    """
    model_vocabulary, other_vocabulary = _vocabulary(model), _vocabulary(directory)
    if model_vocabulary is not None and other_vocabulary is not None and model_vocabulary != other_vocabulary:
        raise ConfigError(
            f"{key} is {directory}, whose tokenizer.json has another vocabulary than that of {model}: the same ids "
            "would be other text; choose a model with the same tokenizer"
        )


def _vocabulary(directory: Path) -> object:
    file = directory / "tokenizer.json"
    try:
        record = orjson.loads(file.read_bytes())
        added_tokens = {token["content"]: token["id"] for token in record.get("added_tokens", ())}
        return record["model"]["vocab"], added_tokens
    except (OSError, orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        return None
