"""What real programs do when a turn is slow, cut, empty or refused, and what the gateway's recorder makes of it."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import aiohttp
import pytest

from support.gateway.gated_client import GatedClient
from support.gateway.server import Served, serving
from turnwise.errors import InferenceError
from turnwise.gateway.config import GatewayLimits
from turnwise.types import ToolCall, ToolSchema

ADD = ToolSchema("add", "Add.", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
TOOLS = [{"name": "add", "description": "Add.", "input_schema": ADD.parameters}]
GO = {"role": "user", "content": "Go."}
DONE: Any = {"role": "assistant", "content": "Done.", "reasoning_content": "Hm."}
BODIES: dict[str, Any] = {
    "messages": {"model": "m", "max_tokens": 200, "messages": [GO]},
    "chat/completions": {"model": "m", "messages": [GO]},
    "responses": {"model": "m", "input": [GO]},
}


def calls(*numbers: int) -> Any:
    return {"role": "assistant", "content": "Adding.", "tool_calls": [ToolCall("", "add", {"a": n}) for n in numbers]}


async def post(served: Served, opened: Any, route: str, body: Any) -> tuple[int, Any]:
    async with served.http.post(f"{opened['path']}/v1/{route}", json=body) as answer:
        return answer.status, await answer.json()


async def ask(served: Served, opened: Any, *messages: Any) -> list[Any]:
    """One turn of Anthropic's API; returns its blocks."""
    body = {"model": "m", "max_tokens": 200, "tools": TOOLS, "messages": list(messages)}
    status, answer = await post(served, opened, "messages", body)
    assert status == 200, answer
    blocks: list[Any] = answer["content"]
    return blocks


