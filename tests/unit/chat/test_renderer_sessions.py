"""Conversations recorded through real chat formats: one branch, exact ids, every sampled id owned once."""

from __future__ import annotations

import numpy as np
import pytest

from support.chat.model_dirs import FAMILIES, renderer_for
from turnwise.chat.formats.core import INSIDE_REASONING
from turnwise.errors import SessionError
from turnwise.inference.scripted import ScriptedClient, replay
from turnwise.model.canonical import canonical_messages
from turnwise.recorder.session import Session, SessionLimits
from turnwise.types import Message, ToolCall, ToolSchema

TOOLS = [
    ToolSchema("lookup", "Find a row.", {"type": "object", "properties": {"key": {"type": "string"}}}),
    ToolSchema("now", "The time."),
]
SPEAKING = [name for name in FAMILIES if name != "deepseekv3"]


def conversation(family: str) -> list[Message]:
    """Several turns with calls, text and reasoning, as far as the family's template can say them."""
    says = FAMILIES[family].says
    number = 0
    messages: list[Message] = [{"role": "system", "content": "Be brief."}]
    for question in ("Where is alpha?", "And beta?\n\nThink."):
        messages.append({"role": "user", "content": question})
        for count in (1, 2):
            if count == 2 and "two calls" not in says:
                continue
            calls = [ToolCall(f"written{number + n}", "lookup", {"key": f"row {n}\n"}) for n in range(count)]
            number += count
            turn: Message = {"role": "assistant", "content": "", "tool_calls": calls}
            if "reasoning" in says:
                turn["reasoning_content"] = "I need a row."
            messages.append(turn)
            messages += [{"role": "tool", "tool_call_id": call.id, "content": f"{call.id} is 7"} for call in calls]
        final: Message = {"role": "assistant", "content": "It is 7."}
        if "reasoning" in says:
            final["reasoning_content"] = "Easy now."
        messages.append(final)
    return messages


@pytest.mark.parametrize("family", SPEAKING)
async def test_conversation_is_one_branch_with_exact_ids(family: str) -> None:
    renderer = renderer_for(family)
    messages = conversation(family)
    trajectory = await replay(messages, TOOLS, renderer)
    turns = [message for message in messages if message["role"] == "assistant"]
    sampled = [segment for segment in trajectory.segments if segment.sampled]
    assert len(sampled) == len(turns)
    for segment in sampled:
        assert segment.logprobs is not None
        assert len(segment.logprobs) == len(segment.token_ids)
        assert int(segment.token_ids[-1]) in renderer.stop_ids
        assert not any(int(number) in renderer.stop_ids for number in segment.token_ids[:-1])
    if family == "mistral":
        # Its template moves the tools to the last user message: the second question cannot be an extension.
        assert set(trajectory.forks()) == {"bridge_unproven: depends_on_history"}
        return
    assert not trajectory.forks()
    (leaf,) = trajectory.leaves()
    path = np.concatenate([segment.token_ids for segment in trajectory.path(leaf)])
    first = renderer.render(canonical_messages(messages[:2]), TOOLS)
    assert path[: len(first)].tolist() == first.tolist()
    text = renderer.decode(path)
    for message in messages:
        for part in (message.get("content"), message.get("reasoning_content")):
            written = str(part or "").strip()
            assert written in text or written.replace("\n", "\\n") in text
    if family in ("qwen2_5", "llama3_1", "own", "lfm2"):
        # Templates that never change what stands behind: the whole branch is the template's own render.
        full_prompt = renderer.render(canonical_messages([*messages, {"role": "user", "content": "x"}]), TOOLS)
        assert full_prompt[: len(path)].tolist() == path.tolist()


