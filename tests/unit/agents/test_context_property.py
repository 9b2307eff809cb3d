"""Whatever the model says, however small the context is: every sampled token is trained once, every call answered."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from support.agents.context_episodes import Played, play, say
from support.chat.model_dirs import renderer_for
from support.chat.toy_renderer import ForgetfulRenderer, ToyRenderer
from support.property_tests import examples
from turnwise.agents.context.config import ContextConfig
from turnwise.agents.context.sub_agent import schema_of

DELEGATE = schema_of(ContextConfig.model_validate({"sub_agent": {}}).sub_agent)
CALLS = st.one_of(
    st.integers(0, 9).map(lambda n: ("read", {"number": n})),
    st.just(("slip", {})),
    st.sampled_from("abc").map(lambda task: ("delegate", {"task": task})),
    st.sampled_from([("delegate", {}), ("none", {}), ("read", {"number": "x"})]),
)
LINES = st.builds(
    lambda text, calls, thought: say(text, *calls, thought=thought),
    st.sampled_from(["", "I see", "a much longer text that a limit may cut somewhere in its middle"]),
    st.lists(CALLS, min_size=1, max_size=3),
    st.sampled_from(["", "hm"]),
)
SILENT = st.sampled_from([say("the end"), say(""), say("", thought="hm")])
# A message without calls ends whoever says it: where one comes early, little happens.
SCRIPTS = st.builds(lambda lines, silent_line: [*lines, silent_line], st.lists(LINES, min_size=3, max_size=9), SILENT)
SHARES = st.sampled_from([0.3, 0.5, 0.8])
CONTEXTS = st.fixed_dictionaries(
    {
        "drop_tool_results": st.none()
        | st.fixed_dictionaries({"keep": st.integers(0, 2), "note": st.just("(gone)")}, optional={"above": SHARES}),
        "compaction": st.none()
        | st.fixed_dictionaries(
            {"above": SHARES, "keep_turns": st.integers(0, 2), "prompt": st.just("Summarise!")},
            optional={"max_tokens": st.sampled_from([5, 100])},
        ),
        "sub_agent": st.none()
        | st.fixed_dictionaries(
            {"max_turns": st.integers(1, 3), "max_depth": st.integers(1, 2)}, optional={"tools": st.just(["slip"])}
        ),
    }
)
STOPS = {"completed", "max_turns", "max_tokens", "context_overflow", "invalid_calls"}
REASONS = {"compaction", "dropped_tool_results", "sub_agent", "reasoning_dropped", "resample", "rewound", "concurrent"}


def script_of(lines: list[Any]) -> Any:
    source = itertools.cycle(lines)

    async def script(request: Any) -> Any:
        await asyncio.sleep(0)
        return next(source)

    return script


def assert_answered(played: Played) -> None:
    """In no prompt a call has another number of answers than one; only a branch's last turn may have none yet."""
    trajectory = played.trajectory
    for leaf in trajectory.leaves():
        messages = [message for segment in trajectory.path(leaf) for message in segment.messages]
        for index, message in enumerate(messages[:-1]):
            calls = len(message.get("tool_calls") or ())
            answers = len(
                list(itertools.takewhile(lambda following: following["role"] == "tool", messages[index + 1 :]))
            )
            if message["role"] == "assistant":
                assert answers == calls


async def check(
    folder: Any, renderer: Any, lines: list[Any], context: dict[str, Any], length: int, policy: str
) -> None:
    played = await play(
        folder, renderer, script_of(lines), context, tools=[DELEGATE], context_length=length, max_turns=12,
        max_tokens_per_turn=120, reasoning=policy, env_config={"words": 20},
    )  # fmt: skip
    trajectory = played.trajectory
    assert trajectory.error is None
    assert trajectory.stop_reason in STOPS
    assert len(trajectory.rewards) >= 1
    assert max(played.sizes) < length
    assert {reason.partition(":")[0] for reason in trajectory.forks()} <= REASONS | {"bridge_unproven"}
    # A turn's reward is that of the pages that it called for.
    reads = {turn.turn_id: 0.0 for turn in trajectory.turns()}
    for turn, name, value in trajectory.rewards:
        if name == "tool/read":
            reads[turn] += value
    for turn in trajectory.turns():
        [message] = turn.sampled.messages
        read_calls = sum(call["function"]["name"] == "read" for call in message.get("tool_calls") or ())
        assert reads[turn.turn_id] <= 0.25 * read_calls
    assert_answered(played)
    for reason in trajectory.forks():
        event(reason)


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    lines=SCRIPTS, context=CONTEXTS, length=st.sampled_from([700, 1200, 2000]),
    renderer=st.sampled_from([ToyRenderer(), ForgetfulRenderer()]), policy=st.sampled_from(["keep", "template"]),
)  # fmt: skip
async def test_any_conversation_trains_exactly(tmp_path_factory, renderer, lines, context, length, policy) -> None:
    await check(tmp_path_factory.mktemp("any"), renderer, lines, context, length, policy)


@settings(max_examples=examples(15), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(lines=SCRIPTS, context=CONTEXTS, policy=st.sampled_from(["keep", "template"]))
async def test_any_conversation_trains_exactly_in_a_real_format(tmp_path_factory, lines, context, policy) -> None:
    await check(tmp_path_factory.mktemp("qwen3"), renderer_for("qwen3"), lines, context, 900, policy)
