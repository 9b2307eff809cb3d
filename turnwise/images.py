"""Images in messages: the forms in which clients, tools and tasks give them, reduced to bytes and their digest.

An image is given as its data: in a ``data:`` URI, as base64, as bytes or as a Pillow image. URLs and file names are
refused, because what they name may change between two requests of a conversation. A video is a list of images.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from turnwise.errors import SessionError, shown
from turnwise.types import MediaKind

TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
"""Types of parts that are text."""
MOST_BYTES = 32 * 2**20
"""Bytes that the file of an image may have."""
IMAGE_TYPES = ("png", "jpeg", "webp", "gif", "bmp")
"""Types of images, as in ``image/png``."""
_AUDIO = frozenset({"audio", "input_audio", "audio_url"})
_SIGNATURES = {"png": b"\x89PNG\r\n\x1a\n", "jpeg": b"\xff\xd8\xff", "gif": b"GIF8", "bmp": b"BM"}
_REMEDY = "give the image's data as data:image/png;base64,..., for example by turnwise.image_part(...)"

MediaBytes = Callable[[str, bytes], bytes]
"""Given the digest of a file and its bytes: the one copy of them that a session holds."""


@dataclass(frozen=True, slots=True)
class MessageMedia:
    """An image of a message, compared by kind, digest and place.

    Attributes:
        kind: ``image``.
        digest: SHA-256 of ``data`` in hexadecimal.
        at: Number of characters of the message's text before it.
        data: The encoded file.
    """

    kind: MediaKind
    digest: str
    at: int
    data: bytes = field(compare=False, repr=False)


def image_type(data: bytes) -> str | None:
    """Return the type of an encoded image by its first bytes (``png``), or None for none of ``IMAGE_TYPES``."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "webp"
    return next((name for name, start in _SIGNATURES.items() if data.startswith(start)), None)


def data_uri(data: bytes) -> str:
    """Return an encoded image as a ``data:`` URI. Raises SessionError if it is of another type or too large."""
    return f"data:image/{_check_size_and_type(data, 'the image')};base64,{base64.b64encode(data).decode()}"


def image_bytes(value: Any, where: str = "the image") -> bytes:
    """Return the file of an image: given bytes, those of a ``data:`` URI, or PNG for a Pillow image.

    Args:
        value: The image.
        where: What it is, for errors.

    Raises:
        SessionError: It is none of these, or an image of another type, or too large.
    """
    if isinstance(value, (bytes, bytearray, memoryview)):
        data = bytes(value)
        _check_size_and_type(data, where)
        return data
    if isinstance(value, str):
        return _decode_data_uri(value, where)
    # Who has a Pillow image has imported Pillow; nothing else here needs it.
    pillow = sys.modules.get("PIL.Image")
    if pillow is not None and isinstance(value, pillow.Image):
        with io.BytesIO() as file:
            value.save(file, format="PNG")
            return file.getvalue()
    raise SessionError(f"{where} is {shown(value)}, which is no image: {_REMEDY}")


def image_part(image: Any) -> dict[str, Any]:
    """Return the content part of an image for messages, tasks and observations, as JSON.

    Args:
        image: Encoded bytes (PNG, JPEG, WebP, GIF or BMP), a ``data:`` URI, or a Pillow image.

    Raises:
        SessionError: As :func:`image_bytes`.
    """
    return {"type": "image_url", "image_url": {"url": data_uri(image_bytes(image))}}


def media_of_part(part: Mapping[str, Any], at: int, where: str, keep: MediaBytes | None = None) -> list[MessageMedia]:
    """Return the images of a content part: one, or the frames of a video.

    Args:
        part: In OpenAI's form (``image_url``, ``input_image``), Anthropic's (``image`` with a ``source``), LangChain's,
            or that of ``ToolResponse`` (``image`` and ``video``).
        at: Characters of the message's text before it.
        where: Which part it is, for errors.
        keep: Returns the one copy of a file's bytes.

    Raises:
        SessionError: It is no image, or none that is given as data.
    """
    kind = part.get("type")
    if kind == "video":
        frames = part.get("video")
        if isinstance(frames, (str, bytes)) or not isinstance(frames, Sequence) or not frames:
            raise SessionError(f"{where} is a video file: give its frames, a list of images, as the part's 'video'")
        return [_media(frame, at, f"{where}.video[{number}]", keep) for number, frame in enumerate(frames)]
    if kind in _AUDIO:
        raise SessionError(f"{where} is audio, which no model here takes: give its transcript as text")
    if kind not in ("image", "image_url", "input_image"):
        raise SessionError(f"{where} is of type {shown(kind)}: text and images are allowed")
    source = _source(part, where)
    if source is None:
        raise SessionError(f"{where} is of type {kind} and has no image: {_REMEDY}")
    return [_media(source, at, where, keep)]


