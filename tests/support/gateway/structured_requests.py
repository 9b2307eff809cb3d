"""Requests for structured output and tool calls in each wire API, and checks of the responses."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import aiohttp
import jsonschema

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "color": {"type": "string", "enum": ["red", "green"]},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "ok": {"type": "boolean"},
    },
    "required": ["color", "n", "ok"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}, "days": {"type": "integer"}},
    "required": ["city"],
}
TOOLS: dict[str, dict[str, Any]] = {"get_weather": WEATHER, "now": {"type": "object", "properties": {}}}
DIALECTS = ("chat", "responses", "messages")
TOKENS = 400


def body(
    dialect: str, kind: str, *, stream: bool, seed: int = 0, schema: Mapping[str, Any] = SCHEMA, tokens: int = TOKENS
) -> dict[str, Any]:
    """Return a request: ``json``, ``required``, ``named`` (get_weather) or ``single`` (at most one call)."""
    request: dict[str, Any] = {"model": "m", "stream": stream, "messages": [{"role": "user", "content": "Hi."}]}
    if dialect == "messages":
        request |= {"max_tokens": tokens}
        if kind == "json":
            return request | {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
        choice = {
            "required": {"type": "any"},
            "named": {"type": "tool", "name": "get_weather"},
            "single": {"type": "auto", "disable_parallel_tool_use": True},
        }[kind]
        return request | {
            "tools": [{"name": name, "input_schema": schema} for name, schema in TOOLS.items()],
            "tool_choice": choice,
        }
    request["seed"] = seed
    functions: list[dict[str, Any]] = [{"name": name, "parameters": parameters} for name, parameters in TOOLS.items()]
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    if dialect == "responses":
        request["input"] = request.pop("messages")[0]["content"]
        request["max_output_tokens"] = tokens
        answer = {"text": {"format": {"type": "json_schema", "name": "s", "schema": schema}}}
        tools: list[dict[str, Any]] = [{"type": "function", **function} for function in functions]
        named = {"type": "function", "name": "get_weather"}
    else:
        request["max_tokens"] = tokens
        answer = {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}}
        tools = [{"type": "function", "function": function} for function in functions]
    if kind == "json":
        return request | answer
    choice = {"required": "required", "named": named, "single": "auto"}[kind]
    return request | {"tools": tools, "tool_choice": choice, "parallel_tool_calls": kind != "single"}


PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}


async def ask(http: aiohttp.ClientSession, base: str, dialect: str, request: dict[str, Any]) -> tuple[str, list[Any]]:
    """Send a request and return the text and the calls (name, arguments) of its answer."""
    async with http.post(base + PATHS[dialect], json=request) as answer:
        raw = await answer.text()
        assert answer.status == 200, raw
    if not request["stream"]:
        return _whole(dialect, json.loads(raw))
    events = [json.loads(line[5:]) for line in raw.splitlines() if line.startswith("data:") and "[DONE]" not in line]
    return _streamed(dialect, events)


def _whole(dialect: str, answer: dict[str, Any]) -> tuple[str, list[Any]]:
    if dialect == "chat":
        message = answer["choices"][0]["message"]
        calls = [call["function"] for call in message.get("tool_calls", ())]
        return message["content"] or "", [(call["name"], json.loads(call["arguments"])) for call in calls]
    if dialect == "responses":
        items = answer["output"]
        text = "".join(part["text"] for item in items if item["type"] == "message" for part in item["content"])
        calls = [item for item in items if item["type"] == "function_call"]
        return text, [(call["name"], json.loads(call["arguments"])) for call in calls]
    text = "".join(block["text"] for block in answer["content"] if block["type"] == "text")
    return text, [(block["name"], block["input"]) for block in answer["content"] if block["type"] == "tool_use"]


def _streamed(dialect: str, events: list[dict[str, Any]]) -> tuple[str, list[Any]]:
    if dialect == "responses":
        return _whole(dialect, events[-1]["response"])
    text, calls = "", []
    for event in events:
        if dialect == "chat":
            delta = event["choices"][0]["delta"] if event["choices"] else {}
            text += delta.get("content") or ""
            for call in delta.get("tool_calls", ()):
                if call.get("id"):
                    calls.append([call["function"]["name"], ""])
                calls[-1][1] += call["function"]["arguments"]
            continue
        block, delta = event.get("content_block", {}), event.get("delta", {})
        if block.get("type") == "tool_use":
            calls.append([block["name"], ""])
        text += delta.get("text", "")
        if "partial_json" in delta:
            calls[-1][1] += delta["partial_json"]
    return text, [(name, json.loads(arguments or "{}")) for name, arguments in calls]


def check(kind: str, text: str, calls: list[Any]) -> None:
    """Hold an answer to what was asked."""
    for name, arguments in calls:
        jsonschema.validate(arguments, TOOLS[name])
    if kind == "json":
        assert not calls
        jsonschema.validate(json.loads(text), SCHEMA)
    elif kind == "single":
        assert len(calls) <= 1
    else:
        assert calls
        assert not text
        if kind == "named":
            assert [name for name, _ in calls] == ["get_weather"]
