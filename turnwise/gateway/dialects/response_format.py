"""Response formats and tool choices of a request, resolved to its tools and structured output."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from turnwise.errors import StructuredOutputError, shown
from turnwise.gateway.dialects.core import Abilities, ToolChoice
from turnwise.gateway.dialects.fields import Fields
from turnwise.gateway.errors import LENIENT, Lenient, invalid, unsupported
from turnwise.model.core import Renderer
from turnwise.types import Guide, ToolSchema, as_ids


@dataclass(frozen=True, slots=True)
class FormatField:
    """The response format field of a body; ``nested``: the schema is under ``json_schema`` (Chat Completions)."""

    at: str
    value: Any
    nested: bool = False


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """Resolved tools and structured output of a request, and the field that asks for it; ``calls``: may it call."""

    tools: tuple[ToolSchema, ...]
    guide: Guide | None = None
    field: str = ""
    ignored: frozenset[Lenient] = frozenset()
    calls: bool = True


def read_response_format(
    tools: tuple[ToolSchema, ...], choice: ToolChoice, answer: FormatField, abilities: Abilities, *, single: str = ""
) -> ResponseFormat:
    """Resolve tools and structured output of a request. Raises ApiError for invalid or unsupported fields.

    Args:
        tools: Tools of the body.
        choice: Its tool choice.
        answer: Its response format.
        abilities: Capabilities of engine and chat format.
        single: The field that asks for at most one call; empty if none does.
    """
    offered = _offered_tools(tools, choice)
    schema = _schema(answer, abilities)
    forced = choice.mode in ("required", "named")
    calls = choice.mode != "none"
    if not (offered and calls) or not (forced or single or schema is not None):
        guide = None if schema is None else Guide(schema)
        return ResponseFormat(offered, guide, answer.at if guide is not None else "", calls=calls)
    if forced and not abilities.forced_calls and "tool_choice" in abilities.lenient:
        free = read_response_format(tools, ToolChoice(), answer, abilities, single=single)
        return replace(free, ignored=frozenset({"tool_choice"}))
    field = "tool_choice" if forced else single or answer.at
    if not abilities.forced_calls:
        raise unsupported(field, _unsupported_reason(abilities, forced=forced, single=bool(single)))
    names = choice.names or tuple(tool.name for tool in offered)
    # A named tool means exactly one call.
    limit = 1 if single or (choice.mode == "named" and len(names) == 1) else None
    return ResponseFormat(offered, Guide(schema, names, text=not forced, most=limit), field)


def abilities_of(renderer: Renderer, *, guides: bool, lenient: Collection[Lenient] = LENIENT) -> Abilities:
    """Return the capabilities of a renderer and an engine; ``guides``: whether it supports structured output."""
    probe = ToolSchema("f", "")
    try:
        forced = guides and bool(renderer.guides.tagged(Guide(calls=("f",), text=False), as_ids([]), [probe]).tag)
    except StructuredOutputError:
        forced = False
    described = renderer.describe()
    return Abilities(
        images="image" in renderer.media,
        guided=guides,
        forced_calls=forced,
        chat_format=str(described.get("format", "")),
        lenient=frozenset(lenient),
        unread_calls=str(described.get("warning") or ""),
    )


def _offered_tools(tools: Sequence[ToolSchema], choice: ToolChoice) -> tuple[ToolSchema, ...]:
    if not tools and choice.mode in ("required", "named"):
        raise invalid("tool_choice", "requires a call, but there are no tools")
    names = {tool.name for tool in tools}
    missing = [name for name in choice.names if name not in names]
    if missing:
        raise invalid("tool_choice", f"names {missing[0]!r}, which is not one of the tools {', '.join(sorted(names))}")
    return tuple(tools)


def _unsupported_reason(abilities: Abilities, *, forced: bool, single: bool) -> str:
    what = (
        "forced to call a tool" if forced else "limited to one call" if single else "constrained to JSON beside calls"
    )
    remedy = "use auto or none" if forced else "remove it" if single else "remove the tools"
    if forced:
        remedy += ", or set lenient: [tool_choice], which treats it as auto"
    if not abilities.guided:
        return f"the engine has no structured output, so a response cannot be {what}; {remedy}"
    return f"the chat format {abilities.chat_format} has no grammar for calls, so a response cannot be {what}; {remedy}"


def _schema(answer: FormatField, abilities: Abilities) -> dict[str, Any] | None:
    """Return the JSON schema of an answer's text, None if it is free."""
    if answer.value is None:
        return None
    fields = Fields(answer.value, answer.at)
    kind = fields.text("type")
    if kind == "text":
        return None
    if kind not in ("json_object", "json_schema"):
        raise invalid(fields.name("type"), f"must be text, json_object or json_schema, not {shown(kind)}")
    if not abilities.guided:
        raise unsupported(answer.at, f"this engine does not support {kind}; remove it, or ask for JSON in the prompt")
    if kind == "json_object":
        return {"type": "object"}
    inner = Fields(fields.get("json_schema"), f"{answer.at}.json_schema") if answer.nested else fields
    schema = inner.get("schema")
    if not isinstance(schema, dict):
        raise invalid(inner.name("schema"), f"must be a JSON schema, not {shown(schema)}")
    return schema
