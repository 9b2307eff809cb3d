"""A quick yes for arguments of plain schemas.

Owns: :func:`quick_check`, which compiles the keywords that the schemas of most tools have into a few type tests.
Refuses: saying no, and explaining: what does not pass here, and every schema with another keyword in it, is judged by
the JSON schema validator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

Test: TypeAlias = Callable[[Any], bool]
"""True only for values that fit."""

_TYPES: Final[dict[str, tuple[type, ...]]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}
_NOTES: Final = frozenset(("title", "description", "default", "examples", "format"))
"""Keywords that restrict nothing."""
_BOUNDS: Final = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"))
_LENGTHS: Final = frozenset(("minLength", "maxLength"))
_ARRAY: Final = frozenset(("items", "minItems", "maxItems"))
_OBJECT: Final = frozenset(("properties", "required", "additionalProperties", "minProperties", "maxProperties"))
_INFINITE: Final = float("inf")


def quick_check(schema: Mapping[str, Any]) -> Test | None:
    """Return a test that is true only for arguments which fit the schema, or None where the schema is not plain.

    Args:
        schema: A JSON schema of type ``object``. Plain are schemas of strings, numbers, booleans, null, arrays and
            objects with the limits of their sizes, of texts to choose from, and unions of such.
    """
    return _object(schema) if schema.get("type") == "object" else None


def _compile(schema: Any) -> Test | None:
    if not isinstance(schema, Mapping):
        return None
    keywords = set(schema) - _NOTES
    if not keywords:
        return _anything
    if keywords == {"anyOf"}:
        return _any_of([_compile(each) for each in schema["anyOf"]])
    if "enum" in keywords or "const" in keywords:
        return _texts(schema, keywords)
    kind = schema.get("type")
    if kind == "object":
        return _object(schema)
    if kind == "array":
        return _array(schema) if keywords <= {"type", *_ARRAY} else None
    if kind in ("integer", "number") and keywords & _BOUNDS:
        return _bounded(schema, frozenset(_TYPES[kind])) if keywords <= {"type", *_BOUNDS} else None
    if kind == "string" and keywords & _LENGTHS:
        return _long(schema) if keywords <= {"type", *_LENGTHS} else None
    return _of_types(kind) if keywords == {"type"} else None


def _anything(value: Any) -> bool:  # noqa: ARG001 - a test
    return True


def _any_of(tests: list[Test | None]) -> Test | None:
    found = [test for test in tests if test is not None]
    return (lambda value: any(test(value) for test in found)) if len(found) == len(tests) else None


def _of_types(kind: Any) -> Test | None:
    names = kind if isinstance(kind, list) else [kind]
    if not names or not all(isinstance(name, str) and name in _TYPES for name in names):
        return None
    # By type: 0 and 1 are no booleans of a schema, although they equal them.
    types = frozenset(each for name in names for each in _TYPES[name])
    return lambda value: type(value) in types


def _texts(schema: Mapping[str, Any], keywords: set[str]) -> Test | None:
    texts = schema["enum"] if "enum" in keywords else [schema["const"]]
    allowed = ({"enum"}, {"enum", "type"}, {"const"}, {"const", "type"})
    if keywords not in allowed or not all(isinstance(text, str) for text in texts):
        return None
    if schema.get("type", "string") != "string":
        return None
    known = frozenset(texts)
    return lambda value: type(value) is str and value in known


def _bounded(schema: Mapping[str, Any], types: frozenset[type]) -> Test:
    least, most = schema.get("minimum", -_INFINITE), schema.get("maximum", _INFINITE)
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    return lambda value: (
        type(value) in types
        and least <= value <= most
        and (above is None or value > above)
        and (below is None or value < below)
    )


def _long(schema: Mapping[str, Any]) -> Test:
    least, most = schema.get("minLength", 0), schema.get("maxLength", _INFINITE)
    return lambda value: type(value) is str and least <= len(value) <= most


def _array(schema: Mapping[str, Any]) -> Test | None:
    item = _compile(schema.get("items", {}))
    if item is None:
        return None
    least, most = schema.get("minItems", 0), schema.get("maxItems", _INFINITE)
    return lambda value: type(value) is list and least <= len(value) <= most and all(item(each) for each in value)


def _object(schema: Mapping[str, Any]) -> Test | None:
    if set(schema) - {"type"} - _OBJECT - _NOTES:
        return None
    tests: dict[str, Test] = {}
    for name, value in schema.get("properties", {}).items():
        test = _compile(value)
        if test is None:
            return None
        tests[name] = test
    others = schema.get("additionalProperties", True)
    other: Test | None = _anything if others is True else None
    if others is not True and others is not False:
        other = _compile(others)
        if other is None:
            return None
    required = frozenset(schema.get("required", ()))
    least, most = schema.get("minProperties", 0), schema.get("maxProperties", _INFINITE)

    def fits(value: Any) -> bool:
        if type(value) is not dict or not required <= value.keys() or not least <= len(value) <= most:
            return False
        for name, each in value.items():
            test = tests.get(name, other)
            if test is None or not test(each):
                return False
        return True

    return fits
