"""What Claude Code makes of its history, as requests: what it rewrites, drops and adds is told from what it changes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.gateway.client_requests import BLOCK_TOOLS, DONE, LINEAR, calls, results, said, says, talking, user
from turnwise.recorder.session import SessionLimits
from turnwise.types import ToolSchema

GO = user([{"type": "text", "text": "Go.", "cache_control": {"type": "ephemeral"}}])


def system(session: str, **more: str) -> list[Any]:
    line = f"x-anthropic-billing-header: cc_version=2.1.197.{session}; cc_entrypoint=sdk-cli;"
    return [{"type": "text", "text": line}, {"type": "text", "text": "Be brief.", **more}]


async def test_marks_and_forms_of_messages_move_from_request_to_request() -> None:
    async with talking(says("One.", {"command": "ls"}), DONE, DONE) as talk:
        first = await talk.blocks(GO, system=system("abc", cache_control="x"))
        history = [user("Go."), said(*first), results(*first, text=[{"type": "text", "text": "ok"}])]
        second = await talk.blocks(*history, system=system("def"))
        history = [user("Go."), said(*first), results(*first), said(*second), user([{"type": "text", "text": "On."}])]
        await talk.blocks(*history, system=system("def"))
        assert talk.shape == LINEAR
        assert all("billing" not in request.text for request in talk.asked)


BLANK = {"type": "text", "text": "\n\n"}


@pytest.mark.parametrize(
    "change",
    [
        # An empty text block is kept; text and thinking stand before the calls, in any order.
        lambda thought, text, *calls: [text, thought, {"type": "text", "text": ""}, *calls],
        lambda thought, text, *calls: [thought, BLANK, *({**text, "text": part} for part in ("It", " is.")), *calls],
        # Signatures are lost, thinking is empty or redacted, or all of it is gone after a 400.
        lambda thought, text, *calls: [{**thought, "signature": ""}, text, *calls],
        lambda thought, text, *calls: [{"type": "redacted_thinking", "data": "x"}, text, *calls],
        lambda thought, text, *calls: [{**thought, "thinking": ""}, text, *calls],
        lambda thought, text, *calls: [text, *calls],
    ],
)
async def test_blocks_that_are_moved_split_or_dropped_are_no_edit(change: Any) -> None:
    async with talking(says("It is.", {"command": "ls"}, {"command": "pwd"}, thinks="Hm."), DONE) as talk:
        blocks = await talk.blocks(GO)
        assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use", "tool_use"]
        await talk.blocks(GO, said(*change(*blocks)), results(*blocks))
        assert talk.shape == LINEAR
        assert (talk.metrics["rewritten_echoes"], talk.metrics["turns"]) == (0, 2)


async def test_no_block_of_blanks_is_sent_that_could_be_dropped() -> None:
    """What lies between thoughts and a call is often white space: the turn is the same without it."""
    async with talking(says("\n\n", {"command": "ls"}, thinks="Hm."), DONE) as talk:
        blocks = await talk.blocks(GO)
        assert [block["type"] for block in blocks] == ["thinking", "tool_use"]
        await talk.blocks(GO, said(*blocks), results(*blocks))
        assert talk.shape == LINEAR


async def test_turn_without_calls_is_recognised_by_its_content() -> None:
    async with talking(says(" One. \n", thinks="Hm.\n"), DONE) as talk:
        blocks = await talk.blocks(GO)
        await talk.blocks(GO, said({**blocks[0], "signature": ""}, blocks[1]), user("On."))
        assert talk.shape == LINEAR


@pytest.mark.parametrize(
    ("sampled", "echoed", "rewritten"),
    [
        ({"limit": 1.0, "command": "é"}, {"command": "\u00e9", "limit": 1}, 0),
        ({"limit": 1e3}, {"limit": 1000}, 0),
        ({"limit": -0.0}, {"limit": 0}, 0),
        ({"limit": 12345678901234567890}, {"limit": 12345678901234567000}, 1),
        # By the schema of a known tool: keys in its order, defaults added, texts coerced, blanks and `cd` cut.
        ({"limit": "5000", "command": "cd /w && ls"}, {"command": "ls", "limit": 5000}, 1),
        ({"command": "a  \nb \n"}, {"command": "a\nb\n", "replace_all": False}, 1),
        # Not read: the beginning of the text, and how long it was.
        ({"command": "x"}, {"__unparsedToolInput": {"raw": '{"comm', "len": 16}}, 1),
        ({}, {}, 0),
    ],
)
async def test_arguments_that_come_back_rewritten_are_the_same_call(
    sampled: dict[str, Any], echoed: dict[str, Any], rewritten: int
) -> None:
    async with talking(says("", sampled), DONE) as talk:
        blocks = await talk.blocks(GO)
        call = {**blocks[-1], "input": echoed}
        await talk.blocks(GO, said(*blocks[:-1], call), results(call))
        assert talk.shape == LINEAR
        assert talk.metrics["rewritten_echoes"] == rewritten


async def test_tool_results_are_put_in_the_order_of_calls() -> None:
    async with talking(says("", {"command": "1"}, {"command": "2"}), DONE) as talk:
        blocks = await talk.blocks(GO)
        tool_results = results(*blocks)["content"]
        tool_results[0] |= {"content": "slow", "is_error": True}
        tool_results[1] = {"content": "quick", "tool_use_id": tool_results[1]["tool_use_id"], "type": "tool_result"}
        await talk.blocks(GO, said(*blocks), user(tool_results[::-1]))
        assert talk.shape == LINEAR
        text = talk.asked[-1].text
        assert text.index("slow") < text.index("quick")


async def test_reminders_in_the_middle_stay_and_fork_nothing() -> None:
    reminder = {"role": "system", "content": [{"type": "text", "text": "Use tasks."}]}
    async with talking(says("", {"command": "ls"})) as talk:
        history = [GO, {"role": "system", "content": "Agents: none."}]
        for turn in range(4):
            blocks = await talk.blocks(*history)
            history += [said(*blocks), results(*blocks)]
            if turn % 2:
                history.append(reminder)
        await talk.blocks(*history)
        assert talk.shape == LINEAR
        # As older models are told it: inside the user's message.
        history.append(said(*await talk.blocks(*history)))
        tool_results = results(*history[-1]["content"])
        tool_results["content"].append({"type": "text", "text": "<system-reminder>\nUse tasks.\n</system-reminder>"})
        await talk.blocks(*history, tool_results, thinking={"type": "enabled", "budget_tokens": 31999})


async def test_a_run_that_is_continued_sends_its_history_once_more() -> None:
    async with talking(says("", {"command": "ls"}), DONE, DONE) as talk:
        blocks = await talk.blocks(GO)
        answer = await talk.blocks(GO, said(*blocks), results(*blocks))
        repeated = [user("Go."), said(*blocks), results(*blocks), said(*answer), user("And now?")]
        await talk.blocks(*repeated)
        assert talk.shape == LINEAR


async def test_a_turn_that_a_limit_cut_goes_on() -> None:
    async with talking(says("One two three four."), DONE) as talk:
        status, answer = await talk.post("messages", {"messages": [GO], "max_tokens": 5, "tools": BLOCK_TOOLS})
        assert (status, answer["stop_reason"]) == (200, "max_tokens")
        cut = said(*answer["content"])
        await talk.blocks(GO, cut, user("Output token limit hit. Resume directly."))
        assert talk.shape == LINEAR


async def test_sub_agents_have_their_own_system_prompt_model_and_sampling() -> None:
    async with talking(says("", {"command": "ls"}), DONE, DONE) as talk:
        blocks = await talk.blocks(GO, system=system("abc"))
        line = "x-anthropic-billing-header: cc_version=2.1.197.abc; cc_is_subagent=true;"
        system_blocks = [{"type": "text", "text": line}, {"type": "text", "text": "You explore."}]
        answer = await talk.blocks(
            user("Explore."),
            model="claude-haiku-4-5-20251001",
            system=system_blocks,
            temperature=1,
            thinking={"type": "disabled"},
        )
        assert [block["type"] for block in answer] == ["text"]
        await talk.blocks(GO, said(*blocks), results(*blocks), system=system("abc"))
        assert talk.shape == (2, ["system_changed"])


KEY = {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]}
FIND = {"name": "find", "description": "Finds a value.", "input_schema": KEY}
SEARCH = {"name": "ToolSearch", "description": "Finds tools.", "input_schema": {"type": "object"}}
PLACEHOLDER = {**FIND, "name": "DeferredToolPlaceholder", "defer_loading": True}


async def test_tools_that_it_searches_stand_in_the_result_and_fork_nothing() -> None:
    """It offers a tool with the request after the one that found it; the call is read by that tool's schema."""
    find = ToolSchema("find", "Finds a value.", KEY)
    lines = [calls("ToolSearch", query="find"), calls("find", key="5"), DONE]
    async with talking(*lines, tools=[find], family="qwen3_6") as talk:
        search = await talk.blocks(GO, tools=[SEARCH, PLACEHOLDER])
        references = [{"type": "tool_reference", "tool_name": name} for name in ("find", "gone")]
        history = [GO, said(*search), results(*search, text=references)]
        offered = [SEARCH, {**FIND, "defer_loading": True}, PLACEHOLDER]
        call = await talk.blocks(*history, tools=offered)
        assert (call[-1]["name"], call[-1]["input"]) == ("find", {"key": "5"})
        await talk.blocks(*history, said(*call), results(*call), tools=offered)
        assert talk.shape == LINEAR
        first, second, _ = (request.text for request in talk.asked)
        assert "DeferredToolPlaceholder" not in second
        assert second.startswith(first)
        assert f"{json.dumps(find.to_json())}\ngone" in second


