"""Images on the wire: the field ``features`` of vLLM's ``/inference/v1/generate``.

It has three lists with one entry per image: ``mm_hashes``, ``mm_placeholders`` (``offset`` and ``length``) and
``kwargs_data``. An entry of ``kwargs_data`` is MessagePack in Base64: a map from the name of a model input to
``{"data": [dtype, shape, bytes], "field": [how, {...}]}``, where ``how`` says how vLLM joins the inputs of several
images: ``flat`` along the first axis, or ``batched`` along a new one. The bytes are an extension of type 3. An entry is
null where the server keeps the inputs of an image with this hash from an earlier request.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import math
import threading
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import ormsgpack

from turnwise.errors import FormatError, RequestRefused, shown
from turnwise.media_files import BoundedCache
from turnwise.model.media import MediaProcessor
from turnwise.types import Media

_RAW: Final = 3
_BATCHED: Final = frozenset({"image_grid_thw", "num_patches"})
"""Inputs with one entry per image; the others have rows of patches or tiles."""
_DTYPES: Final = frozenset({"float32", "int64"})
_DIGESTS: Final = 1 << 16
"""Most images whose hashes an encoder remembers."""

Features = Mapping[str, npt.NDArray[np.generic]]


class FeaturesError(FormatError):
    """``features`` of a request is malformed; ``field`` is the path of the offending field."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True, slots=True)
class WireImage:
    """An image of a request.

    Attributes:
        digest: Hash of its inputs, as the client computed it (:func:`features_digest`).
        offset: Position of its first placeholder.
        length: Number of ids from the first to the last placeholder.
        features: Model inputs by name.
    """

    digest: str
    offset: int
    length: int
    features: Features


def features_digest(features: Features) -> str:
    """Return the SHA-256 of model inputs in hexadecimal: names, types, shapes and bytes."""
    digest = hashlib.sha256()
    for name, array in sorted(features.items()):
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


class MediaEncoder:
    """Writes images for the wire, and keeps what it wrote for further turns. Threads may share it."""

    def __init__(self, processor: MediaProcessor | None, *, room: int = 256 << 20) -> None:
        """Create an encoder that keeps up to ``room`` bytes of text."""
        self._processor = processor
        self._lock = threading.Lock()
        self._digests: BoundedCache[str] = BoundedCache(_DIGESTS)
        self._items: BoundedCache[str] = BoundedCache(room, len)

    def encode(self, media: Sequence[Media], sent: Container[str] = ()) -> dict[str, Any] | None:
        """Return ``features`` of a request; None without media.

        Args:
            media: Media of the prompt.
            sent: Hashes of images whose inputs the server keeps: they are left out.

        Raises:
            RequestRefused: The client has no processor of the model.
            RenderError: An item cannot be processed.
        """
        if not media:
            return None
        processor = self._processor
        if processor is None:
            raise RequestRefused(
                f"the prompt holds {len(media)} media, but the model of this client takes text only: remove them, or "
                "name a model directory with a processor of images"
            )
        hashes: dict[str, list[str]] = {}
        placeholders: dict[str, list[dict[str, int]]] = {}
        items: dict[str, list[str | None]] = {}
        for part in sorted(media, key=lambda item: item.position):
            digest, item = self._item(part, processor, sent)
            hashes.setdefault(part.kind, []).append(digest)
            placeholders.setdefault(part.kind, []).append({"offset": part.position, "length": part.length})
            items.setdefault(part.kind, []).append(item)
        return {"mm_hashes": hashes, "mm_placeholders": placeholders, "kwargs_data": items}

    def _item(self, media: Media, processor: MediaProcessor, sent: Container[str]) -> tuple[str, str | None]:
        """Return the hash of an item's inputs, and the inputs as text if they are not known."""
        with self._lock:
            digest = self._digests.get(media.digest)
            if digest is not None and digest in sent:
                return digest, None
            text = None if digest is None else self._items.get(digest)
            if digest is None or text is None:
                features = processor.features(media.kind, media.data)
                digest, text = features_digest(features), encode_item(features)
                self._digests.keep(media.digest, digest)
                self._items.keep(digest, text)
        return digest, None if digest in sent else text


