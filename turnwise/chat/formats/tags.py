"""Structural tags: the JSON grammars for structured output that xgrammar reads and vLLM accepts.

A marker that is an added token matches that token's id only: the same text spelled in pieces is text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from turnwise.chat.tokens import alternatives
from turnwise.types import Guide, Json, ToolSchema

_DEPTH = 8
_MOST_SHAPES = 16
_COMPOSED = ("$ref", "allOf", "anyOf", "oneOf")


@dataclass(frozen=True, slots=True)
class Shape:
    """One set of parameters that a tool accepts: schemas by name in schema order, and the required names."""

    properties: dict[str, Any] = field(default_factory=dict)
    required: frozenset[str] = frozenset()


def shapes(parameters: Mapping[str, Any]) -> list[Shape]:
    """Return the parameter sets that a schema allows, one per alternative; more than 16 are merged into one."""
    distinct: list[Shape] = []
    for shape in _shapes(parameters, parameters, {}):
        unnamed: dict[str, Any] = {key: {} for key in sorted(shape.required - shape.properties.keys())}
        complete = Shape({**shape.properties, **unnamed}, shape.required)
        if complete not in distinct:
            distinct.append(complete)
    return distinct


def names_all(parameters: Mapping[str, Any]) -> bool:
    """Return whether a schema names all its parameters at the top, so that it can be closed to others."""
    properties, required = parameters.get("properties"), parameters.get("required")
    named = properties if isinstance(properties, Mapping) else {}
    required_names = required if isinstance(required, list) else []
    return not any(word in parameters for word in _COMPOSED) and all(key in named for key in required_names)


def parameter_types(tools: Sequence[ToolSchema], name: str) -> dict[str, frozenset[str]]:
    """Return the allowed JSON types of each parameter of a tool; empty for any."""
    types_by_name: dict[str, frozenset[str]] = {}
    root = next((tool.parameters for tool in tools if tool.name == name), {})
    for shape in shapes(root):
        for key, schema in shape.properties.items():
            types = types_of(schema, root)
            # One alternative that allows any value allows it.
            known_types = types_by_name.get(key, types)
            types_by_name[key] = known_types | types if known_types and types else frozenset()
    return types_by_name


def types_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """Return the JSON types that a parameter's schema names; empty if it names none."""
    return frozenset(_types(schema, root, set()))


def choices_of(schema: Any, root: Mapping[str, Any]) -> list[Json] | None:
    """Return the values of a parameter's ``const`` or ``enum``, None if it has neither."""
    return next(_choices(schema, root, set()), None)


def _shapes(node: Any, root: Mapping[str, Any], resolved: dict[str, list[Shape]], depth: int = _DEPTH) -> list[Shape]:
    if not isinstance(node, Mapping) or depth == 0:
        return [Shape()]
    properties, required = node.get("properties"), node.get("required")
    named = dict(properties) if isinstance(properties, Mapping) else {}
    required_names = [key for key in required if isinstance(key, str)] if isinstance(required, list) else []
    combined = [Shape(named, frozenset(required_names))]
    options = [_referred_shapes(node["$ref"], root, resolved, depth)] if isinstance(node.get("$ref"), str) else []
    groups = [[part] for part in node["allOf"]] if isinstance(node.get("allOf"), list) else []
    groups += [node[word] for word in ("anyOf", "oneOf") if isinstance(node.get(word), list) and node[word]]
    options += [[shape for part in group for shape in _shapes(part, root, resolved, depth - 1)] for group in groups]
    for alternatives_of_part in options:
        combined = _merge_many([_merge(one, other) for one in combined for other in _merge_many(alternatives_of_part)])
    return combined


def _referred_shapes(
    reference: str, root: Mapping[str, Any], resolved: dict[str, list[Shape]], depth: int
) -> list[Shape]:
    if reference not in resolved:
        # A schema that refers to itself adds nothing to itself.
        resolved[reference] = [Shape()]
        resolved[reference] = _shapes(_resolve(reference, root), root, resolved, depth - 1)
    return resolved[reference]


def _merge(one: Shape, other: Shape) -> Shape:
    properties = dict(one.properties)
    for key, schema in other.properties.items():
        earlier = properties.get(key, schema)
        properties[key] = schema if earlier == schema else {"allOf": [earlier, schema]}
    return Shape(properties, one.required | other.required)


def _merge_many(alternative_shapes: list[Shape]) -> list[Shape]:
    if len(alternative_shapes) <= _MOST_SHAPES:
        return alternative_shapes
    properties: dict[str, Any] = {}
    for shape in alternative_shapes:
        for key, schema in shape.properties.items():
            # What the alternatives say differently is not known.
            properties[key] = schema if properties.get(key, schema) == schema else {}
    return [Shape(properties, frozenset.intersection(*(shape.required for shape in alternative_shapes)))]


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
        yield from (
            kind for part in _unseen_references(schema, root, seen) for kind in _types(part, root, seen, depth - 1)
        )
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
        for part in [*together, *_unseen_references(schema, root, seen)]:
            yield from _choices(part, root, seen, depth - 1)


def _unseen_references(schema: Mapping[str, Any], root: Mapping[str, Any], seen: set[str]) -> list[Any]:
    """Return the schemas that a schema refers to, unless seen (references may be cyclic)."""
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


Tag = dict[str, Any]

KINDS = frozenset(
    {"const_string", "token", "json_schema", "regex", "any_text", "sequence", "or", "optional", "star", "plus"}
)
"""What a tag's ``type`` may be."""

