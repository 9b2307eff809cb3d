"""The OpenAI Chat Completions dialect, with open servers' extensions (``reasoning_content``, ``top_k``, ``min_p``).

Reasoning and text are streamed as sampled; calls follow once the turn is recorded, for only then their validity (a call
cut by a limit is none) and their ids are known.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from turnwise.errors import shown
from turnwise.gateway.dialects import sse
from turnwise.gateway.dialects.core import Abilities, Answer, ChatRequest, ToolChoice, call_for_client, new_id
from turnwise.gateway.dialects.field_tables import CHAT
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

_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
}
_SPEAKERS = ("system", "developer", "user", "assistant")
_ROLES = (*_SPEAKERS, "tool")


class OpenAIChat:
    """The dialect of ``POST /v1/chat/completions``."""

    name = "openai_chat"
    statuses: Mapping[int, int] = {}

    def read(self, body: Mapping[str, Any], abilities: Abilities) -> ChatRequest:
        """Parse a request body."""
        CHAT.check(body, "")
        fields = Fields(body)
        ignored: set[Lenient] = set()
        tools = tuple(_tools(fields, abilities, ignored))
        check_names(tools)
        choice = read_choice(fields)
        single = "" if fields.flag("parallel_tool_calls", default=True) else "parallel_tool_calls"
        answer = FormatField("response_format", fields.get("response_format"), nested=True)
        resolved = read_response_format(tools, choice, answer, abilities, single=single)
        sampling = read_sampling(fields, limit_fields=("max_completion_tokens", "max_tokens"), stop="stop")
        messages: list[Any] = [
            # Role and text only: nothing to check, and nothing to rewrite.
            entry
            if type(entry) is dict
            and len(entry) == 2
            and type(entry.get("content")) is str
            and entry.get("role") in _SPEAKERS
            else read_message(entry, f"messages[{index}]", abilities)
            for index, entry in enumerate(fields.items("messages"))
        ]
        if not messages:
            raise invalid("messages", "must hold at least one message")
        logprobs = fields.flag("logprobs")
        if fields.integer("top_logprobs", 0, 20):
            raise unsupported("top_logprobs", "only the sampled token's log-probability is available; set it to 0")
        options = Fields(fields.get("stream_options") or {}, "stream_options")
        return ChatRequest(
            model=fields.text("model", ""),
            messages=messages,
            tools=resolved.tools,
            calls=resolved.calls,
            sampling=sampling,
            n=fields.integer("n", 1, abilities.most_choices) or 1,
            stream=fields.flag("stream"),
            include_usage=options.flag("include_usage"),
            guide=resolved.guide,
            guide_field=resolved.field,
            ignored=resolved.ignored | ignored,
            logprobs=logprobs,
            token_ids=fields.flag("return_token_ids"),
            options=read_template_options(
                fields.text("reasoning_effort", ""), kwargs=fields.get("chat_template_kwargs")
            ),
        )

    def respond(self, request: ChatRequest, answers: Sequence[Answer]) -> dict[str, Any]:
        """Return a ``chat.completion``."""
        return {
            "id": new_id("chatcmpl-"),
            "object": "chat.completion",
            "created": int(time.time()),
            "model": request.model,
            "choices": [_choice(request, index, answer) for index, answer in enumerate(answers)],
            "usage": usage(answers),
        }

    def writer(self, request: ChatRequest) -> ChunkWriter:
        """Return the chunk writer of a stream."""
        return ChunkWriter(request)

    def error(self, error: ApiError) -> dict[str, Any]:
        """Return an error in OpenAI's form."""
        return openai_error(error)


def openai_error(error: ApiError) -> dict[str, Any]:
    """Return the error body of OpenAI's APIs."""
    kind = _ERROR_TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


# Requests


def _tools(fields: Fields, abilities: Abilities, ignored: set[Lenient]) -> Iterator[ToolSchema]:
    for index, entry in enumerate(fields.items("tools")):
        tool = Fields(entry, f"tools[{index}]")
        kind = tool.text("type", "function")
        if kind != "function":
            ignored.add(leave_out_tool(tool, "type", kind, abilities))
            continue
        function = Fields(tool.get("function"), tool.name("function"))
        at = tool.name("function")
        yield read_tool(function.get("name"), function.get("description"), function.get("parameters"), at)


