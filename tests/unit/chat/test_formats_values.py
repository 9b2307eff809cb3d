"""Values without quotes, JSON without surprises, and Python literals."""

from __future__ import annotations

import ast
import contextlib
import warnings
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise.chat.formats.json_calls import JsonCalls, decode_at, decode_whole
from turnwise.chat.formats.literals import Reader, Unreadable
from turnwise.chat.formats.tagged import coerce
from turnwise.chat.formats.tags import parameter_types
from turnwise.types import ToolSchema


def types(schema: Any) -> frozenset[str]:
    parameters = {"type": "object", "properties": {"x": schema}, "$defs": {"a/b": {"type": "integer"}}}
    return parameter_types([ToolSchema("f", "", parameters)], "f").get("x", frozenset())


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, {"integer", "null"}),
        ({"enum": ["a", 1, None]}, {"string", "integer", "null"}),
        ({"const": True}, {"boolean"}),
        ({"$ref": "#/$defs/a~1b"}, {"integer"}),
        ({"$ref": "#/$defs/missing"}, set()),
        ({"type": "string", "nullable": True}, {"string", "null"}),
        ({}, set()),
        (True, set()),
    ],
)
def test_types_of_a_parameter(schema: Any, expected: set[str]) -> None:
    assert types(schema) == expected


def test_types_of_a_schema_that_refers_to_itself_end() -> None:
    parameters = {"properties": {"x": {"$ref": "#/properties/x"}}}
    assert parameter_types([ToolSchema("f", "", parameters)], "f").get("x", frozenset()) == frozenset()
    assert parameter_types([], "f") == {}


@pytest.mark.parametrize(
    ("text", "allowed", "value"),
    [
        ("5", {"string"}, "5"),
        ("null", {"string"}, "null"),
        ("null", {"string", "null"}, None),
        ("None", {"integer", "null"}, None),
        ("null", {"integer"}, "null"),
        ("5", {"integer"}, 5),
        (" 5\n", {"integer"}, 5),
        ("5.0", {"integer"}, 5),
        ("5.5", {"integer"}, "5.5"),
        ("5", {"number"}, 5),
        ("1e400", {"number"}, "1e400"),
        ("true", {"integer"}, "true"),
        ("True", {"boolean"}, True),
        ("false", {"boolean"}, False),
        ("1", {"boolean"}, "1"),
        ("5", {"string", "integer"}, 5),
        ("five", {"string", "integer"}, "five"),
        ('{"a": [1]}', {"object"}, {"a": [1]}),
        ("[1]", {"object"}, "[1]"),
        ('"quoted"', {"string", "null"}, '"quoted"'),
        ("7", set(), 7),
        ('"quoted"', set(), '"quoted"'),
        ("word", set(), "word"),
        ("NaN", {"number"}, "NaN"),
    ],
)
def test_values_by_type(text: str, allowed: set[str], value: Any) -> None:
    coerced = coerce(text, frozenset(allowed))
    assert coerced == value
    assert type(coerced) is type(value)


@given(
    st.text(max_size=30), st.frozensets(st.sampled_from(["string", "integer", "number", "boolean", "null", "array"]))
)
def test_any_text_is_some_value_of_an_allowed_type_or_the_text(text: str, allowed: frozenset[str]) -> None:
    value = coerce(text, allowed)
    if value != text:
        kinds = {bool: "boolean", int: "integer", float: "number", type(None): "null", list: "array", str: "string"}
        kind = kinds.get(type(value), "object")
        assert not allowed or kind in allowed or (kind == "integer" and "number" in allowed)


def test_json_is_strict_and_reports_where() -> None:
    assert decode_at('xx {"a": 1} y', 2) == ({"a": 1}, 11)
    for text in ("NaN", "1e400", "[Infinity]", "{'a': 1}", '"\\ud83d"', "1 2", "", "[" * 100_000):
        with pytest.raises(ValueError):
            decode_whole(text)
    assert decode_whole('"\\ud83d\\ude42"') == "🙂"


def test_raw_arguments_stay_as_sampled() -> None:
    calls = JsonCalls("name", "arguments")
    call = calls.read('{"note": {"arguments": 1}, "name": "f", "arguments":  {"b":1,  "a": 2.0} }')
    assert call.raw == '{"b":1,  "a": 2.0}'
    assert calls.read('{"name": "f", "arguments": {"a": }}').raw == '{"a": }'


def read(text: str) -> Any:
    reader = Reader(text, 0, len(text))
    value = reader.value(0)
    assert not reader.peek()
    return value


literal = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


@given(literal)
def test_literals_follow_python(value: Any) -> None:
    if "\\ud" in ascii(value):
        return
    assert read(repr(value)) == ast.literal_eval(repr(value))


@given(st.text(max_size=60))
def test_any_text_is_read_or_unreadable(text: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with contextlib.suppress(Unreadable):
            Reader(text, 0, len(text)).call()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("'''a'b'''", "a'b"),
        (r"'\x41\u00e9\U0001F642\q\ud800'", "Aé🙂\\q\\ud800"),
        ("1_000", 1000),
        (".5", 0.5),
        ("-3e2", -300.0),
        ("(1, 2,)", [1, 2]),
        ("true", True),
        ("null", None),
    ],
)
def test_literals_that_models_write(text: str, value: Any) -> None:
    assert read(text) == value


@pytest.mark.parametrize("text", ["", "'a", "[1", "{1: 2}", "foo", "1e999", "--1", "[" * 1000, "'\\", "-"])
def test_literals_that_are_none(text: str) -> None:
    with pytest.raises(Unreadable):
        read(text)
