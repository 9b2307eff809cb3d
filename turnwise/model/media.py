"""The contract of media processors, which turn images into placeholder ids and model inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from turnwise.types import TokenIds


@dataclass(frozen=True, slots=True)
class PlacedMedia:
    """The ids of one image in a prompt.

    Attributes:
        ids: int32 of shape [tokens]: wrappers and placeholders, which replace the marker.
        offset: Index of the first placeholder in ``ids``.
        length: Number of ids from the first to the last placeholder. Other ids may stand between: those of rows and
            tiles.
    """

    ids: TokenIds
    offset: int
    length: int


class MediaProcessor(Protocol):
    """Places media in prompts, and computes what the model's forward takes for them.

    Results depend on kind and bytes only: neither on the messages around an image nor on the other images. They are
    cached by content. Methods may be called from several threads.
    """

    kinds: frozenset[str]
    """Kinds of media that the model takes: ``image``."""

    def marker(self, kind: str) -> str:
        """Return the text that the model's chat template writes for one item: a single token.

        Raises:
            RenderError: The model takes no media of this kind.
        """

    def place(self, kind: str, data: bytes) -> PlacedMedia:
        """Return the ids that replace the marker, as the model's own processor would place them.

        Args:
            kind: ``image``.
            data: The encoded file.

        Raises:
            RenderError: The model takes no media of this kind, or the data is no image that can be read, is too large,
                or is of another type; the message names what to do.
        """

    def features(self, kind: str, data: bytes) -> Mapping[str, npt.NDArray[np.generic]]:
        """Return the arguments of the model's forward for one item, by name (``pixel_values``, ``image_grid_thw``).

        The arrays are shared: they must not be written to. Raises RenderError as :meth:`place`.
        """
