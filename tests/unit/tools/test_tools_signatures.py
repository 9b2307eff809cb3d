"""Any signature that JSON can express: its schema is one, and what the types or the schema allow is accepted."""

import dataclasses
import enum
import itertools
import json
import sys
import types
import typing
from typing import Annotated, Any, Literal, Optional

import annotated_types
import jsonschema
import pydantic
import pytest
import typing_extensions
from hypothesis import given, settings
from hypothesis import strategies as st

from support.chat.model_dirs import renderer_for
from support.property_tests import examples
from support.tools.schema_values import values_of
from turnwise.errors import ToolSchemaError
from turnwise.model.canonical import canonical_messages
from turnwise.tools import as_schema, function_schema, function_tool
from turnwise.tools.sample_arguments import example_arguments
from turnwise.tools.schema import ArgumentError

NUMBERS = itertools.count()


class Suit(enum.Enum):
    HEARTS = "hearts"
    SPADES = 4


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


@dataclasses.dataclass
class Hint:
    """A type, and the JSON values that it allows."""

    hint: Any
    values: st.SearchStrategy[Any]

    def __repr__(self):
        return f"{self.hint}"


LEAVES = [
    Hint(str, st.text(max_size=4)),
    Hint(int, st.integers(-(2**40), 2**40)),
    Hint(float, st.floats(allow_nan=False, allow_infinity=False) | st.integers(-9, 9)),
    Hint(bool, st.booleans()),
    Hint(None, st.none()),
    Hint(Any, st.none() | st.integers(0, 3) | st.lists(st.text(max_size=2), max_size=2)),
    Hint(Suit, st.sampled_from(["hearts", 4])),
    Hint(Level, st.sampled_from([1, 2])),
    Hint(Literal["a", 3, None], st.sampled_from(["a", 3, None])),
    Hint(Annotated[int, annotated_types.Interval(ge=2, lt=9)], st.integers(2, 8)),
    Hint(
        Annotated[int, annotated_types.MultipleOf(3), annotated_types.Gt(0), annotated_types.Le(30)],
        st.sampled_from([3, 30]),
    ),
    Hint(Annotated[float, annotated_types.Gt(0), "above zero"], st.floats(0, 9, exclude_min=True)),
    Hint(Annotated[str, annotated_types.Len(2, 5)], st.text(min_size=2, max_size=5)),
    Hint(
        Annotated[list[int], annotated_types.MinLen(1), annotated_types.MaxLen(2)],
        st.lists(st.integers(0, 3), min_size=1, max_size=2),
    ),
    Hint(
        Annotated[dict[str, int], annotated_types.MinLen(1)],
        st.dictionaries(st.text(max_size=2), st.integers(0, 3), min_size=1, max_size=2),
    ),
    Hint(set[int], st.lists(st.integers(0, 9), max_size=3, unique=True)),
]


def containers(inner: st.SearchStrategy[Hint]) -> st.SearchStrategy[Hint]:
    fields = st.dictionaries(st.sampled_from(["x", "y_1", "title", "type"]), inner, min_size=1, max_size=3)
    return st.one_of(
        inner.map(lambda hint: Hint(list[hint.hint], st.lists(hint.values, max_size=2))),
        inner.map(
            lambda hint: Hint(dict[str, hint.hint], st.dictionaries(st.text(max_size=2), hint.values, max_size=2))
        ),
        inner.map(lambda hint: Hint(Optional[hint.hint], hint.values | st.none())),  # noqa: UP045
        inner.map(lambda hint: Hint(Annotated[hint.hint, "what it is"], hint.values)),
        st.tuples(inner, inner).map(
            lambda pair: Hint(tuple[pair[0].hint, pair[1].hint], st.tuples(pair[0].values, pair[1].values).map(list))
        ),
        fields.map(typed_dict),
        fields.map(data_class),
        fields.map(model),
    )


def typed_dict(fields: dict[str, Hint]) -> Hint:
    required, *rest = fields
    hints = {required: typing.Required[fields[required].hint], **{name: fields[name].hint for name in rest}}
    built = typing.TypedDict(f"Typed{next(NUMBERS)}", hints, total=False)
    optional = {name: fields[name].values for name in rest}
    return Hint(built, st.fixed_dictionaries({required: fields[required].values}, optional=optional))


def data_class(fields: dict[str, Hint]) -> Hint:
    built = dataclasses.make_dataclass(f"Data{next(NUMBERS)}", [(name, hint.hint) for name, hint in fields.items()])
    built.__module__ = __name__
    return Hint(built, st.fixed_dictionaries({name: hint.values for name, hint in fields.items()}))


