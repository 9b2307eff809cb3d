"""Values that a format writes without quotes, read by a tool's JSON schema.

Owns: the choice of a type for a text. Refuses: validation; the tool layer checks the full schema, and a value that
fits no allowed type stays the text that it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from turnwise.inference.formats.jsoncalls import decode_whole
from turnwise.types import Json, ToolSchema

_DEPTH = 8


def parameter_types(tools: Sequence[ToolSchema], name: str, key: str) -> frozenset[str]:
    """Return the JSON types that a tool's parameter may have; empty where any may stand or nothing is known."""
    for tool in tools:
        if tool.name == name:
            properties = tool.parameters.get("properties")
            schema = properties.get(key) if isinstance(properties, Mapping) else None
            return frozenset(_types(schema, tool.parameters, _DEPTH))
    return frozenset()


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> Iterator[str]:
    if not isinstance(schema, Mapping) or depth == 0:
        return
    kind = schema.get("type")
    if isinstance(kind, str):
        yield kind
    elif isinstance(kind, list):
        yield from (item for item in kind if isinstance(item, str))
    else:
        if "const" in schema:
            yield _type_of(schema["const"])
        for value in schema["enum"] if isinstance(schema.get("enum"), list) else ():
            yield _type_of(value)
        for word in ("anyOf", "oneOf", "allOf"):
            for branch in schema[word] if isinstance(schema.get(word), list) else ():
                yield from _types(branch, root, depth - 1)
        if isinstance(schema.get("$ref"), str):
            yield from _types(_resolve(schema["$ref"], root), root, depth - 1)
    if schema.get("nullable") is True:
        yield "null"


def _resolve(reference: str, root: Mapping[str, Any]) -> Any:
    node: Any = root
    for part in reference.removeprefix("#").strip("/").split("/"):
        node = node.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(node, Mapping) else None
    return node


def _type_of(value: Json) -> str:
    if value is None:
        return "null"
    kinds: dict[type, str] = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    return kinds.get(type(value), "object")


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
    kind = _type_of(value)
    if kind in types:
        return value
    if kind == "integer" and "number" in types:
        return value
    if kind == "number" and "integer" in types and math.isfinite(value) and value == math.floor(value):
        return int(value)
    return _NOTHING
