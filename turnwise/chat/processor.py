"""Placeholders and model inputs of images, by the image processors of transformers (Qwen-VL, SmolVLM, InternVL).

Image processors run on Pillow, whatever else is installed: the same bytes give the same pixels on each machine. Where
``transformers.AutoProcessor`` replaces a marker in the text and then tokenizes it, here the replacement is tokenized
alone; its first and last tokens are special ones, so the ids are the same.
"""

from __future__ import annotations

import functools
import hashlib
import io
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from turnwise.chat.model_dir import read_json, read_model_dir
from turnwise.errors import RenderError, requires_extra, shown
from turnwise.media_files import BoundedCache
from turnwise.model.media import MediaProcessor, PlacedMedia
from turnwise.types import as_ids

FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Formats of images that are read, by Pillow's names."""
MAX_PIXELS: Final = 64 * 2**20
"""Most pixels of an image, before it is scaled to what the model takes."""
CACHE_BYTES: Final = 512 * 2**20
"""Most bytes of model inputs that a processor keeps."""
_PLACED: Final = 1 << 14
"""Most placements that a processor keeps: they are small."""

Features = Mapping[str, npt.NDArray[np.generic]]


class _Family(ABC):
    """The parts that differ between families: the call of the image processor, and the text that replaces a marker."""

    marker: ClassVar[str]
    names: ClassVar[tuple[str, ...]]
    """Model inputs of one image."""
    arguments: ClassVar[Mapping[str, Any]] = {}
    """Arguments of the image processor's call that the family's processor sets."""

    def __init__(self, images: Any, settings: Mapping[str, Any], tokens: Mapping[str, Any]) -> None:
        """Keep the image processor, ``processor_config.json`` and ``tokenizer_config.json``."""
        self.images, self.settings, self.tokens = images, settings, tokens

    @abstractmethod
    def text(self, output: Mapping[str, Any]) -> str:
        """Return the replacement of the marker, given the image processor's output for one image."""

    def features(self, output: Mapping[str, Any]) -> dict[str, npt.NDArray[np.generic]]:
        """Return the model inputs of one image."""
        return {name: np.ascontiguousarray(output[name]) for name in self.names}


