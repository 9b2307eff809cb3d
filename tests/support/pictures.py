"""Pictures as PNG files, made without Pillow."""

from __future__ import annotations

import random
import struct
import zlib

from turnwise.images import data_uri


def png(width: int = 8, height: int = 8, seed: int = 0) -> bytes:
    """Return an RGB picture of random pixels, in squares of four so that scaling it keeps something."""
    generator = random.Random(f"{width}x{height}-{seed}")
    colours = [
        [bytes(generator.randrange(256) for _ in range(3)) for _ in range(width // 4 + 1)] for _ in range(height)
    ]
    rows = b"".join(
        b"\0" + b"".join(colours[row // 4][column // 4] for column in range(width)) for row in range(height)
    )
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in ((b"IHDR", head), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    )


PNG = png()
URI = data_uri(PNG)
