"""The Anthropic Messages dialect: requests, responses, stream events and errors.

Every block is opened, filled by deltas and closed: clients drop text in ``content_block_start`` and unclosed blocks. As
in every dialect, calls are sent once the turn is recorded.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from turnwise.errors import shown
from turnwise.gateway.dialects import sse
from turnwise.gateway.dialects.core import Abilities, Answer, ChatRequest, ToolChoice, call_for_client, new_id
from turnwise.gateway.dialects.field_tables import MESSAGES
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
from turnwise.gateway.dialects.response_format import FormatField, read_response_format
from turnwise.gateway.dialects.template_options import read_template_options
from turnwise.gateway.errors import ApiError, Lenient, invalid, unsupported
from turnwise.types import Message, ToolSchema

_BILLING = "x-anthropic-billing-header:"
# Under ``adaptive`` it is the model that decides.
_THINKING = {"enabled": True, "disabled": False}


def read_messages_request(body: Mapping[str, Any], abilities: Abilities) -> ChatRequest:
    """Parse a request body."""
    fields = Fields(body)
    ignored: set[Lenient] = set()
    if fields.items("mcp_servers"):
        ignored.add(leave_out_tool(fields, "mcp_servers", "mcp", abilities))
    tools = tuple(_tools(fields, abilities, ignored))
    check_names(tools)
    choice, single = _choice(fields)
    resolved = read_response_format(tools, choice, _format(fields), abilities, single=single)
    messages = _messages(fields, abilities, {tool.name: tool for tool in tools})
    thinking = Fields(fields.get("thinking") or {}, "thinking").text("type", "")
    effort = Fields(fields.get("output_config") or {}, "output_config").text("effort", "")
    return ChatRequest(
        model=fields.text("model", ""),
        messages=messages,
        tools=resolved.tools,
        calls=resolved.calls,
        sampling=read_sampling(fields, limit_fields=("max_tokens",), stop="stop_sequences"),
        stream=fields.flag("stream"),
        guide=resolved.guide,
        guide_field=resolved.field,
        ignored=resolved.ignored | ignored,
        reasoning=thinking != "disabled",
        options=read_template_options(effort, _THINKING.get(thinking), fields.get("chat_template_kwargs")),
    )


def _tools(fields: Fields, abilities: Abilities, ignored: set[Lenient]) -> Iterator[ToolSchema]:
    tools = [Fields(entry, f"tools[{index}]") for index, entry in enumerate(fields.items("tools"))]
    # What only the provider's own search could find, which is left out, is offered at once.
    searchable = not any(tool.text("type", "custom").startswith("tool_search_tool") for tool in tools)
    for index, tool in enumerate(tools):
        kind = tool.text("type", "custom")
        if kind == "custom":
            schema = (tool.get("name"), tool.get("description"), tool.get("input_schema"))
            deferred = searchable and tool.flag("defer_loading")
            yield replace(read_tool(*schema, f"tools[{index}]", "input_schema"), deferred=deferred)
        else:
            ignored.add(leave_out_tool(tool, "type", kind, abilities))


def _choice(fields: Fields) -> tuple[ToolChoice, str]:
    value = fields.get("tool_choice")
    if value is None:
        return ToolChoice(), ""
    choice = Fields(value, "tool_choice")
    kind = choice.text("type")
    single = choice.name("disable_parallel_tool_use") if choice.flag("disable_parallel_tool_use") else ""
    if kind == "tool":
        return ToolChoice("named", (choice.text("name"),)), single
    modes = {"auto": ToolChoice(), "any": ToolChoice("required"), "none": ToolChoice("none")}
    if kind not in modes:
        raise invalid("tool_choice.type", f"must be auto, any, tool or none, not {shown(kind)}")
    return modes[kind], single


def _format(fields: Fields) -> FormatField:
    output = Fields(fields.get("output_config") or {}, "output_config")
    if output.get("format") is not None:
        return FormatField("output_config.format", output.get("format"))
    return FormatField("output_format", fields.get("output_format"))


def _messages(fields: Fields, abilities: Abilities, tools: Mapping[str, ToolSchema]) -> list[Message]:
    entries = fields.items("messages")
    if not entries:
        raise invalid("messages", "must hold at least one message")
    messages: list[dict[str, Any]] = []
    system = _system(fields.get("system"), "system")
    if system:
        messages.append({"role": "system", "content": system})
    for index, entry in enumerate(entries):
        at = f"messages[{index}]"
        message = Fields(entry, at)
        role, content = message.text("role"), _blocks(message.get("content"), f"{at}.content")
        if role == "assistant":
            messages.append(_read_assistant(content, f"{at}.content"))
        elif role == "user":
            messages += _read_user(content, f"{at}.content", messages, abilities, tools)
        elif role == "system":
            _append_system(messages, _system(message.get("content"), f"{at}.content"))
        else:
            raise invalid(message.name("role"), f"must be user, assistant or system, not {shown(role)}")
    return cast("list[Message]", messages)


def _blocks(value: Any, at: str) -> list[Any]:
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        raise invalid(at, f"must be a string or a list of blocks, not {shown(value)}")
    return value


def _system(value: Any, at: str) -> str:
    if value is None:
        return ""
    texts = []
    for index, entry in enumerate(_blocks(value, at)):
        block = Fields(entry, f"{at}[{index}]")
        if block.text("type", "text") != "text":
            raise unsupported(block.name("type"), "a system prompt is text")
        text = block.text("text")
        # Claude Code's first line changes with its version, its sub-agents and after a compaction.
        if not text.startswith(_BILLING):
            texts.append(text)
    return "\n\n".join(filter(str.strip, texts))


def _append_system(messages: list[dict[str, Any]], text: str) -> None:
    """Append a mid-conversation system message, which most templates lack, to the last user message."""
    if not text:
        return
    text = f"<system-reminder>\n{text}\n</system-reminder>"
    if messages and messages[-1]["role"] == "user":
        # Templates that want user and assistant in turns take one message for both.
        messages[-1]["content"].append({"type": "text", "text": f"\n\n{text}"})
    else:
        messages.append({"role": "user", "content": [{"type": "text", "text": text}]})


def _read_assistant(blocks: list[Any], at: str) -> dict[str, Any]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for index, entry in enumerate(blocks):
        block = Fields(entry, f"{at}[{index}]")
        kind = block.text("type")
        if kind == "text":
            texts.append(block.text("text"))
        elif kind == "thinking":
            thoughts.append(block.text("thinking", ""))
        elif kind == "tool_use":
            calls.append(echoed_call(block.get("id"), block.get("name"), block.get("input")))
        elif kind != "redacted_thinking":
            raise unsupported(block.name("type"), f"blocks of type {shown(kind)} of an assistant message")
    if len(texts) > 1 or calls:
        texts = [text for text in texts if text.strip()]
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if any(thoughts):
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _read_user(
    blocks: list[Any],
    at: str,
    earlier: Sequence[Mapping[str, Any]],
    abilities: Abilities,
    tools: Mapping[str, ToolSchema],
) -> list[dict[str, Any]]:
    """Return the messages of a user message: one per tool result, then the user's text."""
    results: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    for index, entry in enumerate(blocks):
        block = Fields(entry, f"{at}[{index}]")
        if block.text("type") == "tool_result":
            results.append(_result(block, abilities, tools))
        else:
            parts.append(_part(block, abilities, tools))
    calls = next((message.get("tool_calls") or () for message in reversed(earlier) if message["role"] != "tool"), ())
    order = {call["id"]: position for position, call in enumerate(calls)}
    # Results come in the order in which the tools ended; a prompt holds them in the order of the calls.
    results.sort(key=lambda result: order.get(result["tool_call_id"], len(order)))
    if len(parts) > 1:
        parts = [part for part in parts if part["type"] != "text" or part["text"].strip()] or parts[:1]
    if results and all(part["type"] == "text" and not part["text"].strip() for part in parts):
        parts = []
    if parts:
        results.append({"role": "user", "content": parts})
    return results


