"""The fields of the wire APIs: which are honoured, which have no effect, and which are refused, and why.

A field that is in no table is refused, except in messages of the assistant, to which clients add fields of their own.
They stand in ``field_tables.yaml``; docs/gateway.md shows them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import yaml

from turnwise.errors import nearest, shown
from turnwise.gateway.errors import ApiError, unsupported

_EMPTY: tuple[Any, ...] = (False, "", [], {})


class Rule(Protocol):
    """What a field may hold."""

    def check(self, value: Any, at: str) -> None:
        """Raise ApiError if the value of the field ``at`` is refused."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """A field with any value, which the parser of the request reads (``honoured``) or which has no effect."""

    honoured: bool

    def check(self, value: Any, at: str) -> None:
        """Accept any value: the parser checks it."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A field that is refused, with the remedy, unless its value is null or one that asks for nothing (``neutral``)."""

    remedy: str
    neutral: tuple[Any, ...] = _EMPTY

    def check(self, value: Any, at: str) -> None:
        """Raise ApiError unless the value asks for nothing."""
        if value is not None and value not in self.neutral:
            raise unsupported(at, f"it is {shown(value)}; {self.remedy}")


@dataclass(frozen=True, slots=True)
class ObjectTable:
    """The fields of an object, or of every object in a list; ``is_open``: fields without a rule are accepted."""

    fields: Mapping[str, Rule]
    is_open: bool = False

    def check(self, value: Any, at: str) -> None:
        """Raise ApiError for a refused or unknown field."""
        if isinstance(value, list):
            for index, entry in enumerate(value):
                self.check(entry, f"{at}[{index}]")
        elif isinstance(value, dict):
            for key, entry in value.items():
                rule = self.fields.get(key)
                if rule is None and (self.is_open or entry is None):
                    continue
                if not isinstance(rule, Accepted):
                    name = f"{at}.{key}" if at else key
                    if rule is None:
                        accepted = [field for field, rule in self.fields.items() if not isinstance(rule, Refused)]
                        remedy = nearest(key, accepted) or "; remove it"
                        message = f"{name}: this API has no such field, which is {shown(entry)}{remedy}"
                        raise ApiError(400, message, param=name, code="unknown_parameter")
                    rule.check(entry, name)


@dataclass(frozen=True, slots=True)
class KindTable:
    """Objects whose fields depend on their kind, the value of ``key``.

    Kinds without a rule are refused with the ``remedy``; without one the parser refuses them.
    """

    key: str
    default: str
    kinds: Mapping[str, Rule]
    remedy: str = ""

    def check(self, value: Any, at: str) -> None:
        """Raise ApiError for a refused or unknown field."""
        if isinstance(value, list):
            for index, entry in enumerate(value):
                self.check(entry, f"{at}[{index}]")
        elif isinstance(value, dict):
            kind = value.get(self.key) or self.default
            rule = self.kinds.get(kind) if isinstance(kind, str) else None
            if rule is not None:
                rule.check(value, at)
            elif self.remedy:
                raise unsupported(f"{at}.{self.key}", f"it is {shown(kind)}; {self.remedy}")


def _read_rule(node: Any, rules: dict[int, Rule]) -> Rule:
    """Return the rule of a node of the file of tables; one of an alias is that of its anchor."""
    if node == "honoured":
        return Accepted(True)
    if id(node) not in rules:
        rules[id(node)] = _read_kinds(node, rules) if "by" in node else _read_object(node, rules)
    return rules[id(node)]


def _read_kinds(node: Mapping[str, Any], rules: dict[int, Rule]) -> KindTable:
    kinds = {kind: _read_rule(inner, rules) for names, inner in node["kinds"].items() for kind in names.split()}
    return KindTable(node["by"], node["default"], kinds, node.get("remedy", ""))


def _read_object(node: Mapping[str, Any], rules: dict[int, Rule]) -> ObjectTable:
    fields: dict[str, Rule] = {}
    for name in ("honoured", "neutral"):
        names = node.get(name, "")
        fields |= dict.fromkeys(
            (names if isinstance(names, str) else " ".join(names)).split(), Accepted(name == "honoured")
        )
    for entry in node.get("refused", ()):
        for refusal in entry if isinstance(entry, list) else [entry]:
            neutral = tuple(refusal.get("unless", _EMPTY))
            fields |= dict.fromkeys(refusal["fields"].split(), Refused(refusal["remedy"], neutral))
    fields |= {name: _read_rule(inner, rules) for name, inner in node.get("objects", {}).items()}
    return ObjectTable(fields, node.get("open", False))


def _read_tables() -> Iterator[ObjectTable]:
    nodes = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_bytes())
    rules: dict[int, Rule] = {}
    for api in ("chat", "responses", "messages"):
        yield _read_object(nodes[api], rules)


CHAT, RESPONSES, MESSAGES = _read_tables()
"""Requests of Chat Completions, Responses and Anthropic Messages."""
