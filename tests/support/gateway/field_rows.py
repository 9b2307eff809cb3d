"""The tables of fields of a wire API as rows of its documentation (``python -m support.gateway.field_rows``)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from turnwise.gateway.dialects.field_tables import (
    CHAT,
    MESSAGES,
    RESPONSES,
    Accepted,
    KindTable,
    ObjectTable,
    Refused,
    Rule,
)

APIS = {"Chat Completions": CHAT, "Responses": RESPONSES, "Messages": MESSAGES}
COMMON = {
    name: rule for name, rule in CHAT.fields.items() if all(table.fields.get(name) == rule for table in APIS.values())
}
TABLES = {"all APIs": ObjectTable(COMMON)} | {
    title: ObjectTable({name: rule for name, rule in table.fields.items() if name not in COMMON})
    for title, table in APIS.items()
}
HEAD = ["| object | honoured | without effect | refused |", "|---|---|---|---|"]


def field_rows(table: ObjectTable) -> list[str]:
    """Return the rows: one per object, each shown at its first place only."""
    return [*HEAD, *_rows(table, "the request", set())]


def _rows(rule: Rule, name: str, seen: set[int]) -> Iterator[str]:
    if isinstance(rule, KindTable):
        names: defaultdict[int, list[str]] = defaultdict(list)
        for kind, inner in rule.kinds.items():
            names[id(inner)].append(kind)
        for kinds in names.values():
            yield from _rows(rule.kinds[kinds[0]], f"{name} `{'`, `'.join(kinds)}`", seen)
    elif isinstance(rule, ObjectTable) and id(rule) not in seen:
        seen.add(id(rule))
        if rule.is_open:
            yield f"| {name} | those of the API | all others | |"
            return
        honoured = [key for key, inner in rule.fields.items() if not isinstance(inner, Refused)]
        neutral = [key for key in honoured if rule.fields[key] == Accepted(False)]
        refused = []
        for key, inner in rule.fields.items():
            if isinstance(inner, Refused):
                values = [value for value in inner.neutral if value]
                refused.append(f"`{key}`" + (f" (unless {values[0]!r})" if values else ""))
        honoured = [key for key in honoured if key not in neutral]
        if neutral or refused:
            yield f"| {name} | {_code(honoured)} | {_code(neutral)} | {', '.join(refused)} |"
        for key, inner in rule.fields.items():
            yield from _rows(inner, f"{'' if name == 'the request' else name + ' '}`{key}`", seen)


def _code(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    for title, table in TABLES.items():
        print(f"#### Fields of {title}", "", *field_rows(table), "", sep="\n")
