"""What a request holds its answer to, in each wire API, and the 400 that names the field where that cannot be done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from support.chat.model_dirs import renderer_for
from support.gateway.server import serving
from support.gateway.structured_requests import DIALECTS, PATHS, SCHEMA, TOOLS, ask, body
from turnwise.errors import InferenceError, StructuredOutputError
from turnwise.gateway.dialects.anthropic import Anthropic
from turnwise.gateway.dialects.core import Abilities, ChatRequest
from turnwise.gateway.dialects.openai_chat import OpenAIChat
from turnwise.gateway.dialects.openai_responses import OpenAIResponses
from turnwise.gateway.dialects.response_format import abilities_of
from turnwise.gateway.errors import ApiError
from turnwise.inference.scripted import ScriptedClient
from turnwise.types import Guide, Message, ToolCall, ToolSchema

ALL = Abilities(guided=True, forced_calls=True, chat_format="hermes")
NAMES = tuple(TOOLS)
READ: dict[str, Callable[[dict[str, Any], Abilities], ChatRequest]] = {
    "chat": OpenAIChat().read,
    "responses": OpenAIResponses().read,
    "messages": Anthropic().read,
}
FIELDS = {
    "json": {"chat": "response_format", "responses": "text.format", "messages": "output_config.format"},
    "required": dict.fromkeys(DIALECTS, "tool_choice"),
    "named": dict.fromkeys(DIALECTS, "tool_choice"),
    "single": {
        "chat": "parallel_tool_calls",
        "responses": "parallel_tool_calls",
        "messages": "tool_choice.disable_parallel_tool_use",
    },
}
MEANT = {
    "json": Guide(schema=SCHEMA),
    "required": Guide(calls=NAMES, text=False),
    "named": Guide(calls=("get_weather",), text=False, most=1),
    "single": Guide(calls=NAMES, most=1),
}
CALL: Message = {"role": "assistant", "content": "", "tool_calls": [ToolCall("", "get_weather", {"city": "Rome"})]}


@pytest.mark.parametrize("kind", MEANT)
@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_dialect_reads_the_same_guide(dialect: str, kind: str) -> None:
    request = READ[dialect](body(dialect, kind, stream=False), ALL)
    assert (request.guide, request.guide_field) == (MEANT[kind], FIELDS[kind][dialect])
    assert tuple(tool.name for tool in request.tools) == (() if kind == "json" else NAMES)


@pytest.mark.parametrize("kind", MEANT)
@pytest.mark.parametrize("dialect", DIALECTS)
def test_engine_without_structured_output_is_a_400_that_names_the_field(dialect: str, kind: str) -> None:
    with pytest.raises(ApiError) as raised:
        READ[dialect](body(dialect, kind, stream=False), Abilities())
    assert (raised.value.status, raised.value.param) == (400, FIELDS[kind][dialect])


@pytest.mark.parametrize("kind", ["required", "named", "single"])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_chat_format_without_a_grammar_is_named(dialect: str, kind: str) -> None:
    without = Abilities(guided=True, chat_format="pythonic")
    with pytest.raises(ApiError, match="the chat format pythonic has no grammar") as raised:
        READ[dialect](body(dialect, kind, stream=False), without)
    assert (raised.value.status, raised.value.param) == (400, FIELDS[kind][dialect])
    assert READ[dialect](body(dialect, "json", stream=False), without).guide == MEANT["json"]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_request_without_format_is_not_guided(dialect: str) -> None:
    request_body = body(dialect, "single", stream=False)
    request_body.pop("parallel_tool_calls", None)
    request_body["tool_choice"] = {"type": "auto"} if dialect == "messages" else "auto"
    request = READ[dialect](request_body, Abilities())
    assert request.guide is None
    assert len(request.tools) == len(NAMES)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_single_call_without_tools_is_not_guided(dialect: str) -> None:
    request = body(dialect, "single", stream=False)
    request["tools"] = []
    request["tool_choice"] = {"type": "none"} if dialect == "messages" else "none"
    assert READ[dialect](request, Abilities()).guide is None


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_schema_beside_tools_leaves_the_calls(dialect: str) -> None:
    request = body(dialect, "json", stream=False)
    request["tools"] = body(dialect, "required", stream=False)["tools"]
    assert READ[dialect](request, ALL).guide == Guide(schema=SCHEMA, calls=NAMES)
    with pytest.raises(ApiError, match="constrained to JSON beside calls") as raised:
        READ[dialect](request, Abilities(guided=True, chat_format="pythonic"))
    assert raised.value.param == FIELDS["json"][dialect]


def test_any_object_and_allowed_tools_of_chat_completions() -> None:
    request = {"messages": [{"role": "user", "content": "Hi."}], "response_format": {"type": "json_object"}}
    assert OpenAIChat().read(request, ALL).guide == Guide(schema={"type": "object"})
    request = body("chat", "required", stream=False)
    names = [{"type": "function", "function": {"name": name}} for name in NAMES]
    request["tool_choice"] = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": names}}
    assert OpenAIChat().read(request, ALL).guide == Guide(calls=NAMES, text=False)


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ({"type": "xml"}, "response_format.type"),
        ({"type": "json_schema"}, "response_format.json_schema"),
        ({"type": "json_schema", "json_schema": {}}, "response_format.json_schema.schema"),
        ({"type": "json_schema", "json_schema": {"schema": []}}, "response_format.json_schema.schema"),
        ("json", "response_format"),
    ],
)
def test_a_format_that_is_none_names_its_field(value: Any, field: str) -> None:
    request = {"messages": [{"role": "user", "content": "Hi."}], "response_format": value}
    with pytest.raises(ApiError) as raised:
        OpenAIChat().read(request, ALL)
    assert (raised.value.status, raised.value.param) == (400, field)


def test_abilities_combine_renderer_and_engine() -> None:
    assert abilities_of(renderer_for("qwen3"), guides=True) == ALL
    assert abilities_of(renderer_for("qwen3"), guides=False) == Abilities(chat_format="hermes")
    pythonic = abilities_of(renderer_for("lfm2"), guides=True)
    assert (pythonic.guided, pythonic.forced_calls, pythonic.chat_format) == (True, False, "pythonic")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_the_engine_is_sent_the_tag_and_the_answer_is_as_ever(dialect: str, stream: bool) -> None:
    renderer = renderer_for("qwen3")
    tools = [ToolSchema(name, "", parameters) for name, parameters in TOOLS.items()]
    lines = ['{"color": "red", "n": 3, "ok": true}', CALL, CALL, "Hello."]
    client = ScriptedClient(renderer, lines, tools=tools, guides=True)
    async with serving(client=client, abilities=ALL) as served:
        opened = await served.open()
        for kind, expected in MEANT.items():
            text, calls = await ask(served.http, opened["base"], dialect, body(dialect, kind, stream=stream))
            sent = client.requests[-1]
            offered = () if kind == "json" else tools
            assert sent.params.guide == renderer.guides.tagged(expected, sent.prompt, offered)
            if kind in ("required", "named"):
                assert (text, calls) == ("", [("get_weather", {"city": "Rome"})])
            else:
                assert (text, calls) == (lines[0] if kind == "json" else "Hello.", [])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_schema_that_the_engine_refuses_names_the_field_and_fails_nothing(dialect: str, stream: bool) -> None:
    script = [StructuredOutputError("http://10.0.0.1:5/x answered 400: too deep at 10.0.0.1:5"), "Hello."]
    client = ScriptedClient(renderer_for("qwen3"), script, guides=True)
    nested: dict[str, Any] = {}
    for _ in range(300):
        nested = {"items": nested}
    async with serving(client=client, abilities=ALL) as served:
        opened = await served.open()
        request = body(dialect, "json", stream=stream)
        for schema, reason in (
            (SCHEMA, "the model server answered 400: too deep at the model server"),
            ({"not": {"type": "null"}}, "'not'"),
            (nested, "reduce its nesting"),
        ):
            request = body(dialect, "json", stream=stream, schema=schema)
            async with served.http.post(opened["base"] + PATHS[dialect], json=request) as answer:
                error = (await answer.json())["error"]
            assert answer.status == 400
            assert reason in error["message"]
            assert FIELDS["json"][dialect] in error["message"]
            assert error["type"] == "invalid_request_error"
            assert dialect == "messages" or error["param"] == FIELDS["json"][dialect]
        assert served.session(opened).failure is None
        assert served.session(opened).turns == 0


async def test_a_failing_engine_is_still_a_failing_engine() -> None:
    client = ScriptedClient(renderer_for("qwen3"), [InferenceError("down")], guides=True)
    async with serving(client=client, abilities=ALL) as served:
        opened = await served.open()
        request = body("chat", "json", stream=False)
        async with served.http.post(opened["base"] + PATHS["chat"], json=request) as answer:
            assert answer.status == 503
        assert served.session(opened).failure is not None
