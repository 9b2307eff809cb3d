"""Server-sent events: the headers of a stream, and its events as bytes."""

from __future__ import annotations

import json
from typing import Any

import orjson

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
COMMENT = b": alive\n\n"
DONE = b"data: [DONE]\n\n"


def encode(value: Any) -> bytes:
    """Return a value as JSON. Raises RecursionError if it is nested too deep."""
    try:
        return orjson.dumps(value)
    except TypeError:
        # Numbers of more than 64 bits, which models write as arguments, and what repeats a deeply nested request.
        return json.dumps(value).encode()


def data(value: Any) -> bytes:
    """Return an unnamed event."""
    return b"data: " + encode(value) + b"\n\n"


def event(value: dict[str, Any]) -> bytes:
    """Return an event named by its ``type``: clients of two of the APIs drop unnamed events."""
    return b"event: " + str(value["type"]).encode() + b"\ndata: " + encode(value) + b"\n\n"
