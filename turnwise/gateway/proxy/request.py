"""Requests to a hosted endpoint, parsed for the record by the dialects: conversation, tools and sampling."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from turnwise.errors import SessionError
from turnwise.gateway.dialects.anthropic import read_messages_request
from turnwise.gateway.dialects.core import Abilities
from turnwise.gateway.dialects.openai_chat import read_message
from turnwise.gateway.dialects.responses_request import Conversations, InputReader, ResponsesTools
from turnwise.gateway.errors import ApiError, unsupported
from turnwise.model.canonical import canonical_arguments, canonical_value, clean
from turnwise.types import Message, ToolCall, ToolSchema, text_of

_TEXT = {"text", "input_text", "output_text"}
# Blocks of Anthropic's messages that its dialect reads.
_BLOCKS = {"text", "thinking", "redacted_thinking", "tool_use", "tool_result", "tool_reference"}
_ANY = Abilities()
_NUMBERS = ("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty")
_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
_MOST_CHOICES = 128


@dataclass(frozen=True, slots=True)
class ForwardedRequest:
    """A forwarded request in the form that is recorded.

    Attributes:
        prefill: Assistant text that the answer continues.
        n: Number of answers.
        sampling: Numeric sampling parameters that the request names.
        previous: The response that it continues.
        new: The messages that it adds to that response's conversation.
        parsed: Whether the conversation could be parsed.
        instructions: Number of messages before that conversation.
    """

    messages: list[Message]
    tools: tuple[ToolSchema, ...] = ()
    prefill: str = ""
    n: int = 1
    sampling: dict[str, float] = field(default_factory=dict)
    previous: str | None = None
    new: Sequence[Message] = ()
    parsed: bool = True
    instructions: int = 0


def read_forwarded(dialect: str, body: Mapping[str, Any], conversations: Conversations) -> ForwardedRequest:
    """Parse a request body; ``conversations`` are the session's stored Responses.

    Raises ApiError if it continues a response that this session did not record, or its answer could not be recorded.
    """
    sampling = _sampling(body)
    tools = tuple(_tools(body.get("tools")))
    try:
        if dialect == "openai_responses":
            return _responses(body, conversations, tools, sampling)
        messages = _chat(body) if dialect == "openai_chat" else _anthropic(body)
    except (_Refusal, SessionError) as error:
        if isinstance(error, _Refusal):
            raise error.refusal from None
        return unparsed_request(body)
    except (ApiError, AttributeError, KeyError, TypeError, ValueError, RecursionError):
        return unparsed_request(body)
    n = body.get("n")
    count = n if type(n) is int and 1 <= n <= _MOST_CHOICES and dialect == "openai_chat" else 1
    messages, prefill = _without_prefill(messages)
    return ForwardedRequest(messages, tools, prefill, count, sampling)


def read_answer(dialect: str, parts: Any) -> Message:
    """Return the assistant message of an answer, with the endpoint's call ids. Raises ApiError.

    ``parts``: a Chat Completions message, the items of a response, or the blocks of an Anthropic message.
    """
    if dialect == "openai_chat":
        messages: list[Message] = [read_message(_chat_message({**parts, "role": "assistant"}), "message", _ANY)]
    elif dialect == "openai_responses":
        # Without their ids: in a history those tell one turn from another, and these are one.
        messages = _read_items([{**part, "id": None} for part in parts if isinstance(part, Mapping)])
    else:
        question = {"role": "user", "content": "-"}
        turn = {"role": "assistant", "content": [_block(part) for part in parts]}
        messages = read_messages_request({"messages": [question, turn]}, _ANY).messages[1:]
    text, thoughts = "", ""
    calls: list[ToolCall] = []
    for message in messages:
        text += text_of(message)
        thoughts += message.get("reasoning_content") or ""
        calls += [_call(cast("Mapping[str, Any]", call)) for call in message.get("tool_calls") or ()]
    answer: Message = {"role": "assistant", "content": text}
    if thoughts:
        answer["reasoning_content"] = thoughts
    if calls:
        answer["tool_calls"] = calls
    return answer


class _Refusal(Exception):
    """A request that must not be sent, because its answer could not be recorded."""

    def __init__(self, refusal: ApiError) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


def _call(call: Mapping[str, Any]) -> ToolCall:
    """Return a call of an endpoint; arguments that are not an object are kept as text."""
    function = call["function"]
    source = function["arguments"]
    raw = source if isinstance(source, str) else ""
    name = function["name"]
    _, value = canonical_arguments(source)
    if value is None:
        return ToolCall(call["id"], name, {}, raw, "the arguments are not a JSON object")
    return ToolCall(call["id"], name, value, raw)


# Requests


def _chat(body: Mapping[str, Any]) -> list[Message]:
    entries = [_chat_message(entry) for entry in body["messages"]]
    return [read_message(entry, f"messages[{index}]", _ANY) for index, entry in enumerate(entries)]


def _anthropic(body: Mapping[str, Any]) -> list[Message]:
    entries = [{**entry, "content": _content(entry.get("content"), _block)} for entry in body["messages"]]
    request = {"messages": entries, "system": _content(body.get("system"), _block)}
    return read_messages_request(request, _ANY).messages


def _responses(
    body: Mapping[str, Any], conversations: Conversations, tools: tuple[ToolSchema, ...], sampling: dict[str, float]
) -> ForwardedRequest:
    for key, why in (
        ("background", "an answer is recorded while its request waits"),
        ("conversation", "what the endpoint stored is not known here; send the items, or previous_response_id"),
        ("prompt", "what the endpoint stored is not known here; send instructions and input"),
    ):
        if body.get(key):
            raise _Refusal(unsupported(key, why))
    previous = body.get("previous_response_id") or None
    try:
        earlier = conversations.conversation(str(previous)) if previous is not None else ()
    except ApiError as error:
        # Possibly that of another session.
        raise _Refusal(error) from None
    items = body.get("input")
    new = _read_items([_resolved(item, conversations.items) for item in items] if isinstance(items, list) else items)
    instructions = body.get("instructions")
    system: list[Message] = [{"role": "system", "content": instructions}] if isinstance(instructions, str) else []
    messages, prefill = _without_prefill([*system, *earlier, *new])
    return ForwardedRequest(messages, tools, prefill, 1, sampling, previous, new, instructions=len(system))


def _resolved(item: Any, items: Mapping[str, Mapping[str, Any]]) -> Any:
    if not isinstance(item, Mapping) or item.get("type") != "item_reference":
        return item
    referenced = items.get(str(item.get("id")))
    if referenced is None:
        raise _Refusal(unsupported("input", f"item {str(item.get('id'))[:80]!r} is not an item of this session"))
    return referenced


def _read_items(value: Any) -> list[Message]:
    if isinstance(value, list):
        value = [_item(item) for item in value]
    return InputReader(_ANY, ResponsesTools()).read(value)


def _without_prefill(messages: Sequence[Message]) -> tuple[list[Message], str]:
    """Split the final assistant message off a conversation, as text."""
    final = messages[-1] if messages else None
    if final is None or final["role"] != "assistant" or len(messages) == 1 or final.get("tool_calls"):
        return list(messages), ""
    return list(messages[:-1]), text_of(final)


def unparsed_request(body: Mapping[str, Any]) -> ForwardedRequest:
    """Return a request with an unparsable conversation: its body as one message."""
    answer = json.dumps(body, ensure_ascii=False, sort_keys=True)
    return ForwardedRequest([{"role": "user", "content": clean(answer)}], sampling=_sampling(body), parsed=False)


def _sampling(body: Mapping[str, Any]) -> dict[str, float]:
    sampling = {key: float(body[key]) for key in _NUMBERS if _is_number(body.get(key))}
    limit = next((float(body[key]) for key in _LIMITS if _is_number(body.get(key))), None)
    return sampling if limit is None else {**sampling, "max_tokens": limit}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 2**63


def _tools(entries: Any, namespace: str = "") -> list[ToolSchema]:
    schemas: list[ToolSchema] = []
    for entry in entries if isinstance(entries, list) else ():
        if not isinstance(entry, Mapping):
            continue
        kind = entry.get("type")
        if kind == "namespace":
            schemas += _tools(entry.get("tools"), f"{entry.get('name')}__")
            continue
        inner = next((entry[key] for key in ("function", "custom") if isinstance(entry.get(key), Mapping)), entry)
        schema = inner.get("parameters") or inner.get("input_schema")
        if not isinstance(schema, dict):
            # A tool that the endpoint runs or knows: it has only the fields beside its name.
            schema = {key: value for key, value in inner.items() if key not in ("name", "description", "cache_control")}
        try:
            canonical_value(schema)
        except SessionError:
            schema = {}
        name, description = inner.get("name") or kind or "", inner.get("description") or ""
        schemas.append(ToolSchema(namespace + clean(str(name)), clean(str(description)), schema))
    return schemas


# Parts


def _content(value: Any, part: Callable[[Any], Any]) -> Any:
    return [part(piece) for piece in value] if isinstance(value, list) else value


def _chat_message(entry: Any) -> dict[str, Any]:
    message = {**entry, "content": _content(entry.get("content"), _part)}
    if message.get("role") == "assistant" and not message["content"] and isinstance(entry.get("refusal"), str):
        message["content"] = entry["refusal"]
    return message


def _item(item: Any) -> Any:
    if not isinstance(item, Mapping):
        return item
    changed = dict(item)
    for key in ("content", "output"):
        # The parts of reasoning are texts of another kind; its dialect reads them.
        if isinstance(item.get(key), list) and item.get("type") != "reasoning":
            changed[key] = _content(item[key], _part)
        elif key == "output" and isinstance(item.get(key), Mapping):
            changed[key] = json.dumps(item[key], ensure_ascii=False, sort_keys=True)
    return changed


def _part(part: Any) -> Any:
    if not isinstance(part, Mapping) or part.get("type", "text") in _TEXT:
        return part
    if part.get("type") == "refusal":
        return {"type": "text", "text": str(part.get("refusal") or "")}
    return {"type": "text", "text": _note(part)}


def _block(block: Any) -> Any:
    if not isinstance(block, Mapping):
        return block
    kind = block.get("type")
    if kind == "tool_result":
        return {**block, "content": _content(block.get("content"), _block)}
    source = block.get("source")
    if kind == "document" and isinstance(source, Mapping) and source.get("type") == "text":
        return block
    return block if kind in _BLOCKS else {"type": "text", "text": _note(block)}


def _note(part: Mapping[str, Any]) -> str:
    """Return a placeholder for a part that is not text; equal parts give equal ones, regardless of cache marks."""
    content = {key: value for key, value in part.items() if key != "cache_control"}
    digest = hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=8).hexdigest()
    return f"[{part.get('type')} {digest}]"
