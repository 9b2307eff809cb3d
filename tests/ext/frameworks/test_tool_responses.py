"""What follows a turn with calls: what a session appends, for every chat format, without a session."""

from __future__ import annotations

import pytest

from support.chat.model_dirs import FAMILIES, renderer_for
from support.chat.toy_renderer import ToyRenderer
from turnwise.errors import RenderError
from turnwise.ext.frameworks.training_loops import tool_response_ids
from turnwise.inference.scripted import ScriptedClient
from turnwise.recorder.session import Session, SessionLimits
from turnwise.types import Message, ToolCall, ToolSchema

TOOL = ToolSchema("weather", "The weather of a city.", {"type": "object", "properties": {"city": {"type": "string"}}})
# A template of another revision than its format's: it writes no answers.
NAMES = tuple(name for name in sorted(FAMILIES) if name != "deepseekv3")


async def appended(family: str, cities: list[str], answers: list[str]) -> tuple[list[ToolCall], list[int]]:
    """The calls of a turn, and the ids that a session appends to it for these answers."""
    renderer = renderer_for(family)
    calls = [ToolCall("", "weather", {"city": city}) for city in cities]
    client = ScriptedClient(renderer, [{"role": "assistant", "content": "", "tool_calls": calls}, "So."], tools=[TOOL])
    session = Session(client, renderer, id="s", limits=SessionLimits(context_length=10_000))
    history: list[Message] = [{"role": "user", "content": "How is the weather?"}]
    turn = await session.chat(history, [TOOL])
    history.append(turn)
    history += [
        {"role": "tool", "tool_call_id": call.id, "content": text}
        for call, text in zip(turn["tool_calls"], answers, strict=True)
    ]
    await session.chat(history, [TOOL])
    assert session.metrics()["forks"] == 0
    return turn["tool_calls"], session.segments()[2].token_ids.tolist()


@pytest.mark.parametrize("family", NAMES)
async def test_tool_response_ids_equal_those_that_a_session_appends(family: str) -> None:
    for answer in ("17 degrees", "", 'a "quoted"\nline <|im_end|>'):
        calls, ids = await appended(family, ["Oslo"], [answer])
        assert tool_response_ids(renderer_for(family), calls, [answer], [TOOL]).tolist() == ids


@pytest.mark.parametrize("family", [name for name in NAMES if "two calls" in FAMILIES[name].says])
async def test_ids_of_two_responses_equal_those_that_a_session_appends(family: str) -> None:
    calls, ids = await appended(family, ["Oslo", "Bern"], ["rain", "sun"])
    assert tool_response_ids(renderer_for(family), calls, ["rain", "sun"], [TOOL]).tolist() == ids


TEXTS = {
    "gptoss": '<|start|>functions.weather to=assistant<|channel|>commentary<|message|>"rain"<|end|><|start|>assistant',
    "qwen2_5": "\n<|im_start|>user\n<tool_response>\nrain\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
    # The token that opens an answer is the one that ended the turn.
    "glm4moe": "\n<tool_response>\nrain\n</tool_response><|assistant|>",
    "mistral": '[TOOL_RESULTS] {"content": "rain", "call_id": "call00000"}[/TOOL_RESULTS]',
}


@pytest.mark.parametrize("family", sorted(TEXTS))
def test_decoded_tool_response_equals_the_text_of_its_family(family: str) -> None:
    renderer = renderer_for(family)
    ids = tool_response_ids(renderer, [ToolCall("", "weather", {})], ["rain"], [TOOL])
    assert renderer.decode(ids) == TEXTS[family]


def test_calls_and_answers_that_do_not_fit_are_refused() -> None:
    call = ToolCall("", "weather", {})
    for calls, answers in (([], []), ([call], []), ([call], ["a", "b"])):
        with pytest.raises(RenderError, match="give each call's, in the order"):
            tool_response_ids(ToyRenderer(), calls, answers)
    with pytest.raises(RenderError, match="cannot continue after calls of weather, weather"):
        tool_response_ids(renderer_for("gptoss"), [call, call], ["a", "b"], [TOOL])
