"""A quick yes for arguments of plain schemas.

Owns: :func:`quick_check`, which compiles the schemas that most tools have (named arguments of plain types) into a few
type tests. Refuses: saying no, and explaining: what does not pass here, and every schema with another keyword in it,
is judged by the JSON schema validator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

_TYPES: Final[dict[str, tuple[type, ...]]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}
_NOTES: Final = frozenset(("title", "description", "default", "examples"))
"""Keywords that restrict nothing."""


def quick_check(schema: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], bool] | None:
    """Return a test that is true only for arguments which fit the schema, or None where the schema is not plain.

    Args:
        schema: A JSON schema of type ``object``. Plain are those that have no keyword but ``properties``,
            ``required``, ``additionalProperties`` (true or false) and notes, and whose properties have one or several
            of the types string, integer, number, boolean and null, perhaps an ``enum`` of texts, and notes.
    """
    if set(schema) - {"type", "properties", "required", "additionalProperties"} - _NOTES:
        return None
    others = schema.get("additionalProperties", True)
    # By type: 0 and 1 are no booleans of a schema, although they equal them.
    if schema.get("type") != "object" or type(others) is not bool:
        return None
    kinds: dict[str, tuple[frozenset[type], frozenset[str] | None]] = {}
    for name, value in schema.get("properties", {}).items():
        plain = _plain(value)
        if plain is None:
            return None
        kinds[name] = plain
    required = frozenset(schema.get("required", ()))

    def fits(arguments: Mapping[str, Any]) -> bool:
        if type(arguments) is not dict or not required <= arguments.keys():
            return False
        for name, value in arguments.items():
            kind = kinds.get(name)
            if kind is None:
                if not others:
                    return False
            elif type(value) not in kind[0] or (kind[1] is not None and value not in kind[1]):
                return False
        return True

    return fits


def _plain(schema: Any) -> tuple[frozenset[type], frozenset[str] | None] | None:
    """Return the Python types of a property's values and the texts that are allowed, or None where it is not plain."""
    if not isinstance(schema, dict) or set(schema) - {"type", "enum"} - _NOTES:
        return None
    named = schema.get("type")
    names: list[Any] = named if isinstance(named, list) else [named]
    if not names or not all(isinstance(name, str) and name in _TYPES for name in names):
        return None
    texts = None
    if "enum" in schema:
        if names != ["string"] or not all(isinstance(text, str) for text in schema["enum"]):
            return None
        texts = frozenset(schema["enum"])
    return frozenset(kind for name in names for kind in _TYPES[name]), texts
