"""Images of prompts in the engine: ids that differ by image, rotary positions, and embeddings kept by content."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from turnwise.engine.batching.batch_state import Generation, PromptImage
from turnwise.engine.batching.scheduler import ModelInput
from turnwise.engine.vision import Features, ImageEmbedding, PlacedEmbeddings, VisionTower
from turnwise.errors import FormatError
from turnwise.inference.wire import BadRequest
from turnwise.media_files import BoundedCache
from turnwise.model.media_wire import FeaturesError, decode_features, features_digest
from turnwise.types import TokenIds

_KEYS = 1 << 16
"""Most images whose keys are remembered; prompts of an older one share no prefix."""
_KEPT_BYTES = 1 << 30
"""Most bytes of model inputs that a server keeps between requests."""
_EMBEDDED_BYTES = 256 << 20
"""Most bytes of embeddings that are kept, so that a prompt in several steps is encoded once."""


def features_cache(room: int = _KEPT_BYTES) -> BoundedCache[Features]:
    """Return a store of model inputs by their hashes, so that a conversation sends each image once."""
    return BoundedCache(room, lambda features: sum(array.nbytes for array in features.values()))


def read_images(
    features: Any, token_ids: TokenIds, vision: VisionTower | None, cache: BoundedCache[Features] | None = None
) -> tuple[PromptImage, ...]:
    """Return the images of a request's ``features``, checked against the model and the ids.

    Those that fit are kept in ``cache``. Raises BadRequest.
    """
    cache = cache or features_cache(0)
    if features is None:
        return ()
    if vision is None:
        raise BadRequest("features", "features is given, but this model takes text only: remove the images")
    try:
        decoded = decode_features(features, len(token_ids), cache.get)
    except FeaturesError as error:
        raise BadRequest(error.field, str(error)) from error
    images = []
    for number, image in enumerate(decoded):
        stretch = token_ids[image.offset : image.offset + image.length]
        positions = image.offset + np.flatnonzero(stretch == vision.placeholder)
        try:
            rows = vision.rows(image.features)
        except FormatError as error:
            raise BadRequest("features.kwargs_data", f"image {number}: {error}") from error
        if len(positions) != rows or stretch[0] != vision.placeholder or stretch[-1] != vision.placeholder:
            raise BadRequest(
                "features.mm_placeholders",
                f"image {number} has {rows} embeddings, but {len(positions)} of its {image.length} ids from "
                f"{image.offset} are placeholders ({vision.placeholder}): place it with the model's own processor",
            )
        # Of what is computed from, whatever hash a client sent.
        digest = features_digest(image.features)
        if digest == image.digest:
            cache.keep(digest, image.features)
        images.append(PromptImage(digest, positions, image.features))
    return tuple(images)


class PromptImages:
    """The images of an engine's prompts.

    In the KV cache an image's placeholders stand as negative ids that belong to it alone, so that prefixes are shared
    by equal images only.
    """

    def __init__(self, vision: VisionTower) -> None:
        self._vision = vision
        self._keys: BoundedCache[int] = BoundedCache(_KEYS)
        self._last = 0
        self._embedded: BoundedCache[ImageEmbedding] = BoundedCache(_EMBEDDED_BYTES, lambda embedding: embedding.nbytes)
        self.encoded = 0
        """Number of images that the vision tower has encoded."""

    def enter(self, generation: Generation) -> None:
        """Set ``token_ids`` and ``rotary`` of a request that arrives."""
        if not generation.images:
            return
        token_ids: TokenIds = generation.prompt.copy()
        for image in generation.images:
            token_ids[image.positions] = self._key(image.digest)
        generation.token_ids = token_ids
        if self._vision.rotates:
            grids = [(int(image.positions[0]), image.features) for image in generation.images]
            generation.rotary = self._vision.positions(len(token_ids) + 1, grids)

    def plain(self, token_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return ids with placeholders for the ids of images."""
        return np.where(token_ids < 0, self._vision.placeholder, token_ids)

    def forget(self) -> None:
        """Drop all embeddings: the weights have changed."""
        self._embedded.clear()

    def prepare(
        self, step: ModelInput, images_of: Mapping[int, Generation]
    ) -> tuple[npt.NDArray[np.int64], PlacedEmbeddings | None]:
        """Return a step's rotary positions, and the embeddings of the placeholders among its tokens.

        Args:
            step: The step.
            images_of: Running requests with images by slot.
        """
        if not images_of:
            return step.positions, None
        positions = step.positions
        if self._vision.rotates:
            positions = np.tile(step.positions, (3, 1))
        begins = np.cumsum(step.sizes) - step.sizes
        parts: list[tuple[PromptImage, npt.NDArray[np.int64], npt.NDArray[np.int64]]] = []
        for index in np.flatnonzero(np.isin(step.slots, list(images_of))).tolist():
            generation = images_of[int(step.slots[index])]
            begin, size = int(begins[index]), int(step.sizes[index])
            start = int(step.positions[begin])
            if generation.rotary is not None:
                positions[:, begin : begin + size] = _rotary(generation.rotary, start, size)
            for image in generation.images:
                first, stop = np.searchsorted(image.positions, (start, start + size))
                if first < stop:
                    parts.append((image, np.arange(first, stop), image.positions[first:stop] + (begin - start)))
        return positions, self._join_embeddings(parts) if parts else None

    def _join_embeddings(
        self, parts: list[tuple[PromptImage, npt.NDArray[np.int64], npt.NDArray[np.int64]]]
    ) -> PlacedEmbeddings:
        """Join the embeddings of (image, rows of it, places in the step)."""
        parts.sort(key=lambda part: int(part[2][0]))
        embedded = self._embeddings({image.digest: image for image, _, _ in parts})
        embeddings = [(embedded[image.digest], torch.from_numpy(rows)) for image, rows, _ in parts]

        def joined(part: Callable[[ImageEmbedding], torch.Tensor]) -> torch.Tensor:
            return torch.cat([part(one)[rows.to(one.tokens.device)] for one, rows in embeddings])

        layers = len(embeddings[0][0].deep)
        tokens = joined(lambda one: one.tokens)
        deep = tuple(joined(lambda one, layer=layer: one.deep[layer]) for layer in range(layers))  # type: ignore[misc]
        positions = torch.from_numpy(np.concatenate([positions for _, _, positions in parts])).to(tokens.device)
        return PlacedEmbeddings(positions, ImageEmbedding(tokens, deep))

    def _embeddings(self, images: dict[str, PromptImage]) -> dict[str, ImageEmbedding]:
        """Return the embeddings of images by digest; those that are not kept are encoded together."""
        embeddings: dict[str, Any] = {digest: self._embedded.get(digest) for digest in images}
        missing = [digest for digest, embedding in embeddings.items() if embedding is None]
        if missing:
            encoded = self._vision.encode([images[digest].features for digest in missing])
            self.encoded += len(missing)
            for digest, embedding in zip(missing, encoded, strict=True):
                embeddings[digest] = self._embedded.keep(digest, embedding)
        return embeddings

    def _key(self, digest: str) -> int:
        key = self._keys.get(digest)
        if key is None:
            self._last -= 1
            key = self._keys.keep(digest, self._last)
        return key


def _rotary(table: npt.NDArray[np.int64], start: int, size: int) -> npt.NDArray[np.int64]:
    """Return the positions of tokens [start, start + size); those behind the prompt count up."""
    end = table.shape[1] - 1
    tokens = np.arange(start, start + size)
    positions: npt.NDArray[np.int64] = table[:, np.minimum(tokens, end)] + np.maximum(tokens - end, 0)
    return positions
