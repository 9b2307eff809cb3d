"""Arguments drawn at random fit the schema they are drawn from, and vary."""

from __future__ import annotations

import random

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.property_tests import examples
from turnwise.tools.sample_arguments import random_arguments
from turnwise.types import ToolSchema


def of(**properties):
    return ToolSchema("t", "", {"type": "object", "properties": properties, "required": list(properties)})


LEAVES = st.one_of(
    st.just({"type": "string"}),
    st.builds(lambda n: {"type": "string", "minLength": n, "maxLength": n + 3}, st.integers(0, 30)),
    st.builds(lambda n: {"type": "integer", "minimum": n, "maximum": n + 5}, st.integers(-1000, 1000)),
    st.builds(lambda n: {"type": "number", "exclusiveMinimum": n}, st.integers(-9, 9)),
    st.just({"type": "integer", "multipleOf": 7}),
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.just({"enum": ["a", 1, None]}),
    st.just({"const": {"x": 1}}),
    st.just({"anyOf": [{"type": "integer"}, {"type": "null"}]}),
    st.just({"type": ["string", "null"]}),
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.builds(lambda item, n: {"type": "array", "items": item, "minItems": n}, inner, st.integers(0, 4)),
        st.builds(
            lambda parts: {"type": "object", "properties": parts, "required": sorted(parts)[:1]},
            st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
        ),
    ),
    max_leaves=6,
)


@settings(max_examples=examples(150), deadline=None)
@given(SCHEMAS, st.integers(0, 2**32))
def test_random_arguments_fit_the_schema(schema, seed):
    tool = of(value=schema)
    arguments = random_arguments(tool, random.Random(seed), ["word", "other"])
    assert arguments is not None
    jsonschema.validate(arguments, tool.parameters)


def test_random_arguments_depend_on_the_seed_and_use_words_of_the_conversation():
    tool = of(where={"type": "string"}, times={"type": "integer", "minimum": 1, "maximum": 3})
    samples = [random_arguments(tool, random.Random(seed), ["kitchen"]) for seed in range(60)]
    assert samples == [random_arguments(tool, random.Random(seed), ["kitchen"]) for seed in range(60)]
    assert {sample["times"] for sample in samples} == {1, 2, 3}
    locations = {sample["where"] for sample in samples}
    assert "kitchen" in locations
    assert len(locations) > 10


@pytest.mark.parametrize(
    ("schema", "example"),
    [
        ({"type": "string", "pattern": "^x{3}$"}, None),
        ({"$ref": "#/$defs/missing"}, None),
        ({"type": "string", "pattern": "^example$"}, {"value": "example"}),
    ],
)
def test_undrawable_schemas_give_the_plain_example_or_none(schema, example):
    tool = ToolSchema(
        "t", "", {"type": "object", "properties": {"value": schema}, "required": ["value"], "$defs": {"missing": False}}
    )
    assert random_arguments(tool, random.Random(0)) == example
