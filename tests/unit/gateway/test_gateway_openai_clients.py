"""OpenAI's own client against the gateway: both of its APIs, streamed and not, with tools and reasoning."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from support.chat.model_dirs import renderer_for
from support.gateway.server import serving
from turnwise.trajectory import Segment
from turnwise.types import ToolCall, ToolSchema

ADD = ToolSchema(
    "add",
    "Add two numbers.",
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]},
)
CHAT_TOOLS: Any = [ADD.to_json()]
RESPONSE_TOOLS: Any = [
    {"type": "function", "name": ADD.name, "description": ADD.description, "parameters": ADD.parameters}
]
CALLS = {
    "role": "assistant",
    "content": "Let me add.",
    "reasoning_content": "Two sums, then.",
    "tool_calls": [ToolCall("", "add", {"a": 1, "b": 2}), ToolCall("", "add", {"a": 3, "b": 4})],
}
SCRIPT: Any = [CALLS, {"role": "assistant", "content": "It is 3 and 7.", "reasoning_content": "Done."}]


def client_of(opened: dict[str, Any]) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=opened["base"] + "/v1", api_key="any", max_retries=0, timeout=30)


def assert_reasoning(details: Any, text: str) -> None:
    """Reasoning is counted as it was sampled: with the line breaks around it, without its markers."""
    assert details.reasoning_tokens == renderer_for("qwen3").count(f"\n{text}\n") > 0


async def chat_turn(client: openai.AsyncOpenAI, messages: list[Any], *, stream: bool) -> dict[str, Any]:
    """One turn as a client that echoes everything would keep it."""
    if not stream:
        message = await client.chat.completions.create(model="m", messages=messages, tools=CHAT_TOOLS)
        choice = message.choices[0]
        assert message.usage is not None
        assert message.usage.prompt_tokens > 0
        assert_reasoning(message.usage.completion_tokens_details, choice.message.model_dump()["reasoning_content"])
        return {**choice.message.model_dump(exclude_none=True), "finish": choice.finish_reason}
    message: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": []}
    chunks = 0
    async for chunk in await client.chat.completions.create(
        model="m", messages=messages, tools=CHAT_TOOLS, stream=True, stream_options={"include_usage": True}
    ):
        chunks += 1
        if not chunk.choices:
            assert chunk.usage is not None
            assert chunk.usage.completion_tokens > 0
            assert_reasoning(chunk.usage.completion_tokens_details, message["reasoning_content"])
            continue
        delta = chunk.choices[0].delta
        message["content"] += delta.content or ""
        message["reasoning_content"] += (delta.model_extra or {}).get("reasoning_content", "")
        for call in delta.tool_calls or ():
            assert call.function is not None
            if call.id:
                message["tool_calls"].append(
                    {"id": call.id, "type": "function", "function": {"name": "", "arguments": ""}}
                )
            function = message["tool_calls"][call.index]["function"]
            function["name"] += call.function.name or ""
            function["arguments"] += call.function.arguments or ""
        if chunk.choices[0].finish_reason:
            message["finish"] = chunk.choices[0].finish_reason
    assert chunks > 6
    return {key: value for key, value in message.items() if value}


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_completions_with_calls(stream: bool) -> None:
    async with serving(SCRIPT, tools=[ADD]) as served:
        opened = await served.open(id="s1")
        client = client_of(opened)
        messages: list[Any] = [{"role": "user", "content": "1+2 and 3+4?"}]
        message = await chat_turn(client, messages, stream=stream)
        assert message.pop("finish") == "tool_calls"
        assert (message["content"], message["reasoning_content"]) == ("Let me add.", "Two sums, then.")
        assert [json.loads(call["function"]["arguments"]) for call in message["tool_calls"]] == [
            {"a": 1, "b": 2},
            {"a": 3, "b": 4},
        ]
        messages += [
            message,
            *({"role": "tool", "tool_call_id": c["id"], "content": "?"} for c in message["tool_calls"]),
        ]
        answer = await chat_turn(client, messages, stream=stream)
        assert answer == {
            "role": "assistant",
            "content": "It is 3 and 7.",
            "reasoning_content": "Done.",
            "finish": "stop",
        }
        session = served.session(opened)
        assert session.metrics()["forks"] == 0
        assert session.metrics()["branches"] == 1
        assert session.turns == 2


async def response_turn(client: openai.AsyncOpenAI, *, stream: bool, **request: Any) -> Any:
    if not stream:
        return await client.responses.create(model="m", tools=RESPONSE_TOOLS, **request)
    done, texts, response = [], "", None
    async with client.responses.stream(model="m", tools=RESPONSE_TOOLS, **request) as events:
        async for event in events:
            if event.type == "response.output_item.done":
                done.append(event.item.model_dump())
            if event.type == "response.output_text.delta":
                texts += event.delta
        response = await events.get_final_response()
    assert [item["id"] for item in done] == [item.id for item in response.output]
    assert texts == response.output_text
    return response


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_responses_with_calls(stream: bool, stored: bool) -> None:
    async with serving(SCRIPT, tools=[ADD]) as served:
        opened = await served.open()
        client = client_of(opened)
        request: list[Any] = [{"role": "user", "content": "1+2 and 3+4?"}]
        first = await response_turn(client, stream=stream, input=request, store=stored, instructions="Be brief.")
        assert [item.type for item in first.output] == ["reasoning", "message", "function_call", "function_call"]
        assert first.output_text == "Let me add."
        assert first.output[0].content[0].text == "Two sums, then."
        assert first.status == "completed"
        assert_reasoning(first.usage.output_tokens_details, "Two sums, then.")
        results: list[Any] = [
            {"type": "function_call_output", "call_id": item.call_id, "output": "?"}
            for item in first.output
            if item.type == "function_call"
        ]
        if stored:
            more: dict[str, Any] = {"input": results, "previous_response_id": first.id}
        else:
            more = {"input": [*request, *(item.model_dump(exclude_none=True) for item in first.output), *results]}
        answer = await response_turn(client, stream=stream, store=stored, instructions="Be brief.", **more)
        assert answer.output_text == "It is 3 and 7."
        assert answer.usage.output_tokens > 0
        session = served.session(opened)
        assert session.turns == 2
        assert session.metrics()["forks"] == 0


def columns(segment: Segment) -> tuple[str, list[int], list[float]]:
    return segment.kind, segment.token_ids.tolist(), [] if segment.logprobs is None else segment.logprobs.tolist()


async def test_all_ways_of_asking_leave_the_same_tokens() -> None:
    """Streamed or not, Chat Completions or Responses: ids, masks and logprobs are those of a session without HTTP."""
    recordings = []
    for stream in (False, True):
        async with serving(SCRIPT[1:], tools=[ADD]) as served:
            chat, responses = await served.open(), await served.open()
            await chat_turn(client_of(chat), [{"role": "user", "content": "Well?"}], stream=stream)
            await response_turn(client_of(responses), stream=stream, input="Well?")
            direct = await served.open()
            await served.session(direct).chat([{"role": "user", "content": "Well?"}], [ADD])
            for opened in (chat, responses, direct):
                segments = served.session(opened).segments()
                recordings.append(
                    [
                        (s.kind, s.token_ids.tolist(), None if s.logprobs is None else s.logprobs.tolist())
                        for s in segments
                    ]
                )
    assert all(recording == recordings[0] for recording in recordings)


async def test_several_answers_logprobs_and_stop_strings() -> None:
    async with serving(lambda request: f"One two {request.number} three.") as served:
        opened = await served.open()
        message = await client_of(opened).chat.completions.create(
            model="m", messages=[{"role": "user", "content": "Count."}], n=3, logprobs=True, stop=[" three"], seed=7
        )
        assert sorted(choice.message.content or "" for choice in message.choices) == [
            "One two 0",
            "One two 1",
            "One two 2",
        ]
        for choice in message.choices:
            assert choice.finish_reason == "stop"
            assert choice.logprobs is not None
            tokens = choice.logprobs.content or []
            assert (choice.message.content or "-") in "".join(token.token for token in tokens)
            assert all(token.logprob < 0 for token in tokens)
        assert {request.params.seed for request in served.client.requests} == {7, 8, 9}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 3),
        ("n", 0),
        ("response_format", {"type": "json_object"}),
        ("tool_choice", "required"),
        ("logit_bias", {"1": 5}),
        ("presence_penalty", 0.5),
        ("top_logprobs", 3),
        ("parallel_tool_calls", False),
        ("max_completion_tokens", "many"),
        ("functions", [{"name": "f"}]),
    ],
)
async def test_unsupported_field_is_refused_by_name(field: str, value: Any) -> None:
    async with serving(["never said"]) as served:
        opened = await served.open()
        with pytest.raises(openai.BadRequestError) as caught:
            await client_of(opened).chat.completions.create(
                model="m", messages=[{"role": "user", "content": "Hi."}], tools=CHAT_TOOLS, extra_body={field: value}
            )
        assert caught.value.param == field
        assert served.session(opened).turns == 0
