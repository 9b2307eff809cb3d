"""Arguments made up from a schema, for checks that call tools without a model.

Owns: :func:`example_arguments`. Refuses: satisfying every schema; where simple values do not fit, it says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from turnwise.tools.dialects import validator_of
from turnwise.types import ToolSchema

_DEPTH: Final = 8
_TEXT: Final = "example"


def example_arguments(schema: ToolSchema) -> dict[str, Any] | None:
    """Return arguments that a schema allows, or None where no simple ones do."""
    parameters = schema.parameters
    found = _example(parameters, parameters.get("$defs", {}), _DEPTH)
    return found if isinstance(found, dict) and validator_of(parameters).is_valid(found) else None


def _example(schema: Any, definitions: Mapping[str, Any], depth: int) -> Any:
    if not isinstance(schema, Mapping) or depth == 0:
        return None
    if "$ref" in schema:
        return _example(definitions.get(schema["$ref"].removeprefix("#/$defs/")), definitions, depth - 1)
    for key in ("const", "default"):
        if key in schema:
            return schema[key]
    for key in ("enum", "examples"):
        if schema.get(key):
            return schema[key][0]
    for key in ("anyOf", "oneOf", "allOf"):
        if schema.get(key):
            return _example(schema[key][0], definitions, depth - 1)
    kind = schema.get("type", "string")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object":
        properties = schema.get("properties", {})
        names = [name for name in properties if name in schema.get("required", ())]
        return {name: _example(properties[name], definitions, depth - 1) for name in names}
    if kind == "array":
        count = max(schema.get("minItems", 0), len(schema.get("prefixItems", ())))
        items = [*schema.get("prefixItems", ()), *[schema.get("items", {})] * count][:count]
        return [_example(item, definitions, depth - 1) for item in items]
    if kind in ("integer", "number"):
        return _number(schema, kind)
    if kind == "string":
        text = _TEXT.ljust(schema.get("minLength", 0), "x")
        return text[: schema.get("maxLength", len(text))]
    return {"boolean": True}.get(kind)


def _number(schema: Mapping[str, Any], kind: str) -> float:
    step: float = schema.get("multipleOf", 1 if kind == "integer" else 0.5)
    low: float | None = schema.get("minimum", schema.get("exclusiveMinimum"))
    high: float | None = schema.get("maximum", schema.get("exclusiveMaximum"))
    # The multiple of the step next to a bound, on the inner side of it; whether it fits the other is validated.
    if low is not None:
        return step * (math.floor(low / step) + 1)
    if high is not None:
        return step * (math.ceil(high / step) - 1)
    return step
