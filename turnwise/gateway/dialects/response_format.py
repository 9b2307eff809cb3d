"""What a request holds its answer to: a schema, a call, at most one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from turnwise.errors import StructuredOutputError, shown
from turnwise.gateway.dialects.core import Abilities, Fields, ToolChoice
from turnwise.gateway.errors import invalid, unsupported
from turnwise.model.core import Renderer
from turnwise.types import Guide, ToolSchema, as_ids


@dataclass(frozen=True, slots=True)
class Format:
    """The field of a body that says what the text of its answer must be.

    Attributes:
        at: Its name.
        value: What stands there.
        nested: Whether a schema stands under ``json_schema`` (Chat Completions) or beside the type.
    """

    at: str
    value: Any
    nested: bool = False


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """What an answer is held to.

    Attributes:
        tools: What the model is told of.
        guide: What it is held to, or None.
        field: The field that asks for it.
    """

    tools: tuple[ToolSchema, ...]
    guide: Guide | None = None
    field: str = ""


def read_response_format(
    tools: tuple[ToolSchema, ...], choice: ToolChoice, answer: Format, abilities: Abilities, *, single: str = ""
) -> ResponseFormat:
    """Return what an answer is held to.

    Args:
        tools: Those of the body.
        choice: Whether the model must call.
        answer: What its text must be.
        abilities: What engine and chat format can be asked for.
        single: The field that asks for at most one call; empty where none does.

    Raises:
        ApiError: A field is wrong, or asks for what cannot be done here.
    """
    told = _offered(tools, choice)
    schema = _schema(answer, abilities)
    forced = choice.mode in ("required", "named")
    if not told or not (forced or single or schema is not None):
        return ResponseFormat(told) if schema is None else ResponseFormat(told, Guide(schema), answer.at)
    field = "tool_choice" if forced else single or answer.at
    if not abilities.forced_calls:
        raise unsupported(field, _why_not(abilities, forced=forced, single=bool(single)))
    names = choice.names or tuple(tool.name for tool in told)
    # Who names one tool asks for one call.
    most = 1 if single or (choice.mode == "named" and len(names) == 1) else None
    return ResponseFormat(told, Guide(schema, names, text=not forced, most=most), field)


def abilities_of(renderer: Renderer, *, guides: bool) -> Abilities:
    """Return what can be asked for.

    Args:
        renderer: Of the model's chat format.
        guides: Whether the engine holds completions to grammars.
    """
    probe = ToolSchema("f", "")
    try:
        forced = guides and bool(renderer.guides.tagged(Guide(calls=("f",), text=False), as_ids([]), [probe]).tag)
    except StructuredOutputError:
        forced = False
    return Abilities(
        images="image" in renderer.media,
        guided=guides,
        forced_calls=forced,
        chat_format=str(renderer.describe().get("format", "")),
    )


def _offered(tools: Sequence[ToolSchema], choice: ToolChoice) -> tuple[ToolSchema, ...]:
    """Return the tools that the model is told of under a tool choice."""
    if choice.mode == "none" or not tools:
        if choice.mode in ("required", "named"):
            raise invalid("tool_choice", "asks for a call, but there are no tools")
        return ()
    known = {tool.name for tool in tools}
    missing = [name for name in choice.names if name not in known]
    if missing:
        raise invalid("tool_choice", f"names {missing[0]!r}, which is none of the tools {', '.join(sorted(known))}")
    return tuple(tools)


def _why_not(abilities: Abilities, *, forced: bool, single: bool) -> str:
    what = "made to call a tool" if forced else "held to one call" if single else "held to JSON beside calls"
    remedy = "use auto or none" if forced else "leave it out" if single else "leave the tools out"
    if not abilities.guided:
        return f"the engine cannot be {what}; {remedy}"
    return f"the chat format {abilities.chat_format} has no grammar of its calls, so nothing can be {what}; {remedy}"


def _schema(answer: Format, abilities: Abilities) -> dict[str, Any] | None:
    """Return the JSON schema of an answer's text, None where it is free."""
    if answer.value is None:
        return None
    fields = Fields(answer.value, answer.at)
    kind = fields.text("type")
    if kind == "text":
        return None
    if kind not in ("json_object", "json_schema"):
        raise invalid(fields.name("type"), f"must be text, json_object or json_schema, not {shown(kind)}")
    if not abilities.guided:
        raise unsupported(
            answer.at, f"this engine cannot guide decoding to {kind}; leave it out, or ask for JSON in the prompt"
        )
    if kind == "json_object":
        return {"type": "object"}
    inner = Fields(fields.get("json_schema"), f"{answer.at}.json_schema") if answer.nested else fields
    schema = inner.get("schema")
    if not isinstance(schema, dict):
        raise invalid(inner.name("schema"), f"must be a JSON schema, not {shown(schema)}")
    return schema