def said(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def result(block: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": block["id"], "content": "3"}


def forks(served: Served, opened: Any) -> list[str]:
    """The reason of each fork, once."""
    segments = served.session(opened).segments()
    return [segment.fork for segment in segments if segment.fork is not None and segment.kind == "context"]


def branches(served: Served, opened: Any) -> int:
    return int(served.session(opened).metrics()["branches"])


def blocks_of(stream: bytes) -> list[Any]:
    """The content blocks of a stream of Anthropic's events, put together as its client does."""
    blocks_: list[Any] = []
    for line in re.findall(rb"^data: (\{.*\})$", stream, re.MULTILINE):
        event = json.loads(line)
        if event["type"] == "content_block_start":
            blocks_.append(dict(event["content_block"]))
        elif event["type"] == "content_block_delta":
            for kind, text in event["delta"].items():
                if kind != "type":
                    blocks_[event["index"]][kind] = blocks_[event["index"]].get(kind, "") + text
    return blocks_


async def test_slow_turn_with_keep_alive_blocks_is_recognised() -> None:
    """Nothing but deltas keeps Claude Code waiting; the empty block that they stand in comes back with the turn."""
    client = GatedClient(gate_after=0)
    limits = GatewayLimits(alive_seconds=0.02, first_seconds=0.0)
    async with serving(client=client, limits=limits) as served:
        opened = await served.open()
        path = opened["path"] + "/v1/messages?beta=true"
        async with served.http.post(path, json={**BODIES["messages"], "stream": True}) as answer:
            seen = b""
            while seen.count(b'"text_delta","text":""') < 3:
                seen += await answer.content.readany()
            client.gate.set()
            seen += await answer.content.read()
        blocks = blocks_of(seen)
        assert [block["type"] for block in blocks] == ["text", "thinking", "text"]
        assert (blocks[0]["text"], blocks[2]["text"]) == ("", "All done.")
        await ask(served, opened, GO, said(*blocks), {"role": "user", "content": "More."})
        # Another set of tools is another root: the turn itself was recognised.
        assert forks(served, opened) == ["tools_changed"]
        status, _ = await post(
            served,
            opened,
            "messages",
            {**BODIES["messages"], "messages": [GO, said(*blocks), {"role": "user", "content": "On."}]},
        )
        assert status == 200
        assert forks(served, opened) == ["tools_changed"]


@pytest.mark.parametrize("route", sorted(BODIES))
async def test_repeated_request_after_a_cut_stream_records_one_turn(route: str) -> None:
    client = GatedClient(gate_after=4)
    async with serving(client=client) as served:
        opened = await served.open()
        async with aiohttp.ClientSession(served.url) as other:
            path = f"{opened['path']}/v1/{route}"
            asking = asyncio.ensure_future(other.post(path, json={**BODIES[route], "stream": True}))
            await client.waiting.wait()
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        await asyncio.wait_for(client.stopped.wait(), 10)
        client.gate.set()
        assert (await post(served, opened, route, BODIES[route]))[0] == 200
        assert (served.session(opened).turns, branches(served, opened)) == (1, 1)


@pytest.mark.parametrize("route", sorted(BODIES))
async def test_repeated_request_after_an_error_records_one_turn(route: str) -> None:
    async with serving([InferenceError("down"), InferenceError("down"), DONE]) as served:
        opened = await served.open()
        statuses = [(await post(served, opened, route, {**BODIES[route], "stream": n < 2}))[0] for n in (0, 1)]
        # Each of these statuses makes the program send the same request again.
        assert set(statuses) <= {503, 529}
        assert (await post(served, opened, route, BODIES[route]))[0] == 200
        assert (served.session(opened).turns, branches(served, opened)) == (1, 1)


async def test_turn_with_a_lost_end_is_resampled_as_a_branch() -> None:
    async with serving(lambda _: DONE) as served:
        opened = await served.open()
        first = await ask(served, opened, GO)
        repeated = await ask(served, opened, GO)
        await ask(served, opened, GO, said(*repeated), {"role": "user", "content": "More."})
        assert first[0]["signature"] != repeated[0]["signature"]
        assert (forks(served, opened), branches(served, opened)) == ([], 2)
        assert [segment.fork for segment in served.session(opened).segments() if segment.fork] == ["resample"]


async def attempt(served: Served, opened: Any, route: str, number: int, **more: Any) -> str:
    """One attempt of an SDK; returns the text that its client reads, which is one letter."""
    headers = {"x-stainless-retry-count": str(number)}
    body = {**BODIES[route], **more}
    async with served.http.post(f"{opened['path']}/v1/{route}", json=body, headers=headers) as answer:
        reply = await answer.text()
        assert answer.status == 200, reply
    return re.findall(r'"(?:text|content|delta)":"([A-Z])"', reply)[0]


@pytest.mark.parametrize("route", BODIES)
@pytest.mark.parametrize("stream", [False, True])
async def test_retry_of_an_sdk_gets_the_recorded_answer(route: str, stream: bool) -> None:
    letters = iter("ABC")
    async with serving(lambda _: next(letters)) as served:
        opened = await served.open()
        first = await attempt(served, opened, route, 0, stream=stream)
        for number in (1, 2):
            assert await attempt(served, opened, route, number, stream=stream) == first
        assert (served.session(opened).turns, branches(served, opened), forks(served, opened)) == (1, 1, [])
        # An agent that asks the same again samples; so does its retry if nothing of the second request was recorded.
        assert await attempt(served, opened, route, 0, stream=stream) != first
        assert served.session(opened).turns == 2
        # Another body is another request, whatever its count.
        await attempt(served, opened, route, 1, stream=stream, temperature=0.5)
        assert served.session(opened).turns == 3


async def test_retry_waits_for_the_attempt_that_still_runs() -> None:
    client = GatedClient(gate_after=0)
    async with serving(client=client) as served:
        opened = await served.open()

        async def send(number: int) -> Any:
            headers = {"x-stainless-retry-count": str(number)}
            url = f"{opened['path']}/v1/chat/completions"
            async with served.http.post(url, json={**BODIES["chat/completions"], "n": 2}, headers=headers) as answer:
                return [choice["message"] for choice in (await answer.json())["choices"]]

        first = asyncio.ensure_future(send(0))
        await client.waiting.wait()
        again = asyncio.ensure_future(send(1))
        entry = served.app.sessions.of_id(opened["id"])
        while len(entry.running) < 2:  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0)
        client.gate.set()
        assert await first == await again
        assert served.session(opened).turns == 2


async def test_finished_blocks_of_a_turn_whose_stream_was_cut_are_kept_and_their_calls_run() -> None:
    """Claude Code and Codex keep what was whole when a stream broke."""
    async with serving([calls(1, 2), DONE], tools=[ADD]) as served:
        opened = await served.open()
        text, one, _ = await ask(served, opened, GO)
        await ask(served, opened, GO, said(text, one), {"role": "user", "content": [result(one)]})
        # The model said two calls: a turn of one is not what it said.
        assert forks(served, opened) == ["assistant_edited"]
    async with serving([calls(1), DONE], tools=[ADD]) as served:
        opened = await served.open()
        text, one = await ask(served, opened, GO)
        # Only its end was lost, which says nothing: this is the turn.
        await ask(served, opened, GO, said(text, one), {"role": "user", "content": [result(one)]})
        assert (forks(served, opened), branches(served, opened)) == ([], 1)


async def test_a_part_of_a_turn_as_the_last_message_is_refused_by_name() -> None:
    async with serving(lambda _: DONE) as served:
        opened = await served.open()
        body = {"model": "m", "messages": [GO, {"role": "assistant", "content": "Do"}]}
        status, answer = await post(served, opened, "chat/completions", body)
        assert status == 400
        assert answer["error"]["param"] == "messages"
        assert "assistant" in answer["error"]["message"]
        assert served.session(opened).turns == 0


@pytest.mark.parametrize("family", ["qwen3", "kimi"])
async def test_a_model_that_repeats_its_call_ids_gives_agents_each_once(family: str) -> None:
    line: Any = {
        "role": "assistant",
        "content": "Adding.",
        "tool_calls": [ToolCall("functions.add:0", "add", {"a": 1}), ToolCall("functions.add:1", "add", {"a": 2})],
    }
    async with serving(lambda _: line, tools=[ADD], family=family) as served:
        opened = await served.open()
        messages: list[Any] = [GO]
        ids: list[str] = []
        for _ in range(3):
            blocks = await ask(served, opened, *messages)
            # The same request again: another turn, with other ids.
            other = await ask(served, opened, *messages)
            calls = [block for block in blocks if block["type"] == "tool_use"]
            ids += [block["id"] for block in [*blocks, *other] if block["type"] == "tool_use"]
            messages += [said(*blocks), {"role": "user", "content": [result(block) for block in calls]}]
        assert all(ids)
        assert len(set(ids)) == len(ids) == 12
        assert branches(served, opened) == 4
        assert {segment.fork for segment in served.session(opened).segments()} == {None, "resample"}


@pytest.mark.parametrize("thoughts", ["", "Hm."])
async def test_an_empty_turn_is_dropped_by_programs_and_stays_on_record(thoughts: str) -> None:
    empty: Any = {"role": "assistant", "content": "", "reasoning_content": thoughts}
    # Claude Code says so in the last user message, which it edits for it.
    async with serving([DONE, empty, DONE]) as served:
        opened = await served.open()
        history = [GO, said(*await ask(served, opened, GO))]
        blocks = await ask(served, opened, *history, {"role": "user", "content": "More."})
        assert not any(block.get("text") for block in blocks)
        edited = "More.\n\n[Your previous response had no visible output.]"
        await ask(served, opened, *history, {"role": "user", "content": edited})
        assert (forks(served, opened), branches(served, opened)) == (["rewound"], 2), "shorter, with another end"
    # Others say so in a message of their own, with or without the turn before it.
    for retained in ([], [said({"type": "text", "text": ""})]):
        async with serving([empty, DONE]) as served:
            opened = await served.open()
            await ask(served, opened, GO)
            await ask(served, opened, GO, *retained, {"role": "user", "content": "You said nothing."})
            assert (forks(served, opened), branches(served, opened)) == ([], 1)


async def test_a_turn_that_an_agent_rejects_is_left_out_and_forks() -> None:
    """What mini-swe-agent does with a turn without a call."""
    async with serving(lambda _: DONE) as served:
        opened = await served.open()
        body = {"model": "m", "messages": [GO]}
        assert (await post(served, opened, "chat/completions", body))[0] == 200
        body["messages"] = [GO, {"role": "user", "content": "Call a tool."}]
        assert (await post(served, opened, "chat/completions", body))[0] == 200
        assert (forks(served, opened), branches(served, opened)) == (["assistant_edited"], 2)
        assert served.session(opened).turns == 2
