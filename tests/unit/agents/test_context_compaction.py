"""A conversation is summarised by the model and continues from it: exact, counted, and honest where it fails."""

from __future__ import annotations

import pytest

from support.agents.context_episodes import play, reads, say
from support.chat.model_dirs import renderer_for
from support.chat.toy_renderer import ToyRenderer
from turnwise.trainer.algorithms.losses.core import loss_weights
from turnwise.trajectory import to_samples

DONE = say("42")
ASK = "Summarise!"


def summarising(lines, summary="pages {n} were read"):
    """Go through the lines; where the prompt ends with the question, say the next summary."""
    remaining, summaries = list(lines), [0]

    def script(request):
        if request.text.rpartition("Read it all.")[2].count(ASK) and ASK in request.text[-400:]:
            line = summary[summaries[0]] if isinstance(summary, list) else summary.replace("{n}", str(summaries[0]))
            summaries[0] += 1
            return line
        return remaining.pop(0)

    return script


def compaction(**changes):
    return {"compaction": {"above": 0.6, "prompt": ASK, "summary": "[So far: {summary}]", **changes}}


@pytest.mark.parametrize("renderer", [ToyRenderer(), renderer_for("qwen3"), renderer_for("llama3_1")])
async def test_conversation_continues_across_several_summaries(tmp_path, renderer):
    played = await play(tmp_path, renderer, summarising([*reads(*range(14)), DONE]), compaction(), context_length=3000)
    trajectory = played.trajectory
    assert (trajectory.error, trajectory.stop_reason, trajectory.reward) == (None, "completed", 4.5)
    done = played.counted()["compactions"]
    assert done >= 2
    assert trajectory.forks() == {"compaction": done}
    assert played.counted()["tokens_saved"] > 1000
    final_prompt = played.prompts[-1]
    assert final_prompt.count("[So far:") == 1, "the second summary replaces the first"
    assert f"[So far: pages {int(done) - 1} were read]" in final_prompt
    assert (
        final_prompt.index("You read.")
        < final_prompt.index("Read it all.")
        < final_prompt.index("[So far:")
        < final_prompt.index("page ")
    )
    assert trajectory.metrics["turns"] == 15 + done


async def test_the_question_extends_the_branch_and_the_last_turns_stay(tmp_path):
    played = await play(
        tmp_path, ToyRenderer(), summarising([*reads(*range(6)), DONE]), compaction(keep_turns=2), context_length=3000
    )
    [question] = [number for number, prompt in enumerate(played.prompts) if ASK in prompt]
    assert played.prompts[question].startswith(played.prompts[question - 1])
    next_prompt = played.prompts[question + 1]
    assert next_prompt.count("page ") == 2
    assert ASK not in next_prompt


async def test_a_turn_with_several_calls_stays_whole(tmp_path):
    two_calls = say("", ("read", {"number": 1}), ("read", {"number": 2}))
    played = await play(
        tmp_path, ToyRenderer(), summarising([two_calls, two_calls, two_calls, DONE]), compaction(), context_length=3000
    )
    assert played.trajectory.reward == 2.5
    for path in (played.trajectory.path(leaf) for leaf in played.trajectory.leaves()):
        messages = [message for segment in path[:-1] for message in segment.messages]
        calls = sum(len(message.get("tool_calls") or ()) for message in messages)
        assert sum(message["role"] == "tool" for message in messages) == calls


async def test_a_question_without_room_leaves_the_last_turn_out(tmp_path):
    # The last answers are cut to what fits, so that nothing can be asked behind them.
    played = await play(
        tmp_path,
        ToyRenderer(),
        summarising([*reads(0), say("", *[("read", {"number": n}) for n in range(1, 6)]), DONE]),
        compaction(above=0.5, max_tokens=700, keep_turns=0),
        context_length=2000,
    )
    assert (played.trajectory.error, played.trajectory.reward) == (None, 2.5)
    assert played.counted()["compactions"] == 1
    assert "page 5" not in next(prompt for prompt in played.prompts if ASK in prompt)
    assert "page 5" in played.prompts[-1]
    assert "page 0" not in played.prompts[-1]


async def test_calls_in_a_summary_are_answered_and_not_executed(tmp_path):
    calling = say("I look first", ("read", {"number": 99}), ("slip", {}))
    script = summarising([*reads(*range(6)), DONE], [calling, "pages were read"])

    def answering(request):
        # The errors stand behind the question, so that it no longer ends the prompt.
        if request.text.rstrip("\n").count("was not executed") == 2 and "[So far" not in request.text:
            return "pages were read"
        return script(request)

    played = await play(tmp_path, ToyRenderer(), answering, compaction(), context_length=4000)
    assert (played.trajectory.error, played.trajectory.reward) == (None, 2.5)
    assert played.counted()["compactions"] == 1
    assert "page 99" not in "".join(played.prompts)
    assert "[So far: pages were read]" in played.prompts[-1]


async def test_a_model_that_only_calls_goes_on_with_its_calls_answered(tmp_path):
    calling = say("", ("read", {"number": 99}))
    lines = [*reads(*range(6)), DONE]
    state = {"asked": 0}

    def script(request):
        if ASK in request.text and state["asked"] < 2:
            state["asked"] += 1
            return calling
        return lines.pop(0)

    played = await play(tmp_path, ToyRenderer(), script, compaction(), context_length=4000)
    assert (played.trajectory.error, played.trajectory.stop_reason) == (None, "completed")
    assert played.counted() == {"failed_compactions": 1}
    assert played.trajectory.forks() == {}
    assert played.prompts[-1].count("was not executed") == 2
    assert [name for _, name, _ in played.trajectory.rewards].count("tool/read") == 6