def model(fields: dict[str, Hint]) -> Hint:
    # Pydantic itself takes no typing.TypedDict on Python 3.11, wherever in a model it stands.
    allowed = {name: hint for name, hint in fields.items() if takes(hint.hint)} or {"x": LEAVES[0]}
    built = pydantic.create_model(f"Model{next(NUMBERS)}", **{name: (hint.hint, ...) for name, hint in allowed.items()})
    return Hint(built, st.fixed_dictionaries({name: hint.values for name, hint in allowed.items()}))


def takes(hint: Any) -> bool:
    try:
        pydantic.TypeAdapter(hint)
    except pydantic.errors.PydanticUserError:
        return False
    return True


HINTS = st.recursive(st.sampled_from(LEAVES), containers, max_leaves=5)
SIGNATURES = st.lists(st.tuples(HINTS, st.booleans()), max_size=4)


def signature(hints: list[Hint], optional: list[bool]):
    """Return a function of those parameters; optional ones are ``None`` where they are left out."""
    names = [f"p{number}" for number in range(len(hints))]
    listed = [f"{name}=None" if left_out else name for name, left_out in zip(names, optional, strict=True)]
    scope: dict[str, Any] = {}
    exec(f"def fn(*, {', '.join(listed)}): pass" if listed else "def fn(): pass", scope)
    scope["fn"].__module__ = __name__
    scope["fn"].__annotations__ = {name: hint.hint for name, hint in zip(names, hints, strict=True)}
    return scope["fn"], names


@settings(max_examples=examples(100), deadline=None)
@given(SIGNATURES, st.data())
def test_schema_equals_that_of_the_types(drawn, data):
    hints, optional = [hint for hint, _ in drawn], [left_out for _, left_out in drawn]
    fn, names = signature(hints, optional)
    schema, arguments = function_schema(fn)
    parameters = schema.parameters
    jsonschema.Draft202012Validator.check_schema(parameters)
    assert json.loads(json.dumps(schema.to_json())) == schema.to_json()
    assert as_schema(schema.to_json()) == schema
    assert "$ref" not in str(parameters)
    assert list(parameters["properties"]) == names
    assert parameters.get("required", []) == [
        name for name, omitted in zip(names, optional, strict=True) if not omitted
    ]

    validator = jsonschema.Draft202012Validator(parameters)
    from_types = {name: data.draw(hint.values) for name, hint in zip(names, hints, strict=True)}
    validator.validate(from_types)
    assert list(arguments.parse(from_types)) == names

    from_schema = data.draw(values_of(parameters))
    validator.validate(from_schema)
    assert set(arguments.parse(from_schema)) == set(from_schema)

    with pytest.raises(ArgumentError, match="p99"):
        arguments.parse({**from_types, "p99": 1})
    made_up = example_arguments(schema)
    assert made_up is None or arguments.parse(made_up) is not None


class Place(typing.TypedDict):
    city: Annotated[str, "its name"]
    zip: typing.NotRequired[Annotated[str, annotated_types.Len(5, 5)]]


@dataclasses.dataclass(frozen=True)
class Trip:
    """A way between places."""

    stops: Annotated[list[Place], annotated_types.MinLen(1), "in order"]
    seats: Annotated[int, annotated_types.Interval(ge=1, le=9), "free ones"] = 2
    notes: list[str] = dataclasses.field(default_factory=list)

    def __post_init__(self):
        if any(not stop["city"] for stop in self.stops):
            raise ValueError("a stop needs a city")


