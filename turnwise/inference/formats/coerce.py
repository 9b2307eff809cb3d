"""Values that a format writes without quotes, read by a tool's JSON schema.

Owns: the choice of a type for a text, of those that ``parameters.py`` finds. Refuses: validation; the tool layer checks
the full schema, and a value that fits no allowed type stays the text that it is.
"""

from __future__ import annotations

import math

from turnwise.inference.formats.jsoncalls import decode_whole
from turnwise.inference.formats.parameters import type_of
from turnwise.types import Json


def coerce(text: str, types: frozenset[str]) -> Json:
    """Return the value that a text stands for, where one of ``types`` may stand.

    A string parameter takes the text as it is, ``null`` is None only where the schema allows null, and where
    nothing is known of the parameter JSON is read as JSON and everything else as text.
    """
    if types == {"string"}:
        return text
    stripped = text.strip()
    try:
        value = decode_whole(stripped)
    except ValueError:
        value = _spoken(stripped, types)
    if not types:
        return value if value is not _NOTHING and not isinstance(value, str) else text
    if value is not _NOTHING and not isinstance(value, str):
        fitting = _fit(value, types)
        if fitting is not _NOTHING:
            return fitting
    return text


_NOTHING = object()


def _spoken(text: str, types: frozenset[str]) -> Json:
    """Read the words that Python writes for constants."""
    word = text.lower()
    if "boolean" in types and word in ("true", "false"):
        return word == "true"
    if "null" in types and word in ("null", "none"):
        return None
    return _NOTHING


def _fit(value: Json, types: frozenset[str]) -> Json:
    """Return the value in one of the allowed types, or ``_NOTHING``."""
    kind = type_of(value)
    if kind in types:
        return value
    if kind == "integer" and "number" in types:
        return value
    if kind == "number" and "integer" in types and math.isfinite(value) and value == math.floor(value):
        return int(value)
    return _NOTHING
