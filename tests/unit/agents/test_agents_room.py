"""Answers that would not fit into what is left of the context: equal shares, short ones whole, never too much."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.chat.model_dirs import renderer_for
from support.property_tests import examples
from turnwise import Agent, ToolEnv, function_tool
from turnwise.agents import register_agent
from turnwise.agents.limits import fit_messages, truncate_tool_results
from turnwise.inference.scripted import ScriptedClient
from turnwise.rollout.config import RolloutConfig
from turnwise.rollout.core import EpisodeSpec
from turnwise.rollout.runner import EpisodeRunner
from turnwise.tasks import Task
from turnwise.types import ToolCall

TEXTS = st.tuples(st.text(max_size=5), st.integers(0, 60)).map(lambda pair: pair[0] * pair[1])


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(TEXTS, max_size=5), st.integers(-5, 300))
def test_results_fit_the_room_and_only_long_texts_are_cut(texts, room):
    count = renderer_for("qwen3").count
    fitted = truncate_tool_results(texts, room, count)
    assert len(fitted) == len(texts)
    if room < len(texts):
        assert fitted == texts
        return
    assert sum(map(count, fitted)) <= max(room, 0)
    if sum(map(count, texts)) <= room:
        assert fitted == texts
    for text, shortened in zip(texts, fitted, strict=True):
        if count(text) <= room // max(1, len(texts)):
            assert shortened == text


def test_most_texts_are_never_counted():
    def refuse(text: str) -> int:
        raise AssertionError(f"{text!r} was counted")

    assert truncate_tool_results(["abc", "数据"], 9, refuse) == ["abc", "数据"]


def test_only_texts_of_tools_are_cut():
    parts = [{"type": "text", "text": "y" * 500}]
    messages = [
        {"role": "user", "content": "x" * 500},
        {"role": "tool", "content": "z" * 500},
        {"role": "tool", "content": parts},
    ]
    fitted, cut = fit_messages(messages, 100, len)
    assert (fitted[0], fitted[2], cut) == (messages[0], messages[2], 1)
    assert len(fitted[1]["content"]) == 100
    assert len(messages[1]["content"]) == 500, "the environment's own message is left alone"


class Pages(ToolEnv):
    def reset(self, task=None, *, seed=None):
        return "read", {}

    @function_tool
    def read(self, words: int) -> str:
        return " ".join(f"word{number}" for number in range(words))

    def score(self, final):
        return 1.0


@register_agent("test_room_call_by_call")
class CallByCall(Agent):
    async def run(self, episode):
        messages = list(episode.observation)
        while True:
            message = await episode.session.chat(messages, episode.tools)
            messages.append(message)
            for call in message.get("tool_calls") or ():
                answer = await episode.call(call)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": answer.text})
            if not message.get("tool_calls"):
                return


async def test_single_calls_share_the_room_of_their_message():
    renderer = renderer_for("qwen3")
    calls = [ToolCall("", "read", {"words": 2000}) for _ in range(3)]
    lines = [{"role": "assistant", "content": "", "tool_calls": calls}, "done"]
    client = ScriptedClient(renderer, lines, tools=[Pages.tool_methods["read"].schema])
    settings = {"env": {"name": f"{__name__}:Pages"}, "agent": {"name": "test_room_call_by_call"}}
    runner = EpisodeRunner(RolloutConfig.model_validate(settings), client, renderer, context_length=3000)
    outcome = await runner.run(EpisodeSpec(Task("t", ""), "g"))
    [trajectory] = outcome.trajectories
    assert (trajectory.error, trajectory.stop_reason, trajectory.reward) == (None, "completed", 1.0)
    assert trajectory.metrics["tool_answers_cut"] == 3.0
    assert 2000 < len(client.requests[1].prompt) < 3000


@register_agent("test_room_two_conversations")
class TwoConversations(Agent):
    """Answers the calls of one conversation after another one of the same session was asked."""

    async def run(self, episode):
        messages = list(episode.observation)
        message = await episode.session.chat(messages, episode.tools)
        await episode.session.chat([{"role": "user", "content": "something else"}], episode.tools)
        messages.append(message)
        for call in message["tool_calls"]:
            answer = await episode.call(call)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": answer.text})
        await episode.session.chat(messages, episode.tools)


@pytest.mark.parametrize(("first_calls", "second_calls"), [(3, 1), (1, 3)])
async def test_calls_share_with_those_of_their_own_message_whoever_spoke_last(first_calls, second_calls):
    renderer = renderer_for("qwen3")

    def line(count):
        calls = [ToolCall("", "read", {"words": 2000}) for _ in range(count)]
        return {"role": "assistant", "content": "", "tool_calls": calls}

    client = ScriptedClient(
        renderer, [line(first_calls), line(second_calls), "done"], tools=[Pages.tool_methods["read"].schema]
    )
    settings = {"env": {"name": f"{__name__}:Pages"}, "agent": {"name": "test_room_two_conversations"}}
    runner = EpisodeRunner(RolloutConfig.model_validate(settings), client, renderer, context_length=3000)
    [trajectory] = (await runner.run(EpisodeSpec(Task("t", ""), "g"))).trajectories
    assert (trajectory.error, trajectory.stop_reason) == (None, "completed")
    assert trajectory.metrics["tool_answers_cut"] == first_calls
    assert 2000 < len(client.requests[2].prompt) < 3000
