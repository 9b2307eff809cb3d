"""Requests of OpenAI Responses: input items to messages, and stored conversations.

Consecutive assistant items form one turn as long as the ids that this gateway gave them name the same turn.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from turnwise.errors import shown
from turnwise.gateway.dialects.core import (
    Abilities,
    ChatRequest,
    Fields,
    check_names,
    echoed_call,
    image_part,
    read_sampling,
    read_template_options,
    read_tool,
    text_part,
)
from turnwise.gateway.dialects.openai_chat import Format, read_choice, read_response_format
from turnwise.gateway.errors import ApiError, invalid, unsupported
from turnwise.types import Message, ToolSchema

_ITEM = re.compile(r"(?:msg|fc|rs|ctc)_([0-9a-f]{24})\d\d\Z")
"""An item id of this gateway: its kind, the response that holds it, its place there."""
_CUSTOM = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
Earlier = Callable[[str], Sequence[Message]]
"""Returns the conversation up to and with a response; raises ApiError where there is none of this id."""


@dataclass(slots=True)
class ResponsesTools:
    """The tools of a request: schemas in order, (namespace, own name) by name, and names of tools that take text."""

    schemas: list[ToolSchema] = field(default_factory=list)
    namespaces: dict[str, tuple[str, str]] = field(default_factory=dict)
    custom: set[str] = field(default_factory=set)


def namespaced(namespace: Any, name: Any) -> Any:
    """Return the name that the model sees for a tool of a namespace."""
    return f"{namespace}__{name}" if isinstance(namespace, str) and namespace else name


def read_request(body: Mapping[str, Any], abilities: Abilities, earlier: Earlier) -> ChatRequest:
    """Parse a request body; ``earlier`` finds the conversation of ``previous_response_id``. Raises ApiError."""
    fields = Fields(body)
    fields.refuse("background", "background responses are not supported")
    fields.refuse("conversation", "send the items, or previous_response_id")
    fields.refuse("prompt", "stored prompts are not supported: send instructions and input")
    tools = ResponsesTools()
    for index, entry in enumerate(fields.items("tools")):
        _tool(tools, Fields(entry, f"tools[{index}]"), "")
    check_names(tools.schemas)
    schemas = tuple(tools.schemas)
    choice = read_choice(fields)
    single = "" if fields.flag("parallel_tool_calls", default=True) else "parallel_tool_calls"
    if fields.whole("top_logprobs", 0, 20):
        raise unsupported("top_logprobs", "only the sampled token's log-probability is available; set it to 0")
    text = Fields(fields.get("text") or {}, "text")
    held = read_response_format(schemas, choice, Format("text.format", text.get("format")), abilities, single=single)
    before = list(earlier(previous)) if (previous := fields.text("previous_response_id", "")) else []
    new = Reader(abilities, tools.custom).read(fields.get("input"))
    if not before and not new:
        raise invalid("input", "must be a string or a non-empty list of items")
    reasoning = Fields(fields.get("reasoning") or {}, "reasoning")
    instructions = fields.text("instructions", "")
    system: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
    return ChatRequest(
        model=fields.text("model", ""),
        messages=[*system, *before, *new],
        tools=held.tools,
        sampling=read_sampling(fields, most=("max_output_tokens",), stop="stop"),
        stream=fields.flag("stream"),
        tool_choice=choice,
        guide=held.guide,
        guide_field=held.field,
        logprobs="message.output_text.logprobs" in fields.items("include"),
        options=read_template_options(reasoning.text("effort", ""), kwargs=fields.get("chat_template_kwargs")),
        extra={"body": body, "tools": tools, "conversation": (previous or None, new)},
    )


def _tool(tools: ResponsesTools, tool: Fields, namespace: str) -> None:
    kind = tool.text("type", "function")
    at = tool.name("")[:-1]
    if kind == "function":
        inner = tool.get("function")
        function = Fields(inner, tool.name("function")) if isinstance(inner, Mapping) else tool
        schema = read_tool(function.get("name"), function.get("description"), function.get("parameters"), at)
    elif kind == "custom":
        schema = read_tool(tool.get("name"), tool.get("description"), dict(_CUSTOM), at)
    elif kind == "namespace":
        name = tool.text("name")
        for index, entry in enumerate(tool.items("tools")):
            _tool(tools, Fields(entry, f"{at}.tools[{index}]"), name)
        return
    else:
        # Server-side tools (web_search, file_search, ...): the model must not see tools that it cannot call.
        return
    known = namespaced(namespace, schema.name)
    if namespace:
        tools.namespaces[known] = (namespace, schema.name)
    if kind == "custom":
        tools.custom.add(known)
    tools.schemas.append(ToolSchema(known, schema.description, schema.parameters))


class Reader:
    """Parser of the items of an input; ``custom`` names the tools that take text."""

    __slots__ = ("_abilities", "_custom", "_messages", "_turn")

    def __init__(self, abilities: Abilities, custom: set[str]) -> None:
        self._abilities = abilities
        self._custom = custom
        self._messages: list[dict[str, Any]] = []
        self._turn = ""

    def read(self, value: Any) -> list[Message]:
        """Return the messages of an input."""
        if isinstance(value, str):
            return [{"role": "user", "content": value}]
        if value is None:
            return []
        if not isinstance(value, list):
            raise invalid("input", f"must be a string or a list of items, not {shown(value)}")
        for index, entry in enumerate(value):
            self._item(Fields(entry, f"input[{index}]"))
        if self._turn and self._messages and self._messages[-1]["role"] == "assistant":
            # What an agent kept of a turn whose stream broke, and is asked for again.
            self._messages.pop()
        return cast("list[Message]", self._messages)

    def _item(self, item: Fields) -> None:
        kind = item.text("type", "message")
        if kind == "message":
            self._message(item)
        elif kind == "function_call":
            name = namespaced(item.get("namespace"), item.get("name"))
            self._call(item, echoed_call(item.get("call_id"), name, item.get("arguments")))
        elif kind == "custom_tool_call":
            name = namespaced(item.get("namespace"), item.get("name"))
            self._call(item, echoed_call(item.get("call_id"), name, {"input": item.get("input")}))
        elif kind in ("function_call_output", "custom_tool_call_output", "local_shell_call_output"):
            content = self._parts(item.get("output"), item.name("output"))
            self._messages.append({"role": "tool", "tool_call_id": item.text("call_id", ""), "content": content})
        elif kind == "reasoning":
            self._reasoning(item)
        elif kind == "item_reference":
            raise unsupported(item.name("type"), "item references are not supported: send the item itself")
        # Other items are server-side tool runs or unknown: not part of this model's conversation.

    def _message(self, item: Fields) -> None:
        role = item.text("role")
        if role not in ("system", "developer", "user", "assistant"):
            raise invalid(item.name("role"), f"must be system, developer, user or assistant, not {shown(role)}")
        content = self._parts(item.get("content"), item.name("content"))
        if role != "assistant":
            self._messages.append({"role": role, "content": content})
            return
        said = self._said(item)
        earlier = said["content"]
        if not earlier:
            said["content"] = content
            return
        # Added to what is there: a copy for each of many items would cost their square.
        parts = said["content"] = _as_parts(earlier)
        parts += _as_parts(content)

    def _call(self, item: Fields, call: dict[str, Any]) -> None:
        self._said(item).setdefault("tool_calls", []).append(call)

    def _reasoning(self, item: Fields) -> None:
        parts = [*item.items("content")] or [*item.items("summary")]
        texts = [part.get("text") for part in parts if isinstance(part, Mapping)]
        text = "".join(text for text in texts if isinstance(text, str))
        said = self._said(item)
        if text:
            said["reasoning_content"] = said.get("reasoning_content", "") + text

    def _said(self, item: Fields) -> dict[str, Any]:
        """Return the assistant message that an item belongs to.

        Two adjacent turns of this gateway are one turn requested twice: a stream broke, and its complete items stayed
        in the agent's history.
        """
        found = _ITEM.match(item.text("id", ""))
        turn = found[1] if found else ""
        last = self._messages[-1] if self._messages else None
        if last is not None and last["role"] == "assistant" and turn and self._turn and turn != self._turn:
            self._messages.pop()
            last = None
        if last is None or last["role"] != "assistant":
            last = {"role": "assistant", "content": ""}
            self._messages.append(last)
            self._turn = turn
        self._turn = turn or self._turn
        return last

    def _parts(self, value: Any, at: str) -> str | list[dict[str, Any]]:
        if value is None or isinstance(value, str):
            return value or ""
        if not isinstance(value, list):
            raise invalid(at, f"must be a string or a list of parts, not {shown(value)}")
        parts = []
        for index, entry in enumerate(value):
            part = Fields(entry, f"{at}[{index}]")
            kind = part.text("type", "input_text")
            if kind in ("input_text", "output_text", "text"):
                parts.append(text_part(part.get("text"), part.name("text")))
            elif kind == "input_image":
                parts.append(image_part(part.text("image_url", ""), part.name("image_url"), self._abilities))
            elif kind != "refusal":
                raise unsupported(
                    part.name("type"), f"parts of type {shown(kind)}; supported: input_text and input_image"
                )
        return parts


def _as_parts(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


@dataclass(frozen=True, slots=True)
class _StoredResponse:
    before: _StoredResponse | None
    messages: tuple[Message, ...]


class Conversations:
    """Stored conversations for ``previous_response_id``, sharing messages; at most ``most``, oldest dropped first."""

    __slots__ = ("_kept", "_most")

    def __init__(self, most: int = 4096) -> None:
        self._kept: dict[str, _StoredResponse] = {}
        self._most = most

    def keep(self, response_id: str, previous: str | None, messages: Sequence[Message]) -> None:
        """Store the messages that a response added to an earlier conversation, its own last."""
        before = self._kept.get(previous) if previous is not None else None
        self._kept[response_id] = _StoredResponse(before, tuple(messages))
        if len(self._kept) > self._most:
            del self._kept[next(iter(self._kept))]

    def earlier(self, response_id: str) -> Sequence[Message]:
        """Return the conversation up to and including a response. Raises ApiError for an unknown id."""
        found = self._kept.get(response_id)
        if found is None:
            raise ApiError(
                400,
                f"previous_response_id: this session has no response {shown(response_id)}",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        parts: list[tuple[Message, ...]] = []
        while found is not None:
            parts.append(found.messages)
            found = found.before
        return [message for part in reversed(parts) for message in part]
