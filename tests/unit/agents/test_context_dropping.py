"""Old answers of tools are dropped: never an unread one, each replaced by one note, and what is trained stays exact."""

from __future__ import annotations

import pytest

from support.agents.context_episodes import page, play, reads, say
from support.chat.model_dirs import renderer_for
from support.chat.toy_renderer import ToyRenderer
from turnwise.agents.context.config import DropConfig
from turnwise.agents.context.conversation import drop_results, droppable_results
from turnwise.types import ToolCall

DONE = say("42")


def talk(*answers: str):
    messages = [{"role": "user", "content": "go"}]
    for number, answer in enumerate(answers):
        call = ToolCall(f"c{number}", "read", {"number": number})
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": call.id, "content": answer})
    return messages


def test_the_last_answers_stay_and_the_oldest_go_first():
    messages = talk(*[page(n) for n in range(5)])
    assert droppable_results(messages, DropConfig(keep=2)) == [2, 4, 6]
    assert droppable_results(messages, DropConfig(keep=9)) == []
    # The last one was not read yet.
    assert droppable_results(messages, DropConfig(keep=0)) == [2, 4, 6, 8]


def test_answers_that_nobody_read_stay_however_many_they_are():
    messages = talk(page(0))
    calls = [ToolCall(f"d{n}", "read", {"number": n}) for n in range(3)]
    messages.append({"role": "assistant", "content": "", "tool_calls": calls})
    messages += [{"role": "tool", "tool_call_id": call.id, "content": page(7)} for call in calls]
    assert droppable_results(messages, DropConfig(keep=0)) == [2]
    assert droppable_results(messages, DropConfig(keep=1)) == [2]


def test_short_answers_notes_and_excluded_tools_stay():
    config = DropConfig(keep=0, note="gone: {tool}")
    messages = talk("short", page(1), page(2), page(3))
    assert droppable_results(messages, config) == [4, 6]
    shortened = drop_results(messages, [4, 6], config)
    assert [shortened[index]["content"] for index in (4, 6)] == ["gone: read"] * 2
    assert messages[4]["content"] == page(1), "what was sent is left alone"
    assert droppable_results(shortened, config) == []
    assert droppable_results(messages, DropConfig(keep=0, exclude=["read"])) == []


def test_image_results_are_dropped():
    messages = talk("x", page(1))
    messages[2] = {**messages[2], "content": [{"type": "image", "image": "..."}]}
    assert droppable_results(messages, DropConfig(keep=0)) == [2]


@pytest.mark.parametrize("renderer", [ToyRenderer(), renderer_for("qwen3"), renderer_for("mistral")])
async def test_a_run_that_drops_at_once_keeps_its_prompts_small(tmp_path, renderer):
    context = {"drop_tool_results": {"keep": 1, "note": "(gone)"}}
    played = await play(tmp_path, renderer, [*reads(*range(8)), DONE], context, context_length=10_000)
    trajectory = played.trajectory
    assert (trajectory.error, trajectory.reward) == (None, 3.0)
    assert played.prompts[-1].count("lorem lorem") < 2 * page(0).count("lorem lorem")
    assert "page 7" in played.prompts[-1]
    assert "page 6" not in played.prompts[-1]
    assert played.prompts[-1].count("(gone)") == 7
    assert trajectory.forks() == {"dropped_tool_results": 7}
    assert played.counted()["dropped_results"] == 7
    saved = played.counted()["tokens_saved"]
    undropped = await play(tmp_path / "whole", renderer, [*reads(*range(8)), DONE], None, context_length=10_000)
    assert undropped.sizes[-1] - played.sizes[-1] == saved, "the counted savings are what the last prompt has less"


async def test_rewards_stay_on_their_turns_after_dropping(tmp_path):
    played = await play(tmp_path, ToyRenderer(), [*reads(1, 2, 3, 4), DONE], {"drop_tool_results": {"keep": 0}})
    expected = [(f"t{n}", "tool/read", 0.25) for n in range(4)]
    assert played.trajectory.rewards == [*expected, ("t4", "score", 1.0)]


async def test_above_a_share_all_old_results_are_dropped_together(tmp_path):
    context = {"drop_tool_results": {"keep": 1, "above": 0.6, "note": "(gone)"}}
    played = await play(tmp_path, ToyRenderer(), [*reads(*range(12)), DONE], context, context_length=3000)
    assert (played.trajectory.error, played.trajectory.stop_reason) == (None, "completed")
    assert max(played.sizes) <= 0.6 * 3000
    forks = played.trajectory.forks()["dropped_tool_results"]
    assert 2 <= forks <= 6, "fewer branches than turns"
    assert played.counted()["dropped_results"] > forks


async def test_until_a_share_no_more_results_are_dropped_than_needed(tmp_path):
    context = {"drop_tool_results": {"keep": 0, "until": 0.6, "note": "(gone)"}}
    played = await play(tmp_path, ToyRenderer(), [*reads(*range(12)), DONE], context, context_length=3000)
    assert (played.trajectory.error, played.trajectory.stop_reason) == (None, "completed")
    assert max(played.sizes) <= 0.6 * 3000
    # One page more would not have fitted.
    for size, forked in zip(played.sizes[6:], played.sizes[7:], strict=False):
        assert min(size, forked) > 0.6 * 3000 - len(page(0)) - 100


async def test_undroppable_results_stay_and_the_context_overflows(tmp_path):
    context = {"drop_tool_results": {"keep": 30}}
    played = await play(tmp_path, ToyRenderer(), [*reads(*range(12)), DONE], context, context_length=1500)
    assert (played.trajectory.error, played.trajectory.stop_reason) == (None, "context_overflow")
    assert played.counted() == {}


async def test_context_is_unchanged_without_configuration(tmp_path):
    played = await play(tmp_path, ToyRenderer(), [*reads(1, 2), DONE], None)
    assert played.trajectory.forks() == {}
    assert played.counted() == {}


async def test_every_prompt_answers_each_call_once(tmp_path):
    context = {"drop_tool_results": {"keep": 1, "note": "(gone)"}}
    two_calls = say("", ("read", {"number": 1}), ("read", {"number": 2}))
    played = await play(tmp_path, ToyRenderer(), [two_calls, two_calls, *reads(3), DONE], context)
    for path in (played.trajectory.path(leaf) for leaf in played.trajectory.leaves()):
        messages = [message for segment in path[:-1] for message in segment.messages]
        calls = sum(len(message.get("tool_calls") or ()) for message in messages)
        assert sum(message["role"] == "tool" for message in messages) == calls


async def test_dropped_reasoning_and_dropped_results_fork_separately(tmp_path):
    renderer = renderer_for("qwen3")
    script = [say("", ("read", {"number": n}), thought=f"thinking {n}") for n in range(5)]
    context = {"drop_tool_results": {"keep": 1}}
    played = await play(tmp_path, renderer, [*script, DONE], context, context_length=9000, reasoning="template")
    assert (played.trajectory.error, played.trajectory.reward) == (None, 2.25)
    assert played.trajectory.forks()["dropped_tool_results"] == 4


async def test_answers_that_were_cut_to_fit_are_dropped_like_others(tmp_path):
    context = {"drop_tool_results": {"keep": 0, "note": "(gone)"}}
    played = await play(
        tmp_path, ToyRenderer(), [*reads(*range(4)), DONE], context, context_length=1500, env_config={"words": 600}
    )
    assert (played.trajectory.error, played.trajectory.stop_reason) == (None, "completed")
    assert played.trajectory.metrics["tool_answers_cut"] == 4
    assert played.counted()["dropped_results"] == 3
