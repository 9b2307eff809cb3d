"""Tiny vision-language models made in place, images, and the processors of transformers to compare with."""

from __future__ import annotations

import atexit
import functools
import io
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from PIL import Image

from turnwise.trainer.offline.small_vision import make_vision_model

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "smolvlm", "idefics3", "internvl")
SIZES = ((20, 20), (64, 40), (200, 90))
"""Width and height of a small, a middle and a large image: the last is scaled down by each tiny model."""

_PART = {"type": "image"}
_SEEN = [_PART, {"type": "text", "text": "What is it? red green blue"}]
CONVERSATIONS = [
    {
        "messages": [
            {"role": "system", "content": "You see."},
            {"role": "user", "content": _SEEN},
            {"role": "assistant", "content": f"It is {colour}."},
        ],
        "tools": [],
    }
    for colour in ("red", "green", "blue")
]


def image(width: int, height: int, seed: int = 0, kind: str = "PNG", mode: str = "RGB") -> bytes:
    """Return an encoded image of random pixels, smooth enough that scaling it keeps something."""
    pixels = np.random.default_rng(seed).integers(0, 255, (height // 4 + 1, width // 4 + 1, len(mode)), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels, mode).resize((width, height)).save(buffer, kind)
    return buffer.getvalue()


@functools.cache
def _root() -> Path:
    root = Path(tempfile.mkdtemp(prefix="turnwise-vision-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root


@functools.cache
def vision_model(family: str = "qwen2_5_vl", seed: int = 0) -> Path:
    """Return the directory of a tiny model, which is made once per process. Tests must not change it."""
    directory = _root() / f"{family}-{seed}"
    make_vision_model(
        directory, CONVERSATIONS, seed, family=family, width=64, most_patches=64 if family.startswith("qwen") else 16
    )
    return directory


def transformers_processor(directory: Path) -> Any:
    """Return the processor of transformers for a model, without its part for videos, which needs torchvision."""
    import transformers
    from transformers import AutoImageProcessor, AutoTokenizer, ProcessorMixin
    from transformers.models.smolvlm import processing_smolvlm

    settings = json.loads((directory / "processor_config.json").read_text())
    name = settings.pop("processor_class")
    videos = {"video_processor": None} if name == "SmolVLMProcessor" else {}
    tokenizer = AutoTokenizer.from_pretrained(directory)
    images = AutoImageProcessor.from_pretrained(directory, backend="pil")
    with (
        mock.patch.object(ProcessorMixin, "check_argument_for_proper_class", lambda *_: None),
        mock.patch.object(processing_smolvlm, "num2words", str),
    ):
        return getattr(transformers, name)(image_processor=images, tokenizer=tokenizer, **videos, **settings)
