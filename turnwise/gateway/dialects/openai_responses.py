"""The OpenAI Responses dialect, stateless or with ``previous_response_id``: responses, events and errors.

Codex ignores ``response.completed.output`` in favour of ``response.output_item.done`` items, and stops at
``response.incomplete``; with ``reports_complete`` it gets ``response.completed`` instead.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from turnwise.gateway.dialects import sse
from turnwise.gateway.dialects.core import Abilities, Answer, ChatRequest, Origin, call_for_client, new_id
from turnwise.gateway.dialects.field_tables import RESPONSES
from turnwise.gateway.dialects.openai_chat import openai_error, token_logprobs
from turnwise.gateway.dialects.responses_request import SEARCH, Conversations, ResponsesTools, read_responses_request
from turnwise.gateway.errors import ApiError
from turnwise.types import Message, ToolCall

_REPEATED_FIELDS: dict[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "reasoning": {"effort": None, "summary": None},
    "store": True,
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": None,
    "truncation": "disabled",
    "user": None,
}
"""Fields of a response that repeat the request, with their defaults."""


class OpenAIResponses:
    """The dialect of ``POST /v1/responses``; ``reports_complete``: truncated responses are reported as complete."""

    name = "openai_responses"
    statuses: Mapping[int, int] = {}

    def __init__(self, conversations: Conversations | None = None, *, reports_complete: bool = False) -> None:
        self._conversations = conversations or Conversations()
        self._reports_complete = reports_complete

    def read(self, body: Mapping[str, Any], abilities: Abilities) -> ChatRequest:
        """Parse a request body."""
        RESPONSES.check(body, "")
        return read_responses_request(body, abilities, self._conversations)

    def respond(self, request: ChatRequest, answers: Sequence[Answer]) -> dict[str, Any]:
        """Return a ``response``, which later requests may reference."""
        (answer,) = answers
        response = _Response(request, self._reports_complete)
        items = response.items(answer)
        self.store(response.id, request, answer, items)
        return response.finished(answer, items)

    def writer(self, request: ChatRequest) -> ItemWriter:
        """Return the item writer of a stream."""
        return ItemWriter(self, request, self._reports_complete)

    def error(self, error: ApiError) -> dict[str, Any]:
        """Return an error in OpenAI's form."""
        return openai_error(error)

    def store(self, response_id: str, request: ChatRequest, answer: Answer, items: Sequence[Mapping[str, Any]]) -> None:
        """Store a response unless the request forbids it."""
        if request.extra["body"].get("store") is False:
            return
        previous, new, instructions = request.extra["conversation"]
        origin = Origin(answer.message["turn_id"], instructions)
        self._conversations.add(response_id, previous, [*new, _echo(answer)], items, origin)


def _echo(answer: Answer) -> Message:
    """Return an answer in the form in which agents send it back."""
    message = dict(answer.message)
    return {key: value for key, value in message.items() if key not in ("turn_id", "finish_reason")}  # type: ignore[return-value]