class TestDataclasses:
    def of(self, hint):
        def fn(value):
            pass

        fn.__annotations__["value"] = hint
        return function_schema(fn)

    def test_texts_limits_and_typed_dicts_inside_are_kept(self):
        schema, arguments = self.of(list[Trip] | None)
        trip = schema.parameters["properties"]["value"]["anyOf"][0]["items"]
        point = {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "its name"},
                "zip": {"type": "string", "minLength": 5, "maxLength": 5},
            },
            "required": ["city"],
        }
        assert trip == {
            "type": "object",
            "description": "A way between places.",
            "properties": {
                "stops": {"type": "array", "items": point, "minItems": 1, "description": "in order"},
                "seats": {"type": "integer", "minimum": 1, "maximum": 9, "default": 2, "description": "free ones"},
                "notes": {"type": "array", "items": {"type": "string"}},
            },
            "required": ["stops"],
        }
        assert arguments.parse({"value": [{"stops": [{"city": "Bonn"}]}]}) == {"value": [Trip([{"city": "Bonn"}])]}

    @pytest.mark.parametrize(
        ("value", "path", "words"),
        [
            ({"stops": []}, "$.value.stops", "non-empty|too short"),
            ({"stops": [{"city": "Bonn", "zip": "1"}]}, "$.value.stops[0].zip", "too short"),
            ({"stops": [{"city": "Bonn"}], "seats": 10}, "$.value.seats", "maximum of 9"),
            ({"stops": [{"city": ""}]}, "$.value", "needs a city"),
        ],
    )
    def test_limits_of_nested_types_are_enforced(self, value, path, words):
        _, arguments = self.of(Trip)
        with pytest.raises(ArgumentError, match=words) as error:
            arguments.parse({"value": value})
        assert error.value.path == path

    def test_recursive_schema_keeps_definitions(self):
        _, arguments = self.of(Node)
        assert arguments.parse({"value": {"inner": [{"inner": []}]}}) == {"value": Node([Node([])])}


@dataclasses.dataclass
class Node:
    inner: list["Node"]


@pytest.mark.parametrize("family", ["qwen3", "qwen2_5", "qwen3_6", "llama3_1", "glm4moe"])
def test_prompt_has_all_details_of_the_function(family):
    @function_tool
    def plan(
        trip: Trip, colours: list[Literal["red", "blue"]], limit: Annotated[float, annotated_types.Gt(0)] | None = None
    ):
        """Plan a trip.

        Args:
            trip: Where to go.
            colours: What to wear.
        """

    renderer = renderer_for(family)
    prompt = renderer.decode(renderer.render(canonical_messages([{"role": "user", "content": "Go."}]), [plan.schema]))
    tools = [hint for hint in objects_in(prompt) if "plan" in (hint.get("name"), hint.get("function", {}).get("name"))]
    if tools:
        function = tools[0].get("function", tools[0])
        assert {key: function[key] for key in ("name", "description", "parameters")} == plan.schema.to_json()[
            "function"
        ]
    else:
        # A template that writes its own markup: every word and number of the schema stands in it.
        assert family == "qwen3_6"
        for word in words_of(plan.schema.parameters):
            assert str(word) in prompt, word


def objects_in(text: str) -> list[dict[str, Any]]:
    """Every JSON object in a text that stands in no other."""
    tools, position = [], 0
    decoder = json.JSONDecoder()
    while (start := text.find("{", position)) >= 0:
        try:
            value, position = decoder.raw_decode(text, start)
            tools.append(value)
        except json.JSONDecodeError:
            position = start + 1
    return tools


def words_of(schema: Any) -> list[Any]:
    if isinstance(schema, dict):
        return [*schema, *(word for value in schema.values() for word in words_of(value))]
    if isinstance(schema, list):
        return [word for value in schema for word in words_of(value)]
    return [schema] if isinstance(schema, (str, int)) and not isinstance(schema, bool) else []


def tool_of(hint: Any) -> Any:
    def fn(value): ...

    fn.__annotations__["value"] = hint
    return function_schema(fn)[0]


def test_qualifiers_of_keys_hold_where_annotations_are_strings(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"NotRequired": typing.NotRequired, "Required": typing.Required, "Annotated": Annotated}
    for kind in (typing.TypedDict, typing_extensions.TypedDict):
        scope: dict[str, Any] = {"kind": kind, "__name__": f"made_{next(NUMBERS)}", **names}
        exec(
            "from __future__ import annotations\n"
            "class All(kind):\n    a: NotRequired[int]\n    b: int\n    c: Annotated[NotRequired[int], 'third']\n"
            "class Few(kind, total=False):\n    a: Required[int]\n    b: int\n",
            scope,
        )
        monkeypatch.setitem(sys.modules, scope["__name__"], types.SimpleNamespace(**scope))
        for name, required in (("All", ["b"]), ("Few", ["a"])):
            schema = tool_of(scope[name]).parameters["properties"]["value"]
            assert schema.get("required") == required


@pytest.mark.parametrize("hint", [complex, list[complex], complex | None, Annotated[complex, "z"]])
def test_a_complex_number_is_no_argument(hint: Any) -> None:
    with pytest.raises(ToolSchemaError, match="complex is no type of JSON: take two floats"):
        tool_of(hint)
