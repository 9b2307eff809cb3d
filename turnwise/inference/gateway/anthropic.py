"""Anthropic Messages: responses, events and errors.

Owns: what is answered, and what Claude Code needs of a stream: it counts as alive only while deltas come. Refuses: the
request (``anthropic_request.py``).

Every block is opened, filled by deltas and closed: clients drop what stands in ``content_block_start``, and whole
blocks that are not closed. Calls are sent when the turn is recorded, like in every dialect.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from turnwise.inference.gateway import sse
from turnwise.inference.gateway.anthropic_request import read_request
from turnwise.inference.gateway.core import Abilities, Answer, ChatRequest, new_id, told_call
from turnwise.inference.gateway.errors import ApiError

_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    529: "overloaded_error",
}


class Anthropic:
    """The dialect of ``POST /v1/messages``."""

    name = "anthropic"

    def read(self, body: Mapping[str, Any], abilities: Abilities) -> ChatRequest:
        """Return what a body asks for."""
        return read_request(body, abilities)

    def respond(self, request: ChatRequest, answers: Sequence[Answer]) -> dict[str, Any]:
        """Return a ``message``."""
        (answer,) = answers
        content: list[dict[str, Any]] = []
        if answer.thoughts and request.reasoning:
            content.append({"type": "thinking", "thinking": answer.thoughts, "signature": _signature(answer)})
        if answer.text or not answer.calls:
            content.append({"type": "text", "text": answer.text})
        for call in answer.calls:
            name, arguments = told_call(call, raw=False)
            content.append({"type": "tool_use", "id": call.id, "name": name, "input": json.loads(arguments)})
        reason, stop = _stop_reason(answer)
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

    def writer(self, request: ChatRequest) -> EventWriter:
        """Return the writer of a stream of events."""
        return EventWriter(request)

    def error(self, error: ApiError) -> dict[str, Any]:
        """Return an error as Anthropic's clients expect it."""
        kind = _ERROR_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": error.message}, "request_id": new_id("req_")}

    def status(self, error: ApiError) -> int:
        """Return the status under which clients of this API send a request again when a server is overloaded."""
        return 529 if error.status == 503 else error.status


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
    """Writes the events of one message."""

    __slots__ = ("_id", "_index", "_open", "_request", "_sent", "_thought")

    def __init__(self, request: ChatRequest) -> None:
        self._request = request
        self._id = new_id("msg_")
        self._index = -1
        self._open = ""
        self._sent = 0
        self._thought = 0

    def begin(self) -> bytes:
        """Return the start of the message."""
        message: dict[str, Any] = {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._request.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {
                "input_tokens": 0,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 0,
                "output_tokens": 0,
            },
        }
        return sse.event({"type": "message_start", "message": message})

    def thoughts(self, index: int, text: str) -> bytes:  # noqa: ARG002 - this API knows one answer
        """Return a delta of a thinking block."""
        self._thought += len(text)
        if not self._request.reasoning:
            return b""
        return self._into("thinking") + self._delta("thinking_delta", "thinking", text)

    def text(self, index: int, text: str) -> bytes:  # noqa: ARG002
        """Return a delta of a text block."""
        self._sent += len(text)
        return self._into("text") + self._delta("text_delta", "text", text)

    def alive(self) -> bytes:
        """Return an empty delta: Claude Code takes nothing else for a sign of life."""
        if self._open == "thinking":
            return self._delta("thinking_delta", "thinking", "")
        return self._into("text") + self._delta("text_delta", "text", "")

    def finish(self, index: int, answer: Answer) -> bytes:
        """Return the rest of the message, call by call, and why it ended."""
        events = []
        if rest := answer.thoughts[self._thought :]:
            events.append(self.thoughts(index, rest))
        if rest := answer.text[self._sent :]:
            events.append(self.text(index, rest))
        elif not answer.calls and not answer.text:
            events.append(self._into("text") + self._delta("text_delta", "text", ""))
        events.append(self._close(answer))
        for call in answer.calls:
            name, arguments = told_call(call, raw=False)
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

    def _into(self, kind: str) -> bytes:
        """Return what makes ``kind`` the open block."""
        if self._open == kind:
            return b""
        closed = self._close(None)
        self._open = kind
        self._index += 1
        block = {"type": "text", "text": ""} if kind == "text" else {"type": kind, "thinking": "", "signature": ""}
        return closed + self._start(block)

    def _close(self, answer: Answer | None) -> bytes:
        if not self._open:
            return b""
        signed = b""
        if self._open == "thinking":
            signature = _signature(answer) if answer is not None else "turnwise"
            signed = self._delta("signature_delta", "signature", signature)
        self._open = ""
        return signed + sse.event({"type": "content_block_stop", "index": self._index})

    def _start(self, block: dict[str, Any]) -> bytes:
        return sse.event({"type": "content_block_start", "index": self._index, "content_block": block})

    def _delta(self, kind: str, key: str, text: str) -> bytes:
        return sse.event({"type": "content_block_delta", "index": self._index, "delta": {"type": kind, key: text}})
