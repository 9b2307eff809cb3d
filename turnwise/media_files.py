"""Files of images beside journals and trajectories: one a content, named by its SHA-256.

A record names an image by its digest and holds no bytes. A file is written once, whole, and is on disk before the
record that names it.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from turnwise.append_file import private_directory, replace_file, sync_path, writing
from turnwise.errors import FormatError
from turnwise.types import Media

FOLDER = "media"
"""Name of the folder in the directory of a run, an evaluation or a gateway."""
_CACHED_BYTES = 64 * 2**20

Value = TypeVar("Value")


class MediaSpan(NamedTuple):
    """The span of an image in a sequence of ids: kind, digest, and where its placeholders stand."""

    kind: str
    digest: str
    position: int
    length: int

    @classmethod
    def of(cls, media: Media) -> MediaSpan:
        """Return the span of an image."""
        return cls(media.kind, media.digest, media.position, media.length)

    @classmethod
    def read(cls, record: Any) -> MediaSpan:
        """Read a span from JSON. A malformed one raises TypeError or ValueError."""
        kind, digest, position, length = record
        return cls(str(kind), str(digest), int(position), int(length))


def media_spans(media: Iterable[Media]) -> list[MediaSpan]:
    """Return the spans of images."""
    return [MediaSpan.of(image) for image in media]


class BoundedCache(Generic[Value]):
    """Values by key: the least recently used go first, the last one stays. For any thread.

    Args:
        room: Largest size of all values.
        size: Returns the size of a value; by default they are counted.
    """

    def __init__(self, room: int, size: Callable[[Value], int] = lambda _: 1) -> None:
        self._room = room
        self._size = size
        self._used = 0
        self._values: OrderedDict[Any, Value] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> Value | None:
        """Return a value, or None where it is not kept."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
            return self._values.get(key)

    def keep(self, key: Hashable, value: Value) -> Value:
        """Keep a value, which is returned."""
        with self._lock:
            if key not in self._values:
                self._values[key] = value
                self._used += self._size(value)
            self._values.move_to_end(key)
            while self._used > self._room and len(self._values) > 1:
                self._used -= self._size(self._values.popitem(last=False)[1])
        return value

    def clear(self) -> None:
        """Drop all values."""
        with self._lock:
            self._values.clear()
            self._used = 0


class MediaFiles:
    """The folder of the images of one run; several processes may write it.

    Args:
        folder: Created when the first image is written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._cached: BoundedCache[bytes] = BoundedCache(_CACHED_BYTES, len)

    @classmethod
    def beside(cls, file: Path) -> MediaFiles:
        """Return the folder that belongs to a file of records."""
        return cls(file.parent / FOLDER)

    def write(self, media: Iterable[Media]) -> None:
        """Write the images that have no file yet; they are on disk on return. Raises DiskError."""
        fresh = {image.digest: image.data for image in media if not self._is_written(image)}
        if not fresh:
            return
        with writing(self.folder):
            private_directory(self.folder)
            for digest, data in fresh.items():
                # Another process may write the same image: then this is the same file once more.
                replace_file(self.folder / digest, data, secrets.token_hex(4))
            sync_path(self.folder)

    def _is_written(self, image: Media) -> bool:
        path = self.folder / image.digest
        return path.exists() and path.stat().st_size == len(image.data)

    def read(self, digest: str) -> bytes:
        """Return the bytes of an image.

        Raises:
            FormatError: There is no such file, or it was changed.
        """
        cached = self._cached.get(digest)
        if cached is not None:
            return cached
        path = self.folder / digest
        try:
            data = path.read_bytes()
        except OSError as error:
            raise FormatError(
                f"{path} cannot be read ({error.strerror or error}): a record names this image. Keep the folder "
                f"{FOLDER}/ beside the records when you move them"
            ) from error
        if hashlib.sha256(data).hexdigest() != digest:
            raise FormatError(f"{path} does not hold the image that its name says: the file was changed")
        return self._cached.keep(digest, data)
