"""JSON schemas as a model reads them: definitions in place, no titles.

Owns: :func:`plain_schema`. Refuses: losing anything that changes which values are valid.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

# Where a JSON schema holds further ones; everything else in it is a value.
_ONE: Final = ("items", "additionalProperties", "not", "contains", "propertyNames", "if", "then", "else")
_MANY: Final = ("anyOf", "oneOf", "allOf", "prefixItems")
_NAMED: Final = ("properties", "patternProperties", "dependentSchemas")


def plain_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema without titles and with its definitions in place, so that a model reads it from left to right.

    A definition that holds itself stays under ``$defs``.
    """
    inliner = _Inliner(schema.get("$defs", {}), {})
    plain: dict[str, Any] = inliner.plain({key: value for key, value in schema.items() if key != "$defs"}, ())
    if inliner.kept:
        plain["$defs"] = inliner.kept
    return plain


@dataclass(slots=True)
class _Inliner:
    definitions: dict[str, Any]
    kept: dict[str, Any]

    def plain(self, schema: Any, above: tuple[str, ...]) -> Any:
        if not isinstance(schema, dict):
            return schema
        if "$ref" in schema:
            return self._referred(schema, above)
        result: dict[str, Any] = {}
        for key, value in schema.items():
            if key in ("title", "discriminator"):
                continue
            if key in _ONE:
                value = self.plain(value, above)
            elif key in _MANY:
                value = [self.plain(each, above) for each in value]
            elif key in _NAMED:
                value = {name: self.plain(each, above) for name, each in value.items()}
            result[key] = value
        return result

    def _referred(self, schema: dict[str, Any], above: tuple[str, ...]) -> dict[str, Any]:
        name = schema["$ref"].removeprefix("#/$defs/")
        beside = {key: value for key, value in schema.items() if key not in ("$ref", "title")}
        if self._holds_itself(name):
            if name not in self.kept:
                self.kept[name] = {}
                self.kept[name] = self.plain(self.definitions[name], above)
            return {"$ref": schema["$ref"], **beside}
        inner: dict[str, Any] = self.plain(self.definitions[name], (*above, name))
        return {**inner, **beside}

    def _holds_itself(self, name: str) -> bool:
        seen: set[str] = set()
        waiting = list(_references(self.definitions[name]))
        while waiting:
            found = waiting.pop()
            if found == name:
                return True
            if found not in seen:
                seen.add(found)
                waiting.extend(_references(self.definitions[found]))
        return False


def _references(schema: Any) -> list[str]:
    if isinstance(schema, dict):
        own = [schema["$ref"].removeprefix("#/$defs/")] if isinstance(schema.get("$ref"), str) else []
        return own + [name for value in schema.values() for name in _references(value)]
    if isinstance(schema, list):
        return [name for value in schema for name in _references(value)]
    return []
