"""Which parameters a tool takes, wherever its schema says so."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from support.chat.model_dirs import FAMILIES
from support.engine.grammar_walks import WITHOUT_CALLS, walker
from turnwise.chat.formats.tags import choices_of, parameter_types, shapes
from turnwise.types import Guide, ToolSchema

INTEGER = {"type": "integer"}
A = {"type": "object", "properties": {"a": INTEGER}, "required": ["a"]}
COMPOSED: dict[str, dict[str, Any]] = {
    "$ref": {"$ref": "#/$defs/X", "$defs": {"X": A}},
    "allOf": {"allOf": [A, {"properties": {"b": {"type": "boolean"}}, "required": ["b"]}]},
    "anyOf": {"anyOf": [A, {"properties": {"b": {"type": "boolean"}}, "required": ["b"]}]},
    "anyOf required": {
        "properties": {"a": INTEGER, "b": {"type": "boolean"}},
        "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
    },
    "required alone": {"properties": {"a": INTEGER}, "required": ["a", "b"]},
    "choices elsewhere": {**A, "properties": {"a": {"$ref": "#/$defs/s"}}, "$defs": {"s": {"enum": ["x", 7, None]}}},
    "a constant": {**A, "properties": {"a": {"const": "k"}}},
}


def told(parameters: dict[str, Any]) -> list[tuple[list[str], list[str]]]:
    return [(list(shape.properties), sorted(shape.required)) for shape in shapes(parameters)]


def test_parameters_of_composed_schemas_are_listed() -> None:
    assert told({}) == [([], [])]
    assert told(COMPOSED["$ref"]) == [(["a"], ["a"])]
    assert told(COMPOSED["allOf"]) == [(["a", "b"], ["a", "b"])]
    assert told(COMPOSED["anyOf"]) == [(["a"], ["a"]), (["b"], ["b"])]
    assert told(COMPOSED["anyOf required"]) == [(["a", "b"], ["a"]), (["a", "b"], ["b"])]
    assert told(COMPOSED["required alone"]) == [(["a", "b"], ["a", "b"])]
    many = [{"properties": {f"k{n}": INTEGER, "a": {"const": n}}, "required": ["a", f"k{n}"]} for n in range(17)]
    assert told({"anyOf": many}) == [(["k0", "a", *(f"k{n}" for n in range(1, 17))], ["a"])]


def test_types_and_choices_of_a_parameter_of_an_alternative() -> None:
    schema = {"anyOf": [A, {"properties": {"a": {"type": "string"}, "b": {}}}]}
    assert parameter_types([ToolSchema("f", "", schema)], "f") == {"a": {"integer", "string"}, "b": frozenset()}
    assert choices_of({"$ref": "#/$defs/s"}, COMPOSED["choices elsewhere"]) == ["x", 7, None]
    assert choices_of({"allOf": [INTEGER, {"const": 3}]}, {}) == [3]
    assert choices_of({"$ref": "#"}, {"$ref": "#"}) is None


def test_schemas_that_refer_to_themselves_many_times_take_no_time() -> None:
    # 3,000 to the fourth power before a reference was followed only once.
    often = {"properties": {"x": {"anyOf": [{"$ref": "#/properties/x"}] * 3000}}}
    assert parameter_types([ToolSchema("f", "", often)], "f") == {"x": frozenset()}
    assert told({"anyOf": [{"$ref": "#"}] * 3000, "properties": {"a": {}}}) == [(["a"], [])]
    twice = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 30} for n in range(8)}
    assert told({"$ref": "#/$defs/d0", "$defs": {**twice, "d8": A}}) == [([], [])]


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in WITHOUT_CALLS])
def test_calls_follow_the_parameter_types(family: str) -> None:
    walks = walker(family)
    for name, parameters in COMPOSED.items():
        tools = [ToolSchema("f", "", parameters)]
        ends = 0
        for seed in range(3):
            ids, walked = walks.walk(Guide(calls=("f",), text=False, most=1), seed, tools=tools)
            ends += walked
            if walked:
                (call,) = walks.renderer.parse(ids, walks.prompt, tools)["tool_calls"]
                assert call.error is None, (name, call)
                jsonschema.validate(call.arguments, parameters)
        assert ends or name == "required alone", name
