"""The vision side of a vision-language model: embeddings of images, and their positions in rotary embeddings.

Engine and trainer run the vision tower alone, put its embeddings in the places of the placeholders, and then run the
language model on packed tokens as they do for text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from turnwise.errors import FormatError

Features: TypeAlias = Mapping[str, npt.NDArray[np.generic]]
"""What ``MediaProcessor.features`` returns: the model inputs of one image by name."""

_QWEN: Final = frozenset({"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"})
_IDEFICS: Final = frozenset({"idefics3", "smolvlm"})
FAMILIES: Final = _QWEN | _IDEFICS | {"internvl"}
"""Values of ``model_type`` that are loaded with their vision towers."""


@dataclass(frozen=True, slots=True)
class ImageEmbedding:
    """The embedding of an image.

    Attributes:
        tokens: Shape [placeholders, hidden], in place of the placeholders' embeddings.
        deep: Shape [placeholders, hidden] each, added to the states after the first layers (Qwen3-VL).
    """

    tokens: Tensor
    deep: tuple[Tensor, ...] = ()

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.tokens.nbytes * (1 + len(self.deep))


@dataclass(frozen=True, slots=True)
class PlacedEmbeddings:
    """Embeddings of images in a packed row.

    Attributes:
        places: int64 of shape [N], ascending: packed positions of placeholders.
        embedding: What stands there, N rows each.
    """

    indices: Tensor
    embedding: ImageEmbedding


def attention_by_part(text: str) -> dict[str, str]:
    """Return ``attn_implementation`` of a model whose language model attends by ``text``; its vision tower by SDPA."""
    return {"text_config": text, "vision_config": "sdpa"}


class VisionTower:
    """The vision tower of a loaded model, and what the language model has to be given for its images.

    Attributes:
        placeholder: Id of an image's placeholders.
        rotates: Whether images have positions in two dimensions (M-RoPE).
    """

    def __init__(self, model: Any) -> None:
        """Wrap a model of a family in :data:`FAMILIES`."""
        config = model.config
        self._model = model
        self._family = str(config.model_type)
        self._vision: Any = config.vision_config
        self.placeholder = int(config.image_token_id)
        self.rotates = self._family in _QWEN
        self._rows, self._fault = self._measures(config)

    @classmethod
    def of(cls, model: Any) -> VisionTower | None:
        """Return the tower of a model; None where it takes text only."""
        return cls(model) if str(model.config.model_type) in FAMILIES else None

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """Parameters outside of the language model and its head: vision tower and connector."""
        language_model = [*self._model.get_decoder().parameters(), *self._model.get_output_embeddings().parameters()]
        language = {id(parameter) for parameter in language_model}
        return [parameter for parameter in self._model.parameters() if id(parameter) not in language]

    def rows(self, features: Features) -> int:
        """Return the number of placeholders of an image. Raises FormatError if its inputs do not fit the model."""
        try:
            fault = self._fault(features)
        except (KeyError, IndexError, AttributeError, TypeError, ValueError) as error:
            fault = f"are not those of {self._family} ({error!r})"
        if fault is None and not all(np.isfinite(array).all() for array in features.values()):
            fault = "are not finite"
        if fault is not None:
            raise FormatError(f"the inputs of an image {fault}: process it with the model's own image processor")
        return self._rows(features)

    def encode(self, images: Sequence[Features]) -> list[ImageEmbedding]:
        """Return the embeddings of images in one forward of the vision tower; their inputs fit (:meth:`rows`)."""
        device = self._model.get_output_embeddings().weight.device

        def joined(name: str, join: Callable[[Sequence[npt.NDArray[Any]]], npt.NDArray[Any]]) -> Tensor:
            return torch.from_numpy(join([image[name] for image in images])).to(device)

        pixels = joined("pixel_values", np.concatenate)
        if self.rotates:
            output = self._model.get_image_features(pixels, joined("image_grid_thw", np.stack), return_dict=True)
        elif self._family in _IDEFICS:
            mask = joined("pixel_attention_mask", np.concatenate)
            output = self._model.get_image_features(pixels[None], mask[None], return_dict=True)
        else:
            output = self._model.get_image_features(pixels, return_dict=True)
        sizes = [self._rows(image) for image in images]
        tokens = _flatten_embeddings(output.pooler_output)
        deep = [_flatten_embeddings(layer) for layer in getattr(output, "deepstack_features", None) or ()]
        parts = [torch.split(layer, sizes) for layer in (tokens, *deep)]
        return [ImageEmbedding(first, tuple(rest)) for first, *rest in zip(*parts, strict=True)]

    def decoder_inputs(self, token_ids: Tensor, images: PlacedEmbeddings | None) -> dict[str, Any]:
        """Return the arguments of the language model for packed tokens.

        Args:
            token_ids: int64 of shape [T].
            images: What stands in the places of placeholders; None for text.
        """
        embedded: Tensor = self._model.get_input_embeddings()(token_ids)
        if images is None:
            return {"inputs_embeds": embedded[None]}
        values = images.embedding.tokens.to(embedded.dtype)
        inputs: dict[str, Any] = {"inputs_embeds": embedded.index_copy(0, images.indices, values)[None]}
        if images.embedding.deep:
            mask = torch.zeros(len(token_ids), dtype=torch.bool, device=token_ids.device)
            mask[images.indices] = True
            inputs |= {"visual_pos_masks": mask[None], "deepstack_visual_embeds": list(images.embedding.deep)}
        return inputs

    def positions(self, length: int, images: Sequence[tuple[int, Features]]) -> npt.NDArray[np.int64]:
        """Return the rotary positions of a sequence's tokens: int64 of shape [3, length] (time, height, width).

        Text counts up in all three; the tokens of an image have their time, row and column in its merged grid, and
        what follows begins behind the larger of its sides (https://arxiv.org/abs/2409.12191, section 2.1).

        Args:
            length: Number of tokens; as many as are to come may be counted in.
            images: (position of the first placeholder, model inputs) of each image, in order. Not read without M-RoPE.
        """
        positions = np.zeros((3, length), dtype=np.int64)
        begin = current = 0
        for position, features in images if self.rotates else ():
            positions[:, begin:position] = np.arange(current, current + position - begin)
            current += position - begin
            grid = features["image_grid_thw"] // np.array([1, self._merge, self._merge])
            size = int(np.prod(grid))
            positions[:, position : position + size] = current + np.indices(grid).reshape(3, -1)
            current += int(max(grid[1:]))
            begin = position + size
        positions[:, begin:] = np.arange(current, current + length - begin)
        return positions

    @property
    def _merge(self) -> int:
        return int(self._vision.spatial_merge_size)

    def _measures(self, config: Any) -> tuple[Callable[[Features], int], Callable[[Features], str | None]]:
        """Return functions from an image's inputs to its number of placeholders, and to what does not fit."""
        if self.rotates:
            return lambda image: int(np.prod(image["image_grid_thw"])) // self._merge**2, self._grid_fault
        side = self._vision.image_size
        side = int(side[0] if isinstance(side, (list, tuple)) else side)
        patch = self._vision.patch_size
        patch = int(patch[0] if isinstance(patch, (list, tuple)) else patch)
        idefics = self._family in _IDEFICS
        shrinks = int(config.scale_factor) if idefics else round(1 / float(config.downsample_ratio))
        per_tile = (side // patch // shrinks) ** 2

        def fault(image: Features) -> str | None:
            pixels = image["pixel_values"]
            if pixels.ndim != 4 or not len(pixels) or pixels.shape[1:] != (3, side, side):
                return f"have pixel_values of shape {pixels.shape}, not [tiles, 3, {side}, {side}]"
            if not idefics:
                return None
            mask = image["pixel_attention_mask"]
            if mask.shape != (len(pixels), side, side):
                return f"have a pixel_attention_mask of shape {mask.shape}, not [{len(pixels)}, {side}, {side}]"
            # The model takes tiles of zeros for padding and drops them.
            return None if pixels.reshape(len(pixels), -1).any(1).all() else "have an empty tile"

        return lambda image: per_tile * len(image["pixel_values"]), fault

    def _grid_fault(self, image: Features) -> str | None:
        grid, pixels = image["image_grid_thw"], image["pixel_values"]
        vision = self._vision
        merge = self._merge
        sides = grid.shape == (3,) and grid.dtype.kind == "i" and int(grid[0]) == 1 and int(min(grid)) > 0
        if not sides or int(grid[1]) % merge or int(grid[2]) % merge:
            return f"have an image_grid_thw of {grid.tolist()}, not 1 and two multiples of {merge}"
        wide = int(vision.in_channels) * int(vision.temporal_patch_size) * int(vision.patch_size) ** 2
        if pixels.shape != (math.prod(grid.tolist()), wide):
            return f"have pixel_values of shape {pixels.shape}, not [{math.prod(grid.tolist())}, {wide}]"
        return None


def _flatten_embeddings(output: Any) -> Tensor:
    """Return embeddings, given whole or by image, as [placeholders, hidden]."""
    joined = torch.cat(tuple(output)) if isinstance(output, (list, tuple)) else output
    return joined.reshape(-1, joined.shape[-1])
