"""Anthropic Messages: its own client, and the bodies that Claude Code sends."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest

from support.gateway.server import serving
from turnwise.gateway.dialects.anthropic import Anthropic, read_messages_request
from turnwise.gateway.dialects.core import Abilities, Answer, ChatRequest
from turnwise.gateway.errors import ApiError
from turnwise.types import ToolCall, ToolSchema

ADD = ToolSchema("add", "Add.", {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}})
TOOLS: Any = [{"name": "add", "description": "Add.", "input_schema": ADD.parameters}]
CALLS: Any = {
    "role": "assistant",
    "content": "Let me add.",
    "reasoning_content": "Two sums.",
    "tool_calls": [ToolCall("", "add", {"a": 1, "b": 2}), ToolCall("", "add", {"a": 3, "b": 4})],
}
DONE: Any = {"role": "assistant", "content": "It is 3 and 7.", "reasoning_content": "Done."}


async def turn(client: anthropic.AsyncAnthropic, messages: list[Any], *, stream: bool) -> anthropic.types.Message:
    request: Any = {"model": "m", "max_tokens": 500, "messages": messages, "tools": TOOLS, "system": "Be brief."}
    if not stream:
        return await client.messages.create(**request)
    async with client.messages.stream(**request) as events:
        texts = "".join([text async for text in events.text_stream])
        message = await events.get_final_message()
    assert texts == "".join(block.text for block in message.content if block.type == "text")
    return message


@pytest.mark.parametrize("stream", [False, True])
async def test_messages_with_calls_and_results_in_another_order(stream: bool) -> None:
    async with serving([CALLS, DONE], tools=[ADD]) as served:
        opened = await served.open()
        client = anthropic.AsyncAnthropic(base_url=opened["base"], api_key="any", max_retries=0)
        messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "1+2 and 3+4?"}]}]
        first = await turn(client, messages, stream=stream)
        assert [block.type for block in first.content] == ["thinking", "text", "tool_use", "tool_use"]
        assert first.stop_reason == "tool_use"
        assert [block.input for block in first.content if block.type == "tool_use"] == [
            {"a": 1, "b": 2},
            {"a": 3, "b": 4},
        ]
        assert first.usage.output_tokens > 0
        ids = [block.id for block in first.content if block.type == "tool_use"]
        # Thinking at the end, a block of blanks, keys in another order, a moved cache mark, results as they ended.
        echo: list[Any] = [block.model_dump(exclude_none=True) for block in first.content]
        echo[2]["input"] = {"b": 2.0, "a": 1}
        echo.insert(1, {"type": "text", "text": "\n\n"})
        results = [{"tool_use_id": ids[1], "type": "tool_result", "content": [{"type": "text", "text": "7"}]}]
        results.append({"type": "tool_result", "tool_use_id": ids[0], "content": "3"})
        messages[0]["content"] = "1+2 and 3+4?"
        messages += [{"role": "assistant", "content": echo}, {"role": "user", "content": results}]
        answer = await turn(client, messages, stream=stream)
        assert answer.stop_reason == "end_turn"
        assert answer.content[-1].text == "It is 3 and 7."  # type: ignore[union-attr]
        session = served.session(opened)
        assert (session.metrics()["forks"], session.metrics()["branches"]) == (0, 1)
        prompt = served.client.requests[-1].text  # type: ignore[attr-defined]
        assert prompt.index("\n3\n") < prompt.index("\n7\n")


async def test_tokens_are_counted_and_models_listed_as_anthropic_does() -> None:
    async with serving([DONE]) as served:
        opened = await served.open()
        client = anthropic.AsyncAnthropic(base_url=opened["base"], api_key="any", max_retries=0)
        messages: Any = [{"role": "user", "content": "Hello."}]
        counted = await client.messages.count_tokens(model="m", messages=messages)
        await client.messages.create(model="m", messages=messages, max_tokens=50)
        assert counted.input_tokens == len(served.client.requests[-1].prompt)  # type: ignore[attr-defined]
        assert [model.id async for model in client.models.list()] == ["tiny"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tool_choice": {"type": "any"}, "tools": TOOLS}, "tool_choice"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x"}}
                        ],
                    }
                ]
            },
            "messages[0].content[0].source.url",
        ),
        ({"output_config": {"format": {"type": "json_schema", "schema": {}}}}, "output_config.format"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": ""}]}, "messages[0].role"),
    ],
)
def test_unsupported_field_is_refused_by_name(body: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        read(**body)
    assert (caught.value.status, caught.value.param) == (400, param)
    error = Anthropic().error(caught.value)
    assert error["type"] == "error"
    assert error["error"]["type"] == "invalid_request_error"
    assert param in error["error"]["message"]


def read(**body: Any) -> ChatRequest:
    return Anthropic().read({"model": "m", "messages": [{"role": "user", "content": "Hi."}], **body}, Abilities())


def test_claude_codes_additions_are_removed() -> None:
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197.abc; cc_entrypoint=sdk-cli;"},
        {"type": "text", "text": "You are a coder.", "cache_control": {"type": "ephemeral"}},
    ]
    call = {
        "type": "tool_use",
        "id": "c1",
        "name": "Bash",
        "input": {"__unparsedToolInput": {"raw": '{"a": ', "len": 6}},
    }
    request = read(
        system=system,
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "Go.", "cache_control": {"type": "ephemeral"}}]},
            {"role": "system", "content": "Agents: none."},
            {"role": "assistant", "content": [{"type": "text", "text": "\n\n"}, call]},
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "c1", "is_error": True, "content": ""}],
            },
            {"role": "system", "content": [{"type": "text", "text": "Use tasks."}]},
        ],
        thinking={"type": "adaptive"},
        context_management={"edits": []},
        output_config={"effort": "high"},
        metadata={"user_id": "{}"},
        tools=TOOLS,
    )
    assert [message["role"] for message in request.messages] == ["system", "user", "assistant", "tool", "user"]
    assert request.messages[0]["content"] == "You are a coder."
    prompt = "".join(part["text"] for part in request.messages[1]["content"])  # type: ignore[union-attr, index]
    assert prompt == "Go.\n\n<system-reminder>\nAgents: none.\n</system-reminder>"
    assert request.messages[2]["tool_calls"][0]["function"] == {"name": "Bash", "arguments": '{"a": '}  # type: ignore[index]
    assert request.messages[2]["content"] == ""
    assert request.messages[3]["content"] == [{"type": "text", "text": ""}]
    assert [tool.name for tool in request.tools] == ["add"]


def answer(**message: Any) -> Answer:
    return Answer({"role": "assistant", "content": "", "finish_reason": "stop", **message}, 10, 5)  # type: ignore[typeddict-item]


def test_a_call_that_must_not_be_executed_has_the_name_of_no_tool() -> None:
    broken = ToolCall("c1", "add", {}, '{"a": 1', "the call was not closed")
    response = Anthropic().respond(read(), [answer(tool_calls=[broken])])
    (block,) = response["content"]
    assert block["name"] == "invalid_tool_call"
    assert block["input"] == {"tool": "add", "error": "the call was not closed", "input": '{"a": 1'}


def test_stop_reason_of_each_way_a_turn_ends() -> None:
    call = ToolCall("c1", "add", {"a": 1})
    ends = [
        (answer(content="x"), ("end_turn", None)),
        (answer(content="x", finish_reason="length"), ("max_tokens", None)),
        (answer(tool_calls=[call], finish_reason="length"), ("tool_use", None)),
        (Answer({"role": "assistant", "content": "x"}, 1, 1, stop="END"), ("stop_sequence", "END")),
    ]
    for message, expected in ends:
        response = Anthropic().respond(read(), [message])
        assert (response["stop_reason"], response["stop_sequence"]) == expected


def test_thinking_that_was_switched_off_is_not_sent() -> None:
    request = read(thinking={"type": "disabled"})
    message = answer(content="x", reasoning_content="hm")
    assert [block["type"] for block in Anthropic().respond(request, [message])["content"]] == ["text"]
    writer = Anthropic().writer(request)
    assert b"thinking" not in writer.begin() + writer.thoughts(0, "hm") + writer.text(0, "x") + writer.finish(
        0, message
    )


def test_a_waiting_stream_shows_life_by_deltas_and_closes_each_block_once() -> None:
    writer = Anthropic().writer(read())
    message = answer(content="It is", reasoning_content="Hm", tool_calls=[ToolCall("c1", "add", {"a": 1})])
    written = [
        writer.begin(), writer.alive(), writer.thoughts(0, "Hm"), writer.alive(), writer.text(0, "It"), writer.alive(),
        writer.finish(0, message), writer.end(),
    ]  # fmt: skip
    assert all(b"content_block_delta" in written[index] for index in (1, 3, 5))
    stream = b"".join(written)
    events = [line.removeprefix(b"event: ").decode() for line in stream.split(b"\n") if line.startswith(b"event: ")]
    assert events[0] == "message_start"
    assert events[-2:] == ["message_delta", "message_stop"]
    assert events.count("content_block_start") == events.count("content_block_stop") == 4
    depth = 0
    for event in events:
        depth += {"content_block_start": 1, "content_block_stop": -1}.get(event, 0)
        assert depth in (0, 1)


@pytest.mark.parametrize(
    "kind", ["web_search_20250305", "web_fetch_20250910", "code_execution_20250522", "mcp_toolset"]
)
def test_a_tool_that_the_provider_runs_is_refused_by_name_or_left_out(kind: str) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "Go."}], "tools": [{"type": kind, "name": "x"}]}
    with pytest.raises(ApiError) as caught:
        read_messages_request(body, Abilities(lenient=frozenset()))
    assert caught.value.param == "tools[0].type"
    assert kind in caught.value.message
    request = read_messages_request(body, Abilities())
    assert (request.tools, request.ignored) == ((), {"server_tools"})
    # One that the agent runs, but whose schema only the provider has, is never left out.
    with pytest.raises(ApiError, match=r"'computer_20250124'.*describe it as a function or custom tool"):
        read_messages_request({**body, "tools": [{"type": "computer_20250124", "name": "computer"}]}, Abilities())
