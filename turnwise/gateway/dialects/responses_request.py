"""Requests of OpenAI Responses: input items to messages, and stored conversations.

Consecutive assistant items form one turn as long as the ids that this gateway gave them name the same turn.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from turnwise.errors import SessionError, shown
from turnwise.gateway.dialects.core import Abilities, ChatRequest, Origin
from turnwise.gateway.dialects.fields import (
    Fields,
    check_names,
    echoed_call,
    image_part,
    leave_out_tool,
    read_sampling,
    read_tool,
    text_part,
)
from turnwise.gateway.dialects.openai_chat import read_choice
from turnwise.gateway.dialects.response_format import FormatField, read_response_format
from turnwise.gateway.dialects.template_options import read_template_options
from turnwise.gateway.errors import ApiError, Lenient, invalid, unsupported
from turnwise.trajectory import Segment
from turnwise.types import Message, ToolSchema

_ITEM = re.compile(r"(?:msg|fc|rs|ctc|tsc)_([0-9a-f]{24})(\d{2,})\Z")
"""An item id of this gateway: its kind, the response that holds it, its index there."""
SEARCH = "tool_search"
"""The tool of an agent that finds its further tools itself."""
_CUSTOM = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


@dataclass(slots=True)
class ResponsesTools:
    """Tools of a request: schemas in order, (namespace, own name) by name, those that take text, what was ignored.

    ``searchable``: whether the agent itself finds further ones, by calls of ``tool_search``.
    """

    schemas: list[ToolSchema] = field(default_factory=list)
    namespaces: dict[str, tuple[str, str]] = field(default_factory=dict)
    custom: set[str] = field(default_factory=set)
    ignored: set[Lenient] = field(default_factory=set)
    searchable: bool = False


def namespaced(namespace: Any, name: Any) -> Any:
    """Return the name that the model sees for a tool of a namespace."""
    return f"{namespace}__{name}" if isinstance(namespace, str) and namespace else name


def read_responses_request(body: Mapping[str, Any], abilities: Abilities, stored: Conversations) -> ChatRequest:
    """Parse a request body; ``stored`` resolves ``previous_response_id`` and references. Raises ApiError."""
    fields = Fields(body)
    tools = ResponsesTools()
    for index, entry in enumerate(fields.items("tools")):
        _tool(tools, Fields(entry, f"tools[{index}]"), "", abilities)
    check_names(tools.schemas)
    earlier = list(stored.conversation(previous)) if (previous := fields.text("previous_response_id", "")) else []
    new = InputReader(abilities, tools, stored).read(fields.get("input"))
    if not earlier and not new:
        raise invalid("input", "must be a string or a non-empty list of items")
    schemas = tuple(tools.schemas)
    choice = read_choice(fields)
    single = "" if fields.flag("parallel_tool_calls", default=True) else "parallel_tool_calls"
    if fields.integer("top_logprobs", 0, 20):
        raise unsupported("top_logprobs", "only the sampled token's log-probability is available; set it to 0")
    text = Fields(fields.get("text") or {}, "text")
    resolved = read_response_format(
        schemas, choice, FormatField("text.format", text.get("format")), abilities, single=single
    )
    reasoning = Fields(fields.get("reasoning") or {}, "reasoning")
    instructions = fields.text("instructions", "")
    system: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
    return ChatRequest(
        model=fields.text("model", ""),
        messages=[*system, *earlier, *new],
        tools=resolved.tools,
        calls=resolved.calls,
        sampling=read_sampling(fields, limit_fields=("max_output_tokens",), stop="stop"),
        stream=fields.flag("stream"),
        guide=resolved.guide,
        guide_field=resolved.field,
        ignored=resolved.ignored | tools.ignored,
        logprobs="message.output_text.logprobs" in fields.items("include"),
        options=read_template_options(reasoning.text("effort", ""), kwargs=fields.get("chat_template_kwargs")),
        extra={"body": body, "tools": tools, "conversation": (previous or None, new, len(system))},
    )


def _tool(tools: ResponsesTools, tool: Fields, namespace: str, abilities: Abilities) -> None:
    kind = tool.text("type", "function")
    at = tool.name("")[:-1]
    if kind == "function":
        inner = tool.get("function")
        function = Fields(inner, tool.name("function")) if isinstance(inner, Mapping) else tool
        schema = read_tool(function.get("name"), function.get("description"), function.get("parameters"), at)
    elif kind == "custom":
        schema = read_tool(tool.get("name"), tool.get("description"), dict(_CUSTOM), at)
    elif kind == SEARCH and tool.get("execution") == "client":
        schema = read_tool(SEARCH, tool.get("description"), tool.get("parameters"), at)
        tools.searchable = True
    elif kind == "namespace":
        name = tool.text("name")
        for index, entry in enumerate(tool.items("tools")):
            _tool(tools, Fields(entry, f"{at}.tools[{index}]"), name, abilities)
        return
    else:
        tools.ignored.add(leave_out_tool(tool, "type", kind, abilities))
        return
    full_name = namespaced(namespace, schema.name)
    if namespace:
        tools.namespaces[full_name] = (namespace, schema.name)
    if kind == "custom":
        tools.custom.add(full_name)
    tools.schemas.append(ToolSchema(full_name, schema.description, schema.parameters))


class InputReader:
    """Parser of the items of an input; ``tools`` gets those that the agent found, ``stored`` resolves references."""

    __slots__ = ("_abilities", "_messages", "_stored", "_tools", "_turn")

    def __init__(self, abilities: Abilities, tools: ResponsesTools, stored: Conversations | None = None) -> None:
        self._abilities = abilities
        self._tools = tools
        self._stored = stored or Conversations()
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
            # The rest of a turn whose stream broke: the agent requests that turn again.
            self._messages.pop()
        return cast("list[Message]", self._messages)

    def _item(self, item: Fields) -> None:
        # OpenAI reads an item that has only an id as a reference.
        kind = item.text("type", "item_reference" if set(item) == {"id"} else "message")
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
        elif kind == f"{SEARCH}_call" and item.get("execution") == "client":
            self._call(item, echoed_call(item.get("call_id"), SEARCH, item.get("arguments")))
        elif kind == f"{SEARCH}_output" and item.get("execution") == "client":
            self._search_result(item)
        elif kind == "item_reference":
            self._item(Fields(self._stored.item(item.text("id")), item.name("")[:-1]))
        # Other items are those of a hosted endpoint.

    def _message(self, item: Fields) -> None:
        role = item.text("role")
        if role not in ("system", "developer", "user", "assistant"):
            raise invalid(item.name("role"), f"must be system, developer, user or assistant, not {shown(role)}")
        content = self._parts(item.get("content"), item.name("content"))
        if role != "assistant":
            self._messages.append({"role": role, "content": content})
            return
        assistant = self._assistant_of(item)
        existing = assistant["content"]
        if not existing:
            assistant["content"] = content
            return
        # Extended in place: a copy for each of many items would cost quadratic time.
        parts = assistant["content"] = _as_parts(existing)
        parts += _as_parts(content)

    def _search_result(self, item: Fields) -> None:
        """Put the definitions of tools into the result of the search; further calls are read by their schemas."""
        result = ResponsesTools()
        for index, entry in enumerate(item.items("tools")):
            _tool(result, Fields(entry, f"{item.name('tools')}[{index}]"), "", self._abilities)
        names = {tool.name for tool in self._tools.schemas}
        self._tools.schemas += [replace(tool, deferred=True) for tool in result.schemas if tool.name not in names]
        self._tools.namespaces |= result.namespaces
        self._tools.custom |= result.custom
        text = "\n".join(json.dumps(tool.to_json(), ensure_ascii=False) for tool in result.schemas)
        self._messages.append({"role": "tool", "tool_call_id": item.text("call_id", ""), "content": text})

    def _call(self, item: Fields, call: dict[str, Any]) -> None:
        self._assistant_of(item).setdefault("tool_calls", []).append(call)

    def _reasoning(self, item: Fields) -> None:
        parts = [*item.items("content")] or [*item.items("summary")]
        texts = [part.get("text") for part in parts if isinstance(part, Mapping)]
        text = "".join(text for text in texts if isinstance(text, str))
        assistant = self._assistant_of(item)
        if text:
            assistant["reasoning_content"] = assistant.get("reasoning_content", "") + text

    def _assistant_of(self, item: Fields) -> dict[str, Any]:
        """Return the assistant message that an item belongs to.

        Two adjacent turns of this gateway are one turn requested twice: a stream broke, and its complete items stayed
        in the agent's history.
        """
        match = _ITEM.match(item.text("id", ""))
        turn = match[1] if match else ""
        message = self._messages[-1] if self._messages else None
        if message is not None and message["role"] == "assistant" and turn and self._turn and turn != self._turn:
            self._messages.pop()
            message = None
        if message is None or message["role"] != "assistant":
            message = {"role": "assistant", "content": ""}
            self._messages.append(message)
            self._turn = turn
        self._turn = turn or self._turn
        return message

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
    previous: _StoredResponse | None
    messages: tuple[Message, ...]
    items: Sequence[Mapping[str, Any]] = ()
    instructions: int = 0


class Conversations:
    """Stored responses for ``previous_response_id`` and ``item_reference``: at most ``maximum``, oldest dropped first.

    ``items`` has their output items by id. ``journal`` is called with the id, the origin and the items of each stored
    response.
    """

    __slots__ = ("_maximum", "_responses", "items", "journal")

    def __init__(self, maximum: int = 4096) -> None:
        self._responses: dict[str, _StoredResponse] = {}
        self.items: dict[str, Mapping[str, Any]] = {}
        self._maximum = maximum
        self.journal: Callable[[str, Origin, Sequence[Mapping[str, Any]]], None] | None = None

    def add(
        self,
        response_id: str,
        previous: str | None,
        messages: Sequence[Message],
        items: Sequence[Mapping[str, Any]],
        origin: Origin,
    ) -> None:
        """Store the messages that a response added to an earlier conversation, its answer last, and its items."""
        earlier = self._responses.get(previous) if previous is not None else None
        self._store(response_id, _StoredResponse(earlier, tuple(messages), items))
        if self.journal is not None:
            self.journal(response_id, origin, items)

    def restore(
        self, segments: Sequence[Segment], responses: Iterable[tuple[str, Origin, Sequence[Mapping[str, Any]]]]
    ) -> None:
        """Store the responses that an earlier process gave its ``journal``; each conversation is the path of its turn.

        Raises SessionError if a response is that of no turn.
        """
        paths: dict[int, _StoredResponse | None] = {-1: None}
        turns: dict[str | None, int] = {}
        for segment in segments:
            # Messages that paths share are stored once.
            messages = cast("tuple[Message, ...]", segment.messages)
            paths[segment.index] = _StoredResponse(paths[segment.parent], messages)
            turns[segment.turn_id] = segment.index
        for response_id, origin, items in responses:
            if origin.turn_id not in turns:
                raise SessionError(f"response {response_id} is that of turn {origin.turn_id}, which is not recorded")
            path = paths[turns[origin.turn_id]]
            self._store(response_id, _StoredResponse(path, (), items, origin.instructions))

    def _store(self, response_id: str, response: _StoredResponse) -> None:
        self._responses[response_id] = response
        self.items.update((str(item["id"]), item) for item in response.items if item.get("id"))
        if len(self._responses) > self._maximum:
            oldest = self._responses.pop(next(iter(self._responses)))
            for item in oldest.items:
                self.items.pop(str(item.get("id")), None)

    def item(self, item_id: str) -> Mapping[str, Any]:
        """Return an output item by id. Raises ApiError for an unknown id."""
        item = self.items.get(item_id)
        if item is None:
            reason = (
                f"Item with id {shown(item_id)} not found. Items are kept for their session (its last {self._maximum} "
            )
            reason += "responses), and not with store: false: send the item itself, or remove it from your input"
            raise ApiError(404, f"input: {reason}", param="input", code="item_not_found")
        return item

    def conversation(self, response_id: str) -> Sequence[Message]:
        """Return the conversation up to and including a response. Raises ApiError for an unknown id."""
        response = self._responses.get(response_id)
        if response is None:
            raise ApiError(
                400,
                f"previous_response_id: this session has no response {shown(response_id)}",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        parts: list[tuple[Message, ...]] = []
        instructions = 0
        while response is not None:
            parts.append(response.messages)
            instructions = instructions or response.instructions
            response = response.previous
        return [message for part in reversed(parts) for message in part][instructions:]