def _source(part: Mapping[str, Any], where: str) -> Any:
    """Return the image of a part: whatever :func:`image_bytes` takes."""
    url = part.get("image_url")
    if url is not None:
        return url.get("url") if isinstance(url, Mapping) else url
    source = part.get("source")
    if isinstance(source, Mapping):
        if source.get("type") != "base64":
            raise SessionError(f"{where}.source is of type {shown(source.get('type'))}: {_REMEDY}")
        return f"data:{source.get('media_type')};base64,{source.get('data')}"
    # LangChain's standard blocks.
    encoded = part.get("base64", part.get("data"))
    if isinstance(encoded, str):
        return f"data:{part.get('mime_type')};base64,{encoded}"
    return part.get("image", part.get("url"))


def _media(value: Any, at: int, where: str, keep: MediaBytes | None) -> MessageMedia:
    data = image_bytes(value, where)
    digest = hashlib.sha256(data).hexdigest()
    return MessageMedia("image", digest, at, data if keep is None else keep(digest, data))


def _decode_data_uri(uri: str, where: str) -> bytes:
    head, comma, encoded = uri.partition(",")
    if not uri.startswith("data:") or not comma:
        raise SessionError(f"{where} is {shown(uri)}: URLs and file names are not read; {_REMEDY}")
    declared, *options = head.removeprefix("data:").split(";")
    if "base64" not in options:
        raise SessionError(f"{where} is a data URI without base64 ({shown(head)}): {_REMEDY}")
    if len(encoded) > MOST_BYTES * 3 // 2:
        raise _too_large(where, len(encoded) * 3 // 4)
    try:
        # Some clients break lines.
        data = base64.b64decode("".join(encoded.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise SessionError(f"{where} is not valid base64 ({error}): send the whole file, encoded once") from None
    kind = _check_size_and_type(data, where)
    if declared.removeprefix("image/").replace("jpg", "jpeg") != kind:
        raise SessionError(f"{where} says that it is {shown(declared)}, but its data are image/{kind}: name that type")
    return data


def _check_size_and_type(data: bytes, where: str) -> str:
    """Return the type of an encoded image. Raises SessionError if it is of none that is known, or too large."""
    if len(data) > MOST_BYTES:
        raise _too_large(where, len(data))
    return check_type(data, where)


def check_type(data: bytes, where: str) -> str:
    """Return the type of an image that begins with these bytes. Raises SessionError if it is of none that is known."""
    kind = image_type(data)
    if kind is None:
        begins = data[:8].hex(" ") or "nothing"
        allowed = ", ".join(IMAGE_TYPES)
        raise SessionError(f"{where} is no image of a known type (it begins with {begins}): give {allowed}")
    return kind


def _too_large(where: str, size: int) -> SessionError:
    return SessionError(
        f"{where} has {size / 2**20:.1f} MiB; at most {MOST_BYTES // 2**20} are allowed: make the image smaller"
    )


def image_size(data: bytes) -> tuple[int, int] | None:
    """Return width and height in pixels by the header of an encoded image; None where Pillow reads none."""
    try:
        from PIL import Image
    except ImportError:
        return None
    try:
        with Image.open(io.BytesIO(data)) as image:
            return image.size
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None


def image_label(data: bytes, digest: str = "") -> str:
    """Return a line that stands for an image in text: ``[image 64x64 png, 1.2 kB, sha 1f3a...]``."""
    size = image_size(data)
    pixels = "" if size is None else f" {size[0]}x{size[1]}"
    sha = digest or hashlib.sha256(data).hexdigest()
    return f"[image{pixels} {image_type(data) or 'of an unknown type'}, {len(data) / 1000:.1f} kB, sha {sha[:12]}]"


def texts_of(message: Mapping[str, Any]) -> list[str]:
    """Return the texts of a message, between which its images stand."""
    content = message.get("content")
    if not isinstance(content, list):
        return [content] if content else []
    return [str(part.get("text", "")) for part in content if part.get("type", "text") in TEXT_PARTS]


def readable_text(message: Mapping[str, Any]) -> str:
    """Return the text of a message with a label for each image, for readers of text only."""
    content = message.get("content")
    if not isinstance(content, list):
        return content or ""
    pieces = []
    for part in content:
        if part.get("type", "text") in TEXT_PARTS:
            pieces.append(str(part.get("text", "")))
            continue
        digest = part.get("sha256")
        if digest:
            pieces.append(f"[image, sha {str(digest)[:12]}]")
        else:
            pieces += [image_label(media.data, media.digest) for media in media_of_part(part, 0, "the message")]
    return "".join(pieces)
