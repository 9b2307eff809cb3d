"""Which parameters a tool takes, by its JSON schema.

Owns: :class:`Shape` and :func:`shapes`, which look through ``$ref``, ``allOf``, ``anyOf`` and ``oneOf`` at the top of a
schema, and the types and choices of one parameter. Refuses: validation, which is the tool layer's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from turnwise.types import Json, ToolSchema

_DEPTH = 8
_MOST_SHAPES = 16
_COMPOSED = ("$ref", "allOf", "anyOf", "oneOf")


@dataclass(frozen=True, slots=True)
class Shape:
    """One set of parameters that a tool may be called with.

    Attributes:
        properties: Their schemas by name, in the order of the schema.
        required: Those that must be there.
    """

    properties: dict[str, Any] = field(default_factory=dict)
    required: frozenset[str] = frozenset()


def shapes(parameters: Mapping[str, Any]) -> list[Shape]:
    """Return the sets of parameters that a schema allows, one for each of its alternatives.

    Of more than 16 there is one: all parameters, and those required that all of them require.
    """
    found: list[Shape] = []
    for shape in _shapes(parameters, parameters, {}):
        unnamed: dict[str, Any] = {key: {} for key in sorted(shape.required - shape.properties.keys())}
        whole = Shape({**shape.properties, **unnamed}, shape.required)
        if whole not in found:
            found.append(whole)
    return found


def names_all(parameters: Mapping[str, Any]) -> bool:
    """Return whether a schema names all its parameters itself, so that it can be closed to others."""
    properties, required = parameters.get("properties"), parameters.get("required")
    named = properties if isinstance(properties, Mapping) else {}
    wanted = required if isinstance(required, list) else []
    return not any(word in parameters for word in _COMPOSED) and all(key in named for key in wanted)


def parameter_types(tools: Sequence[ToolSchema], name: str) -> dict[str, frozenset[str]]:
    """Return the JSON types that each parameter of a tool may have; none for those that may have any."""
    found: dict[str, frozenset[str]] = {}
    root = next((tool.parameters for tool in tools if tool.name == name), {})
    for shape in shapes(root):
        for key, schema in shape.properties.items():
            types = types_of(schema, root)
            # One alternative that allows any value allows it.
            known = found.get(key, types)
            found[key] = known | types if known and types else frozenset()
    return found


def types_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """Return the JSON types that a parameter's schema names; empty where it names none."""
    return frozenset(_types(schema, root, set()))


def choices_of(schema: Any, root: Mapping[str, Any]) -> list[Json] | None:
    """Return the values that a parameter's schema lists (``const``, ``enum``), None where it lists none."""
    return next(_choices(schema, root, set()), None)


def _shapes(node: Any, root: Mapping[str, Any], known: dict[str, list[Shape]], depth: int = _DEPTH) -> list[Shape]:
    if not isinstance(node, Mapping) or depth == 0:
        return [Shape()]
    properties, required = node.get("properties"), node.get("required")
    named = dict(properties) if isinstance(properties, Mapping) else {}
    wanted = [key for key in required if isinstance(key, str)] if isinstance(required, list) else []
    found = [Shape(named, frozenset(wanted))]
    options = [_referred(node["$ref"], root, known, depth)] if isinstance(node.get("$ref"), str) else []
    groups = [[part] for part in node["allOf"]] if isinstance(node.get("allOf"), list) else []
    groups += [node[word] for word in ("anyOf", "oneOf") if isinstance(node.get(word), list) and node[word]]
    options += [[shape for part in group for shape in _shapes(part, root, known, depth - 1)] for group in groups]
    for others in options:
        found = _few([_merged(one, other) for one in found for other in _few(others)])
    return found


def _referred(reference: str, root: Mapping[str, Any], known: dict[str, list[Shape]], depth: int) -> list[Shape]:
    if reference not in known:
        # A schema that refers to itself adds nothing to itself.
        known[reference] = [Shape()]
        known[reference] = _shapes(_resolve(reference, root), root, known, depth - 1)
    return known[reference]


def _merged(one: Shape, other: Shape) -> Shape:
    properties = dict(one.properties)
    for key, schema in other.properties.items():
        known = properties.get(key, schema)
        properties[key] = schema if known == schema else {"allOf": [known, schema]}
    return Shape(properties, one.required | other.required)


def _few(found: list[Shape]) -> list[Shape]:
    if len(found) <= _MOST_SHAPES:
        return found
    properties: dict[str, Any] = {}
    for shape in found:
        for key, schema in shape.properties.items():
            # What the alternatives say differently is not known.
            properties[key] = schema if properties.get(key, schema) == schema else {}
    return [Shape(properties, frozenset.intersection(*(shape.required for shape in found)))]


def _types(schema: Any, root: Mapping[str, Any], seen: set[str], depth: int = _DEPTH) -> Iterator[str]:
    if not isinstance(schema, Mapping) or depth == 0:
        return
    kind = schema.get("type")
    if isinstance(kind, str):
        yield kind
    elif isinstance(kind, list):
        yield from (item for item in kind if isinstance(item, str))
    else:
        if "const" in schema:
            yield type_of(schema["const"])
        for value in schema["enum"] if isinstance(schema.get("enum"), list) else ():
            yield type_of(value)
        for word in ("anyOf", "oneOf", "allOf"):
            for branch in schema[word] if isinstance(schema.get(word), list) else ():
                yield from _types(branch, root, seen, depth - 1)
        yield from (kind for part in _new(schema, root, seen) for kind in _types(part, root, seen, depth - 1))
    if schema.get("nullable") is True:
        yield "null"


def _choices(schema: Any, root: Mapping[str, Any], seen: set[str], depth: int = _DEPTH) -> Iterator[list[Json]]:
    if not isinstance(schema, Mapping) or depth == 0:
        return
    if "const" in schema:
        yield [schema["const"]]
    elif isinstance(schema.get("enum"), list) and schema["enum"]:
        yield schema["enum"]
    else:
        together = schema["allOf"] if isinstance(schema.get("allOf"), list) else []
        for part in [*together, *_new(schema, root, seen)]:
            yield from _choices(part, root, seen, depth - 1)


def _new(schema: Mapping[str, Any], root: Mapping[str, Any], seen: set[str]) -> list[Any]:
    """Return what a schema refers to, unless that was seen: going through it again would take without end."""
    reference = schema.get("$ref")
    if not isinstance(reference, str) or reference in seen:
        return []
    seen.add(reference)
    return [_resolve(reference, root)]


def _resolve(reference: str, root: Mapping[str, Any]) -> Any:
    node: Any = root
    for part in reference.removeprefix("#").strip("/").split("/"):
        node = node.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(node, Mapping) else None
    return node


def type_of(value: Json) -> str:
    """Return the JSON type of a value."""
    if value is None:
        return "null"
    kinds: dict[type, str] = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    return kinds.get(type(value), "object")
