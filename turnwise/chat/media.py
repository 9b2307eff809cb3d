"""Images in prompts: the marker that a chat template writes for each is replaced by the processor's ids."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from turnwise.chat.tokens import Tokens
from turnwise.errors import RenderError
from turnwise.images import MessageMedia
from turnwise.media_files import BoundedCache
from turnwise.model.canonical import Canonical
from turnwise.model.media import MediaProcessor, PlacedMedia
from turnwise.types import Media, TokenIds

_REMEMBERED = 4096


def media_in(messages: Iterable[Canonical]) -> list[MessageMedia]:
    """Return the media of messages, in order."""
    return [media for message in messages for media in message.media]


class MediaPlacer:
    """Replaces markers in the ids of a rendered text; each image is processed once, by its digest.

    A marker that a user or a tool spells is escaped like every added token, so it is not one here.

    Args:
        processor: The model's processor; None for a model of text only.
        tokens: The tokenizer.

    Attributes:
        kinds: Kinds of media that the model takes.
        marker: What the template writes for an image; None for a model of text only.

    Raises:
        RenderError: The marker is not one added token of the tokenizer.
    """

    def __init__(self, processor: MediaProcessor | None, tokens: Tokens) -> None:
        self._processor = processor
        self.kinds: frozenset[str] = frozenset() if processor is None else processor.kinds
        self.marker: str | None = None if processor is None else processor.marker("image")
        self._marker_id = -1
        self._known: BoundedCache[PlacedMedia] = BoundedCache(_REMEMBERED)
        if self.marker is not None:
            if self.marker not in tokens.added:
                raise RenderError(
                    f"the processor's image marker {self.marker!r} is no token of the tokenizer: the tokenizer and the "
                    "processor in the model's directory are of different models"
                )
            self._marker_id = tokens.added[self.marker]

    def check(self, media: Sequence[MessageMedia]) -> None:
        """Raise RenderError if there are media that the model does not take."""
        refused = sorted({part.kind for part in media} - self.kinds)
        if refused:
            raise RenderError(
                f"the messages hold {len(media)} {refused[0]}(s), but this model takes text only: its directory has no "
                "image processor (preprocessor_config.json) that is known here. Choose a model that takes images, or "
                "describe them as text"
            )

    def fill(self, token_ids: TokenIds, media: Sequence[MessageMedia]) -> tuple[TokenIds, tuple[Media, ...]]:
        """Return the ids with each image in place of its marker, and the images with their positions.

        Args:
            token_ids: Ids of a rendered text.
            media: Images of its messages, in order.

        Raises:
            RenderError: There are more or fewer markers than images, or an image cannot be read.
        """
        if self._processor is None:
            return token_ids, ()
        markers = np.flatnonzero(token_ids == self._marker_id).tolist()
        if len(markers) != len(media):
            raise RenderError(self._miscounted(len(markers), len(media)))
        if not media:
            return token_ids, ()
        pieces: list[TokenIds] = []
        placed: list[Media] = []
        start = length = 0
        for marker, image in zip(markers, media, strict=True):
            text_ids, placement = token_ids[start:marker], self._place(image)
            length += len(text_ids)
            placed.append(Media(image.kind, image.data, length + placement.offset, placement.length))
            pieces += (text_ids, placement.ids)
            start, length = marker + 1, length + len(placement.ids)
        return np.concatenate([*pieces, token_ids[start:]]), tuple(placed)

    def _place(self, media: MessageMedia) -> PlacedMedia:
        placement = self._known.get(media.digest)
        if placement is None:
            assert self._processor is not None
            placement = self._known.keep(media.digest, self._processor.place(media.kind, media.data))
        return placement

    def _miscounted(self, markers: int, images: int) -> str:
        if markers > images:
            return (
                f"the prompt holds {markers} image markers ({self.marker}) for {images} images: a text spells the "
                "marker; set special_in_text: escape"
            )
        return (
            f"this chat template wrote {markers} image markers ({self.marker}) for {images} images: it has no place "
            "for images in messages of that role; name a template that writes image parts as renderer.chat_template, "
            "or give images in user messages"
        )
