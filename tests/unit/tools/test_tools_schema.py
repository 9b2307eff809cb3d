"""Schemas from signatures: nothing of a hint is lost, what JSON cannot express is refused, values become Python's."""

import dataclasses
import enum
import functools
import typing
from collections.abc import Callable
from typing import Annotated, Any, Literal, NotRequired, Optional, TypedDict, Union

import annotated_types
import jsonschema
import pydantic
import pytest
import typing_extensions
from hypothesis import given, settings
from hypothesis import strategies as st

from support.property_tests import examples
from turnwise.errors import ToolSchemaError
from turnwise.tools import as_schema, function_schema, function_tool
from turnwise.tools.sample_arguments import example_arguments
from turnwise.tools.schema import ArgumentError
from turnwise.types import ToolSchema


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Point(TypedDict):
    x: int
    label: NotRequired[Annotated[str, "what it is called"]]


class Newer(typing_extensions.TypedDict, total=False):
    inner: Point


@dataclasses.dataclass
class Box:
    corner: tuple[float, float]
    colour: Colour = Colour.RED


class Person(pydantic.BaseModel):
    name: str
    age: int = pydantic.Field(ge=0, description="in years")
    friends: list["Person"] = []


class Address(pydantic.BaseModel):
    """Where somebody lives."""

    street: str


def parameters(fn) -> dict[str, Any]:
    return function_schema(fn)[0].parameters


def of(hint, **kwargs):
    """Return the schema of one parameter with that hint."""

    def fn(value):
        pass

    fn.__annotations__["value"] = hint
    return parameters(fn)["properties"]["value"]


