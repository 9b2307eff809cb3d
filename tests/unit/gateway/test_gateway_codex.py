"""What Codex makes of its history, as requests: items verbatim or with ids of its own, sub-agents, compaction."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.gateway.client_requests import DONE, ITEM_TOOLS, LINEAR, calls, says, talking
from turnwise.gateway.config import GatewayLimits
from turnwise.recorder.session import SessionLimits
from turnwise.types import ToolSchema

RULES = {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Rules."}], "id": "msg_1"}
GO = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Go."}], "id": "msg_2"}


def asked(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}], "id": "msg_x"}


def outputs(*items: Any, text: str = "Chunk ID: 1f\nok") -> list[Any]:
    return [
        {"type": "function_call_output", "call_id": item["call_id"], "output": text, "id": f"fco_{index}"}
        for index, item in enumerate(items)
        if item["type"] == "function_call"
    ]


def kept(item: dict[str, Any]) -> dict[str, Any]:
    """An item as Codex sends it back: fields that it does not know are gone."""
    echoed_keys = {"type", "id", "role", "content", "summary", "phase", "name", "arguments", "call_id", "namespace"}
    echoed = {key: value for key, value in item.items() if key in echoed_keys}
    return {**echoed, "encrypted_content": None} if item["type"] == "reasoning" else echoed


@pytest.mark.parametrize(
    "change",
    [
        kept,
        # Items without an id get one, constant afterwards.
        lambda item: {**kept(item), "id": f"{item['type']}_of_mine"},
        lambda item: {key: value for key, value in kept(item).items() if key != "id"},
        lambda item: {**kept(item), "status": "completed", "phase": None, "namespace": None, "caller": None},
    ],
)
async def test_items_come_back_and_the_history_only_grows(change: Any) -> None:
    async with talking(says(" A. \n", {"command": "ls"}, {"command": "pwd"}, thinks="Hm.\n"), says("B."), DONE) as talk:
        first = await talk.items(RULES, GO)
        assert [item["type"] for item in first] == ["reasoning", "message", "function_call", "function_call"]
        history = [RULES, GO, *map(change, first), *outputs(*first)]
        second = await talk.items(*history, client_metadata={"b": 1, "a": 2}, prompt_cache_key="k")
        await talk.items(*history, *map(change, second), asked("On."), client_metadata={"a": 2, "b": 1})
        assert talk.shape == LINEAR
        assert talk.metrics["encoded_tokens"] == talk.metrics["context_tokens"]


async def test_tools_that_it_searches_stand_in_the_result_and_fork_nothing() -> None:
    """With a model that it knows it offers a search of its own; what that finds is never among the tools."""
    key = {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]}
    find = ToolSchema("mcp__env__find", "Finds a value.", key)
    search = {"type": "tool_search", "execution": "client", "description": "Finds tools.", "parameters": key}
    function = {"type": "function", "name": "find", "description": "Finds a value.", "parameters": key}
    namespace = {"type": "namespace", "name": "mcp__env", "tools": [{**function, "defer_loading": True}]}
    lines = [calls("tool_search", key="value"), calls(find.name, key="5"), DONE]
    async with talking(*lines, tools=[find], family="qwen3_6") as talk:
        asks: dict[str, Any] = {"tools": [search, {"type": "web_search"}]}
        (called,) = await talk.items(RULES, GO, **asks)
        assert (called["type"], called["execution"], called["arguments"]) == (
            "tool_search_call",
            "client",
            {"key": "value"},
        )
        searched = {"type": "tool_search_output", "execution": "client", "status": "completed", "tools": [namespace]}
        history = [RULES, GO, called, {**searched, "call_id": called["call_id"], "id": "tso_1"}]
        (use,) = await talk.items(*history, **asks)
        assert [use[name] for name in ("namespace", "name", "arguments")] == ["mcp__env", "find", '{"key": "5"}']
        await talk.items(*history, kept(use), *outputs(use), **asks)
        assert talk.shape == LINEAR
        assert talk.metrics["ignored_server_tools"] == 3
        assert talk.asked[-1].text.count(json.dumps(find.to_json())) == 1


async def test_sub_agent_runs_concurrently_with_its_parent() -> None:
    async with talking(says("", {"command": "spawn"}), says("Part done."), says("", {"command": "ls"}), DONE) as talk:
        first = await talk.items(RULES, GO)
        await talk.items(RULES, asked("Do part one."))
        history = [RULES, GO, *first, *outputs(*first), asked("<subagent_notification>Part done.")]
        second = await talk.items(*history)
        await talk.items(*history, *second, *outputs(*second))
        assert talk.shape == (2, ["restart"])


async def test_a_compaction_asks_without_tools_and_begins_anew() -> None:
    async with talking(says("", {"command": "ls"}), says("Summary."), DONE) as talk:
        first = await talk.items(RULES, GO)
        history = [RULES, GO, *first, *outputs(*first), asked("You are performing a CONTEXT CHECKPOINT COMPACTION.")]
        await talk.items(*history, tools=[], parallel_tool_calls=False)
        await talk.items(RULES, GO, asked("Another language model started: Summary."))
        assert talk.shape == (3, ["tools_changed", "assistant_edited"])


async def test_whole_items_of_a_turn_whose_stream_was_cut_are_kept_and_their_calls_run() -> None:
    turn = says("Look.", {"command": "1"}, {"command": "2"})
    async with talking(turn, DONE) as talk:
        first = await talk.items(RULES, GO)
        await talk.items(RULES, GO, *first[:2], *outputs(first[1]))
        assert talk.shape == (2, ["assistant_edited"])
    async with talking(turn, DONE) as talk:
        first = await talk.items(RULES, GO)
        await talk.items(RULES, GO, *first[1:], *outputs(*first))
        # Its text was lost, but not a call: the turn is known by its calls.
        assert (talk.shape, talk.metrics["rewritten_echoes"]) == (LINEAR, 1)


async def test_repeated_request_drops_the_items_of_the_broken_stream() -> None:
    async with talking(says("Look.", {"command": "1"}, thinks="Hm."), says("", {"command": "1"}), DONE) as talk:
        first = await talk.items(RULES, GO)
        repeated = await talk.items(RULES, GO, *first[:2])
        await talk.items(RULES, GO, *first[:2], *repeated, *outputs(*repeated))
        assert talk.shape == (2, ["resample"])
        assert talk.metrics["turns"] == 3


async def test_an_item_of_reasoning_alone_is_an_empty_turn() -> None:
    async with talking(says("", thinks="Hm."), DONE) as talk:
        first = await talk.items(RULES, GO)
        assert [item["type"] for item in first] == ["reasoning", "message"]
        await talk.items(RULES, GO, kept(first[0]), asked("You said nothing."))
        assert talk.shape == LINEAR


async def test_limits_end_a_response_and_retry_after_is_kept() -> None:
    """``response.incomplete`` and a 429 without ``retry-after`` end it."""
    async with talking(says("One two three four.")) as talk:
        body = {"input": [GO], "tools": ITEM_TOOLS, "store": False, "max_output_tokens": 5}
        for originator, status in (("codex_exec", "completed"), ("other", "incomplete")):
            answer = (await talk.post("responses", body, originator=originator))[1]
            assert answer["status"] == status
    async with talking(DONE, limits=GatewayLimits(requests=1)) as talk:
        entry = talk.served.app.sessions.of_id(talk.opened["id"])
        entry.running.add(object())  # type: ignore[arg-type]
        url = f"{talk.opened['path']}/v1/responses"
        async with talk.served.http.post(url, json={"input": "Go.", "stream": True}) as refused:
            assert (refused.status, refused.headers["retry-after"]) == (429, "1")
        entry.running.clear()


async def test_too_long_prompt_has_codexs_error_code() -> None:
    async with talking(DONE, session_limits=SessionLimits(context_length=50)) as talk:
        status, answer = await talk.post("responses", {"input": [asked("word " * 100)], "stream": True})
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert json.dumps(answer).count("context_length_exceeded") == 1
