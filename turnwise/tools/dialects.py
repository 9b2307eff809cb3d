"""JSON schemas of the dialect that they name.

Owns: :func:`validator_of`, and :func:`unresolved`, which finds a reference that leads nowhere before a call does.
Refuses: fetching anything. A schema may come from anybody's server; what it means stands in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.protocols import Validator
from jsonschema.validators import validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012, specification_with


def dialect_of(schema: Mapping[str, Any]) -> type[Validator]:
    """Return the dialect of a schema: what its ``$schema`` names, by default draft 2020-12."""
    found: type[Validator] = validator_for(schema, default=Draft202012Validator)
    return found


def validator_of(schema: Mapping[str, Any]) -> Validator:
    """Return what holds values against a schema."""
    # With a registry of its own it fetches nothing.
    return dialect_of(schema)(schema, registry=Registry())


def unresolved(schema: Mapping[str, Any]) -> str | None:
    """Return a reference of a valid schema that nothing in it answers to, or None."""
    dialect = schema.get("$schema")
    specification = DRAFT202012 if dialect is None else specification_with(dialect, default=DRAFT202012)
    root = specification.create_resource(schema)
    waiting = [(root, Registry().resolver_with_root(root))]
    seen: set[int] = set()
    while waiting:
        resource, resolver = waiting.pop()
        contents = resource.contents
        if not isinstance(contents, Mapping) or id(contents) in seen:
            continue
        seen.add(id(contents))
        for reference in [contents[key] for key in ("$ref", "$dynamicRef") if isinstance(contents.get(key), str)]:
            try:
                found = resolver.lookup(reference)
            except Unresolvable:
                return str(reference)
            # It may lead to a place where no schema is looked for otherwise.
            waiting.append((specification.create_resource(found.contents), found.resolver))
        waiting += [(each, resolver.in_subresource(each)) for each in resource.subresources()]
    return None
