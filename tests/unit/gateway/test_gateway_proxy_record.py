"""What a session of a hosted endpoint records of requests and answers that only a hosted endpoint takes and gives."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import openai
import orjson
import pytest
from aiohttp import web

from support.gateway.hosted_endpoint import Hosted, hosting, provider, streamed
from turnwise.gateway.proxy.session import TextSettings
from turnwise.trajectory import Segment, Trajectory

USER: dict[str, Any] = {"role": "user", "content": "Go."}


def chat(message: Any, finish: str = "stop", *more: Any) -> dict[str, Any]:
    messages = [message, *more]
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 0,
        "model": "m",
        "choices": [{"index": n, "message": message, "finish_reason": finish} for n, message in enumerate(messages)],
        "usage": {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9},
    }


def says(*answers: Any) -> Any:
    remaining = list(answers)

    async def respond(request: web.Request) -> web.StreamResponse:
        return web.json_response(remaining.pop(0))

    return respond


def text(message: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": message, **more}


def call(name: str, arguments: str, call_id: str = "call_0") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


async def ask(hosted: Hosted, opened: dict[str, Any], body: Any, route: str = "chat/completions") -> tuple[int, Any]:
    async with hosted.http.post(f"{opened['path']}/v1/{route}", json=body) as answer:
        return answer.status, await answer.json()


async def record(bodies: list[Any], answers: list[Any], route: str = "chat/completions", **settings: Any) -> Trajectory:
    """Send bodies one after the other; return what is recorded."""
    async with provider(says(*answers)) as there, hosting(there.url, settings=TextSettings(**settings)) as hosted:
        opened = await hosted.open()
        for body in bodies:
            assert (await ask(hosted, opened, body, route))[0] == 200
        return await hosted.finalize(opened)


def forks(trajectory: Trajectory) -> list[str]:
    return [segment.fork for segment in trajectory.segments if segment.fork is not None]


def turns(trajectory: Trajectory) -> list[Segment]:
    return [segment for segment in trajectory.segments if segment.sampled]


@pytest.mark.parametrize("echo", ["same", "strict"])
@pytest.mark.parametrize("call_id", ["call_0", ""])
async def test_ids_that_repeat_prove_nothing(call_id: str, echo: str) -> None:
    answers = [text("", tool_calls=[call("f", f'{{"n": {n}}}', call_id)]) for n in range(3)] + [text("Done.")]
    history: list[Any] = [USER]
    bodies = []
    for answer in answers:
        bodies.append({"messages": list(history)})
        history += [answer, {"role": "tool", "tool_call_id": call_id, "content": "ok"}]
    trajectory = await record(bodies, [chat(answer) for answer in answers], echo=echo)
    assert (forks(trajectory), trajectory.metrics["rewritten_echoes"]) == ([], 0)
    called = [turn.messages[0]["tool_calls"][0]["function"]["arguments"] for turn in turns(trajectory)[:3]]
    assert called == [{"n": 0}, {"n": 1}, {"n": 2}]
    assert [segment.parent for segment in trajectory.segments] == [-1, *range(7)]


@pytest.mark.parametrize("echo", ["same", "strict"])
async def test_an_echo_with_its_own_ids_is_the_turn(echo: str) -> None:
    message = text("Two.", tool_calls=[call("f", '{"n": 1.0}', "call_a")])
    back = text(" two ", tool_calls=[call("f", '{"n":2,"more":null}', "call_a")])
    tool = {"role": "tool", "tool_call_id": "call_a", "content": "ok"}
    bodies = [{"messages": [USER]}, {"messages": [USER, back, tool]}]
    trajectory = await record(bodies, [chat(message), chat(text("Done."))], echo=echo)
    assert forks(trajectory) == ([] if echo == "same" else ["assistant_edited"])
    assert trajectory.metrics["rewritten_echoes"] == (echo == "same")
    assert trajectory.echo == echo


async def test_several_answers_are_several_turns() -> None:
    trajectory = await record([{"messages": [USER], "n": 3}], [chat(text("A"), "length", text("B"), text("C"))])
    assert [(turn.messages[0]["content"], turn.finish_reason) for turn in turns(trajectory)] == [
        ("A", "length"),
        ("B", "length"),
        ("C", "length"),
    ]
    assert forks(trajectory) == ["concurrent", "concurrent"]
    assert trajectory.metrics["completion_tokens"] == 2


async def test_calls_that_cannot_be_used_are_kept_as_they_are() -> None:
    message = text("", tool_calls=[call("f", '{"n": ', "call_a"), call("g", "[1]", "call_b")])
    results = [{"role": "tool", "tool_call_id": call_id, "content": "no"} for call_id in ("call_a", "call_b")]
    trajectory = await record(
        [{"messages": [USER]}, {"messages": [USER, message, *results]}], [chat(message), chat(text("Ok."))]
    )
    assert forks(trajectory) == []
    functions = [call["function"]["arguments"] for call in turns(trajectory)[0].messages[0]["tool_calls"]]
    assert functions == ['{"n":', "[1]"]


async def test_non_text_parts_become_placeholders() -> None:
    image = {"type": "image_url", "image_url": {"url": "https://a.test/b.png"}}
    other = {"type": "image_url", "image_url": {"url": "https://a.test/c.png"}}
    sound = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
    question = {"role": "user", "content": [{"type": "text", "text": "See "}, image, sound]}
    repeated = {
        "role": "user",
        "content": [{"type": "text", "text": "See "}, {**image, "cache_control": {"type": "x"}}, sound],
    }
    edited = {"role": "user", "content": [{"type": "text", "text": "See "}, other, sound]}
    bodies = [
        {"messages": messages}
        for messages in ([question], [repeated, text("I see."), USER], [edited, text("I see."), USER])
    ]
    trajectory = await record(bodies, [chat(text("I see.")), chat(text("Yes.")), chat(text("No."))])
    content = trajectory.segments[0].messages[0]["content"]
    assert content.startswith("See [image_url ")
    assert "[input_audio " in content
    assert "AAAA" not in content
    assert forks(trajectory) == ["restart"]


async def test_a_beginning_that_the_agent_wrote_belongs_to_the_turn() -> None:
    history = [USER, {"role": "assistant", "content": "The answer"}]
    then = [USER, {"role": "assistant", "content": "The answer is 3."}, {"role": "user", "content": "Why?"}]
    answers = [
        {
            "type": "message",
            "content": [{"type": "text", "text": text}],
            "stop_reason": reason,
            "usage": {"input_tokens": 3},
        }
        for text, reason in ((" is 3.", "end_turn"), ("So.", "max_tokens"))
    ]
    trajectory = await record([{"messages": messages} for messages in (history, then)], answers, "messages")
    assert [turn.messages[0]["content"] for turn in turns(trajectory)] == ["The answer is 3.", "So."]
    assert [turn.finish_reason for turn in turns(trajectory)] == ["stop", "length"]
    assert forks(trajectory) == []


async def test_tools_and_blocks_that_the_endpoint_runs_are_recorded() -> None:
    searched = [
        {"type": "server_tool_use", "id": "srv_1", "name": "web_search", "input": {"query": "x"}},
        {
            "type": "web_search_tool_result",
            "tool_use_id": "srv_1",
            "content": [{"type": "web_search_result", "url": "u"}],
        },
        {"type": "text", "text": "Found."},
    ]
    tools = [
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 2},
        {"type": "bash_20250124", "name": "bash"},
    ]
    answer = {"type": "message", "content": searched, "stop_reason": "end_turn"}
    then = {"messages": [USER, {"role": "assistant", "content": searched}, USER], "tools": tools}
    trajectory = await record([{"messages": [USER], "tools": tools}, then], [answer, answer], "messages")
    assert forks(trajectory) == []
    offered = trajectory.segments[0].tools
    assert offered is not None
    assert [tool["function"]["name"] for tool in offered] == ["web_search", "bash"]
    assert offered[0]["function"]["parameters"] == {"type": "web_search_20250305", "max_uses": 2}
    assert turns(trajectory)[0].messages[0]["content"].endswith("Found.")
    assert trajectory.metrics["turns_without_usage"] == 2


async def test_unparsable_answer_is_recorded_as_raw_text() -> None:
    odd = {"messages": [{"role": "critic", "content": {"deep": [1]}}], "temperature": 0.5}
    trajectory = await record([odd, odd, {"messages": []}], [{"strange": 1}, chat(text("Ok.")), chat({"content": 7})])
    assert json.loads(trajectory.segments[0].messages[0]["content"]) == odd
    assert json.loads(turns(trajectory)[0].messages[0]["content"]) == {"strange": 1}
    assert turns(trajectory)[1].messages[0]["content"] == "Ok."
    assert forks(trajectory) == ["resample", "restart"]
    assert trajectory.metrics["unread_requests"] == 3
    assert trajectory.metrics["unread_answers"] == 2


async def test_a_deep_body_is_passed_on_and_recorded() -> None:
    deep: Any = []
    for _ in range(150):
        deep = [deep]
    body = {
        "messages": [
            USER,
            text("", tool_calls=[{"id": "c", "function": {"name": "f", "arguments": {"a": deep}}}]),
            USER,
        ]
    }
    body["tools"] = [{"type": "function", "function": {"name": "f", "parameters": {"a": deep}}}]  # type: ignore[assignment]
    trajectory = await record([body], [chat(text("Ok."))])
    assert [turn.messages[0]["content"] for turn in turns(trajectory)] == ["Ok."]
    assert Trajectory.from_bytes(trajectory.to_bytes()).segments[0].messages == trajectory.segments[0].messages


def response(number: int, message: str, **more: Any) -> dict[str, Any]:
    item = {
        "type": "message",
        "id": f"msg_{number}",
        "role": "assistant",
        "content": [{"type": "output_text", "text": message}],
    }
    return {"id": f"resp_{number}", "status": "completed", "output": [item], **more}


async def test_responses_go_on_from_their_own_session_only() -> None:
    answers = [response(1, "One."), response(2, "Two."), response(3, "Three.")]
    async with provider(says(*answers)) as there, hosting(there.url) as hosted:
        first, theirs = await hosted.open(), await hosted.open()
        assert (await ask(hosted, first, {"input": "Go."}, "responses"))[0] == 200
        assert (await ask(hosted, first, {"input": "On.", "previous_response_id": "resp_1"}, "responses"))[0] == 200
        item = {"type": "item_reference", "id": "msg_2"}
        more = [
            {"role": "user", "content": "Go."},
            {"type": "item_reference", "id": "msg_1"},
            {"role": "user", "content": "On."},
        ]
        assert (await ask(hosted, first, {"input": [*more, item, USER]}, "responses"))[0] == 200
        for refused, field in (
            ({"input": "On.", "previous_response_id": "resp_1"}, "previous_response_id"),
            ({"input": [item, USER]}, "input"),
            ({"input": "Go.", "conversation": "conv_1"}, "conversation"),
            ({"input": "Go.", "background": True}, "background"),
            ({"input": "Go.", "prompt": {"id": "pmpt_1"}}, "prompt"),
        ):
            status, body = await ask(hosted, theirs, refused, "responses")
            assert (status, body["error"]["param"]) == (400, field)
        assert len(there.seen) == 3, "what is refused is not sent"
        trajectory = await hosted.finalize(first)
        assert [turn.messages[0]["content"] for turn in turns(trajectory)] == ["One.", "Two.", "Three."]
        assert forks(trajectory) == []
        assert (await hosted.finalize(theirs)).segments == []


async def test_a_response_that_failed_or_was_not_stored_is_not_gone_on_from() -> None:
    answers = [response(1, "One.", status="failed"), response(2, "Two.")]
    async with provider(says(*answers)) as there, hosting(there.url) as hosted:
        opened = await hosted.open()
        assert (await ask(hosted, opened, {"input": "Go."}, "responses"))[0] == 200
        assert hosted.session(opened).turns == 0
        assert (await ask(hosted, opened, {"input": "Go.", "store": False}, "responses"))[0] == 200
        for response_id in ("resp_1", "resp_2"):
            assert (await ask(hosted, opened, {"input": "On.", "previous_response_id": response_id}, "responses"))[
                0
            ] == 400
        assert [turn.messages[0]["content"] for turn in turns(await hosted.finalize(opened))] == ["Two."]


async def test_real_clients_see_the_endpoint() -> None:
    """What the clients make of answers is what the endpoint said, and an error is one of its own API."""

    async def respond(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if body["model"] == "broken":
            return web.json_response({"error": {"message": "no such model", "type": "x", "code": "y"}}, status=404)
        if request.path.endswith("messages"):
            message: dict[str, Any] = {"id": "m", "type": "message", "role": "assistant", "content": [], "model": "m"}
            message |= {"stop_reason": None, "stop_sequence": None, "usage": {"input_tokens": 3, "output_tokens": 0}}
            end = {"stop_reason": "end_turn", "stop_sequence": None}
            events: list[dict[str, Any]] = [
                {"type": "message_start", "message": message},
                {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
                {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hi."}},
                {"type": "content_block_stop", "index": 0},
                {"type": "message_delta", "delta": end, "usage": {"output_tokens": 2}},
                {"type": "message_stop"},
            ]
            raw = [f"event: {e['type']}\n".encode() + b"data: " + orjson.dumps(e) + b"\n\n" for e in events]
            return await streamed(request, *raw)
        return web.json_response(chat(text("Hi.")))

    async with provider(respond) as there, hosting(there.url) as hosted:
        opened = await hosted.open()
        async with openai.AsyncOpenAI(base_url=opened["base"] + "/v1", api_key="any", max_retries=0) as client:
            message = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "Go."}])
            assert message.choices[0].message.content == "Hi."
            with pytest.raises(openai.NotFoundError, match="no such model"):
                await client.chat.completions.create(model="broken", messages=[{"role": "user", "content": "Go."}])
        async with anthropic.AsyncAnthropic(base_url=opened["base"], api_key="any", max_retries=0) as other:
            async with other.messages.stream(
                model="m", max_tokens=9, messages=[{"role": "user", "content": "Go."}]
            ) as stream:
                message = await stream.get_final_message()
            assert message.content[0].type == "text"
            assert message.content[0].text == "Hi."
        trajectory = await hosted.finalize(opened)
        assert [turn.messages[0]["content"] for turn in turns(trajectory)] == ["Hi.", "Hi."]
        # Two APIs, one conversation: the same request sampled again.
        assert forks(trajectory) == ["resample"]