class _Response:
    """One response: id, fields and items."""

    __slots__ = ("_base", "_key", "_reports_complete", "_request", "_tools", "id")

    def __init__(self, request: ChatRequest, reports_complete: bool) -> None:
        self._key = new_id("")
        self.id = f"resp_{self._key}"
        self._request = request
        self._reports_complete = reports_complete
        self._tools: ResponsesTools = request.extra["tools"]
        body: Mapping[str, Any] = request.extra["body"]
        repeated = {key: default if body.get(key) is None else body[key] for key, default in _REPEATED_FIELDS.items()}
        self._base = {
            "id": self.id,
            "object": "response",
            "created_at": int(time.time()),
            "background": False,
            "error": None,
            "incomplete_details": None,
            "model": request.model,
            **repeated,
        }

    def item_id(self, prefix: str, index: int) -> str:
        """Return an item id, which identifies its response."""
        return f"{prefix}_{self._key}{index:02d}"

    def in_progress(self) -> dict[str, Any]:
        return {**self._base, "status": "in_progress", "output": [], "usage": None}

    def failed(self, error: ApiError) -> dict[str, Any]:
        details = {"code": error.code or "server_error", "message": error.message}
        return {**self._base, "status": "failed", "error": details, "output": [], "usage": None}

    def finished(self, answer: Answer, items: list[dict[str, Any]]) -> dict[str, Any]:
        cut = answer.cut and not self._reports_complete
        return {
            **self._base,
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "completed_at": int(time.time()),
            "output": items,
            "usage": {
                "input_tokens": answer.prompt_tokens,
                "input_tokens_details": {"cached_tokens": answer.cached_tokens},
                "output_tokens": answer.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": answer.reasoning_tokens},
                "total_tokens": answer.prompt_tokens + answer.completion_tokens,
            },
        }

    def items(self, answer: Answer) -> list[dict[str, Any]]:
        """Return the items of an answer: reasoning, text, calls."""
        items: list[dict[str, Any]] = []
        if answer.thoughts:
            items.append(self.reasoning(len(items), answer.thoughts))
        if answer.text or not answer.calls:
            items.append(self.message(len(items), answer.text, answer))
        items += [self.call(len(items) + index, call) for index, call in enumerate(answer.calls)]
        return items

    def reasoning(self, index: int, text: str) -> dict[str, Any]:
        content = [{"type": "reasoning_text", "text": text}] if text else []
        return {
            "type": "reasoning",
            "id": self.item_id("rs", index),
            "summary": [],
            "content": content,
            "status": "completed",
        }

    def message(self, index: int, text: str, answer: Answer | None) -> dict[str, Any]:
        """Return a message item, in progress if ``answer`` is None."""
        status = "completed" if answer is not None else "in_progress"
        if answer is not None and answer.cut and not self._reports_complete:
            status = "incomplete"
        content = [self.text(text, answer)] if answer is not None else []
        return {
            "type": "message",
            "id": self.item_id("msg", index),
            "role": "assistant",
            "status": status,
            "content": content,
        }

    def text(self, text: str, answer: Answer | None) -> dict[str, Any]:
        logprobs = token_logprobs(answer) if self._request.logprobs and answer is not None else []
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def call(self, index: int, call: ToolCall) -> dict[str, Any]:
        name, arguments = call_for_client(call, raw=True)
        item: dict[str, Any]
        text = call.arguments.get("input")
        if call.error is None and name == SEARCH and self._tools.searchable:
            item = {"type": f"{SEARCH}_call", "id": self.item_id("tsc", index), "execution": "client"}
            return item | {"arguments": call.arguments, "call_id": call.id, "status": "completed"}
        if call.error is None and name in self._tools.custom and isinstance(text, str):
            item = {"type": "custom_tool_call", "id": self.item_id("ctc", index), "input": text}
        else:
            item = {"type": "function_call", "id": self.item_id("fc", index), "arguments": arguments}
        item |= {"call_id": call.id, "name": name, "status": "completed"}
        if name in self._tools.namespaces:
            item["namespace"], item["name"] = self._tools.namespaces[name]
        return item


