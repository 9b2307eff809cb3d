"""Deterministic seeds: hashes of what they are for."""

from __future__ import annotations

import struct
from hashlib import blake2b
from typing import Any, Final

_HEADER: Final = struct.Struct("<cQ").pack


def stable_hash(*parts: str | bytes | int | float | bool | None) -> int:
    """Return a 63-bit hash that is the same in every process, on every machine and in every version.

    Each part is encoded as type, length and bytes, so neither ``("ab", "c")`` and ``("a", "bc")`` nor ``1`` and ``"1"``
    collide; the digest is BLAKE2b (RFC 7693). Raises TypeError for other types of parts.
    """
    pieces: list[bytes] = []
    for part in parts:
        kind, payload = _encoded(part)
        pieces += (_HEADER(kind, len(payload)), payload)
    return int.from_bytes(blake2b(b"".join(pieces), digest_size=8).digest(), "little") >> 1


def _encoded(part: Any) -> tuple[bytes, bytes]:
    if isinstance(part, str):
        return b"s", part.encode("utf-8", "surrogatepass")
    if isinstance(part, bytes):
        return b"b", part
    if part is None:
        return b"n", b""
    if isinstance(part, bool):
        return b"t", bytes([part])
    if isinstance(part, int):
        return b"i", f"{part:x}".encode()
    if isinstance(part, float):
        return b"f", struct.pack("<d", part)
    raise TypeError(f"stable_hash takes str, bytes, int, float, bool and None, not {type(part).__name__}")