async def test_tool_edited_in_place_is_rendered_anew() -> None:
    renderer = renderer_for("qwen3")
    session = Session(ScriptedClient(renderer, ["a", "b"]), renderer, id="s", limits=SessionLimits(100_000))
    tool = ToolSchema("look", "Looks.", {"type": "object", "properties": {}})
    question: Message = {"role": "user", "content": "q"}
    await session.chat([question], [tool])
    tool.parameters["properties"]["zebra"] = {"type": "string"}
    await session.chat([question], [tool])
    roots = [segment for segment in session.segments() if segment.parent < 0]
    assert ["zebra" in renderer.decode(root.token_ids) for root in roots] == [False, True]
    assert ["zebra" in str(root.tools) for root in roots] == [False, True]


def defaulting(value: object, *, turned: bool = False) -> ToolSchema:
    """A tool with an argument of that default; its keys in the other order if turned."""
    kind = {"default": value, "type": "integer"} if turned else {"type": "integer", "default": value}
    return ToolSchema("look", "Looks.", {"type": "object", "properties": {"x": kind}})


@pytest.mark.parametrize(("one", "other"), [(1, True), (False, 0), (True, 1.0)])
async def test_tools_that_differ_in_a_switch_are_other_tools(one: object, other: object) -> None:
    """``==`` takes True for 1; a template writes them differently."""
    renderer = renderer_for("qwen3")
    session = Session(ScriptedClient(renderer, ["a", "b", "c"]), renderer, id="s", limits=SessionLimits(100_000))
    history: list[Message] = [{"role": "user", "content": "q"}]
    for tool in (one, one, other):
        history.append(await session.chat(history, [defaulting(tool)]))
        history.append({"role": "user", "content": "more"})
    segments = session.segments()
    assert [segment.fork for segment in segments] == [None, None, None, None, "tools_changed", None]
    for root, value in ((segments[0], one), (segments[4], other)):
        assert f'"default": {str(value).lower()}' in renderer.decode(root.token_ids)


def test_tools_of_other_requests_are_not_in_the_prompt() -> None:
    """One renderer serves many sessions: each sees its own tools, as it wrote them."""
    question = canonical_messages([{"role": "user", "content": "q"}])
    tools = [defaulting(1), defaulting(True), defaulting(1.0), defaulting(1, turned=True), defaulting(2**70)]
    alone = [renderer_for("qwen3").render(question, [tool]).tolist() for tool in tools]
    assert len(set(map(tuple, alone))) == len(tools)
    shared = renderer_for("qwen3")
    for _ in range(2):
        assert [shared.render(question, [tool]).tolist() for tool in tools] == alone


async def test_a_session_that_is_closed_takes_no_request() -> None:
    renderer = renderer_for("qwen3")
    session = Session(ScriptedClient(renderer, ["a", "b", "c"]), renderer, id="s", limits=SessionLimits(100_000))
    question: list[Message] = [{"role": "user", "content": "q"}]
    await session.chat(question)
    stream = session.stream(question)
    await anext(stream)
    count_before = len(session.segments())
    session.close()
    with pytest.raises(SessionError, match="this session is closed"):
        await session.chat(question)
    with pytest.raises(SessionError, match="this session is closed"):
        _ = [item async for item in stream]
    assert len(session.segments()) == count_before


async def test_endless_arguments_of_a_call_inside_reasoning_are_recorded_as_an_error() -> None:
    renderer = renderer_for("qwen3")
    deep = "[" * 600 + "]" * 600
    call = f'<tool_call>\n{{"name": "lookup", "arguments": {{"key": {deep}}}}}\n</tool_call>'
    completion = renderer._tokens.encode(f"<think>\nmaybe\n{call}\n</think>\n\nno")
    session = Session(
        ScriptedClient(renderer, [[*completion, min(renderer.stop_ids)]]),
        renderer,
        id="s",
        limits=SessionLimits(100_000),
    )
    turn = await session.chat([{"role": "user", "content": "q"}], TOOLS)
    assert [(call.error, call.arguments) for call in turn["tool_calls"]] == [(INSIDE_REASONING, {})]