class TestHints:
    @pytest.mark.parametrize(
        ("hint", "schema"),
        [
            (str, {"type": "string"}),
            (int, {"type": "integer"}),
            (float, {"type": "number"}),
            (bool, {"type": "boolean"}),
            (None, {"type": "null"}),
            (list, {"type": "array", "items": {}}),
            (dict, {"type": "object", "additionalProperties": True}),
            (list[int], {"type": "array", "items": {"type": "integer"}}),
            (typing.List[str], {"type": "array", "items": {"type": "string"}}),  # noqa: UP006
            (dict[str, float], {"type": "object", "additionalProperties": {"type": "number"}}),
            (Optional[int], {"anyOf": [{"type": "integer"}, {"type": "null"}]}),  # noqa: UP045
            (int | str, {"anyOf": [{"type": "integer"}, {"type": "string"}]}),
            (Union[int, list[str]], {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"type": "string"}}]}),  # noqa: UP007
            (Literal["a", "b"], {"type": "string", "enum": ["a", "b"]}),
            (Literal["a", 1, None], {"enum": ["a", 1, None]}),
            (Colour, {"type": "string", "enum": ["red", "blue"]}),
            (Any, {}),
            (
                Annotated[int, annotated_types.Ge(1), annotated_types.Lt(5)],
                {"type": "integer", "minimum": 1, "exclusiveMaximum": 5},
            ),
            (Annotated[str, annotated_types.MinLen(2)], {"type": "string", "minLength": 2}),
            (Annotated[str, "the name"], {"type": "string", "description": "the name"}),
            (list[Annotated[str, "a name"]], {"type": "array", "items": {"type": "string", "description": "a name"}}),
            (
                Point,
                {
                    "type": "object",
                    "properties": {
                        "x": {"type": "integer"},
                        "label": {"type": "string", "description": "what it is called"},
                    },
                    "required": ["x"],
                },
            ),
            (
                Address,
                {
                    "type": "object",
                    "description": "Where somebody lives.",
                    "properties": {"street": {"type": "string"}},
                    "required": ["street"],
                },
            ),
        ],
    )
    def test_single_hint_gives_its_schema(self, hint, schema):
        assert of(hint) == schema

    def test_nested_typed_dicts_of_both_kinds(self):
        result = of(list[Newer] | None)
        assert result["anyOf"][0]["items"]["properties"]["inner"] == of(Point)

    def test_a_dataclass_is_in_place_with_its_defaults(self):
        result = of(Box)
        assert result["required"] == ["corner"]
        assert result["properties"]["corner"]["prefixItems"] == [{"type": "number"}, {"type": "number"}]
        assert result["properties"]["colour"] == {"type": "string", "enum": ["red", "blue"], "default": "red"}

    def test_a_model_that_holds_itself_keeps_a_definition(self):
        def fn(person: Person):
            pass

        schema = parameters(fn)
        assert schema["$defs"]["Person"]["properties"]["friends"]["items"] == {"$ref": "#/$defs/Person"}
        assert schema["$defs"]["Person"]["properties"]["age"]["description"] == "in years"
        jsonschema.Draft202012Validator.check_schema(schema)
        _, arguments = function_schema(fn)
        value = arguments.parse({"person": {"name": "a", "age": 1, "friends": [{"name": "b", "age": 2}]}})
        assert value["person"].friends[0].name == "b"
        with pytest.raises(ArgumentError) as error:
            arguments.parse({"person": {"name": "a", "age": 1, "friends": [{"name": "b", "age": -2}]}})
        assert error.value.path == "$.person.friends[0].age"

    def test_properties_called_title_stay(self):
        def fn(title: str, address: Address):
            pass

        assert list(parameters(fn)["properties"]) == ["title", "address"]
        assert "title" not in parameters(fn)["properties"]["address"]

    def test_defaults_and_required(self):
        def fn(a: str, b: int = 3, c: Colour = Colour.BLUE, d: list[int] | None = None, *, e: float = 0.5):
            pass

        schema = parameters(fn)
        assert schema["required"] == ["a"]
        assert {name: body.get("default", "none") for name, body in schema["properties"].items()} == {
            "a": "none",
            "b": 3,
            "c": "blue",
            "d": None,
            "e": 0.5,
        }

    def test_a_default_of_none_allows_null(self):
        def fn(a: int = None):  # noqa: RUF013
            pass

        assert parameters(fn)["properties"]["a"] == {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None}

    def test_without_parameters(self):
        def fn() -> str:
            pass

        assert parameters(fn) == {"type": "object", "properties": {}}

    def test_self_is_no_parameter(self):
        class Owner:
            def fn(self, a: int):
                pass

        assert list(parameters(Owner.fn)["properties"]) == ["a"]

    def test_names_that_pydantic_would_refuse(self):
        def fn(model_config: str, schema: str, _private: int, copy: int):
            pass

        _, arguments = function_schema(fn)
        values = {"model_config": "a", "schema": "b", "_private": 1, "copy": 2}
        assert arguments.parse(values) == values


def local_hints():
    class Inner(TypedDict):
        a: int

    @function_tool
    def uses_a_local_name(inner: "Inner") -> str:
        return ""

    return uses_a_local_name


def test_hints_as_text_find_local_names():
    assert local_hints().schema.parameters["properties"]["inner"]["required"] == ["a"]


class TestDocstrings:
    def test_google_sections(self):
        def fn(city: str, days: int = 1, unit: Annotated[str, "own text"] = "c"):
            """Tell the weather.

            It may rain.

            Args:
                city (str): Where, such as
                    "Paris: north".
                days: How long.
                unit: Not this.
                other: Of no parameter.

            Returns:
                text: the weather.
            """

        schema, _ = function_schema(fn)
        assert schema.description == "Tell the weather.\n\nIt may rain."
        texts = {name: body.get("description") for name, body in schema.parameters["properties"].items()}
        assert texts == {"city": 'Where, such as "Paris: north".', "days": "How long.", "unit": "own text"}

    def test_no_docstring_is_fine(self):
        def fn(a: str):
            pass

        assert function_schema(fn)[0].description == ""

    def test_a_given_description_wins(self):
        def fn(a: str):
            """Text."""

        assert function_schema(fn, description="other")[0].description == "other"


