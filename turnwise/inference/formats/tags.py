"""Grammars of completions, as structural tags: the JSON that xgrammar reads and vLLM passes on.

Owns: the few kinds of tags in use here (:data:`KINDS`), written by small functions. Refuses: how a chat format uses
them (``guides.py`` and the formats), and checking ids by them (``guided.py``).

A marker that is an added token is that token's id and nothing else: the same text spelled in pieces is text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from turnwise.inference.formats.parameters import names_all
from turnwise.inference.tokens import alternatives
from turnwise.types import Guide, ToolSchema

Tag = dict[str, Any]

KINDS = frozenset(
    {"const_string", "token", "json_schema", "regex", "any_text", "sequence", "or", "optional", "star", "plus"}
)
"""What a tag's ``type`` may be."""

_UNHELD = frozenset(
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
        excludes: Texts that none of its strings may hold. They are left out where the schema limits the length of a
            string, which the engine would then no longer do.
    """
    tag: Tag = {"type": "json_schema", "json_schema": dict(schema)}
    if excludes and not any(key in _LENGTHS for key in _keywords(schema)):
        tag["excludes"] = list(excludes)
    return tag


def free(*excludes: str) -> Tag:
    """Return the tag of any text that holds none of these."""
    return {"type": "any_text", "excludes": [each for each in excludes if each]}


def pattern(regex: str) -> Tag:
    """Return the tag of a text that a regular expression matches."""
    return {"type": "regex", "pattern": regex}


def sequence(*parts: Tag) -> Tag:
    """Return the tag of one behind the other."""
    flat: list[Tag] = []
    for part in parts:
        flat += part["elements"] if part["type"] == "sequence" else [part]
    return flat[0] if len(flat) == 1 else {"type": "sequence", "elements": flat}


def either(*parts: Tag) -> Tag:
    """Return the tag of one of several."""
    return parts[0] if len(parts) == 1 else {"type": "or", "elements": list(parts)}


def optional(part: Tag) -> Tag:
    """Return the tag of a part that may be missing."""
    return {"type": "optional", "content": part}


def star(part: Tag) -> Tag:
    """Return the tag of a part any number of times."""
    return {"type": "star", "content": part}


def marked(literal: str, added: Mapping[str, int]) -> Tag:
    """Return the tag of a literal: its added tokens as ids, what stands between them as text."""
    known = alternatives(added)
    pieces = [piece for piece in re.split(f"({known.pattern})", literal) if piece] if known else [literal]
    pieces = pieces or [literal]
    return sequence(*({"type": "token", "token": added[each]} if each in added else text(each) for each in pieces))


def joined(part: Tag, separator: Tag | None, most: int | None) -> Tag:
    """Return the tag of a part at least once and at most so often, None without end, with a separator between."""
    if most == 1:
        return part
    following = part if separator is None else sequence(separator, part)
    if most is None:
        return sequence(part, star(following))
    rest = optional(following)
    for _ in range(most - 2):
        rest = optional(sequence(following, rest))
    return sequence(part, rest)


def unheld(schema: Any) -> str | None:
    """Return the first keyword of a JSON schema that engines accept and do not hold answers to, or None."""
    for node in _schemas(schema):
        for key, value in node.items():
            if key in _UNHELD and value not in (True, {}):
                return key
        if node.get("uniqueItems") is True:
            return "uniqueItems"
        if isinstance(node.get("allOf"), list) and len(node["allOf"]) > 1:
            return "allOf"
        if node.get("patternProperties") and node.get("properties"):
            return "patternProperties"
    return None


def _schemas(schema: Any) -> Iterator[Mapping[str, Any]]:
    """Yield a JSON schema and those within it; what stands under ``enum``, ``const`` and the like is none."""
    left = [schema]
    while left:
        node = left.pop()
        if not isinstance(node, Mapping):
            continue
        yield node
        for key, value in node.items():
            if key in ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"):
                left.extend(value.values() if isinstance(value, Mapping) else ())
            elif key in ("items", "additionalProperties", "not", "contains"):
                left.extend(value if isinstance(value, list) else [value])
            elif key in ("anyOf", "oneOf", "allOf", "prefixItems"):
                left.extend(value if isinstance(value, list) else ())


def _keywords(schema: Any) -> Iterable[str]:
    return (key for node in _schemas(schema) for key in node)


BLANK = optional(either(text("\n\n"), text("\n")))
"""The line breaks, or none, that stand between parts of a turn."""


def arguments(tool: ToolSchema, excludes: Sequence[str] = ()) -> Tag:
    """Return the tag of a tool's arguments as a JSON object, without any that its schema does not name.

    A schema that names them elsewhere than at its top (``$ref``, ``anyOf``, ...) is not closed to others: it would be
    closed to those as well.
    """
    closed = {"additionalProperties": False} if names_all(tool.parameters) else {}
    return json_value({"type": "object", **closed, **tool.parameters}, excludes)


def json_call(tool: ToolSchema, name_key: str, arguments_key: str, excludes: Sequence[str], *, id_key: str = "") -> Tag:
    """Return the tag of a call that is a JSON object with these keys."""
    begin = f"{{{json.dumps(name_key)}: {json.dumps(tool.name)}, {json.dumps(arguments_key)}: "
    end = sequence(text(f', {json.dumps(id_key)}: "'), pattern("[a-zA-Z0-9]{9}"), text('"}')) if id_key else text("}")
    return sequence(text(begin), arguments(tool, excludes), end)


def held_tag(guide: Guide, calls: Tag | None, beside: Callable[[Tag], Tag], markers: Sequence[str]) -> Tag:
    """Return the tag of what stands behind a turn's reasoning.

    Args:
        guide: What it is held to.
        calls: The tag of its calls, where it may have some.
        beside: Returns the tag of a free text or calls.
        markers: Texts that a JSON text must not hold.
    """
    if calls is not None and not guide.text:
        return calls
    if guide.schema is None:
        return free() if calls is None else beside(calls)
    said = json_value(guide.schema, markers)
    return said if calls is None else either(said, calls)
