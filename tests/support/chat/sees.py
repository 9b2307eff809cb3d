"""Renderers that place images, with a processor whose rules a test can foretell: no Pillow, no model."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from support.chat.model_dirs import model_dir
from turnwise.chat.model_dir import read_model_dir
from turnwise.chat.renderer import TemplateRenderer, load_renderer
from turnwise.errors import RenderError
from turnwise.images import image_size
from turnwise.model.media import MediaProcessor, PlacedMedia
from turnwise.types import as_ids

MARKER, OPEN, CLOSE = "<|image_pad|>", "<|vision_start|>", "<|vision_end|>"
TEMPLATE = Path(__file__).parents[3] / "examples" / "small_model" / "small_vision.jinja"


class GridProcessor(MediaProcessor):
    """An image of w x h pixels is a wrapper around one placeholder for each 8 x 8 pixels, at least one.

    Attributes:
        placed: Digest-free log of the images that were processed: their bytes.
    """

    kinds = frozenset({"image"})

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._open, self._pad, self._close = (tokenizer.token_to_id(text) for text in (OPEN, MARKER, CLOSE))
        self.placed: list[bytes] = []

    def marker(self, kind: str) -> str:
        return MARKER

    def place(self, kind: str, data: bytes) -> PlacedMedia:
        self.placed.append(data)
        size = image_size(data)
        if size is None or data[-8:-4] != b"IEND":
            raise RenderError(f"an image of {len(data)} bytes is broken: save it again")
        count = max(1, size[0] // 8) * max(1, size[1] // 8)
        return PlacedMedia(as_ids([self._open, *[self._pad] * count, self._close]), 1, count)

    def features(self, kind: str, data: bytes) -> Mapping[str, npt.NDArray[np.generic]]:
        return {}


def seeing(template: str | None = None) -> tuple[TemplateRenderer, GridProcessor]:
    """Return a renderer of Qwen's tokens with a template that writes images, and its processor."""
    files = read_model_dir(model_dir("qwen3"))
    tokenizer = Tokenizer.from_str(files.tokenizer.to_str())  # type: ignore[attr-defined]
    tokenizer.add_special_tokens([OPEN, MARKER, CLOSE])
    processor = GridProcessor(tokenizer)
    source = TEMPLATE.read_text().replace("IMAGE_MARKER", MARKER) if template is None else template
    from dataclasses import replace

    return load_renderer(replace(files, tokenizer=tokenizer), chat_template=source, processor=processor), processor


@functools.cache
def shared() -> tuple[TemplateRenderer, GridProcessor]:
    """Return one that tests which do not count may share."""
    return seeing()