def read_choice(fields: Fields) -> ToolChoice:
    """Return the tool choice of either OpenAI API."""
    value = fields.get("tool_choice")
    if value is None or value == "auto":
        return ToolChoice()
    if value == "none":
        return ToolChoice("none")
    if value == "required":
        return ToolChoice("required")
    if isinstance(value, str):
        raise invalid("tool_choice", f"must be auto, none, required or name a tool, not {shown(value)}")
    choice = Fields(value, "tool_choice")
    kind = choice.text("type", "function")
    if kind == "allowed_tools":
        allowed = Fields(choice.get("allowed_tools") or value, "tool_choice")
        names = tuple(_name_of(entry) for entry in allowed.items("tools"))
        if allowed.text("mode", "auto") == "auto":
            raise unsupported("tool_choice", "allowed_tools with mode auto: offer only those tools instead")
        return ToolChoice("named", names)
    if kind not in ("function", "custom"):
        raise unsupported("tool_choice", f"a tool of type {shown(kind)} is not supported")
    return ToolChoice("named", (_name_of(value),))


def _name_of(entry: Any) -> str:
    fields = Fields(entry, "tool_choice")
    inner = fields.get("function") or fields.get("custom")
    return (Fields(inner, "tool_choice.function") if inner is not None else fields).text("name")


def read_message(entry: Any, at: str, abilities: Abilities) -> Message:
    """Parse a message."""
    fields = Fields(entry, at)
    role = fields.text("role")
    if role == "function":
        # What answered a legacy function call: it names the function, not the call.
        role = "tool"
    if role not in _ROLES:
        raise invalid(fields.name("role"), f"must be one of {', '.join(_ROLES)}, not {shown(role)}")
    message: dict[str, Any] = {"role": role, "content": _content(fields.get("content"), f"{at}.content", abilities)}
    name = fields.get("name")
    if isinstance(name, str):
        message["name"] = name
    if role == "tool":
        message["tool_call_id"] = fields.text("tool_call_id", "")
    if role == "assistant":
        thoughts = fields.get("reasoning_content") or fields.get("reasoning")
        if isinstance(thoughts, str) and thoughts:
            message["reasoning_content"] = thoughts
        calls = [_echoed(call, f"{at}.tool_calls[{index}]") for index, call in enumerate(fields.items("tool_calls"))]
        legacy = fields.get("function_call")
        if isinstance(legacy, Mapping) and not calls:
            calls = [echoed_call("", legacy.get("name"), legacy.get("arguments"))]
        if calls:
            message["tool_calls"] = calls
    return cast(Message, message)


def _echoed(entry: Any, at: str) -> dict[str, Any]:
    call = Fields(entry, at)
    function = Fields(call.get("function") or call.get("custom") or {}, f"{at}.function")
    arguments = function.get("arguments")
    return echoed_call(call.get("id"), function.get("name"), function.get("input") if arguments is None else arguments)


def _content(value: Any, at: str, abilities: Abilities) -> str | list[dict[str, Any]]:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, list):
        raise invalid(at, f"must be a string or a list of parts, not {shown(value)}")
    parts: list[dict[str, Any]] = []
    for index, entry in enumerate(value):
        if isinstance(entry, str):
            parts.append({"type": "text", "text": entry})
            continue
        part = Fields(entry, f"{at}[{index}]")
        kind = part.text("type", "text")
        if kind in ("text", "input_text", "output_text"):
            parts.append(text_part(part.get("text"), part.name("text")))
        elif kind == "image_url":
            image = part.get("image_url")
            source = image if isinstance(image, str) else Fields(image, part.name("image_url")).text("url")
            parts.append(image_part(source, part.name("image_url"), abilities))
        elif kind != "refusal":
            raise unsupported(part.name("type"), f"parts of type {shown(kind)}; supported: text and image_url")
    return parts


# Answers


def usage(answers: Sequence[Answer]) -> dict[str, Any]:
    """Return the usage: the prompt once, and the sampled tokens of all answers."""
    prompt = max((answer.prompt_tokens for answer in answers), default=0)
    sampled = sum(answer.completion_tokens for answer in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": max((answer.cached_tokens for answer in answers), default=0)},
        "completion_tokens_details": {"reasoning_tokens": sum(answer.reasoning_tokens for answer in answers)},
    }