_UNENFORCED = frozenset(
    {
        "not", "if", "then", "else", "contains", "minContains", "maxContains", "multipleOf", "dependentSchemas",
        "dependentRequired", "dependencies", "propertyNames", "unevaluatedProperties", "unevaluatedItems",
        "$dynamicRef", "$recursiveRef",
    }
)  # fmt: skip
_LENGTHS = ("minLength", "maxLength")


def text(value: str) -> Tag:
    """Return the tag of exactly this text."""
    return {"type": "const_string", "value": value}


def json_value(schema: Mapping[str, Any], excludes: Sequence[str] = ()) -> Tag:
    """Return the tag of a JSON value by its schema.

    Args:
        schema: The JSON schema.
        excludes: Texts that strings must not contain; ignored if the schema limits string lengths, which engines would
            no longer enforce.
    """
    tag: Tag = {"type": "json_schema", "json_schema": dict(schema)}
    if excludes and not any(key in _LENGTHS for node in _schemas(schema) for key in node):
        tag["excludes"] = list(excludes)
    return tag


def free(*excludes: str) -> Tag:
    """Return the tag of any text without these strings."""
    return {"type": "any_text", "excludes": [text for text in excludes if text]}


def pattern(regex: str) -> Tag:
    """Return the tag of a text that matches a regular expression."""
    return {"type": "regex", "pattern": regex}


def sequence(*parts: Tag) -> Tag:
    """Return the tag of parts in sequence."""
    flat: list[Tag] = []
    for part in parts:
        flat += part["elements"] if part["type"] == "sequence" else [part]
    return flat[0] if len(flat) == 1 else {"type": "sequence", "elements": flat}


def either(*parts: Tag) -> Tag:
    """Return the tag of one of several parts."""
    return parts[0] if len(parts) == 1 else {"type": "or", "elements": list(parts)}


def optional(part: Tag) -> Tag:
    """Return the tag of an optional part."""
    return {"type": "optional", "content": part}


def star(part: Tag) -> Tag:
    """Return the tag of a part repeated any number of times."""
    return {"type": "star", "content": part}


def marked(literal: str, added: Mapping[str, int]) -> Tag:
    """Return the tag of a literal: added tokens as ids, the rest as text."""
    token_pattern = alternatives(added)
    pieces = (
        [piece for piece in re.split(f"({token_pattern.pattern})", literal) if piece] if token_pattern else [literal]
    )
    pieces = pieces or [literal]
    return sequence(*({"type": "token", "token": added[piece]} if piece in added else text(piece) for piece in pieces))


def repeated(part: Tag, separator: Tag | None, limit: int | None) -> Tag:
    """Return the tag of a part repeated 1 to ``limit`` times (None: unbounded) with a separator."""
    if limit == 1:
        return part
    following = part if separator is None else sequence(separator, part)
    if limit is None:
        return sequence(part, star(following))
    rest = optional(following)
    for _ in range(limit - 2):
        rest = optional(sequence(following, rest))
    return sequence(part, rest)


def unenforced_keyword(schema: Any) -> str | None:
    """Return the first keyword of a JSON schema that engines accept but do not enforce, or None."""
    for node in _schemas(schema):
        for key, value in node.items():
            if key in _UNENFORCED and value not in (True, {}):
                return key
        if node.get("uniqueItems") is True:
            return "uniqueItems"
        if isinstance(node.get("allOf"), list) and len(node["allOf"]) > 1:
            return "allOf"
        if node.get("patternProperties") and node.get("properties"):
            return "patternProperties"
    return None


def _schemas(schema: Any) -> Iterator[Mapping[str, Any]]:
    """Yield a JSON schema and its subschemas, excluding values of ``enum``, ``const`` and the like."""
    pending = [schema]
    while pending:
        node = pending.pop()
        if not isinstance(node, Mapping):
            continue
        yield node
        for key, value in node.items():
            if key in ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"):
                pending.extend(value.values() if isinstance(value, Mapping) else ())
            elif key in ("items", "additionalProperties", "not", "contains"):
                pending.extend(value if isinstance(value, list) else [value])
            elif key in ("anyOf", "oneOf", "allOf", "prefixItems"):
                pending.extend(value if isinstance(value, list) else ())


BLANK = optional(either(text("\n\n"), text("\n")))
"""The optional line breaks between parts of a turn."""


def arguments(tool: ToolSchema, excludes: Sequence[str] = ()) -> Tag:
    """Return the tag of a tool's arguments as a JSON object, closed if the schema lists all names at its top."""
    closed = {"additionalProperties": False} if names_all(tool.parameters) else {}
    return json_value({"type": "object", **closed, **tool.parameters}, excludes)


def json_call(tool: ToolSchema, name_key: str, arguments_key: str, excludes: Sequence[str], *, id_key: str = "") -> Tag:
    """Return the tag of a call that is a JSON object with these keys."""
    begin = f"{{{json.dumps(name_key)}: {json.dumps(tool.name)}, {json.dumps(arguments_key)}: "
    end = sequence(text(f', {json.dumps(id_key)}: "'), pattern("[a-zA-Z0-9]{9}"), text('"}')) if id_key else text("}")
    return sequence(text(begin), arguments(tool, excludes), end)


def guided_tag(guide: Guide, calls: Tag | None, with_text: Callable[[Tag], Tag], markers: Sequence[str]) -> Tag:
    """Return the tag of what follows a turn's reasoning.

    Args:
        guide: The structured output.
        calls: The tag of its calls, if allowed.
        with_text: Returns the tag of free text or calls.
        markers: Texts that JSON strings must not contain.
    """
    if calls is not None and not guide.text:
        return calls
    if guide.schema is None:
        return free() if calls is None else with_text(calls)
    value_tag = json_value(guide.schema, markers)
    return value_tag if calls is None else either(value_tag, calls)