class TestRefusals:
    def test_no_hint(self):
        def fn(a, b: int):
            pass

        with pytest.raises(ToolSchemaError, match="parameter 'a' has no type hint: write a: str"):
            function_schema(fn)

    def test_star_arguments(self):
        def stars(*args: str):
            pass

        def double(**kwargs: str):
            pass

        with pytest.raises(ToolSchemaError, match=r"\*args.*name the parameters, take one of type list\[str\]"):
            function_schema(stars)
        with pytest.raises(ToolSchemaError, match=r"\*\*kwargs"):
            function_schema(double)

    def test_positional_only(self):
        def fn(a: str, /):
            pass

        with pytest.raises(ToolSchemaError, match="remove the '/'"):
            function_schema(fn)

    @pytest.mark.parametrize(
        "hint", [Callable[[int], int], object(), "Undefined", typing.Iterator[int], type("Own", (), {})]
    )
    def test_types_that_json_cannot_express(self, hint):
        def fn(count: int, value):
            pass

        fn.__annotations__["value"] = hint
        with pytest.raises(ToolSchemaError) as error:
            function_schema(fn)
        assert "fn" in str(error.value)

    def test_the_culprit_is_named(self):
        def fn(count: int, callback: Callable[[], int]):
            pass

        with pytest.raises(ToolSchemaError, match=r"parameter 'callback'.*Literal"):
            function_schema(fn)

    def test_a_default_that_json_cannot_express(self):
        def fn(a: Any = object()):  # noqa: B008
            pass

        with pytest.raises(ToolSchemaError, match="the default of 'a'"):
            function_schema(fn)

    def test_a_typed_dict_that_holds_itself(self):
        with pytest.raises(ToolSchemaError, match="contains itself: use a pydantic model"):
            of(Tree)

    @pytest.mark.parametrize("name", ["<lambda>", "two words", "", "x" * 129])
    def test_names(self, name):
        def fn(a: str):
            pass

        fn.__name__ = name
        with pytest.raises(ToolSchemaError, match="not a name for a tool"):
            function_schema(fn)


class Tree(TypedDict):
    children: "list[Tree]"


