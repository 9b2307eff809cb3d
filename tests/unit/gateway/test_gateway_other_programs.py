"""What mini-swe-agent, inspect-ai and opencode make of their history, as requests."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.gateway.client_requests import CHAT_TOOLS, DONE, ITEM_TOOLS, LINEAR, results, said, says, talking, user

GO = user("Go.")
REFUSAL = {"refusal": None}


def answers(message: dict[str, Any], text: str = '{"returncode": 0, "output": "ok"}') -> list[dict[str, Any]]:
    return [{"role": "tool", "tool_call_id": call["id"], "content": text} for call in message.get("tool_calls", ())]


def rewritten(message: dict[str, Any], arguments: str, **more: Any) -> dict[str, Any]:
    """A message with other text for the arguments of its calls, under the same ids."""
    calls = [
        {**tool_call, "function": {**tool_call["function"], "arguments": arguments}}
        for tool_call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls, **more}


# mini-swe-agent


@pytest.mark.parametrize(
    "change",
    [
        # A content of null is left out; fields of its own come back.
        lambda message: {key: value for key, value in message.items() if key != "content"},
        lambda message: {**message, "provider_specific_fields": {**REFUSAL, "reasoning": "Hm."}, "audio": None},
        lambda message: {**message, "reasoning_content": None, "reasoning": message.get("reasoning_content")},
    ],
)
async def test_good_turns_of_mini_come_back_with_fields_of_its_own(change: Any) -> None:
    async with talking(says("", {"command": "ls"}, thinks="Hm."), DONE) as talk:
        first = await talk.message(GO)
        await talk.message(GO, change(first), *answers(first))
        assert talk.shape == LINEAR


@pytest.mark.parametrize(
    "turn",
    [says("I think."), says(""), says("", {"command": "ls"}, {"limit": "wrong"})],
    ids=["no call", "nothing", "a wrong call beside a good one"],
)
async def test_turns_that_mini_rejects_are_left_out(turn: Any) -> None:
    async with talking(turn, says("", {"command": "ls"}), DONE) as talk:
        await talk.message(GO)
        history = [GO, user("Format error: call one tool.")]
        second = await talk.message(*history)
        await talk.message(*history, second, *answers(second))
        # A turn that said nothing may be missing: that is no other history.
        assert talk.shape == (LINEAR if turn["content"] == "" and not turn["tool_calls"] else (2, ["assistant_edited"]))
        assert talk.metrics["turns"] == 3


async def test_blocks_that_litellm_joins_are_the_same_turn() -> None:
    async with talking(says("Two parts", {"command": "ls"}, thinks="Hm."), DONE, DONE) as talk:
        first = await talk.blocks(GO)
        joined = [first[0], {"type": "text", "text": "Two"}, {"type": "text", "text": " parts"}, first[-1]]
        tool_results = results(*first, text=[{"type": "text", "text": "ok"}])
        tool_results["content"][-1]["cache_control"] = {"type": "ephemeral"}
        second = await talk.blocks(GO, said(*joined), tool_results)
        await talk.blocks(GO, said(*first), results(*first), said(*second), user("On."))
        assert talk.shape == LINEAR


async def test_items_by_way_of_litellm_carry_nulls() -> None:
    async with talking(says("A.", {"command": "ls"}, thinks="Hm."), DONE) as talk:
        first = await talk.items(GO)
        nulls = {"phase": None, "caller": None, "namespace": None, "logprobs": None}
        output = {"type": "function_call_output", "call_id": first[-1]["call_id"], "output": "ok"}
        await talk.items(GO, *({**item, **nulls} for item in first), output)
        assert talk.shape == LINEAR


# inspect-ai


@pytest.mark.parametrize(
    ("sampled", "echoed"),
    [
        ({"command": "é", "limit": 1000}, '{"command": "\\u00e9", "limit": 1000.0}'),
        ({"limit": 1.5}, '{"limit": 1.50}'),
        ({"limit": 12345678901234567890}, '{"limit": 12345678901234567890}'),
        ({}, '{"command": null}'),
        ({"command": ["x"]}, '{"command": ["x"]}'),
    ],
)
async def test_arguments_by_way_of_inspect_are_the_same_call(sampled: dict[str, Any], echoed: str) -> None:
    async with talking(says("", sampled, thinks="Hm."), DONE) as talk:
        first = await talk.message(GO)
        # One more line break in front of the text of a turn with reasoning; null is an empty text.
        await talk.message(GO, rewritten(first, echoed, content="\n" + (first["content"] or "")), *answers(first))
        assert talk.shape == LINEAR


async def test_inspect_probes_counts_and_leaves_marks() -> None:
    async with talking(says("A.", {"command": "ls"}, thinks="Hm."), DONE, DONE) as talk:
        async with talk.served.http.get(talk.opened["path"] + "/v1/models") as listed:
            assert listed.status == 200
        first = await talk.items(GO)
        emptied = {**first[0], "summary": [], "content": [], "encrypted_content": "x"}
        output = {"type": "function_call_output", "call_id": first[-1]["call_id"], "output": "ok"}
        await talk.items(GO, emptied, *first[1:], output)
        assert talk.shape == LINEAR
        probe = {"effort": "low", "summary": "auto"}
        status, _ = await talk.post("responses", {"input": "Please say 'hello, world'", "reasoning": probe})
        assert status == 200
        assert talk.shape == (2, ["restart"])
    async with talking(says("A.", {"command": "ls"}, thinks="Hm."), DONE) as talk:
        first = await talk.blocks(GO, cache_control={"type": "ephemeral"})
        status, counted = await talk.post("messages/count_tokens", {"messages": [user(first[0]["thinking"])]})
        assert (status, set(counted)) == (200, {"input_tokens"})
        await talk.blocks(GO, said(first[0], {**first[1], "citations": None}, first[2]), results(*first))
        assert talk.shape == LINEAR


# opencode


async def test_opencode_asks_for_a_title_and_for_usage() -> None:
    async with talking(says("Title."), says("", {"command": "ls"}), DONE) as talk:
        title = [{"role": "system", "content": "Write a title."}, user("Go.")]
        status, _ = await talk.post("chat/completions", {"messages": title})
        assert status == 200
        body = {"messages": [GO], "tools": CHAT_TOOLS, "stream": True, "stream_options": {"include_usage": True}}
        url = f"{talk.opened['path']}/v1/chat/completions"
        async with talk.served.http.post(url, json={"model": "m", **body}) as answer:
            chunks = [json.loads(line[6:]) async for line in answer.content if line.startswith(b"data: {")]
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"]["completion_tokens"] > 0
        assert talk.shape == (2, ["system_changed"])


@pytest.mark.parametrize(
    ("sampled", "echoed"),
    [
        ({"limit": 1.0, "command": "é"}, '{"limit":1,"command":"é"}'),
        ({"limit": 12345678901234567890}, '{"limit":12345678901234567000}'),
        ({"limit": -0.0}, '{"limit":0}'),
        ({}, "{}"),
    ],
)
async def test_arguments_by_way_of_opencode_are_the_same_call(sampled: dict[str, Any], echoed: str) -> None:
    async with talking(says("", sampled, thinks="Hm."), DONE) as talk:
        first = await talk.message(GO)
        echo = rewritten(first, echoed, content="")
        echo["reasoning_content"] = echo.pop("reasoning_content", None) or echo.pop("reasoning", None)
        await talk.message(GO, echo, *answers(first))
        assert talk.shape == LINEAR


async def test_a_call_that_opencode_could_not_run_comes_back_under_another_name() -> None:
    async with talking(says("", {"command": "ls"}), DONE) as talk:
        first = await talk.message(GO)
        (call,) = first["tool_calls"]
        arguments = {"name": "invalid", "arguments": '{"tool":"run","error":"no such tool"}'}
        await talk.message(GO, {**first, "tool_calls": [{**call, "function": arguments}]}, *answers(first))
        assert talk.shape == LINEAR
        assert talk.metrics["rewritten_echoes"] == 1


async def test_items_without_ids_and_joined_parts_are_the_same_turn() -> None:
    async with talking(says("A.", {"command": "ls"}, thinks="Hm."), says("B.", thinks="Well."), DONE) as talk:
        first = await talk.items(GO)
        bare = [{key: value for key, value in item.items() if key != "id"} for item in first]
        output = {"type": "function_call_output", "call_id": first[-1]["call_id"], "output": "ok"}
        second = await talk.items(GO, *bare, output)
        more = [{key: value for key, value in item.items() if key != "id"} for item in second]
        await talk.items(GO, *bare, output, *more, {"role": "user", "content": "On."}, tools=ITEM_TOOLS)
        assert talk.shape == LINEAR


async def test_rewritten_history_is_recorded_as_a_restart() -> None:
    """After an overflow: a summary is asked for without tools, and a new history begins with it."""
    async with talking(says("", {"command": "ls"}), says("Summary."), DONE) as talk:
        await talk.message(GO)
        status, _ = await talk.post("chat/completions", {"messages": [user("Summarise: Go. ls. ok")]})
        assert status == 200
        new = [user("What did we do so far?"), {"role": "assistant", "content": "Summary."}, user("Continue.")]
        await talk.message(*new)
        assert talk.shape == (3, ["restart", "restart"])
