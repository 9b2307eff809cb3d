"""Sample arguments of a schema, for checks that call tools without a model."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any, Final

from turnwise.tools.schema import validator_of
from turnwise.types import ToolSchema

_DEPTH: Final = 8
_TEXT: Final = "example"


def example_arguments(schema: ToolSchema) -> dict[str, Any] | None:
    """Return minimal arguments that a schema allows, or None if none were found."""
    parameters = schema.parameters
    example = _example(parameters, parameters.get("$defs", {}), _DEPTH)
    return example if isinstance(example, dict) and validator_of(parameters).is_valid(example) else None


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


_DRAWN_DEPTH: Final = 6
_MOST_ITEMS: Final = 3
_TRIES: Final = 4
_SPAN: Final = 100
_LETTERS: Final = "abcdefghijklmnopqrstuvwxyz"


def random_arguments(schema: ToolSchema, rng: random.Random, words: Sequence[str] = ()) -> dict[str, Any] | None:
    """Return random arguments that a schema allows, with strings from ``words`` or random letters, or None."""
    parameters = schema.parameters
    validator = validator_of(parameters)
    draw = _Draw(rng, words, parameters.get("$defs", {}))
    for _ in range(_TRIES):
        arguments = draw.value(parameters, _DRAWN_DEPTH)
        if isinstance(arguments, dict) and validator.is_valid(arguments):
            return arguments
    return example_arguments(schema)


class _Draw:
    def __init__(self, rng: random.Random, words: Sequence[str], definitions: Mapping[str, Any]) -> None:
        self._rng, self._words, self._definitions = rng, words, definitions

    def value(self, schema: Any, depth: int) -> Any:
        if not isinstance(schema, Mapping) or depth == 0:
            return None
        if "$ref" in schema:
            return self.value(self._definitions.get(schema["$ref"].removeprefix("#/$defs/")), depth - 1)
        if "const" in schema:
            return schema["const"]
        if schema.get("enum"):
            return self._rng.choice(schema["enum"])
        for key in ("anyOf", "oneOf"):
            if schema.get(key):
                return self.value(self._rng.choice(schema[key]), depth - 1)
        if schema.get("allOf"):
            return self.value(schema["allOf"][0], depth - 1)
        kind = schema.get("type", "string")
        kind = self._rng.choice(kind) if isinstance(kind, list) else kind
        if kind == "object":
            return self._object(schema, depth)
        if kind == "array":
            return self._array(schema, depth)
        if kind in ("integer", "number"):
            return self._number(schema, kind)
        return {"boolean": self._rng.random() < 0.5}.get(kind) if kind != "string" else self._text(schema)

    def _object(self, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
        required = schema.get("required", ())
        names = [name for name in schema.get("properties", {}) if name in required or self._rng.random() < 0.5]
        return {name: self.value(schema["properties"][name], depth - 1) for name in names}

    def _array(self, schema: Mapping[str, Any], depth: int) -> list[Any]:
        prefix = list(schema.get("prefixItems", ()))
        minimum = max(schema.get("minItems", 0), len(prefix))
        count = self._rng.randint(minimum, max(minimum, min(schema.get("maxItems", _MOST_ITEMS), _MOST_ITEMS)))
        items = [*prefix, *[schema.get("items", {})] * count][:count]
        return [self.value(item, depth - 1) for item in items]

    def _number(self, schema: Mapping[str, Any], kind: str) -> float:
        low = schema.get("minimum", schema.get("exclusiveMinimum"))
        high = schema.get("maximum", schema.get("exclusiveMaximum"))
        if low is None:
            low = -_SPAN if high is None else high - 2 * _SPAN
        high = low + 2 * _SPAN if high is None else high
        step = schema.get("multipleOf", 1 if kind == "integer" else None)
        if step is None:
            return self._rng.uniform(low, high)
        lowest, highest = math.ceil(low / step), math.floor(high / step)
        number: float = step * self._rng.randint(lowest, max(lowest, highest))
        return number

    def _text(self, schema: Mapping[str, Any]) -> str:
        minimum = schema.get("minLength", 0)
        if self._words and self._rng.random() < 0.5:
            text = self._rng.choice(self._words)
        else:
            text = "".join(self._rng.choices(_LETTERS, k=self._rng.randint(1, 12)))
        text = text.ljust(minimum, "x")
        return text[: schema.get("maxLength", len(text))]