async def test_tools_that_only_the_provider_could_search_are_offered_at_once() -> None:
    async with talking(DONE) as talk:
        server_search = {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}
        await talk.blocks(GO, tools=[server_search, {**FIND, "defer_loading": True}])
        assert "Finds a value." in talk.asked[0].text


async def test_a_compaction_asks_behind_an_edited_message_and_begins_anew() -> None:
    async with talking(says("", {"command": "ls"}), says("Listed."), says("Summary."), DONE) as talk:
        first = await talk.blocks(GO)
        history = [GO, said(*first), results(*first)]
        second = await talk.blocks(*history)
        request = results(*first)
        request["content"].append({"type": "text", "text": "CRITICAL: Respond with TEXT ONLY."})
        await talk.blocks(*history[:2], request)
        new = [user("This session is being continued: Summary."), said(*second), user("More.")]
        await talk.blocks(*new)
        assert talk.shape == (3, ["assistant_edited", "restart"])


async def test_a_session_that_is_over_and_a_prompt_that_is_too_long_are_no_reason_to_wait() -> None:
    """404 and 400 are not sent again and again; 413 ends it."""
    async with talking(DONE, session_limits=SessionLimits(context_length=3000)) as talk:
        status, answer = await talk.post("messages", {"max_tokens": 5, "messages": [user("word " * 4000)]})
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
        assert answer["error"]["message"].startswith("prompt is too long: ")
        await talk.served.app.sessions.end(talk.opened["id"])
        status, answer = await talk.post("messages", {"max_tokens": 5, "messages": [GO]})
        assert (status, answer["error"]["type"]) == (404, "not_found_error")