def _result(block: Fields, abilities: Abilities, tools: Mapping[str, ToolSchema]) -> dict[str, Any]:
    content, name = block.get("content"), block.name("content")
    blocks = [] if content is None else _blocks(content, name)
    parts = [_part(Fields(entry, f"{name}[{index}]"), abilities, tools) for index, entry in enumerate(blocks)]
    text = "Error" if block.flag("is_error") else ""
    return {"role": "tool", "tool_call_id": block.text("tool_use_id"), "content": parts or text}


def _part(block: Fields, abilities: Abilities, tools: Mapping[str, ToolSchema]) -> dict[str, Any]:
    kind = block.text("type")
    if kind == "text":
        return text_part(block.get("text"), block.name("text"))
    if kind == "image":
        return _image(block, abilities)
    if kind == "document" and (text := _document(block)) is not None:
        return text_part(text, block.name("source"))
    if kind == "tool_reference":
        # The provider puts the definition of a tool here that a search of the agent's own found.
        tool = tools.get(name := block.text("tool_name"))
        definition = name if tool is None else json.dumps(tool.to_json(), ensure_ascii=False)
        return text_part(f"{definition}\n", block.name("tool_name"))
    raise unsupported(block.name("type"), f"blocks of type {shown(kind)}; supported: text, image and tool_result")