class ItemWriter:
    """Writer of one response's events: each item is added, grows and is done."""

    __slots__ = (
        "_dialect",
        "_items",
        "_number",
        "_open_kind",
        "_open_text",
        "_reasoning_sent",
        "_request",
        "_response",
        "_text_sent",
    )

    def __init__(self, dialect: OpenAIResponses, request: ChatRequest, reports_complete: bool) -> None:
        self._dialect = dialect
        self._request = request
        self._response = _Response(request, reports_complete)
        self._number = 0
        self._items: list[dict[str, Any]] = []
        self._open_kind = ""
        self._open_text: list[str] = []
        self._text_sent = 0
        self._reasoning_sent = 0

    def begin(self) -> bytes:
        """Return the start of the response."""
        response = self._response.in_progress()
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def alive(self) -> bytes:
        """Return an empty event: Codex accepts any event, but no comment, as keep-alive."""
        return self._event("response.in_progress", response=self._response.in_progress())

    def thoughts(self, index: int, text: str) -> bytes:  # noqa: ARG002 - this API knows one answer
        """Return the events of more reasoning."""
        self._reasoning_sent += len(text)
        opening = self._switch_to("reasoning")
        self._open_text.append(text)
        return opening + self._part_event("response.reasoning_text.delta", delta=text)

    def text(self, index: int, text: str) -> bytes:  # noqa: ARG002
        """Return the events of more text."""
        self._text_sent += len(text)
        opening = self._switch_to("message")
        self._open_text.append(text)
        return opening + self._part_event("response.output_text.delta", delta=text, logprobs=[])

    def finish(self, index: int, answer: Answer) -> bytes:
        """Return the rest of the response, its calls and its end."""
        events = []
        if rest := answer.thoughts[self._reasoning_sent :]:
            events.append(self.thoughts(index, rest))
        rest = answer.text[self._text_sent :]
        if rest or not (answer.text or answer.calls):
            events.append(self.text(index, rest))
        events.append(self._close(answer))
        events.extend(self._call(call) for call in answer.calls)
        response = self._response.finished(answer, self._items)
        self._dialect.store(self._response.id, self._request, answer, self._items)
        events.append(self._event(f"response.{response['status']}", response=response))
        return b"".join(events)

    def end(self) -> bytes:
        """Return nothing: the last event ended the response."""
        return b""

    def fail(self, error: ApiError) -> bytes:
        """Return the event of a failed response."""
        return self._event("response.failed", response=self._response.failed(error))

    def _call(self, call: ToolCall) -> bytes:
        index = len(self._items)
        item = self._response.call(index, call)
        self._items.append(item)
        if item["type"] == f"{SEARCH}_call":
            adding = self._event("response.output_item.added", output_index=index, item=item)
            return adding + self._event("response.output_item.done", output_index=index, item=item)
        key = "input" if item["type"] == "custom_tool_call" else "arguments"
        kind = "custom_tool_call_input" if key == "input" else "function_call_arguments"
        added_item = {**item, key: "", "status": "in_progress"}
        location = {"item_id": item["id"], "output_index": index}
        done_fields: dict[str, Any] = {key: item[key]} if key == "input" else {key: item[key], "name": item["name"]}
        return b"".join(
            [
                self._event("response.output_item.added", output_index=index, item=added_item),
                self._event(f"response.{kind}.delta", **location, delta=item[key]),
                self._event(f"response.{kind}.done", **location, **done_fields),
                self._event("response.output_item.done", output_index=index, item=item),
            ]
        )

    def _switch_to(self, kind: str) -> bytes:
        """Return the events that make an item of ``kind`` the open one."""
        if self._open_kind == kind:
            return b""
        closing = self._close(None)
        self._open_kind = kind
        index = len(self._items)
        if kind == "reasoning":
            item = {**self._response.reasoning(index, ""), "status": "in_progress"}
            adding = self._event("response.output_item.added", output_index=index, item=item)
            return closing + adding
        adding = self._event(
            "response.output_item.added", output_index=index, item=self._response.message(index, "", None)
        )
        return closing + adding + self._part_event("response.content_part.added", part=self._response.text("", None))

    def _close(self, answer: Answer | None) -> bytes:
        """Return the end of the open item; ``answer`` is set if the response ends with it."""
        kind, text, index = self._open_kind, "".join(self._open_text), len(self._items)
        if not kind:
            return b""
        if kind == "reasoning":
            events = self._part_event("response.reasoning_text.done", text=text)
            item = self._response.reasoning(index, text)
        else:
            part = self._response.text(text, answer)
            events = self._part_event("response.output_text.done", text=text, logprobs=part["logprobs"])
            events += self._part_event("response.content_part.done", part=part)
            item = self._response.message(index, text, answer)
            if answer is None:
                item |= {"status": "completed", "content": [part]}
        self._open_kind = ""
        self._open_text.clear()
        self._items.append(item)
        return events + self._event("response.output_item.done", output_index=index, item=item)

    def _part_event(self, kind: str, **values: Any) -> bytes:
        index = len(self._items)
        prefix = "rs" if self._open_kind == "reasoning" else "msg"
        location = {"item_id": self._response.item_id(prefix, index), "output_index": index, "content_index": 0}
        return self._event(kind, **location, **values)

    def _event(self, kind: str, **values: Any) -> bytes:
        number = self._number
        self._number += 1
        return sse.event({"type": kind, "sequence_number": number, **values})
