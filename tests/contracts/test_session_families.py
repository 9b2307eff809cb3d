"""The recorder over real chat formats: the same invariants, whatever the template and whatever the agent."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.chat.model_dirs import FAMILIES, MAIN, renderer_for
from support.property_tests import examples
from support.recorder.histories import behave, path_ids, plans, scripts
from turnwise.inference.scripted import ScriptedClient
from turnwise.recorder.session import Session, SessionLimits
from turnwise.trajectory import Trajectory
from turnwise.types import Message, ToolCall, ToolSchema

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = ToolSchema("weather", "The weather of a city.", CITY)


@pytest.mark.parametrize("family", MAIN)
@settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
async def test_every_behaviour_is_recorded_exactly(tmp_path_factory, family, data) -> None:
    renderer = renderer_for(family)
    says = FAMILIES[family].says
    script = data.draw(scripts(st.integers(0, 400), reasoning="reasoning" in says))
    plan, cut = data.draw(plans()), data.draw(st.integers(1, 30))
    await behave(renderer, script, plan, cut, tmp_path_factory.mktemp("ledger") / "ledger.jsonl")


@pytest.mark.parametrize("family", MAIN)
async def test_conversation_with_tools_is_one_branch_encoded_once(family: str) -> None:
    renderer = renderer_for(family)
    turns: list[Message] = [
        {"role": "assistant", "content": "", "tool_calls": [ToolCall("", "weather", {"city": city})]}
        for city in ("Oslo", "Bern\n\nCity", "Łódź")
    ]
    client = ScriptedClient(renderer, [*turns, "It rains."], tools=[WEATHER])
    session = Session(client, renderer, id="s", limits=SessionLimits(context_length=100_000))
    messages: list[Message] = [{"role": "user", "content": "Where does it rain?"}]
    for number in range(4):
        answer = await session.chat(messages, [WEATHER])
        messages.append(answer)
        assert [call.error for call in answer.get("tool_calls", ())] == [None] * (number < 3)
        messages += [
            {"role": "tool", "tool_call_id": call.id, "content": f"rain in {call.arguments['city']}"}
            for call in answer.get("tool_calls", ())
        ]
    trajectory = Trajectory("s", "e", "g", "t", segments=session.segments())
    assert len(trajectory.leaves()) == 1
    assert not trajectory.forks()
    for request, turn in zip(client.requests, trajectory.turns(), strict=True):
        assert path_ids(trajectory, turn.sampled.parent) == tuple(request.prompt.tolist())
    # Each sampled segment is, id by id, what the model said.
    completions = [renderer.completion(turn, [WEATHER]).tolist() for turn in turns]
    assert [s.token_ids.tolist() for s in trajectory.segments if s.sampled][:3] == completions


@pytest.mark.parametrize("family", MAIN)
async def test_cut_turn_is_closed_by_the_next_message(family: str) -> None:
    renderer = renderer_for(family)
    completion = renderer.completion({"role": "assistant", "content": "one two three four five"}, [])
    client = ScriptedClient(renderer, [completion[: len(completion) // 2], "done"])
    session = Session(client, renderer, id="s", limits=SessionLimits(context_length=100_000))
    first = await session.chat([{"role": "user", "content": "q"}])
    assert first["finish_reason"] == "length"
    await session.chat([{"role": "user", "content": "q"}, first, {"role": "user", "content": "go on"}])
    trajectory = Trajectory("s", "e", "g", "t", segments=session.segments())
    assert not trajectory.forks()
    assert trajectory.segments[1].token_ids.tolist() == completion[: len(completion) // 2].tolist()
    assert path_ids(trajectory, 2) == tuple(client.requests[1].prompt.tolist())