class TestGivenSchemas:
    FULL = {  # noqa: RUF012
        "type": "object",
        "properties": {"a": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "x-own": {"title": "kept"}}},
        "required": ["a"],
        "$defs": {"unused": {"title": "T"}},
    }

    @pytest.mark.parametrize(
        "form",
        [
            {"type": "function", "function": {"name": "f", "description": "d", "parameters": FULL, "strict": True}},
            {"name": "f", "description": "d", "parameters": FULL},
            ToolSchema("f", "d", FULL),
        ],
    )
    def test_schema_keeps_all_keywords(self, form):
        assert as_schema(form) == ToolSchema("f", "d", self.FULL)

    def test_a_pydantic_object_in_openais_form(self):
        class Inner(pydantic.BaseModel):
            name: str
            description: str
            parameters: dict[str, Any]
            strict: bool = False

        class Outer(pydantic.BaseModel):
            type: str
            function: Inner

        inner = Inner(name="f", description="d", parameters=self.FULL)
        assert as_schema(Outer(type="function", function=inner)) == ToolSchema("f", "d", self.FULL)

    @pytest.mark.parametrize(
        ("form", "words"),
        [
            ({"parameters": {}}, "without a name"),
            ({"name": "f", "parameters": {"type": "array"}}, "'array'.*type 'object'"),
            ({"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "strng"}}}}, "'strng'"),
            ({"name": "f", "params": {}}, "not params"),
        ],
    )
    def test_bad_forms(self, form, words):
        with pytest.raises(ToolSchemaError, match=words):
            as_schema(form)

    def test_values_are_converted_by_the_hints_there_are(self):
        schema = {
            "name": "f",
            "parameters": {"type": "object", "properties": {"c": {"type": "string"}, "d": {}}, "required": ["c"]},
        }

        @function_tool(schema=schema)
        def given(c: Colour, d=None):
            return ""

        assert given.schema.parameters == schema["parameters"]
        assert given.arguments.parse({"c": "red", "d": [1]}) == {"c": Colour.RED, "d": [1]}
        with pytest.raises(ArgumentError):
            given.arguments.parse({"c": "green"})

    def test_the_signature_must_fit(self):
        schema = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
        with pytest.raises(ToolSchemaError, match=r"'a', which .* does not take"):
            function_tool(schema=schema)(lambda: "")
        with pytest.raises(ToolSchemaError, match="needs 'a', which the schema does not require"):

            @function_tool(schema=schema)
            def fn(a: str):
                pass

        @function_tool(schema=schema)
        def open_ended(**arguments):
            return arguments

        assert open_ended.arguments.parse({"a": "x"}) == {"a": "x"}


class TestArguments:
    def convert(self, fn, values):
        return function_schema(fn)[1].parse(values)

    def test_values_become_the_annotated_types(self):
        def fn(box: Box, point: Point, colours: list[Colour], ratio: float, count: int, person: Person | None = None):
            pass

        arguments = {
            "box": {"corner": [1, 2.5], "colour": "blue"},
            "point": {"x": 3},
            "colours": ["red"],
            "ratio": 2,
            "count": 3.0,
            "person": {"name": "a", "age": 3},
        }
        result = self.convert(fn, arguments)
        assert result["box"] == Box((1.0, 2.5), Colour.BLUE)
        assert result["point"] == {"x": 3}
        assert result["colours"] == [Colour.RED]
        assert (result["ratio"], type(result["ratio"])) == (2.0, float)
        assert (result["count"], type(result["count"])) == (3, int)
        assert result["person"] == Person(name="a", age=3)

    def test_defaults_are_left_to_the_function(self):
        def fn(a: int, b: int = 2):
            pass

        assert self.convert(fn, {"a": 1}) == {"a": 1}

    @pytest.mark.parametrize(
        ("values", "path", "word"),
        [
            ({}, "$", "required"),
            ({"a": "x"}, "$.a", "integer"),
            ({"a": True}, "$.a", "integer"),
            ({"a": 1, "zzz": 1}, "$", "zzz"),
            ({"a": 1, "b": [{"x": 1}, {"x": "no"}]}, "$.b[1].x", "integer"),
            ([], "$", "object"),
            ("text", "$", "object"),
            ({"a": "9" * 10_000}, "$.a", "integer"),
        ],
    )
    def test_unfitting_arguments_raise_argument_errors(self, values, path, word):
        def fn(a: int, b: list[Point] = []):  # noqa: B006
            pass

        with pytest.raises(ArgumentError, match=word) as error:
            self.convert(fn, values)
        assert error.value.path == path
        assert len(str(error.value)) < 400

    def test_values_that_only_python_refuses(self):
        import datetime

        def fn(day: datetime.date):
            pass

        assert self.convert(fn, {"day": "2026-02-03"}) == {"day": datetime.date(2026, 2, 3)}
        with pytest.raises(ArgumentError) as error:
            self.convert(fn, {"day": "yesterday"})
        assert error.value.path == "$.day"

    def test_deep_nesting_is_an_argument_error(self):
        def fn(person: Person):
            pass

        deep: dict[str, Any] = {"name": "a", "age": 1, "friends": []}
        for _ in range(3000):
            deep = {"name": "a", "age": 1, "friends": [deep]}
        with pytest.raises(ArgumentError):
            self.convert(fn, {"person": deep})


@functools.cache
def parser_of_points():
    def fn(a: Point, b: list[Colour] | None = None):
        pass

    return function_schema(fn)[1]


@settings(max_examples=examples(100), deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=4),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "b", "x", "zz"]), inner, max_size=3)
        ),
        max_leaves=8,
    )
)
def test_any_json_either_parses_or_is_an_argument_error(value):
    try:
        result = parser_of_points().parse(value)
    except ArgumentError as error:
        assert error.path.startswith("$")  # noqa: PT017 - either outcome is right
    else:
        assert set(result) <= {"a", "b"}


def test_examples_respect_bounds():
    def fn(
        a: Annotated[int, annotated_types.Gt(4), annotated_types.Lt(6)],
        b: Annotated[str, annotated_types.MinLen(12)],
        c: Annotated[float, annotated_types.Le(-3)],
        d: Annotated[list[int], annotated_types.MinLen(2)],
        e: Box,
    ):
        pass

    schema, arguments = function_schema(fn)
    result = example_arguments(schema)
    assert result is not None
    assert result["a"] == 5
    arguments.parse(result)
