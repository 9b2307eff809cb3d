"""Small vision-language models with random weights, their tokenizers and image processors: nothing is downloaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import torch
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForImageTextToText

from turnwise.errors import ConfigError, shown
from turnwise.trainer.offline.small_model import rendered, train_tokenizer, words_of

TEMPLATE: Final = Path(__file__).with_name("small_vision.jinja")
VisionFamily: TypeAlias = Literal["qwen2_5_vl", "qwen3_vl", "smolvlm", "idefics3", "internvl"]

_TILES: Final = 4
_QWEN: Final = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
_IDEFICS: Final = [
    "<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>",
    *(f"<row_{row}_col_{column}>" for row in range(1, _TILES + 1) for column in range(1, _TILES + 1)),
]  # fmt: skip
_INTERN: Final = ["<img>", "</img>", "<IMG_CONTEXT>", "<video>"]
_HALF: Final = [0.5, 0.5, 0.5]

_TOKENS: Final[Mapping[str, list[str]]] = {
    "qwen2_5_vl": _QWEN, "qwen3_vl": _QWEN, "smolvlm": _IDEFICS, "idefics3": _IDEFICS, "internvl": _INTERN,
}  # fmt: skip
_MARKERS: Final[Mapping[str, str]] = {
    "qwen2_5_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "qwen3_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "smolvlm": "<image>",
    "idefics3": "<image>",
    "internvl": "<IMG_CONTEXT>\\n",
}
_CLASSES: Final[Mapping[str, tuple[str, str]]] = {
    "qwen2_5_vl": ("Qwen2VLImageProcessor", "Qwen2_5_VLProcessor"),
    "qwen3_vl": ("Qwen2VLImageProcessor", "Qwen3VLProcessor"),
    "smolvlm": ("SmolVLMImageProcessor", "SmolVLMProcessor"),
    "idefics3": ("Idefics3ImageProcessor", "Idefics3Processor"),
    "internvl": ("GotOcr2ImageProcessor", "InternVLProcessor"),
}
"""Classes of image processor and processor."""


def make_vision_model(
    directory: Path,
    conversations: list[dict[str, Any]],
    seed: int,
    *,
    family: VisionFamily = "qwen2_5_vl",
    width: int = 128,
    layers: int = 2,
    context: int = 2048,
    patch: int = 8,
    most_patches: int = 256,
    tiles: bool = True,
    words: str | None = None,
) -> int:
    """Write a new vision-language model to a directory in Hugging Face format; return its number of parameters.

    Args:
        directory: The directory, created if missing.
        conversations: Demonstrations as for :func:`~turnwise.trainer.offline.small_model.make_model`; content may be a
            list of parts, images as ``{"type": "image"}``.
        seed: Of the weights.
        family: ``model_type`` of the model.
        width: Hidden size of the language model, and of the vision tower.
        layers: Number of layers of each.
        context: Maximum number of tokens of a sequence.
        patch: Side of a patch, in pixels.
        most_patches: Maximum number of patches of an image (Qwen), or of a tile (the others).
        tiles: Whether large images are split into tiles besides the whole (not Qwen).
        words: A regular expression of what stands alone for the tokenizer; by default the words of the data.

    Raises:
        ConfigError: An unknown family.
    """
    if family not in _TOKENS:
        raise ConfigError(f"family is {shown(family)}; there are {', '.join(_TOKENS)}")
    directory.mkdir(parents=True, exist_ok=True)
    template = TEMPLATE.read_text().replace("IMAGE_MARKER", _MARKERS[family])
    tokenizer = train_tokenizer(rendered(conversations, template), words or words_of(conversations))
    tokenizer.add_special_tokens(_TOKENS[family])
    tokenizer.save(str(directory / "tokenizer.json"))
    side = patch * int(most_patches**0.5)
    _write_settings(directory, family, template, patch, side, tiles=tiles)
    torch.manual_seed(seed)
    config = AutoConfig.for_model(**_config(tokenizer, family, width, layers, context, patch, side))
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    model.save_pretrained(directory)
    return sum(parameter.numel() for parameter in model.parameters())


def _write_settings(directory: Path, family: str, template: str, patch: int, side: int, *, tiles: bool) -> None:
    """Write the files of tokenizer, chat template and processors."""
    images, processor = _CLASSES[family]
    extra = {}
    if family == "internvl":
        extra = {
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        }
    tokens = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        **({"extra_special_tokens": extra} if extra else {}),
    }
    settings: dict[str, Any] = {"image_processor_type": images, "image_mean": _HALF, "image_std": _HALF}
    wrapper: dict[str, Any] = {"processor_class": processor}
    if images.startswith("Qwen"):
        shortest, longest = (4 * patch) ** 2, side**2
        settings |= {
            "patch_size": patch, "merge_size": 2, "temporal_patch_size": 2,
            "size": {"shortest_edge": shortest, "longest_edge": longest},
        }  # fmt: skip
    elif family == "internvl":
        settings |= {"size": {"height": side, "width": side}, "min_patches": 1, "max_patches": _TILES if tiles else 1}
        wrapper["image_seq_length"] = (side // patch // 2) ** 2
    else:
        size = 2 * side if tiles else side
        settings |= {
            "size": {"longest_edge": size}, "max_image_size": {"longest_edge": side}, "do_image_splitting": tiles,
        }  # fmt: skip
        wrapper["image_seq_len"] = (side // patch // 2) ** 2
    files = {"tokenizer_config.json": tokens, "preprocessor_config.json": settings, "processor_config.json": wrapper}
    if images.startswith("Qwen"):
        files["video_preprocessor_config.json"] = settings | {"video_processor_type": "Qwen2VLVideoProcessor"}
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content, indent=2) + "\n")
    (directory / "chat_template.jinja").write_text(template)


def _config(
    tokenizer: Tokenizer, family: str, width: int, layers: int, context: int, patch: int, side: int
) -> dict[str, Any]:
    """Return the arguments of ``AutoConfig.for_model``."""
    ids = {name: tokenizer.token_to_id(name) for name in [*_TOKENS[family], "<|im_end|>", "<|endoftext|>"]}
    # Serving engines have no kernels for smaller heads.
    heads = max(1, width // 32)
    text: dict[str, Any] = {
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 2),
        "max_position_embeddings": context,
        "initializer_range": 0.04,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
        "dtype": "float32",
    }
    common = {"tie_word_embeddings": True, "eos_token_id": ids["<|im_end|>"], "pad_token_id": ids["<|endoftext|>"]}
    vision: dict[str, Any] = {"hidden_size": width, "intermediate_size": 2 * width, "patch_size": patch}
    if family.startswith("qwen"):
        rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
        vision |= {
            "depth": layers, "num_heads": heads, "spatial_merge_size": 2, "temporal_patch_size": 2,
            "out_hidden_size": width, "initializer_range": 0.04,
        }  # fmt: skip
        if family == "qwen3_vl":
            text |= {"head_dim": 32, "rope_parameters": rope | {"mrope_interleaved": True}}
            vision |= {"num_position_embeddings": (side // patch) ** 2, "deepstack_visual_indexes": [0]}
        else:
            text |= {"rope_parameters": rope}
            vision |= {"window_size": 8 * patch, "fullatt_block_indexes": [layers - 1]}
        named = {
            "image_token_id": ids["<|image_pad|>"],
            "video_token_id": ids["<|video_pad|>"],
            "vision_start_token_id": ids["<|vision_start|>"],
            "vision_end_token_id": ids["<|vision_end|>"],
        }
        return {"model_type": family, "text_config": text, "vision_config": vision, **named, **common}
    vision |= {"num_hidden_layers": layers, "num_attention_heads": heads, "image_size": side}
    if family == "internvl":
        vision |= {"patch_size": [patch, patch], "image_size": [side, side], "use_absolute_position_embeddings": True}
        text["model_type"] = "qwen2"
        named = {"image_token_id": ids["<IMG_CONTEXT>"], "image_seq_length": (side // patch // 2) ** 2}
        return {"model_type": family, "text_config": text, "vision_config": vision, **named, **common}
    text["model_type"] = "llama"
    named = {"image_token_id": ids["<image>"], "scale_factor": 2}
    return {"model_type": family, "text_config": text, "vision_config": vision, **named, **common}
