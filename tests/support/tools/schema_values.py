"""A hypothesis strategy for the values that a JSON schema allows.

``values_of(schema)`` knows the keywords that schemas of tools have; another one is an error of the test.
"""

from __future__ import annotations

import math
from typing import Any

from hypothesis import strategies as st

from turnwise.types import Json

NOTES = {"title", "description", "default", "examples", "format"}
KNOWN = {
    "string": {"minLength", "maxLength"},
    "integer": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
    "boolean": set(),
    "null": set(),
    "array": {"items", "minItems", "maxItems", "prefixItems", "uniqueItems"},
    "object": {"properties", "required", "additionalProperties", "propertyNames", "minProperties", "maxProperties"},
}
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=4,
)


def values_of(schema: dict[str, Any]) -> st.SearchStrategy[Json]:
    """Return a strategy of values that the schema allows."""
    if "enum" in schema or "const" in schema:
        return st.sampled_from(schema.get("enum", [schema.get("const")]))
    if "anyOf" in schema:
        return st.one_of([values_of(alternative) for alternative in schema["anyOf"]])
    kind = schema.get("type")
    if kind is None:
        assert set(schema) <= NOTES, f"unknown keywords in {schema}"
        return ANYTHING
    assert set(schema) - NOTES - {"type"} <= KNOWN[kind], f"unknown keywords in {schema}"
    return MAKERS[kind](schema)


def _strings(schema: dict[str, Any]) -> st.SearchStrategy[str]:
    return st.text(
        min_size=schema.get("minLength", 0), max_size=schema.get("maxLength", schema.get("minLength", 0) + 4)
    )


def _integers(schema: dict[str, Any]) -> st.SearchStrategy[int]:
    low, high = schema.get("minimum", -(2**40)), schema.get("maximum", 2**40)
    low = max(low, schema.get("exclusiveMinimum", low - 1) + 1)
    high = min(high, schema.get("exclusiveMaximum", high + 1) - 1)
    step = schema.get("multipleOf", 1)
    return st.integers(math.ceil(low / step), math.floor(high / step)).map(lambda number: number * step)


def _numbers(schema: dict[str, Any]) -> st.SearchStrategy[float]:
    low, high = (
        schema.get("minimum", schema.get("exclusiveMinimum")),
        schema.get("maximum", schema.get("exclusiveMaximum")),
    )
    floats = st.floats(
        low,
        high,
        exclude_min="exclusiveMinimum" in schema,
        exclude_max="exclusiveMaximum" in schema,
        allow_nan=False,
        allow_infinity=False,
    )
    return floats if low is not None or high is not None else floats | st.integers(-99, 99)


def _arrays(schema: dict[str, Any]) -> st.SearchStrategy[list[Json]]:
    if "prefixItems" in schema:
        assert len(schema["prefixItems"]) == schema["minItems"] == schema["maxItems"]
        return st.tuples(*map(values_of, schema["prefixItems"])).map(list)
    unique = repr if schema.get("uniqueItems") else None
    low = schema.get("minItems", 0)
    return st.lists(
        values_of(schema.get("items", {})), min_size=low, max_size=schema.get("maxItems", low + 2), unique_by=unique
    )


def _objects(schema: dict[str, Any]) -> st.SearchStrategy[dict[str, Json]]:
    properties = {name: values_of(subschema) for name, subschema in schema.get("properties", {}).items()}
    required = schema.get("required", ())
    fixed = st.fixed_dictionaries(
        {name: values for name, values in properties.items() if name in required},
        optional={name: values for name, values in properties.items() if name not in required},
    )
    additional = schema.get("additionalProperties")
    if properties or not additional:
        return fixed
    low = schema.get("minProperties", 0)
    names = values_of(schema["propertyNames"]) if "propertyNames" in schema else st.text(max_size=3)
    values = values_of(additional if isinstance(additional, dict) else {})
    return st.dictionaries(names, values, min_size=low, max_size=schema.get("maxProperties", low + 2))


MAKERS: dict[str, Any] = {
    "string": _strings,
    "integer": _integers,
    "number": _numbers,
    "boolean": lambda schema: st.booleans(),
    "null": lambda schema: st.none(),
    "array": _arrays,
    "object": _objects,
}
