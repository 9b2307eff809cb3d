"""The items that Codex sends, and what it needs of an answer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.gateway.server import serving
from turnwise.gateway.dialects.core import Abilities, Answer
from turnwise.gateway.dialects.openai_responses import OpenAIResponses
from turnwise.gateway.dialects.responses_request import Conversations
from turnwise.gateway.errors import ApiError
from turnwise.types import ToolCall, ToolSchema

TOOLS = [
    {"type": "function", "name": "exec_command", "parameters": {"type": "object", "properties": {}}, "strict": False},
    {"type": "namespace", "name": "multi_agent_v1", "tools": [{"type": "function", "name": "spawn_agent"}]},
    {"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}},
]
SEARCH = {"type": "web_search"}


def body(**more: Any) -> dict[str, Any]:
    return {"model": "m", "input": "Hi.", "tools": TOOLS, **more}


def answer(**message: Any) -> Answer:
    turn = {"role": "assistant", "content": "", "finish_reason": "stop", "turn_id": "t0", **message}
    return Answer(turn, 10, 5)  # type: ignore[arg-type]


def test_items_of_a_codex_turn_are_one_message() -> None:
    dialect = OpenAIResponses()
    lenient = Abilities(lenient=frozenset({"server_tools"}))
    request = dialect.read(body(tools=[*TOOLS, SEARCH]), lenient)
    assert request.ignored == {"server_tools"}
    assert [tool.name for tool in request.tools] == ["exec_command", "multi_agent_v1__spawn_agent", "apply_patch"]
    calls = [
        ToolCall("c1", "exec_command", {"cmd": "ls"}),
        ToolCall("c2", "multi_agent_v1__spawn_agent", {}),
        ToolCall("c3", "apply_patch", {"input": "*** Begin"}),
    ]
    message = answer(content="Let me.", reasoning_content="Hm.", tool_calls=calls)
    output = dialect.respond(request, [message])["output"]
    assert [item["type"] for item in output] == [
        "reasoning", "message", "function_call", "function_call", "custom_tool_call",
    ]  # fmt: skip
    assert (output[3]["namespace"], output[3]["name"]) == ("multi_agent_v1", "spawn_agent")
    assert output[4]["input"] == "*** Begin"
    echoed = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Rules."}], "id": "msg_x"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Go."}]},
        *({**item, "encrypted_content": None} for item in output),
        {"type": "function_call_output", "call_id": "c1", "output": "a.txt", "id": "fco_1"},
        {"type": "custom_tool_call_output", "call_id": "c3", "output": [{"type": "input_text", "text": "ok"}]},
    ]
    messages = dialect.read(body(input=echoed), Abilities()).messages
    assert [message["role"] for message in messages] == ["developer", "user", "assistant", "tool", "tool"]
    turn: Any = messages[2]
    assert turn["reasoning_content"] == "Hm."
    assert [call["id"] for call in turn["tool_calls"]] == ["c1", "c2", "c3"]
    assert [call["function"]["name"] for call in turn["tool_calls"]] == [tool.name for tool in request.tools]
    assert json.loads(turn["tool_calls"][0]["function"]["arguments"]) == {"cmd": "ls"}


def test_items_of_a_broken_stream_are_dropped() -> None:
    """Codex keeps the items that were whole, and asks again with them at the end; the model sees none of them."""
    dialect = OpenAIResponses()
    request = dialect.read(body(), Abilities())
    first, second = (dialect.respond(request, [answer(content=text)])["output"] for text in ("One.", "Two."))
    question = {"role": "user", "content": "Go."}
    repeated = dialect.read(body(input=[question, *first]), Abilities()).messages
    assert [message["content"] for message in repeated] == ["Go."]
    more = dialect.read(
        body(input=[question, *first, *second, {"role": "user", "content": "On."}]), Abilities()
    ).messages
    assert ["Two." in str(message["content"]) for message in more] == [False, True, False]
    # A message that this gateway never sent is the agent's own, and stays.
    items = [{**item, "id": "msg_of_mine"} for item in first]
    messages = dialect.read(body(input=[question, *items]), Abilities()).messages
    assert [message["role"] for message in messages] == ["user", "assistant"]


def test_a_cut_answer_is_incomplete_but_for_programs_that_would_give_up() -> None:
    for reports_complete, status in ((False, "incomplete"), (True, "completed")):
        dialect = OpenAIResponses(reports_complete=reports_complete)
        request = dialect.read(body(), Abilities())
        cut = answer(content="It", finish_reason="length")
        assert dialect.respond(request, [cut])["status"] == status
        writer = dialect.writer(request)
        stream = writer.begin() + writer.text(0, "It") + writer.finish(0, cut)
        assert stream.count(b"event: response." + status.encode()) == 1
        assert stream.count(b"event: response.output_item.done") == 1


def test_a_call_that_must_not_be_executed_cannot_be() -> None:
    dialect = OpenAIResponses()
    request = dialect.read(body(), Abilities())
    calls = [
        ToolCall("c1", "exec_command", {}, '{"cmd": nope}', "the arguments are not valid JSON"),
        ToolCall("c2", "exec_command", {}, '{"cmd": "rm -rf /tmp/a', "the call was not closed"),
        ToolCall("c3", "exec_command", {}, '{"cmd": "ls"}', "the call stands inside the reasoning"),
    ]
    names = [
        (item["name"], item["arguments"]) for item in dialect.respond(request, [answer(tool_calls=calls)])["output"]
    ]
    # The client itself says what is wrong with the first; the others could be taken for calls.
    assert names[0] == ("exec_command", '{"cmd": nope}')
    assert [name for name, _ in names[1:]] == ["invalid_tool_call"] * 2
    assert json.loads(names[2][1])["error"] == "the call stands inside the reasoning"


def test_conversations_are_named_by_responses_and_forgotten_in_order() -> None:
    dialect = OpenAIResponses()
    first = dialect.read(body(input="One?"), Abilities())
    one = dialect.respond(first, [answer(content="One.")])
    second = dialect.read(body(input="Two?", previous_response_id=one["id"], instructions="Be brief."), Abilities())
    assert [message["content"] for message in second.messages] == ["Be brief.", "One?", "One.", "Two?"]
    two = dialect.respond(second, [answer(content="Two.")])
    branch = dialect.read(body(input="Again?", previous_response_id=one["id"]), Abilities())
    assert [message["content"] for message in branch.messages] == ["One?", "One.", "Again?"]
    third = dialect.read(body(input="Three?", previous_response_id=two["id"]), Abilities())
    assert [message["content"] for message in third.messages] == ["One?", "One.", "Two?", "Two.", "Three?"]
    for wrong in ({"previous_response_id": "resp_unknown"}, {"background": True}, {"conversation": "c"}):
        with pytest.raises(ApiError) as caught:
            dialect.read(body(**wrong), Abilities())
        assert caught.value.param == next(iter(wrong))


@pytest.mark.parametrize("kind", ["web_search", "web_search_preview", "file_search", "code_interpreter", "mcp"])
def test_a_tool_that_the_provider_runs_is_refused_by_name(kind: str) -> None:
    for tools, field in (
        ([*TOOLS, {"type": kind}], "tools[3].type"),
        ([{"type": "namespace", "name": "n", "tools": [{"type": kind}]}], "tools[0].tools[0].type"),
    ):
        with pytest.raises(ApiError) as caught:
            OpenAIResponses().read(body(tools=tools), Abilities(lenient=frozenset()))
        assert (caught.value.status, caught.value.param) == (400, field)
        assert f"'{kind}' is run by the provider's own servers" in caught.value.message
        assert "offer a tool that the agent runs, or remove it" in caught.value.message


CALLED: Any = {
    "role": "assistant", "content": "Let me.", "reasoning_content": "Hm.",
    "tool_calls": [ToolCall("", "exec_command", {"cmd": "ls"}), ToolCall("", "apply_patch", {"input": "*** Begin"})],
}  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
async def test_items_are_referenced_as_the_ai_sdk_does(stream: bool) -> None:
    """Its default provider sends what was answered as references, and everything else in full."""
    async with serving(
        [CALLED, "Done.", "Again."], tools=[ToolSchema("exec_command", ""), ToolSchema("apply_patch", "")]
    ) as served:
        opened, other = await served.open(), await served.open()

        async def ask(**more: Any) -> tuple[int, Any]:
            path = f"{opened['path']}/v1/responses"
            async with served.http.post(path, json={"model": "m", "tools": TOOLS, "stream": stream, **more}) as answer:
                text = await answer.text()
            lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
            body = json.loads(lines[-1] if lines else text)
            return answer.status, body.get("response", body)

        request: dict[str, Any] = {"role": "user", "content": [{"type": "input_text", "text": "Go."}]}
        status, first = await ask(input=[request])
        assert (status, [item["type"] for item in first["output"]]) == (
            200, ["reasoning", "message", "function_call", "custom_tool_call"],
        )  # fmt: skip
        references: list[Any] = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
        del references[1]["type"]
        calls = [item["call_id"] for item in first["output"][2:]]
        results = [
            {"type": "function_call_output", "call_id": calls[0], "output": "ok"},
            {"type": "custom_tool_call_output", "call_id": calls[1], "output": "ok"},
        ]
        status, second = await ask(input=[request, *references, *results])
        assert status == 200, second
        assert served.session(opened).metrics()["branches"] == 1
        assert served.session(opened).metrics()["forks"] == 0
        # Of another session, of one that was not to be stored, of none at all.
        _, loose = await ask(input=[request], store=False)
        for unknown in (loose["output"][0]["id"], "msg_1", "x" * 5000, ""):
            status, body = await ask(input=[request, {"type": "item_reference", "id": unknown}, request])
            assert (status, body["error"]["param"], body["error"]["code"]) == (404, "input", "item_not_found")
            assert "Item with id" in body["error"]["message"]
            assert len(body["error"]["message"]) < 400
        opened = other
        assert (await ask(input=[request, *references, *results]))[0] == 404


def test_stored_items_are_dropped_with_their_response() -> None:
    stored = Conversations(maximum=2)
    dialect = OpenAIResponses(stored)
    request = dialect.read(body(), Abilities())
    items = [dialect.respond(request, [answer(content=str(number))])["output"][0]["id"] for number in range(3)]
    assert [stored.item(item_id)["content"][0]["text"] for item_id in items[1:]] == ["1", "2"]
    with pytest.raises(ApiError, match="not found"):
        stored.item(items[0])