def _image(block: Fields, abilities: Abilities) -> dict[str, Any]:
    source = Fields(block.get("source"), block.name("source"))
    if source.text("type") == "base64":
        url = f"data:{source.text('media_type')};base64,{source.text('data')}"
    else:
        url = source.text("url", "")
    return image_part(url, source.name("url"), abilities)


def _document(block: Fields) -> str | None:
    source = Fields(block.get("source"), block.name("source"))
    return source.text("data") if source.text("type") == "text" else None


_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}


class Anthropic:
    """The dialect of ``POST /v1/messages``."""

    name = "anthropic"
    # On 529 these clients retry.
    statuses: Mapping[int, int] = {503: 529}

    def read(self, body: Mapping[str, Any], abilities: Abilities) -> ChatRequest:
        """Parse a request body."""
        MESSAGES.check(body, "")
        return read_messages_request(body, abilities)

    def respond(self, request: ChatRequest, answers: Sequence[Answer]) -> dict[str, Any]:
        """Return a ``message``."""
        (answer,) = answers
        content: list[dict[str, Any]] = []
        if answer.thoughts and request.reasoning:
            content.append({"type": "thinking", "thinking": answer.thoughts, "signature": _signature(answer)})
        if answer.text or not answer.calls:
            content.append({"type": "text", "text": answer.text})
        for call in answer.calls:
            name, arguments = call_for_client(call, raw=False)
            content.append({"type": "tool_use", "id": call.id, "name": name, "input": json.loads(arguments)})
        return _message(request, content, answer, *_stop_reason(answer))

    def writer(self, request: ChatRequest) -> EventWriter:
        """Return the event writer of a stream."""
        return EventWriter(request)

    def error(self, error: ApiError) -> dict[str, Any]:
        """Return an error in Anthropic's form."""
        kind = _ERROR_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": error.message}, "request_id": new_id("req_")}


def _message(
    request: ChatRequest,
    content: list[dict[str, Any]],
    answer: Answer,
    reason: str | None = None,
    stop: str | None = None,
) -> dict[str, Any]:
    return {
        "id": new_id("msg_"),
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "content": content,
        "stop_reason": reason,
        "stop_sequence": stop,
        "usage": _usage(answer),
    }


def _signature(answer: Answer) -> str:
    return answer.message.get("turn_id") or "turnwise"


def _usage(answer: Answer) -> dict[str, Any]:
    return {
        "input_tokens": answer.prompt_tokens - answer.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": answer.cached_tokens,
        "output_tokens": answer.completion_tokens,
    }


