"""The quick yes of plain schemas never says yes where the JSON schema validator says no."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from support.property_tests import examples
from turnwise.tools.schema import quick_check

NAMES = ("a", "b", "c")
TYPES = ("string", "integer", "number", "boolean", "null")
VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 3), st.sampled_from([0.0, 1.0, 2.5]), st.sampled_from(["", "x", "1"]),
    st.lists(st.integers(), max_size=1), st.dictionaries(st.sampled_from(NAMES), st.integers(), max_size=1),
)  # fmt: skip
SIMPLE = st.one_of(
    st.just({}),
    st.fixed_dictionaries(
        {"type": st.sampled_from(TYPES)}, optional={"description": st.just("some"), "default": VALUES}
    ),
    st.fixed_dictionaries(
        {"enum": st.lists(st.sampled_from(["x", "y"]), min_size=1, unique=True)}, optional={"type": st.just("string")}
    ),
)


def nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.fixed_dictionaries({"anyOf": st.lists(inner, min_size=1, max_size=3)}, optional={"title": st.just("some")}),
        st.fixed_dictionaries({"type": st.just("array")}, optional={"items": inner}),
        st.fixed_dictionaries(
            {"type": st.just("object")},
            optional={
                "properties": st.dictionaries(st.sampled_from(NAMES), inner, max_size=2),
                "additionalProperties": st.booleans() | inner,
                "required": st.lists(st.sampled_from(NAMES), unique=True, max_size=1),
            },
        ),
    )


PROPERTIES = st.recursive(SIMPLE, nested, max_leaves=3)
SCHEMAS = st.fixed_dictionaries(
    {"type": st.just("object"), "properties": st.dictionaries(st.sampled_from(NAMES), PROPERTIES)},
    optional={
        "required": st.lists(st.sampled_from(NAMES), unique=True),
        "additionalProperties": st.booleans() | SIMPLE,
        "title": st.just("some"),
    },
)


@settings(max_examples=examples(300), deadline=None)
@given(SCHEMAS, st.dictionaries(st.sampled_from((*NAMES, "d")), VALUES))
def test_quick_check_accepts_only_valid_arguments(schema: dict[str, Any], arguments: dict[str, Any]) -> None:
    fits = quick_check(schema)
    assert fits is not None
    valid = Draft202012Validator(schema).is_valid(arguments)
    if fits(arguments):
        assert valid
    elif valid:
        # Only floats that stand for integers are left to the validator.
        assert "." in repr(arguments)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"type": "string", "pattern": "x"}}},
        {"type": "object", "properties": {"a": {"type": "string", "minimum": 3}}},
        {"type": "object", "properties": {"a": {"type": "string", "minLength": 3}}},
        {"type": "object", "properties": {"a": {"type": ["string", "null"]}}},
        {"type": "object", "properties": {"a": {"type": "array", "minItems": 1}}},
        {"type": "object", "properties": {}, "minProperties": 1},
        {"type": "object", "properties": {"a": {"type": "integer", "multipleOf": 3}}},
        {"type": "object", "properties": {"a": {"type": "integer", "enum": [1, 2]}}},
        {"type": "object", "properties": {"a": {"type": "integer", "enum": ["x"]}}},
        {"type": "object", "properties": {"a": {"const": 1}}},
        {"type": "object", "properties": {"a": {"type": "string", "enum": ["x"], "minLength": 3}}},
        {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}},
        {"type": "object", "properties": {"a": {"type": "array", "items": {"pattern": "x"}}}},
        {"type": "object", "properties": {"a": {"type": "array", "prefixItems": [{}]}}},
        {"type": "object", "properties": {"a": {"anyOf": [{"type": "string"}, {"pattern": "x"}]}}},
        {"type": "object", "properties": {"a": {"anyOf": [{"type": "string"}], "type": "string"}}},
        {"type": "object", "properties": {"a": {"type": ["string", "array"]}}},
        {"type": "object", "properties": {"a": {"type": "thing"}}},
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"type": "string"}}},
        {"type": "object", "properties": {"a": True}},
        {"type": "object", "properties": {}, "additionalProperties": {"pattern": "x"}},
        {"type": "object", "properties": {}, "additionalProperties": 0},
        {"type": "object", "properties": {}, "propertyNames": {"type": "string"}},
        {"properties": {}},
        {"type": "string"},
    ],
)
def test_schema_with_other_keywords_has_no_quick_check(schema: dict[str, Any]) -> None:
    assert quick_check(schema) is None
