"""Responses of a hosted endpoint, parsed for the record, whole or from stream events."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from turnwise.gateway.errors import ApiError
from turnwise.gateway.proxy.request import read_answer
from turnwise.gateway.proxy.session import Usage
from turnwise.model.canonical import clean
from turnwise.types import Message

_TEXTS = ("content", "reasoning_content", "refusal")
_QUOTED = 300
_DELTAS = {
    "text_delta": "text",
    "thinking_delta": "thinking",
    "signature_delta": "signature",
    "input_json_delta": "partial_json",
}
_FINAL_EVENTS = ("response.completed", "response.incomplete")


@dataclass(frozen=True, slots=True)
class UpstreamAnswer:
    """One answer of an endpoint; ``cut``: by a length limit, ``parsed``, else its text is the raw answer."""

    message: Message
    cut: bool = False
    parsed: bool = True


class AnswerReader(ABC):
    """Parser of the responses of one API; ``usage`` and ``model`` are as reported so far."""

    dialect = ""

    def __init__(self) -> None:
        self.ended = False
        self.usage: Usage | None = None
        self.model = ""
        self.response_id = ""
        self.items: list[dict[str, Any]] = []

    def feed(self, lines: bytes) -> None:
        """Parse more lines of an event stream, which are complete."""
        for line in lines.split(b"\n"):
            if line.startswith(b"data:"):
                self._read_event(line[5:].strip())

    @abstractmethod
    def read_body(self, body: Mapping[str, Any]) -> list[UpstreamAnswer]:
        """Return the answers of a body without streaming. Raises if it cannot be parsed."""

    @property
    @abstractmethod
    def complete(self) -> bool:
        """Whether all answers that began are complete."""

    @abstractmethod
    def answers(self) -> list[UpstreamAnswer]:
        """Return the answers of a complete stream."""

    @abstractmethod
    def add_event(self, event: Mapping[str, Any]) -> None:
        """Parse one event."""

    def read_response(self, raw: bytes) -> list[UpstreamAnswer]:
        """Return the answers of a body without streaming: none for a failure, the raw text if it cannot be parsed."""
        try:
            body = orjson.loads(raw)
            if isinstance(body, Mapping):
                self._read_model(body)
                return [] if body.get("error") else self.read_body(body)
        except _UNREADABLE:
            pass
        return [UpstreamAnswer({"role": "assistant", "content": raw.decode("utf-8", "replace")}, parsed=False)]

    def _read_event(self, data: bytes) -> None:
        if data == b"[DONE]":
            self.ended = True
            return
        try:
            event = orjson.loads(data)
            if isinstance(event, Mapping):
                self.add_event(event)
        except _UNREADABLE:
            return

    def _read_model(self, body: Mapping[str, Any]) -> None:
        model = body.get("model")
        if isinstance(model, str) and model:
            self.model = clean(model[:_QUOTED])

    def _note_usage(self, body: Mapping[str, Any], prompt: str, completion: str) -> None:
        usage = body.get("usage")
        if isinstance(usage, Mapping):
            cached = _count(usage.get(f"{prompt}_details") or {}, "cached_tokens")
            self.usage = Usage(_count(usage, prompt), _count(usage, completion), cached)

    def _message(self, parts: Any, *, cut: bool) -> UpstreamAnswer:
        try:
            return UpstreamAnswer(read_answer(self.dialect, parts), cut)
        except _UNREADABLE:
            text = json.dumps(parts, ensure_ascii=False, default=str)
            return UpstreamAnswer({"role": "assistant", "content": text}, cut, parsed=False)


_UNREADABLE = (ApiError, AttributeError, IndexError, KeyError, TypeError, ValueError, RecursionError)


def answer_reader(dialect: str) -> AnswerReader:
    """Return the response parser of an API."""
    kinds: tuple[type[AnswerReader], ...] = (_Chat, _Responses, _Anthropic)
    return next(kind for kind in kinds if kind.dialect == dialect)()


def _count(usage: Mapping[str, Any], key: str) -> int:
    value = usage.get(key)
    return value if isinstance(value, int) and value > 0 else 0


class _Chat(AnswerReader):
    dialect = "openai_chat"

    def __init__(self) -> None:
        super().__init__()
        self._choices: dict[int, dict[str, Any]] = {}

    @property
    def complete(self) -> bool:
        reasons = [choice["finish_reason"] for choice in self._choices.values()]
        return bool(reasons) and all(reason and reason != "error" for reason in reasons)

    def read_body(self, body: Mapping[str, Any]) -> list[UpstreamAnswer]:
        self._note_usage(body, "prompt_tokens", "completion_tokens")
        return [
            self._message(choice["message"], cut=choice.get("finish_reason") == "length") for choice in body["choices"]
        ]

    def answers(self) -> list[UpstreamAnswer]:
        choices = [_join_pieces(choice) for _, choice in sorted(self._choices.items())]
        return [self._message(choice, cut=choice["finish_reason"] == "length") for choice in choices]

    def add_event(self, event: Mapping[str, Any]) -> None:
        self._read_model(event)
        self._note_usage(event, "prompt_tokens", "completion_tokens")
        for chunk in event.get("choices") or ():
            blank: dict[str, Any] = {key: [] for key in _TEXTS}
            blank |= {"tool_calls": [], "finish_reason": None}
            choice = self._choices.setdefault(chunk.get("index") or 0, blank)
            delta = chunk.get("delta") or {}
            choice["finish_reason"] = chunk.get("finish_reason") or choice["finish_reason"]
            choice["content"].append(_text(delta.get("content")))
            choice["refusal"].append(_text(delta.get("refusal")))
            choice["reasoning_content"].append(_text(delta.get("reasoning_content") or delta.get("reasoning")))
            for call in delta.get("tool_calls") or ():
                _add_call(choice["tool_calls"], call)


def _join_pieces(choice: dict[str, Any]) -> dict[str, Any]:
    """Return a choice with its text pieces joined at once; pairwise joining would take quadratic time."""
    calls = [
        {**call, "function": {**call["function"], "arguments": "".join(call["function"]["arguments"])}}
        for call in choice["tool_calls"]
    ]
    return {**choice, **{key: "".join(choice[key]) for key in _TEXTS}, "tool_calls": calls}


def _text(value: Any) -> str:
    """Return a piece of text, which some endpoints send as parts."""
    if isinstance(value, list):
        return "".join(str(part.get("text") or "") for part in value if isinstance(part, Mapping))
    return value if isinstance(value, str) else ""


def _add_call(calls: list[dict[str, Any]], piece: Mapping[str, Any]) -> None:
    """Merge a piece of a call by its index; without an index, an id begins a new call."""
    index = piece.get("index")
    existing = next((call for call in calls if call["index"] == index), None) if index is not None else None
    if index is None and calls and not piece.get("id"):
        existing = calls[-1]
    if existing is None:
        existing = {
            "index": len(calls) if index is None else index,
            "id": "",
            "function": {"name": "", "arguments": []},
        }
        calls.append(existing)
    function = piece.get("function") or {}
    existing["id"] = piece.get("id") or existing["id"]
    existing["function"]["name"] = existing["function"]["name"] or function.get("name") or ""
    arguments = function.get("arguments") or ""
    existing["function"]["arguments"].append(arguments if isinstance(arguments, str) else json.dumps(arguments))


class _Responses(AnswerReader):
    dialect = "openai_responses"

    def __init__(self) -> None:
        super().__init__()
        self._done: dict[int, dict[str, Any]] = {}
        self._response: Mapping[str, Any] | None = None

    @property
    def complete(self) -> bool:
        return self._response is not None

    def read_body(self, body: Mapping[str, Any]) -> list[UpstreamAnswer]:
        self._note_usage(body, "input_tokens", "output_tokens")
        if body.get("status") in ("failed", "cancelled", "queued", "in_progress"):
            return []
        self.response_id = str(body.get("id") or "")
        self.items = [dict(item) for item in body["output"] or [self._done[index] for index in sorted(self._done)]]
        why = (body.get("incomplete_details") or {}).get("reason")
        return [self._message(self.items, cut=why == "max_output_tokens")]

    def answers(self) -> list[UpstreamAnswer]:
        return self.read_body(self._response or {})

    def add_event(self, event: Mapping[str, Any]) -> None:
        kind = event.get("type")
        if kind == "response.output_item.done":
            self._done[event.get("output_index", len(self._done))] = dict(event["item"])
        elif kind in _FINAL_EVENTS:
            self._response, self.ended = {"output": [], **event["response"]}, True
            self._read_model(self._response)


class _Anthropic(AnswerReader):
    dialect = "anthropic"

    def __init__(self) -> None:
        super().__init__()
        self._blocks: dict[int, dict[str, Any]] = {}
        self._stop_reason: str | None = None
        self._counts: dict[str, Any] = {}

    @property
    def complete(self) -> bool:
        return self._stop_reason is not None

    def read_body(self, body: Mapping[str, Any]) -> list[UpstreamAnswer]:
        self._read_usage(body)
        return [self._message(body["content"], cut=_is_cut(body.get("stop_reason")))]

    def answers(self) -> list[UpstreamAnswer]:
        blocks = [_join_deltas(self._blocks[index]) for index in sorted(self._blocks)]
        return [self._message(blocks, cut=_is_cut(self._stop_reason))]

    def add_event(self, event: Mapping[str, Any]) -> None:
        kind = event.get("type")
        if kind == "message_start":
            self._read_model(event["message"])
            self._read_usage(event["message"])
        elif kind == "content_block_start":
            self._blocks[event["index"]] = {**event["content_block"], "_pieces": {}}
        elif kind == "content_block_delta":
            _add_delta(self._blocks[event["index"]], event["delta"])
        elif kind == "message_delta":
            self._read_usage(event)
            self._stop_reason = event["delta"].get("stop_reason") or self._stop_reason
        elif kind == "message_stop":
            self.ended = True

    def _read_usage(self, body: Mapping[str, Any]) -> None:
        usage = body.get("usage")
        if isinstance(usage, Mapping):
            # Counts that a later event does not repeat keep their first value.
            self._counts |= {key: value for key, value in usage.items() if value is not None}
            cached = _count(self._counts, "cache_read_input_tokens")
            prompt = _count(self._counts, "input_tokens") + _count(self._counts, "cache_creation_input_tokens") + cached
            self.usage = Usage(prompt, _count(self._counts, "output_tokens"), cached)


def _is_cut(stop_reason: Any) -> bool:
    return stop_reason in ("max_tokens", "model_context_window_exceeded")


def _add_delta(block: dict[str, Any], delta: Mapping[str, Any]) -> None:
    kind = delta.get("type")
    key = _DELTAS.get(kind) if isinstance(kind, str) else None
    if key is not None and isinstance(delta[key], str):
        block["_pieces"].setdefault(key, []).append(delta[key])


def _join_deltas(block: dict[str, Any]) -> dict[str, Any]:
    """Return a block completed with its deltas."""
    pieces = {key: "".join(parts) for key, parts in block["_pieces"].items()}
    written = pieces.pop("partial_json", "")
    block = {key: value for key, value in block.items() if key != "_pieces"}
    block |= {key: _text(block.get(key)) + text for key, text in pieces.items()}
    if not written:
        return block
    try:
        return {**block, "input": json.loads(written)}
    except (ValueError, RecursionError):
        return {**block, "input": written}