def _stop_reason(answer: Answer) -> tuple[str, str | None]:
    if answer.calls:
        return "tool_use", None
    if answer.cut:
        return "max_tokens", None
    return ("stop_sequence", answer.stop) if answer.stop is not None else ("end_turn", None)


class EventWriter:
    """Writer of one message's events."""

    __slots__ = ("_index", "_open_kind", "_reasoning_sent", "_request", "_text_sent")

    def __init__(self, request: ChatRequest) -> None:
        self._request = request
        self._index = -1
        self._open_kind = ""
        self._text_sent = 0
        self._reasoning_sent = 0

    def begin(self) -> bytes:
        """Return the start of the message."""
        unanswered = Answer({"role": "assistant"}, 0, 0)
        return sse.event({"type": "message_start", "message": _message(self._request, [], unanswered)})

    def thoughts(self, index: int, text: str) -> bytes:  # noqa: ARG002 - this API knows one answer
        """Return a delta of a thinking block."""
        self._reasoning_sent += len(text)
        if not self._request.reasoning:
            return b""
        return self._switch_to("thinking") + self._delta("thinking_delta", "thinking", text)

    def text(self, index: int, text: str) -> bytes:  # noqa: ARG002
        """Return a delta of a text block."""
        self._text_sent += len(text)
        return self._switch_to("text") + self._delta("text_delta", "text", text)

    def alive(self) -> bytes:
        """Return an empty delta, the only keep-alive that Claude Code accepts."""
        if self._open_kind == "thinking":
            return self._delta("thinking_delta", "thinking", "")
        return self._switch_to("text") + self._delta("text_delta", "text", "")

    def finish(self, index: int, answer: Answer) -> bytes:
        """Return the rest of the message, its calls and its stop reason."""
        events = []
        if rest := answer.thoughts[self._reasoning_sent :]:
            events.append(self.thoughts(index, rest))
        if rest := answer.text[self._text_sent :]:
            events.append(self.text(index, rest))
        elif not answer.calls and not answer.text:
            events.append(self._switch_to("text") + self._delta("text_delta", "text", ""))
        events.append(self._close(answer))
        for call in answer.calls:
            name, arguments = call_for_client(call, raw=False)
            self._index += 1
            block = {"type": "tool_use", "id": call.id, "name": name, "input": {}}
            events.append(self._start(block) + self._delta("input_json_delta", "partial_json", arguments))
            events.append(sse.event({"type": "content_block_stop", "index": self._index}))
        reason, stop = _stop_reason(answer)
        delta = {"stop_reason": reason, "stop_sequence": stop}
        events.append(sse.event({"type": "message_delta", "delta": delta, "usage": _usage(answer)}))
        return b"".join(events)

    def end(self) -> bytes:
        """Return the end of the message."""
        return sse.event({"type": "message_stop"})

    def fail(self, error: ApiError) -> bytes:
        """Return an error event."""
        return sse.event(Anthropic().error(error))

    def _switch_to(self, kind: str) -> bytes:
        """Return the events that make ``kind`` the open block."""
        if self._open_kind == kind:
            return b""
        closed = self._close(None)
        self._open_kind = kind
        self._index += 1
        block = {"type": "text", "text": ""} if kind == "text" else {"type": kind, "thinking": "", "signature": ""}
        return closed + self._start(block)

    def _close(self, answer: Answer | None) -> bytes:
        if not self._open_kind:
            return b""
        signed = b""
        if self._open_kind == "thinking":
            signature = _signature(answer) if answer is not None else "turnwise"
            signed = self._delta("signature_delta", "signature", signature)
        self._open_kind = ""
        return signed + sse.event({"type": "content_block_stop", "index": self._index})

    def _start(self, block: dict[str, Any]) -> bytes:
        return sse.event({"type": "content_block_start", "index": self._index, "content_block": block})

    def _delta(self, kind: str, key: str, text: str) -> bytes:
        return sse.event({"type": "content_block_delta", "index": self._index, "delta": {"type": kind, key: text}})