class _QwenVL(_Family):
    marker = "<|image_pad|>"
    names = ("pixel_values", "image_grid_thw")

    def text(self, output: Mapping[str, Any]) -> str:
        return self.marker * int(np.prod(output["image_grid_thw"][0]) // self.images.merge_size**2)

    def features(self, output: Mapping[str, Any]) -> dict[str, npt.NDArray[np.generic]]:
        return {
            "pixel_values": np.ascontiguousarray(output["pixel_values"], dtype=np.float32),
            "image_grid_thw": np.asarray(output["image_grid_thw"][0], dtype=np.int64),
        }


class _Idefics3(_Family):
    """Idefics3 and SmolVLM: tiles in rows and columns, then the whole image."""

    marker = "<image>"
    names = ("pixel_values", "pixel_attention_mask")
    arguments = {"return_row_col_info": True}  # noqa: RUF012

    def text(self, output: Mapping[str, Any]) -> str:
        fake = _token(self.tokens, "fake_image_token", "<fake_token_around_image>")
        global_start = fake + _token(self.tokens, "global_image_token", "<global-img>")
        placeholders = self.marker * int(self.settings.get("image_seq_len", 169))
        rows, columns = int(output["rows"][0][0]), int(output["cols"][0][0])
        tiles = ""
        for row in range(1, rows + 1):
            tiles += "".join(f"{fake}<row_{row}_col_{column}>{placeholders}" for column in range(1, columns + 1)) + "\n"
        return (
            f"{tiles}\n{global_start}{placeholders}{fake}" if rows or columns else f"{global_start}{placeholders}{fake}"
        )

    def features(self, output: Mapping[str, Any]) -> dict[str, npt.NDArray[np.generic]]:
        arrays = {name: np.ascontiguousarray(output[name][0]) for name in self.names}
        # vLLM asks for the number of tiles.
        return {**arrays, "num_patches": np.asarray(len(arrays["pixel_values"]), dtype=np.int64)}


class _InternVL(_Family):
    marker = "<IMG_CONTEXT>"
    names = ("pixel_values",)
    arguments = {"crop_to_patches": True}  # noqa: RUF012

    def text(self, output: Mapping[str, Any]) -> str:
        start = _token(self.tokens, "start_image_token", "<img>")
        end = _token(self.tokens, "end_image_token", "</img>")
        tokens_per_patch = int(self.settings.get("image_seq_length", 256))
        return f"{start}{self.marker * (tokens_per_patch * int(output['num_patches'][0]))}{end}"


FAMILIES: Final[Mapping[str, type[_Family]]] = {
    "qwen2_vl": _QwenVL,
    "qwen2_5_vl": _QwenVL,
    "qwen3_vl": _QwenVL,
    "qwen3_vl_moe": _QwenVL,
    "idefics3": _Idefics3,
    "smolvlm": _Idefics3,
    "internvl": _InternVL,
}
"""Families by ``model_type`` of ``config.json``."""


class ImageProcessor(MediaProcessor):
    """The images of one model. Placements and model inputs are kept by content; each image is processed once."""

    kinds = frozenset({"image"})

    def __init__(self, family: str, model: _Family, path: Path, *, cache_bytes: int = CACHE_BYTES) -> None:
        """Create a processor of a model directory; :func:`load_processor` does."""
        self._name = family
        self._family = model
        self._tokenizer = read_model_dir(path).tokenizer
        placeholder = self._tokenizer.get_vocab().get(model.marker)
        if placeholder is None:
            raise RenderError(f"{path} is a {family} model, but its tokenizer has no token {model.marker!r}")
        self._placeholder = placeholder
        self._lock = threading.Lock()
        self._placed: BoundedCache[PlacedMedia] = BoundedCache(_PLACED)
        self._features: BoundedCache[Features] = BoundedCache(
            cache_bytes, lambda features: sum(array.nbytes for array in features.values())
        )
        self.processed = 0
        """Number of images that were decoded and processed."""

    def marker(self, kind: str) -> str:
        """Return the text of the chat template for one image."""
        del kind
        return self._family.marker

    def place(self, kind: str, data: bytes) -> PlacedMedia:
        """Return the ids that replace the marker."""
        del kind
        key = hashlib.sha256(data).digest()
        with self._lock:
            return self._placed.get(key) or self._process(key, data)[0]

    def features(self, kind: str, data: bytes) -> Features:
        """Return the arguments of the model's forward for one image."""
        del kind
        key = hashlib.sha256(data).digest()
        with self._lock:
            cached = self._features.get(key)
            return self._process(key, data)[1] if cached is None else cached

    def _process(self, key: bytes, data: bytes) -> tuple[PlacedMedia, Features]:
        output = self._family.images(images=decode_image(data), return_tensors="np", **self._family.arguments)
        self.processed += 1
        features = self._family.features(output)
        for array in features.values():
            array.flags.writeable = False
        ids = as_ids(self._tokenizer.encode(self._family.text(output), add_special_tokens=False).ids)
        positions = np.flatnonzero(ids == self._placeholder)
        offset, last_position = int(positions[0]), int(positions[-1])
        ids.flags.writeable = False
        placement = PlacedMedia(ids, offset, last_position - offset + 1)
        return self._placed.keep(key, placement), self._features.keep(key, features)


def decode_image(data: bytes) -> Any:
    """Return the image of an encoded file, upright and in RGB, as ``PIL.Image.Image``.

    Raises:
        RenderError: It is no image of :data:`FORMATS`, is broken, or has too many pixels.
    """
    from PIL import Image, ImageOps

    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        width, height = image.size
        if width * height <= MAX_PIXELS:
            return ImageOps.exif_transpose(image).convert("RGB")
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        raise RenderError(
            f"an image of {len(data):,} bytes, which begin with {shown(data[:12])}, cannot be read ({error}): save it "
            f"again, as one of {', '.join(FORMATS)}"
        ) from error
    raise RenderError(
        f"an image of {width} x {height} pixels is too large: at most {MAX_PIXELS:,} pixels are decoded: scale it down"
    )


@functools.lru_cache(maxsize=8)
def _load(path: Path, written: tuple[int, ...]) -> ImageProcessor | None:
    """Load a processor; ``written`` are the times of its files, so that another model in the same place is another."""
    del written
    config = read_json(path / "config.json") or {}
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None or not any((path / name).is_file() for name in (_PREPROCESSOR, _PROCESSOR)):
        return None
    with requires_extra("pillow", "vision", f"the model {path}, which takes images,"):
        import PIL  # noqa: F401
    with requires_extra("transformers", "vision", f"the model {path}, which takes images,"):
        from transformers import AutoImageProcessor
    try:
        images = AutoImageProcessor.from_pretrained(str(path), backend="pil", local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise RenderError(f"the image processor of {path} cannot be loaded: {error}") from error
    model = family(images, *(read_json(path / name) or {} for name in (_PROCESSOR, "tokenizer_config.json")))
    return ImageProcessor(str(config["model_type"]), model, path)


def load_processor(model_dir: str | Path) -> MediaProcessor | None:
    """Return the media processor of a model directory; None for a model that takes text only. One per process.

    Raises:
        RenderError: Its processor cannot be loaded.
        MissingExtraError: It takes images, and Pillow or transformers is not installed.
    """
    path = Path(model_dir).resolve()
    files = [path / name for name in ("config.json", "tokenizer.json", _PROCESSOR, _PREPROCESSOR)]
    return _load(path, tuple(file.stat().st_mtime_ns if file.is_file() else 0 for file in files))


_PROCESSOR: Final = "processor_config.json"
_PREPROCESSOR: Final = "preprocessor_config.json"


def _token(settings: Mapping[str, Any], name: str, default: str) -> str:
    value = settings.get(name)
    if value is None:
        extra = settings.get("extra_special_tokens")
        value = extra.get(name) if isinstance(extra, dict) else None
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else default