@pytest.mark.parametrize("empty", [say(""), say("", thought="what shall I say"), say("  \n ")])
async def test_an_empty_summary_is_asked_for_again_and_then_given_up(tmp_path, empty):
    played = await play(
        tmp_path,
        ToyRenderer(),
        summarising([*reads(*range(12)), DONE], [empty] * 3),
        compaction(attempts=3),
        context_length=3000,
    )
    assert played.trajectory.error is None
    assert played.trajectory.stop_reason == "context_overflow", "it continues while there is room, and then ends"
    assert played.counted() == {"failed_compactions": 1}
    retried = await play(
        tmp_path / "again",
        ToyRenderer(),
        summarising([*reads(*range(6)), DONE], [empty, "pages"]),
        compaction(),
        context_length=3000,
    )
    assert retried.counted()["compactions"] == 1
    assert "[So far: pages]" in retried.prompts[-1]


async def test_a_summary_that_a_limit_cut_is_used_and_counted(tmp_path):
    played = await play(
        tmp_path,
        ToyRenderer(),
        summarising([*reads(*range(6)), DONE], ["the pages that were read are all of them"]),
        compaction(max_tokens=9),
        context_length=3000,
    )
    assert "[So far: the pages]" in played.prompts[-1]
    assert (played.counted()["compactions"], played.counted()["cut_summaries"]) == (1, 1)


async def test_a_summary_that_does_not_shrink_is_not_used_and_not_tried_again(tmp_path):
    played = await play(
        tmp_path,
        ToyRenderer(),
        summarising([*reads(*range(12)), DONE], ["x" * 5000]),
        compaction(above=0.2, max_tokens=1500, keep_turns=0),
        context_length=3000,
    )
    assert (played.trajectory.error, played.trajectory.stop_reason) == (None, "context_overflow")
    assert played.counted() == {"failed_compactions": 1}
    assert "[So far" not in played.prompts[-1]


async def test_summaries_count_as_turns(tmp_path):
    played = await play(
        tmp_path, ToyRenderer(), summarising([*reads(*range(12)), DONE]), compaction(), context_length=3000, max_turns=6
    )
    assert (played.trajectory.error, played.trajectory.stop_reason) == (None, "max_turns")
    assert played.trajectory.metrics["turns"] == 6
    assert ASK in played.prompts[-1]


async def test_all_tokens_of_a_session_are_bounded_over_its_branches(tmp_path):
    played = await play(
        tmp_path,
        ToyRenderer(),
        summarising([*reads(*range(30)), DONE]),
        compaction(),
        context_length=3000,
        max_total_tokens=6000,
    )
    assert (played.trajectory.error, played.trajectory.stop_reason) == (None, "max_tokens")
    assert played.trajectory.metrics["branches"] >= 2


async def test_results_are_dropped_before_the_rest_is_summarised(tmp_path):
    context = {"drop_tool_results": {"keep": 1, "above": 0.5, "note": "(gone)"}, **compaction(above=0.55)}
    lines = [say(f"I now read the page of number {n}, slowly", ("read", {"number": n})) for n in range(30)]
    played = await play(tmp_path, ToyRenderer(), summarising([*lines, DONE]), context, context_length=2500)
    assert (played.trajectory.error, played.trajectory.stop_reason) == (None, "completed")
    forks = played.trajectory.forks()
    assert set(forks) == {"dropped_tool_results", "compaction"}
    assert played.counted()["compactions"] <= forks["compaction"]


async def test_a_fork_keeps_its_name_where_a_summary_has_no_room(tmp_path):
    drop = {"keep": 1, "note": "(gone)"}
    context = {"drop_tool_results": drop, **compaction(above=0.26, max_tokens=2400)}
    played = await play(tmp_path, ToyRenderer(), [*reads(*range(9)), DONE], context, context_length=2500)
    assert (played.trajectory.error, played.trajectory.stop_reason) == (None, "completed")
    assert played.counted()["failed_compactions"] == 1
    assert ASK not in "".join(played.prompts)
    assert set(played.trajectory.forks()) == {"dropped_tool_results"}


async def test_reasoning_that_the_template_drops_is_in_no_later_prompt(tmp_path):
    renderer = renderer_for("qwen3")
    lines = [say("", ("read", {"number": n}), thought=f"musing {n}") for n in range(12)]
    played = await play(
        tmp_path, renderer, summarising([*lines, DONE]), compaction(), context_length=3000, reasoning="template"
    )
    assert (played.trajectory.error, played.trajectory.reward) == (None, 4.0)
    assert played.counted()["compactions"] >= 2
    assert set(played.trajectory.forks()) <= {"compaction", "reasoning_dropped"}


async def test_branches_give_a_trajectory_no_more_weight(tmp_path):
    unbranched = await play(tmp_path / "whole", ToyRenderer(), [*reads(*range(8)), DONE], None, context_length=9000)
    parted = await play(
        tmp_path / "parted", ToyRenderer(), summarising([*reads(*range(8)), DONE]), compaction(), context_length=3000
    )
    rows = [(row.trained_tokens, name) for name, played in (("whole", unbranched), ("parted", parted))
            for row in to_samples(played.trajectory).rows]  # fmt: skip
    assert len(rows) > 2
    weights, normalizer = loss_weights([tokens for tokens, _ in rows], [name for _, name in rows], "trajectory_mean")
    of = {
        name: sum(w * t for w, (t, n) in zip(weights, rows, strict=True) if n == name) for name in ("whole", "parted")
    }
    assert of["whole"] / normalizer == pytest.approx(0.5)
    assert of["parted"] / normalizer == pytest.approx(0.5)
