"""Sample arguments of a schema, for checks that call tools without a model."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any, Final

from turnwise.tools.schema import validator_of
from turnwise.types import ToolSchema

_DEPTH: Final = 8
_MOST_ITEMS: Final = 3
_TRIES: Final = 4
_SPAN: Final = 200
_LETTERS: Final = "abcdefghijklmnopqrstuvwxyz"


def example_arguments(schema: ToolSchema) -> dict[str, Any] | None:
    """Return minimal arguments that a schema allows, or None if none were found."""
    return _sample(schema, _Sampler(schema.parameters.get("$defs", {})))


def random_arguments(schema: ToolSchema, rng: random.Random, words: Sequence[str] = ()) -> dict[str, Any] | None:
    """Return random arguments that a schema allows, with strings from ``words`` or random letters, or None."""
    sampler = _Sampler(schema.parameters.get("$defs", {}), rng, words)
    for _ in range(_TRIES):
        arguments = _sample(schema, sampler)
        if arguments is not None:
            return arguments
    return example_arguments(schema)


def _sample(schema: ToolSchema, sampler: _Sampler) -> dict[str, Any] | None:
    arguments = sampler.value(schema.parameters, _DEPTH)
    return arguments if isinstance(arguments, dict) and validator_of(schema.parameters).is_valid(arguments) else None


class _Sampler:
    """Draws values of schemas; without ``rng`` it takes the first and least of everything."""

    def __init__(
        self, definitions: Mapping[str, Any], rng: random.Random | None = None, words: Sequence[str] = ()
    ) -> None:
        self._definitions, self._rng, self._words = definitions, rng, words

    def value(self, schema: Any, depth: int) -> Any:
        if not isinstance(schema, Mapping) or depth == 0:
            return None
        if "$ref" in schema:
            return self.value(self._definitions.get(schema["$ref"].removeprefix("#/$defs/")), depth - 1)
        if self._rng is None and ("default" in schema or schema.get("examples")):
            return schema["default"] if "default" in schema else schema["examples"][0]
        if "const" in schema or schema.get("enum"):
            return schema["const"] if "const" in schema else self._choose(schema["enum"])
        for key in ("anyOf", "oneOf"):
            if schema.get(key):
                return self.value(self._choose(schema[key]), depth - 1)
        if schema.get("allOf"):
            return self.value(schema["allOf"][0], depth - 1)
        kind = schema.get("type", "string")
        kind = self._choose(kind) if isinstance(kind, list) else kind
        if kind == "object":
            required = schema.get("required", ())
            properties = schema.get("properties", {})
            names = [name for name in properties if name in required or self._choose([False, True])]
            return {name: self.value(properties[name], depth - 1) for name in names}
        if kind == "array":
            prefix = schema.get("prefixItems", ())
            least = max(schema.get("minItems", 0), len(prefix))
            count = self._choose(range(least, max(least, min(schema.get("maxItems", _MOST_ITEMS), _MOST_ITEMS)) + 1))
            return [self.value(item, depth - 1) for item in [*prefix, *[schema.get("items", {})] * count][:count]]
        if kind in ("integer", "number"):
            return self._number(schema, kind)
        return self._text(schema) if kind == "string" else {"boolean": self._choose([True, False])}.get(kind)

    def _choose(self, options: Sequence[Any]) -> Any:
        return options[0] if self._rng is None else self._rng.choice(options)

    def _number(self, schema: Mapping[str, Any], kind: str) -> float:
        low = schema.get("minimum", schema.get("exclusiveMinimum"))
        high = schema.get("maximum", schema.get("exclusiveMaximum"))
        spread = 0.5 if low is None or high is None else (high - low) / 8 or 0.5
        step: float = schema.get("multipleOf", 1 if kind == "integer" else spread)
        # Multiples of the step on the inner side of the bounds.
        least = None if low is None else math.ceil(low / step) if "minimum" in schema else math.floor(low / step) + 1
        most = None if high is None else math.floor(high / step) if "maximum" in schema else math.ceil(high / step) - 1
        if self._rng is None:
            return step * next(number for number in (least, most, 1) if number is not None)
        if least is None:
            least = -_SPAN // 2 if most is None else most - _SPAN
        return step * self._rng.randint(least, least + _SPAN if most is None else max(least, most))

    def _text(self, schema: Mapping[str, Any]) -> str:
        if self._rng is None:
            text = "example"
        elif self._words and self._rng.random() < 0.5:
            text = self._rng.choice(self._words)
        else:
            text = "".join(self._rng.choices(_LETTERS, k=self._rng.randint(1, 12)))
        text = text.ljust(schema.get("minLength", 0), "x")
        return text[: schema.get("maxLength", len(text))]
