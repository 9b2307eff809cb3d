"""The chat model on a session: messages both ways, tools and what calls are held to, streams, structured output."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from pydantic import BaseModel
from pydantic.v1 import BaseModel as BaseModelV1
from typing_extensions import TypedDict

from support.agents.langgraph_episodes import calls
from support.chat.model_dirs import renderer_for
from support.chat.toy_renderer import CALL, CALL_END, END, THINK, THINK_END, ToyRenderer
from turnwise import ChatTurnwise
from turnwise.errors import AgentError, InferenceError, SessionError, StructuredOutputError
from turnwise.inference.scripted import ScriptedClient
from turnwise.recorder.session import Session, SessionLimits
from turnwise.types import Guide, ToolSchema

QUESTION = HumanMessage("hi")


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


class Answer(BaseModel):
    """The answer."""

    value: int


class Plain(TypedDict):
    """The answer."""

    value: int


SCHEMA = {"title": "Plain", "type": "object", "properties": {"value": {"type": "integer"}}, "required": ["value"]}
ADD_DICT = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


def made(script: Any, *, family: str | None = None, guides: bool = False, **fields: Any) -> tuple[ChatTurnwise, Any]:
    renderer: Any = ToyRenderer() if family is None else renderer_for(family)
    schemas = [ToolSchema("add", "Add.", ADD_DICT["function"]["parameters"])]
    client = ScriptedClient(renderer, script, guides=guides, tools=schemas)
    session = Session(client, renderer, id="s", limits=SessionLimits(context_length=5000))
    return ChatTurnwise(session=session, **fields), client


async def test_an_answer_has_its_ids_usage_and_end() -> None:
    model, _ = made(["well"])
    answer = await model.ainvoke([SystemMessage("be"), QUESTION])
    assert (answer.text, answer.id) == ("well", "s/t0")
    assert answer.response_metadata == {"finish_reason": "stop", "model_name": "turnwise", "turn_id": "t0"} | {
        key: answer.response_metadata[key] for key in ("model_provider",) if key in answer.response_metadata
    }
    assert answer.usage_metadata == {
        "input_tokens": 9,
        "output_tokens": 5,
        "total_tokens": 14,
        "input_token_details": {"cache_read": 0},
    }
    model, _ = made(["well"], max_tokens=2)
    assert (await model.ainvoke([QUESTION])).response_metadata["finish_reason"] == "length"


async def test_calls_reasoning_and_unusable_calls_come_and_go_without_a_fork() -> None:
    turn = {**calls(("add", {"a": 1, "b": 2}), text="so"), "reasoning_content": "hm"}
    renderer = ToyRenderer()
    client = ScriptedClient(renderer, [sampled(renderer, turn, '{"name": "add", '), "done"])
    session = Session(client, renderer, id="s", limits=SessionLimits(context_length=5000))
    bound = ChatTurnwise(session=session).bind_tools([add])
    first = await bound.ainvoke([QUESTION])
    assert first.tool_calls == [{"name": "add", "args": {"a": 1, "b": 2}, "id": "c00000000", "type": "tool_call"}]
    [invalid] = first.invalid_tool_calls
    assert (invalid["id"], invalid["error"]) == ("c00000001", "not a call")
    assert first.additional_kwargs["reasoning_content"] == "hm"
    assert {"type": "reasoning", "reasoning": "hm"} in first.content_blocks
    # Copied as checkpoints and reducers copy, and with its blocks as content.
    copied = AIMessage.model_validate(first.model_dump() | {"content": first.content_blocks})
    answer = await bound.ainvoke([QUESTION, copied, ToolMessage("3", tool_call_id="c00000000")])
    assert answer.text == "done"
    assert session.metrics()["forks"] == 0
    [_, _, context, _] = session.segments()
    assert [message["tool_call_id"] for message in context.messages] == ["c00000000", "c00000001"]
    assert "this call was not executed: not a call" in context.messages[1]["content"]


def sampled(renderer: ToyRenderer, turn: Any, raw: str) -> list[int]:
    """The ids of a turn whose second call is not JSON."""
    ids = [THINK, *renderer.text(turn["reasoning_content"]), THINK_END, *renderer.text(turn["content"])]
    ids += [CALL, *renderer.text('{"name": "add", "arguments": {"a": 1, "b": 2}}'), CALL_END]
    return [*ids, CALL, *renderer.text(raw), CALL_END, END]


@pytest.mark.parametrize("form", [add, ADD_DICT, ADD_DICT["function"] | {"title": "add"}])
async def test_tools_in_any_form_are_told_alike(form: Any) -> None:
    model, client = made(["x"], family="qwen3")
    await model.bind_tools([form]).ainvoke([QUESTION])
    assert '"name": "add"' in client.requests[0].text
    assert "Add two numbers." in client.requests[0].text


async def test_tool_choice_none_keeps_the_prompt_and_refuses_calls() -> None:
    model, client = made([calls(("add", {"a": 1, "b": 2})), "x"], family="qwen3")
    answer = await model.bind_tools([add], tool_choice="none").ainvoke([QUESTION])
    [refused] = answer.invalid_tool_calls
    assert not answer.tool_calls
    assert refused["error"] == "tool_choice is none: it was not executed"
    await model.bind_tools([add]).ainvoke([QUESTION, answer, HumanMessage("go on")])
    first, second = (request.text for request in client.requests)
    assert '"name": "add"' in first
    assert second.startswith(first)


@pytest.mark.parametrize(
    ("choice", "limit"),
    [
        ("any", None),
        ("required", None),
        (True, None),
        ("add", 1),
        ({"type": "function", "function": {"name": "add"}}, 1),
        ({"type": "tool", "name": "add"}, 1),
        ({"type": "any"}, None),
    ],
)
async def test_a_forced_call_is_held_to_a_grammar(choice: Any, limit: int | None) -> None:
    model, client = made([calls(("add", {"a": 1, "b": 2}))], family="qwen3", guides=True)
    answer = await model.bind_tools([add], tool_choice=choice).ainvoke([QUESTION])
    assert answer.tool_calls[0]["name"] == "add"
    guide = client.requests[0].params.guide
    assert (guide.calls, guide.text, guide.most) == (("add",), False, limit)
    assert guide.tag


async def test_parallel_tool_calls_false_allows_a_single_call() -> None:
    model, client = made(["x"], family="qwen3", guides=True)
    await model.bind_tools([add], parallel_tool_calls=False).ainvoke([QUESTION])
    assert client.requests[0].params.guide.most == 1


async def test_unsupported_constraints_raise_session_errors() -> None:
    model, client = made(["x"], family="qwen3")
    with pytest.raises(StructuredOutputError, match="does not support structured output"):
        await model.bind_tools([add], tool_choice="any").ainvoke([QUESTION])
    model, _ = made(["x"])
    with pytest.raises(StructuredOutputError, match="no grammar"):
        await model.bind_tools([add], tool_choice="any").ainvoke([QUESTION])
    for options, refusal in [
        ({"tool_choice": "sub"}, "names 'sub', which is not one of the tools add"),
        ({"tool_choice": {"type": "magic"}}, "a tool of type 'magic'"),
        ({"tols": 1}, r"takes no 'tols' \(1\): it takes stop, temperature"),
        ({"response_format": {"type": "json_schema"}}, "json_schema"),
    ]:
        with pytest.raises(SessionError, match=refusal):
            await model.bind_tools([add], **options).ainvoke([QUESTION])
    with pytest.raises(SessionError, match="3 is not a tool"):
        model.bind_tools([3])
    assert client.requests == []


@pytest.mark.parametrize("schema", [Answer, Plain, SCHEMA])
@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
async def test_structured_output(schema: Any, method: Any) -> None:
    line = '{"value": 3}' if method != "function_calling" else calls((schema_name(schema), {"value": 3}))
    model, client = made([line, line], family="qwen3", guides=True)
    answer = await model.with_structured_output(schema, method=method).ainvoke([QUESTION])
    assert answer == (Answer(value=3) if schema is Answer else {"value": 3})
    guide: Guide = client.requests[0].params.guide
    if method == "json_schema":
        assert guide.schema is not None
        assert guide.schema["properties"]["value"]["type"] == "integer"
    assert guide.tag
    raw = await model.with_structured_output(schema, method=method, include_raw=True).ainvoke([QUESTION])
    assert raw["parsed"] == answer
    assert isinstance(raw["raw"], AIMessage)


def schema_name(schema: Any) -> str:
    return schema["title"] if isinstance(schema, dict) else schema.__name__


async def test_structured_output_that_cannot_be_read_is_told_beside_the_answer() -> None:
    model, _ = made(["no"], family="qwen3", guides=True)
    raw = await model.with_structured_output(Answer, include_raw=True).ainvoke([QUESTION])
    assert raw["parsed"] is None
    assert raw["parsing_error"] is not None
    with pytest.raises(SessionError, match="method is 'magic'"):
        model.with_structured_output(Answer, method="magic")


async def test_stream_yields_the_same_message_incrementally() -> None:
    turn = {**calls(("add", {"a": 1, "b": 2}), text="let me see"), "reasoning_content": "hm"}
    model, _ = made([turn], family="qwen3")
    invoked = await model.bind_tools([add]).ainvoke([QUESTION])
    model, _ = made([turn], family="qwen3")
    chunks = [chunk async for chunk in model.bind_tools([add]).astream([QUESTION])]
    assert len([chunk for chunk in chunks if chunk.text]) > 2
    assert len({chunk.id for chunk in chunks}) == 1
    joined = chunks[0]
    for chunk in chunks[1:]:
        joined += chunk
    assert isinstance(joined, AIMessageChunk)
    for name in ("text", "tool_calls", "invalid_tool_calls", "additional_kwargs"):
        assert getattr(joined, name) == getattr(invoked, name), name
    assert joined.usage_metadata == invoked.usage_metadata
    assert joined.response_metadata["turn_id"] == "t0"
    assert joined.response_metadata["finish_reason"] == "tool_calls"
    # What was streamed is a turn like any other.
    assert model.session is not None
    assert model.session.metrics()["turns"] == 1


async def test_an_unusable_call_is_no_call_in_a_stream_either() -> None:
    model, _ = made([calls(("nope", {"a": 1}), ("add", {"a": 1, "b": 2})), "x"])
    chunks = [chunk async for chunk in model.bind_tools([add]).astream([QUESTION])]
    joined = chunks[0]
    for chunk in chunks[1:]:
        joined += chunk
    assert [call["name"] for call in joined.tool_calls] == ["add"]
    assert [call["name"] for call in joined.invalid_tool_calls] == ["nope"]
    await model.bind_tools([add]).ainvoke([QUESTION, joined, ToolMessage("3", tool_call_id="c00000001")])
    assert model.session is not None
    assert model.session.metrics()["forks"] == 0


async def test_stop_strings_and_sampling() -> None:
    model, client = made(["one two three"] * 3, stop=["two"], top_p=0.5)
    assert (await model.ainvoke([QUESTION])).text == "one "
    assert (await model.ainvoke([QUESTION], stop=["three"], top_p=None, seed=7)).text == "one two "
    joined = "".join([chunk.text async for chunk in model.astream([QUESTION])])
    assert joined == "one "
    assert [request.params.top_p for request in client.requests] == [0.5, 1.0, 0.5]
    assert client.requests[1].params.seed == 7


async def test_a_reducer_never_takes_turns_of_two_sessions_for_each_other() -> None:
    renderer = ToyRenderer()
    models = []
    for name in ("one", "two"):
        session = Session(ScriptedClient(renderer, ["x"]), renderer, id=name, limits=SessionLimits(context_length=500))
        models.append(ChatTurnwise(session=session))
    first, second = [await model.ainvoke([QUESTION]) for model in models]
    assert first.id != second.id


async def test_plain_calls_work_where_no_loop_would_stand_still() -> None:
    model, _ = made(["a", "b"])
    with pytest.raises(AgentError, match="await ainvoke"):
        model.invoke([QUESTION])
    await model.ainvoke([QUESTION])
    assert (await asyncio.to_thread(model.invoke, [QUESTION])).text == "b"


def test_plain_calls_work_without_any_loop() -> None:
    model, _ = made(["a"])
    assert model.invoke([QUESTION]).text == "a"


async def test_model_outside_an_episode_names_its_needs() -> None:
    with pytest.raises(AgentError, match=r"ChatTurnwise\(session=...\)"):
        await ChatTurnwise().ainvoke([QUESTION])


async def test_langchain_caches_are_not_used() -> None:
    from langchain_core.caches import InMemoryCache
    from langchain_core.globals import set_llm_cache

    set_llm_cache(InMemoryCache())
    try:
        model, _ = made(["a", "b"])
        assert [(await model.ainvoke([QUESTION])).text for _ in range(2)] == ["a", "b"]
        fake = GenericFakeChatModel(messages=iter([AIMessage("a"), AIMessage("b")]))
        # As any other model would.
        assert [(await fake.ainvoke([QUESTION])).text for _ in range(2)] == ["a", "a"]
    finally:
        set_llm_cache(None)


async def test_tokens_are_counted_by_the_models_own_tokenizer() -> None:
    model, _ = made([])
    assert model.get_num_tokens("abc") == 3
    with pytest.raises(SessionError, match="get_num_tokens"):
        model.get_token_ids("abc")


async def test_kinds_of_messages_that_no_model_is_told_are_refused() -> None:
    from langchain_core.messages import ChatMessage, RemoveMessage

    model, client = made(["x", "x"])
    with pytest.raises(AgentError, match="kind 'critic'"):
        await model.ainvoke([ChatMessage("x", role="critic")])
    with pytest.raises(AgentError, match="kind 'remove'"):
        await model.ainvoke([QUESTION, RemoveMessage("1")])
    await model.ainvoke([ChatMessage("x", role="developer"), QUESTION])
    assert len(client.requests) == 1


async def test_a_stream_of_a_thread_runs_on_the_sessions_loop_and_not_on_the_callers() -> None:
    model, client = made(["one", "two", InferenceError("gone")])
    await model.ainvoke([QUESTION])
    text = await asyncio.to_thread(lambda: "".join(chunk.text for chunk in model.stream([QUESTION])))
    assert (text, len(client.requests)) == ("two", 2)
    with pytest.raises(InferenceError, match="gone"):
        await asyncio.to_thread(lambda: list(model.stream([QUESTION])))
    with pytest.raises(AgentError, match="would deadlock"):
        list(model.stream([QUESTION]))


async def test_streaming_option_makes_invoke_stream() -> None:
    seen: list[str] = []

    class Watch(BaseCallbackHandler):
        def on_llm_new_token(self, token: str, **_: Any) -> None:
            seen.append(token)

    for streaming in (False, True):
        model, _ = made(["well"], streaming=streaming)
        seen.clear()
        assert (await model.ainvoke([QUESTION], config={"callbacks": [Watch()]})).text == "well"
        assert ("".join(seen) == "well") == streaming


def test_standard_parameters_are_those_of_every_chat_model() -> None:
    model, _ = made([], temperature=0.0, max_tokens=10, timeout=60, max_retries=2, api_key="very-secret", stop=["x"])
    params = model._get_ls_params()
    assert {key: params[key] for key in ("ls_model_name", "ls_provider", "ls_temperature", "ls_max_tokens")} == {
        "ls_model_name": "turnwise",
        "ls_provider": "turnwise",
        "ls_temperature": 0.0,
        "ls_max_tokens": 10,
    }
    assert "very-secret" not in str(model.model_dump())
    with pytest.raises(ValueError, match="retries"):
        made([], retries=3)


class OldAnswer(BaseModelV1):
    """The answer, as a class of pydantic 1."""

    value: int


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
async def test_a_class_of_pydantic_1_is_answered_by_its_instance(method: str) -> None:
    line: Any = '{"value": 3}' if method == "json_schema" else calls(("OldAnswer", {"value": 3}))
    model, _ = made([line], family="qwen3", guides=True)
    structured = model.with_structured_output(OldAnswer, method=method)
    assert await structured.ainvoke([QUESTION]) == OldAnswer(value=3)
    bound = structured.first.kwargs["ls_structured_output_format"]
    assert (bound["kwargs"], bound["schema"]) == ({"method": method}, OldAnswer)