def decode_features(
    wire: Any, tokens: int, cached: Callable[[str], Features | None] = lambda _: None
) -> list[WireImage]:
    """Return the images of ``features`` in a request, in order.

    Args:
        wire: The field.
        tokens: Number of ids of the prompt.
        cached: Returns the inputs of an image by its hash, where they were kept.

    Raises:
        FeaturesError: It is malformed; its field is ``features.mm_hashes`` where an image without data is not kept.
    """
    if not isinstance(wire, dict):
        raise FeaturesError("features", f"features must be an object, not {shown(wire)}")
    parts = [wire.get(name) for name in ("mm_hashes", "mm_placeholders", "kwargs_data")]
    if not all(isinstance(part, dict) and list(part) == ["image"] for part in parts):
        raise FeaturesError(
            "features", "features must have mm_hashes, mm_placeholders and kwargs_data, each with lists of 'image' only"
        )
    hashes, ranges, items = (part["image"] for part in parts if isinstance(part, dict))
    if not all(isinstance(column, list) and len(column) == len(hashes) for column in (hashes, ranges, items)):
        raise FeaturesError("features", "the lists of mm_hashes, mm_placeholders and kwargs_data differ in length")
    images = []
    for number, (digest, position, item) in enumerate(zip(hashes, ranges, items, strict=True)):
        images.append(_image(number, digest, position, item, tokens, cached))
    images.sort(key=lambda image: image.offset)
    for preceding, following in itertools.pairwise(images):
        if preceding.offset + preceding.length > following.offset:
            raise FeaturesError(
                "features.mm_placeholders",
                f"the images at {preceding.offset} and {following.offset} overlap: their placeholders must be apart",
            )
    return images


def _image(
    number: int, digest: Any, position: Any, item: Any, tokens: int, cached: Callable[[str], Features | None]
) -> WireImage:
    if not isinstance(digest, str) or not digest:
        raise FeaturesError("features.mm_hashes", f"image {number} has the hash {shown(digest)}, which is no text")
    offset, length = (
        (position.get(name) for name in ("offset", "length")) if isinstance(position, dict) else (None, None)
    )
    if type(offset) is not int or type(length) is not int or not 0 <= offset < offset + length <= tokens:
        raise FeaturesError(
            "features.mm_placeholders",
            f"image {number} has the placeholders {shown(position)}, "
            f"which are not within the {tokens} ids of the prompt",
        )
    field = "features.kwargs_data"
    if item is None:
        if (features := cached(digest)) is None:
            raise FeaturesError("features.mm_hashes", f"image {number} is not kept here: send its kwargs_data")
        return WireImage(digest, offset, length, features)
    if not isinstance(item, str):
        raise FeaturesError(field, f"image {number} has the data {shown(item)}, which is no text")
    try:
        return WireImage(digest, offset, length, decode_item(item))
    except FormatError as error:
        raise FeaturesError(field, f"image {number}: {error}") from error


def encode_item(features: Features) -> str:
    """Return the model inputs of one image as an entry of ``kwargs_data``."""
    entries = {
        name: {
            "data": [str(array.dtype), list(array.shape), ormsgpack.Ext(_RAW, array.tobytes())],
            "field": ["batched", {"keep_on_cpu": True}]
            if name in _BATCHED
            else ["flat", {"keep_on_cpu": False, "slices": [[0, len(array), None]], "dim": 0}],
        }
        for name, array in features.items()
    }
    return base64.b64encode(ormsgpack.packb(entries)).decode("ascii")


def decode_item(text: str) -> dict[str, npt.NDArray[np.generic]]:
    """Return the model inputs of an entry of ``kwargs_data``. Raises FormatError."""
    try:
        value = ormsgpack.unpackb(base64.b64decode(text, validate=True), ext_hook=lambda _, data: data)
        arrays = {}
        for name, entry in value.items():
            dtype, shape, data = entry["data"]
            if dtype not in _DTYPES:
                raise FormatError(f"{name} has dtype {shown(dtype)}; it must be one of {', '.join(sorted(_DTYPES))}")
            if not isinstance(data, bytes) or not all(type(size) is int and size >= 0 for size in shape):
                raise FormatError(f"{name} has no bytes, or the shape {shown(shape)}")
            if math.prod(shape) * np.dtype(dtype).itemsize != len(data):
                raise FormatError(f"{name} has {len(data)} bytes, which is not the size of {dtype} {shown(shape)}")
            arrays[str(name)] = np.frombuffer(data, dtype=dtype).reshape(shape)
        return arrays
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise FormatError(f"kwargs_data is not the MessagePack of model inputs: {error!r}") from error