def _finish_reason(answer: Answer) -> str:
    # Calls of a turn that was truncated after them are valid: clients run them only under this reason.
    return "tool_calls" if answer.calls else ("length" if answer.cut else "stop")


def _calls(answer: Answer) -> list[dict[str, Any]]:
    calls = []
    for call in answer.calls:
        name, arguments = call_for_client(call, raw=True)
        calls.append({"id": call.id, "type": "function", "function": {"name": name, "arguments": arguments}})
    return calls


def token_logprobs(answer: Answer) -> list[dict[str, Any]]:
    """Return the log-probabilities of an answer's tokens, as both of OpenAI's APIs write them."""
    return [
        {
            "token": token.text,
            "logprob": token.logprob,
            "bytes": list(token.text.encode("utf-8", "replace")),
            "top_logprobs": [],
        }
        for token in answer.logprobs
    ]


def _logprobs(answer: Answer) -> dict[str, Any]:
    return {"content": token_logprobs(answer), "refusal": None}


def _choice(request: ChatRequest, index: int, answer: Answer) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
    if answer.thoughts:
        message["reasoning_content"] = answer.thoughts
    if answer.calls:
        message["content"] = answer.text or None
        message["tool_calls"] = _calls(answer)
    return {
        "index": index,
        "message": message,
        "logprobs": _logprobs(answer) if request.logprobs else None,
        "finish_reason": _finish_reason(answer),
        **({"token_ids": answer.token_ids} if request.token_ids else {}),
    }


class ChunkWriter:
    """Writer of ``chat.completion.chunk`` objects."""

    __slots__ = ("_answers", "_base", "_reasoning_sent", "_request", "_text_sent")

    def __init__(self, request: ChatRequest) -> None:
        self._request = request
        self._base = {
            "id": new_id("chatcmpl-"),
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": request.model,
        }
        self._text_sent = [0] * request.n
        self._reasoning_sent = [0] * request.n
        self._answers: list[Answer] = []

    def begin(self) -> bytes:
        """Return the role chunk of each answer."""
        return b"".join(self._delta(index, {"role": "assistant", "content": ""}) for index in range(self._request.n))

    def thoughts(self, index: int, text: str) -> bytes:
        """Return a chunk of reasoning."""
        self._reasoning_sent[index] += len(text)
        return self._delta(index, {"reasoning_content": text})

    def text(self, index: int, text: str) -> bytes:
        """Return a chunk of text."""
        self._text_sent[index] += len(text)
        return self._delta(index, {"content": text})

    def alive(self) -> bytes:
        """Return a comment: any bytes keep clients of this API waiting."""
        return sse.COMMENT

    def finish(self, index: int, answer: Answer) -> bytes:
        """Return the rest of an answer, its calls and its finish reason."""
        self._answers.append(answer)
        chunks = []
        if rest := answer.thoughts[self._reasoning_sent[index] :]:
            chunks.append(self.thoughts(index, rest))
        if rest := answer.text[self._text_sent[index] :]:
            chunks.append(self.text(index, rest))
        for position, call in enumerate(_calls(answer)):
            function = call["function"]
            named = {**call, "index": position, "function": {"name": function["name"], "arguments": ""}}
            chunks.append(self._delta(index, {"tool_calls": [named]}))
            rest_of_call = {"index": position, "function": {"arguments": function["arguments"]}}
            chunks.append(self._delta(index, {"tool_calls": [rest_of_call]}))
        logprobs = _logprobs(answer) if self._request.logprobs else None
        chunks.append(self._delta(index, {}, _finish_reason(answer), logprobs))
        return b"".join(chunks)

    def end(self) -> bytes:
        """Return the usage, if requested, and the end mark."""
        if not self._request.include_usage:
            return sse.DONE
        return sse.data({**self._base, "choices": [], "usage": usage(self._answers)}) + sse.DONE

    def fail(self, error: ApiError) -> bytes:
        """Return an error in place of a chunk."""
        return sse.data(openai_error(error)) + sse.DONE

    def _delta(
        self, index: int, delta: dict[str, Any], reason: str | None = None, logprobs: dict[str, Any] | None = None
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return sse.data({**self._base, "choices": [choice]})
